"""The tiny vision-language model of examples/: it learns what photos show, and decodes the same in every way."""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_vlm
import torch
from tiny_vlm import TinyVLM, ask, nats, remote_positions, train
from tiny_vlm_task import Photo, Shown, answer_of, load_photos, pairs
from tolerance import assert_within, rounding

import mmpos
from mmpos.client import Client
from mmpos.integrations.hf import MMPosProcessor
from mmpos_server.testing import running

EXAMPLE = Path(tiny_vlm.__file__)


@cache
def processor() -> MMPosProcessor:
    return tiny_vlm.make_processor()


@cache
def photos() -> list[Photo]:
    return load_photos()


def chats_of(shown: list[Photo], seed: int = 1) -> list[Shown]:
    return [*((photo,) for photo in shown), *pairs(shown, np.random.default_rng(seed))]


def untrained() -> TinyVLM:
    return TinyVLM(processor()).double().eval()


def decoded(model: TinyVLM, batch: object, table: mmpos.PositionTable, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, steps) what generate says from its cache, and (rows, steps, words) the logits of it."""
    found = model.language.generate(
        inputs_embeds=model.embed(batch),
        attention_mask=batch["attention_mask"],  # type: ignore[index]  # a batch of the processor
        mm_position_ids=table,
        do_sample=False,
        max_new_tokens=steps,
        min_new_tokens=steps,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences, torch.stack(found.logits, 1)


def whole(model: TinyVLM, batch: Any, said: torch.Tensor, positions: mmpos.PositionTable) -> torch.Tensor:
    """(rows, steps, words) the logits of what is said, by one forward without a cache."""
    words, rows = model.language.get_input_embeddings()(said), np.arange(len(said))
    found: torch.Tensor = model.language(
        inputs_embeds=torch.cat([model.embed(batch), words], 1),
        attention_mask=torch.cat([batch["attention_mask"], torch.ones_like(said)], 1),
        mm_position_ids=positions.window(rows, 0 * rows, positions.lengths + said.shape[1]),
    ).logits
    return found[:, -said.shape[1] - 1 : -1]


def rounding_of(model: TinyVLM, run: Callable[[], torch.Tensor]) -> list[float]:
    """The bound of what a model gives, whose norms and rotations are float32 whatever its dtype."""
    return rounding(run, model.parameters(), dtype=torch.float32)


@torch.no_grad()
def test_logits_from_the_cache_are_those_of_whole_forwards() -> None:
    model, batch = untrained(), ask(processor(), chats_of(photos()[:3]))
    table = batch["positions"]
    said, logits = decoded(model, batch, table, 5)
    bound = rounding_of(model, lambda: whole(model, batch, said, table))
    assert_within(logits, whole(model, batch, said, table).float(), bound)  # generate gives float32
    flat = mmpos.place(
        processor().segments(*(batch[key] for key in ("input_ids", "image_grid_thw", "attention_mask"))), "flatten"
    )
    axes = np.concatenate([flat.table, flat.table[5:]])
    other = mmpos.PositionTable.from_arrays(axes, flat.documents, flat.num_tokens, fractional=False, scheme="flatten")
    moved = whole(model, batch, said, other) - logits
    assert moved.abs().max() > 100 * bound[0]  # positions are not lost on the way


@torch.no_grad()
def test_a_forward_sees_the_pixels_and_positions_of_its_batch() -> None:
    model, batch = untrained(), ask(processor(), chats_of(photos()[:2]))
    embeds, patch = model.embed(batch), batch["mm_token_type_ids"] == 1
    words = model.language.get_input_embeddings()(batch["input_ids"])
    assert torch.equal(embeds[~patch], words[~patch])
    values = batch["patches"].double().flatten().view(-1, model.pixels.in_features) / 127.5 - 1
    made = values @ model.pixels.weight.T + model.pixels.bias
    assert_within(embeds[patch], made, rounding(lambda: model.embed(batch)[patch], model.pixels.parameters()))
    told = {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]}
    logits, real = model(batch).logits, batch["attention_mask"] == 1
    dense = model.language(**told, mm_position_ids=batch["mm_position_ids"]).logits
    bound = rounding_of(model, lambda: model(batch).logits[real])
    assert_within(logits[real], dense[real], bound)
    assert (model.language(**told).logits - logits)[real].abs().max() > 100 * bound[0]


def ask_all(model: TinyVLM, chats: list[Shown], *, see: bool = True) -> list[str]:
    """Answers of the model, proved to be the same with and without a cache, and with positions of a server."""
    batch = ask(processor(), chats, see=see)
    said = model.answer(batch)
    assert_likeliest(model, batch, said)
    assert_likeliest(model, batch, model.answer_without_cache(batch))
    with running() as address, Client(address) as client:
        positions = remote_positions(client, processor(), batch)
    np.testing.assert_array_equal(positions.table, batch["positions"].table)
    np.testing.assert_array_equal(positions.documents, batch["positions"].documents)
    assert torch.equal(said, model.answer(batch, positions))
    texts: list[str] = processor().tokenizer.batch_decode(said, skip_special_tokens=True)
    return texts


@torch.no_grad()
def assert_likeliest(model: TinyVLM, batch: Any, said: torch.Tensor) -> None:
    """Check that a forward without a cache finds no token likelier than those said, but for what it rounds."""
    logits = whole(model, batch, said, batch["positions"])
    (bound,) = rounding_of(model, lambda: whole(model, batch, said, batch["positions"]))
    less = logits.max(-1).values - logits.gather(-1, said[..., None])[..., 0]
    assert (less[said != model.language.config.pad_token_id] <= 2 * bound).all()


def test_the_program_says_what_it_finds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLE.parent), *sys.path])
    with running() as address:
        monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "--steps", "2", "--server", address])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, *answers, cached, remote = capsys.readouterr().out.splitlines()
    assert first.startswith("2 steps in ")
    assert len(answers) == 2 * len(photos())
    assert cached == "same without a cache: True"
    assert remote == "same with positions of the server: True"


@pytest.mark.slow
@pytest.mark.xdist_group("tiny-vlm")
def test_a_trained_model_says_what_photos_show_in_their_order() -> None:
    shown = photos()
    assert len(shown) == 8
    model = TinyVLM(processor())
    assert train(model, processor(), shown, 400) < 0.5  # nats an answer
    model.eval()
    chats = chats_of(shown)
    assert ask_all(model, chats) == [answer_of(each) for each in chats]
    random = np.random.default_rng(12345)  # crops and orders that were not among those learned from
    unseen = chats_of([photo.crop(random) for photo in shown], seed=12345)
    assert nats(model, processor(), unseen).item() < 1


@pytest.mark.slow
@pytest.mark.xdist_group("tiny-vlm")
def test_a_model_that_is_shown_nothing_can_only_guess() -> None:
    shown = photos()
    model = TinyVLM(processor())
    cost = train(model, processor(), shown, 50, see=False)
    # Of sixteen ways to begin, eight photos alone and eight before another, every step has each once: whatever a model
    # without photos believes, they cost log 16 nats at least.
    assert cost > math.log(16)
    alone: list[Shown] = [(photo,) for photo in shown]
    said = ask_all(model.eval(), alone, see=False)
    assert len(set(said)) == 1
