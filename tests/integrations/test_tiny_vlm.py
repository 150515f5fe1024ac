"""The tiny vision-language model in examples/: it learns to describe photos, and all decoding methods agree."""

from __future__ import annotations

import math
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_vlm
from tiny_vlm import TinyVLM, ask, nats, train
from tiny_vlm_task import Photo, Shown, answer_of, load_photos, pairs

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


def answers_of(model: TinyVLM, batch: Any) -> list[str]:
    answers: list[str] = processor().tokenizer.batch_decode(model.answer(batch), skip_special_tokens=True)
    return answers


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
    assert answers_of(model, ask(processor(), chats)) == [answer_of(chat) for chat in chats]
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
    assert len(set(answers_of(model.eval(), ask(processor(), chats, see=False)))) == 1
