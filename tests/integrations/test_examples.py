"""The examples: tiny models trained with mmpos and by TRL, and workers of disaggregated serving that all agree."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiny_qwen3_vl
import tiny_vlm
import torch
from disaggregated_workers import BLOCK, BUILDER, CHUNK, HEAD_DIM, HEADS, REQUESTS, ROTARY, rotate
from tiny_vlm import TinyVLM, ask, nats, train
from tiny_vlm_task import Photo, Shown, answer_of, load_photos, pairs
from tolerance import EXACT, assert_within, rotations

from mmpos.integrations.hf import MMPosProcessor, install
from mmpos.rotary import apply_rotary
from mmpos_server.testing import running

Run = Callable[..., list[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs an example with these options and returns its lines of output."""

    def run(example: ModuleType, *options: str) -> list[str]:
        path = Path(str(example.__file__))
        monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
        monkeypatch.setattr(sys, "argv", [path.name, *options])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


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


@torch.no_grad()
def test_a_forward_pass_uses_the_pixels_and_positions_of_its_batch() -> None:
    model, batch = TinyVLM(processor()).eval(), ask(processor(), chats_of(photos()[:2]))
    embeds, mask = model.embed(batch), batch["attention_mask"]
    levels = batch["patches"].view(-1, model.pixels.in_features)
    assert torch.equal(embeds[batch["mm_token_type_ids"] == 1], model.pixels(levels / 127.5 - 1))
    logits, inputs = model(batch).logits, {"inputs_embeds": embeds, "attention_mask": mask}
    dense = model.language(**inputs, mm_position_ids=batch["mm_position_ids"]).logits
    assert torch.equal(logits[mask == 1], dense[mask == 1])
    assert not torch.equal(logits, model.language(**inputs).logits)


def test_the_program_reports_that_all_decoding_methods_agree(run: Run) -> None:
    with running() as address:
        first, *answers, cached, remote = run(tiny_vlm, "--steps", "2", "--server", address)
    assert first.startswith("2 steps in ")
    assert len(answers) == 2 * len(photos())
    assert cached == "same without a cache: True"
    assert remote == "same with positions of the server: True"


@pytest.mark.slow
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


def test_qwen3_vl_has_the_same_losses_and_weights_as_with_its_own_method() -> None:
    model, own = tiny_qwen3_vl.make_model(), tiny_qwen3_vl.make_model()
    assert tiny_qwen3_vl.train(install(model), photos()[:2], 2) == tiny_qwen3_vl.train(own, photos()[:2], 2)
    for weight, other in zip(model.parameters(), own.parameters(), strict=True):
        assert torch.equal(weight, other)


@pytest.mark.slow
def test_qwen3_vl_learns_to_describe_photos(run: Run) -> None:
    first, *answers, last = run(tiny_qwen3_vl)
    assert first.startswith("150 steps in ")
    assert answers == [f"right: {photo.caption!r}" for photo in photos()]
    assert last == "same with the model's own method: True"


@pytest.mark.slow
def test_trl_refuses_to_train_at_other_positions_than_those_of_the_rollout(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    import trl_rollouts

    model = tiny_qwen3_vl.make_model()
    records = trl_rollouts.roll_out(model, photos()[:2], copies=2)
    trl_rollouts.train(model, records, str(tmp_path))
    with pytest.raises(ValueError, match="the trainer's positions differ from the rollout's"):
        trl_rollouts.train(model, records, str(tmp_path), mistake=True)


ROOT = Path(__file__).parents[2]


def disaggregated(*arguments: str) -> tuple[int, list[str]]:
    """Run the workers as a user would, and return their exit status and their lines of output."""
    command = [sys.executable, "examples/disaggregated.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_every_window_agrees_with_the_complete_sequence() -> None:
    status, lines = disaggregated()
    assert (status, lines[-1]) == (0, "64 windows agree with the whole, placed at once")
    assert all(line.endswith(" agree") for line in lines[:-1])
    output = "\n".join(lines)
    for stage in ("chunk ", "after 4 cached blocks", "draft of 4", "after a step back", "after prefill elsewhere"):
        assert stage in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "faults"),
    [
        ("prefill 1", {"delta"}),  # it never decodes
        # The retracted tokens are wrong, and so are the tokens that the decode worker computes from them.
        ("prefill 2", {"delta, positions, q and k", "tokens, k"}),
        ("decode", {"positions, delta, q and k", "tokens, k, block keys"}),
    ],
)
def test_a_worker_that_ignores_the_delta_is_detected(worker: str, faults: set[str]) -> None:
    status, lines = disaggregated("--forget-delta", worker)
    assert (status, lines[-1]) == (1, "not everything agrees")
    assert {line.partition("DISAGREE: ")[2] for line in lines if "DISAGREE" in line} == faults
    assert all(line.startswith((worker, "decode")) for line in lines if "DISAGREE" in line)


def test_the_examples_rotation_equals_apply_rotary_and_does_not_depend_on_the_window() -> None:
    positions = BUILDER.build(REQUESTS[0]).positions
    x = np.random.default_rng(0).standard_normal((positions.num_tokens, 2, HEADS, HEAD_DIM), np.float32)
    q, k = (torch.from_numpy(part.copy()) for part in (x[:, 0], x[:, 1]))
    want = np.stack([part.numpy() for part in apply_rotary(q, k, positions, ROTARY) if part is not None], axis=1)
    rotated = rotate(x, positions.dense())
    assert_within(rotated, want, rotations(want, 2 * EXACT))
    window = positions.window([0], [3], [7])
    assert np.array_equal(rotate(x[3:10], window.dense()), rotated[3:10])


def test_chunks_split_both_photographs_and_shared_blocks_contain_one() -> None:
    first, second = (BUILDER.build(parts) for parts in REQUESTS)
    for begin, end in first.image_spans.tolist():
        assert any(begin < edge < end for edge in range(0, end, CHUNK))
    keys = zip(first.block_keys(BLOCK), second.block_keys(BLOCK), strict=False)
    assert second.image_spans[0, 1] <= BLOCK * sum(a == b for a, b in keys) < second.input_ids.size
