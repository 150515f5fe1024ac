"""The example of disaggregated serving: all workers agree, and a worker that ignores its delta is reported."""

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
    """Run the example as a user would, and return its exit status and its lines of output."""
    command = [sys.executable, "examples/disaggregated.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_every_window_agrees_with_the_complete_sequence() -> None:
    status, lines = run()
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
    status, lines = run("--forget-delta", worker)
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
