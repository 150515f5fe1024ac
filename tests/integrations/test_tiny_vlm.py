"""The tiny vision-language model in examples/: it learns to describe photos, and all decoding methods agree."""

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


def chats_of(photos: list[Photo], seed: int = 1) -> list[Shown]:
    return [*((photo,) for photo in photos), *pairs(photos, np.random.default_rng(seed))]


def untrained() -> TinyVLM:
    return TinyVLM(processor()).double().eval()


def decoded(model: TinyVLM, batch: object, table: mmpos.PositionTable, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate with a cache; return the (rows, steps) tokens and their (rows, steps, vocabulary) logits."""
    output = model.language.generate(
        inputs_embeds=model.embed(batch),
        attention_mask=batch["attention_mask"],  # type: ignore[index]  # a batch from the processor
        mm_position_ids=table,
        do_sample=False,
        max_new_tokens=steps,
        min_new_tokens=steps,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences, torch.stack(output.logits, 1)


def full_logits(model: TinyVLM, batch: Any, generated: torch.Tensor, positions: mmpos.PositionTable) -> torch.Tensor:
    """Return the (rows, steps, vocabulary) logits of generated tokens, from one forward pass without a cache."""
    words, rows = model.language.get_input_embeddings()(generated), np.arange(len(generated))
    logits: torch.Tensor = model.language(
        inputs_embeds=torch.cat([model.embed(batch), words], 1),
        attention_mask=torch.cat([batch["attention_mask"], torch.ones_like(generated)], 1),
        mm_position_ids=positions.window(rows, 0 * rows, positions.lengths + generated.shape[1]),
    ).logits
    return logits[:, -generated.shape[1] - 1 : -1]


def rounding_of(model: TinyVLM, run: Callable[[], torch.Tensor]) -> list[float]:
    """Bound the rounding error of a model's results; its norms and rotations are computed in float32 in every dtype."""
    return rounding(run, model.parameters(), dtype=torch.float32)


@torch.no_grad()
def test_logits_with_a_cache_equal_those_of_full_forward_passes() -> None:
    model, batch = untrained(), ask(processor(), chats_of(photos()[:3]))
    table = batch["positions"]
    generated, logits = decoded(model, batch, table, 5)
    bound = rounding_of(model, lambda: full_logits(model, batch, generated, table))
    assert_within(logits, full_logits(model, batch, generated, table).float(), bound)  # generate returns float32
    flat = mmpos.place(
        processor().segments(*(batch[key] for key in ("input_ids", "image_grid_thw", "attention_mask"))), "flatten"
    )
    axes = np.concatenate([flat.table, flat.table[5:]])
    other = mmpos.PositionTable.from_arrays(axes, flat.documents, flat.num_tokens, fractional=False, scheme="flatten")
    difference = full_logits(model, batch, generated, other) - logits
    assert difference.abs().max() > 100 * bound[0]  # the logits depend on positions


@torch.no_grad()
def test_a_forward_pass_uses_the_pixels_and_positions_of_its_batch() -> None:
    model, batch = untrained(), ask(processor(), chats_of(photos()[:2]))
    embeds, patch = model.embed(batch), batch["mm_token_type_ids"] == 1
    words = model.language.get_input_embeddings()(batch["input_ids"])
    assert torch.equal(embeds[~patch], words[~patch])
    values = batch["patches"].double().flatten().view(-1, model.pixels.in_features) / 127.5 - 1
    want = values @ model.pixels.weight.T + model.pixels.bias
    assert_within(embeds[patch], want, rounding(lambda: model.embed(batch)[patch], model.pixels.parameters()))
    inputs = {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]}
    logits, real = model(batch).logits, batch["attention_mask"] == 1
    dense = model.language(**inputs, mm_position_ids=batch["mm_position_ids"]).logits
    bound = rounding_of(model, lambda: model(batch).logits[real])
    assert_within(logits[real], dense[real], bound)
    assert (model.language(**inputs).logits - logits)[real].abs().max() > 100 * bound[0]


def ask_all(model: TinyVLM, chats: list[Shown], *, see: bool = True) -> list[str]:
    """Return the model's answers; check that they are the same without a cache and with positions from a server."""
    batch = ask(processor(), chats, see=see)
    generated = model.answer(batch)
    assert_most_likely(model, batch, generated)
    assert_most_likely(model, batch, model.answer_without_cache(batch))
    with running() as address, Client(address) as client:
        positions = remote_positions(client, processor(), batch)
    np.testing.assert_array_equal(positions.table, batch["positions"].table)
    np.testing.assert_array_equal(positions.documents, batch["positions"].documents)
    assert torch.equal(generated, model.answer(batch, positions))
    texts: list[str] = processor().tokenizer.batch_decode(generated, skip_special_tokens=True)
    return texts


@torch.no_grad()
def assert_most_likely(model: TinyVLM, batch: Any, generated: torch.Tensor) -> None:
    """Check that the generated tokens are, up to rounding, the most likely ones in a forward pass without a cache."""
    logits = full_logits(model, batch, generated, batch["positions"])
    (bound,) = rounding_of(model, lambda: full_logits(model, batch, generated, batch["positions"]))
    gap = logits.max(-1).values - logits.gather(-1, generated[..., None])[..., 0]
    assert (gap[generated != model.language.config.pad_token_id] <= 2 * bound).all()


def test_the_program_reports_that_all_decoding_methods_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_a_trained_model_describes_photos_in_their_order() -> None:
    assert len(photos()) == 8
    model = TinyVLM(processor())
    assert train(model, processor(), photos(), 400) < 0.5  # nats per answer
    model.eval()
    chats = chats_of(photos())
    assert ask_all(model, chats) == [answer_of(chat) for chat in chats]
    random = np.random.default_rng(12345)  # draws crops and orders that training did not use
    unseen = chats_of([photo.crop(random) for photo in photos()], seed=12345)
    assert nats(model, processor(), unseen).item() < 1


@pytest.mark.slow
@pytest.mark.xdist_group("tiny-vlm")
def test_a_model_without_photos_can_only_guess() -> None:
    model = TinyVLM(processor())
    cost = train(model, processor(), photos(), 50, see=False)
    # Every step has sixteen different answers: one for each of the eight photos alone, and one for each photo followed
    # by another. Without photos the model cannot distinguish the answers, so they cost at least log 16 nats.
    assert cost > math.log(16)
    chats: list[Shown] = [(photo,) for photo in photos()]
    answers = ask_all(model.eval(), chats, see=False)
    assert len(set(answers)) == 1
