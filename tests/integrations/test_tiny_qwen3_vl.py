"""The tiny Qwen3-VL in examples/, trained with rope_index instead of its own get_rope_index."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import tiny_qwen3_vl
import torch
from tiny_vlm_task import load_photos

from mmpos.integrations.hf import install

EXAMPLE = Path(tiny_qwen3_vl.__file__)


def test_training_gives_the_same_losses_and_weights_as_with_the_models_own_method() -> None:
    model, own = tiny_qwen3_vl.make_model(), tiny_qwen3_vl.make_model()
    photos = load_photos()[:2]
    assert tiny_qwen3_vl.train(install(model), photos, 2) == tiny_qwen3_vl.train(own, photos, 2)
    for weight, other in zip(model.parameters(), own.parameters(), strict=True):
        assert torch.equal(weight, other)


@pytest.mark.slow
def test_the_program_learns_to_describe_photos(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLE.parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, *answers, last = capsys.readouterr().out.splitlines()
    assert first.startswith("150 steps in ")
    assert answers == [f"right: {photo.caption!r}" for photo in load_photos()]
    assert len(answers) == 8
    assert last == "same with the model's own method: True"
