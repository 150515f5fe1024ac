"""The example of disaggregated serving: it agrees as it stands, and says so when a worker gets the delta wrong."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from disaggregated_workers import BLOCK, BUILDER, CHUNK, HEAD_DIM, HEADS, REQUESTS, ROTARY, rotate
from tolerance import EXACT, assert_within, rotations

from mmpos.rotary import apply_rotary

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> tuple[int, list[str]]:
    """Exit status and lines of the example, started as a user would."""
    command = [sys.executable, "examples/disaggregated.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_every_hop_agrees_with_the_whole() -> None:
    status, lines = run()
    assert (status, lines[-1]) == (0, "64 windows agree with the whole, placed at once")
    assert all(line.endswith(" agree") for line in lines[:-1])
    told = "\n".join(lines)
    for what in ("chunk ", "after 4 cached blocks", "draft of 4", "after a step back", "after prefill elsewhere"):
        assert what in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "faults"),
    [
        ("prefill 1", {"delta"}),  # it never decodes
        (
            "prefill 2",
            {"delta, positions, q and k", "tokens, k"},
        ),  # the retracted tokens, and what decode makes of them
        ("decode", {"positions, delta, q and k", "tokens, k, block keys"}),
    ],
)
def test_a_worker_that_forgets_the_delta_is_found_out(worker: str, faults: set[str]) -> None:
    status, lines = run("--forget-delta", worker)
    assert (status, lines[-1]) == (1, "not everything agrees")
    found = {line.partition("DISAGREE: ")[2] for line in lines if "DISAGREE" in line}
    assert found == faults
    assert all(line.startswith((worker, "decode")) for line in lines if "DISAGREE" in line)


def test_its_rotation_is_apply_rotary() -> None:
    positions = BUILDER.build(REQUESTS[0]).positions
    x = np.random.default_rng(0).standard_normal((positions.num_tokens, 2, HEADS, HEAD_DIM), np.float32)
    q, k = (torch.from_numpy(part.copy()) for part in (x[:, 0], x[:, 1]))
    turned = np.stack([part.numpy() for part in apply_rotary(q, k, positions, ROTARY) if part is not None], axis=1)
    assert_within(rotate(x, positions.dense()), turned, rotations(turned, 2 * EXACT))


def test_its_rotation_of_a_window_has_the_bits_of_the_whole() -> None:
    positions = BUILDER.build(REQUESTS[0]).positions
    x = np.random.default_rng(0).standard_normal((positions.num_tokens, 2, HEADS, HEAD_DIM), np.float32)
    whole = rotate(x, positions.dense())
    for start in range(0, positions.num_tokens, 7):
        window = positions.window([0], [start], [min(7, positions.num_tokens - start)])
        assert np.array_equal(rotate(x[start : start + 7], window.dense()), whole[start : start + 7])


def test_its_chunks_cut_both_photographs_and_its_blocks_share_one() -> None:
    first, second = (BUILDER.build(parts) for parts in REQUESTS)
    for begin, end in first.image_spans.tolist():
        assert any(begin < edge < end for edge in range(0, end, CHUNK))
    keys = zip(first.block_keys(BLOCK), second.block_keys(BLOCK), strict=False)
    assert second.image_spans[0, 1] <= BLOCK * sum(a == b for a, b in keys) < second.input_ids.size
