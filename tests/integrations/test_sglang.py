"""The positions that a processor returns to SGLang; SGLang 0.5.23, if it is installed, as the reference."""

from __future__ import annotations

import ast
import importlib.util
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import assert_refused
from torch import Tensor

import mmpos
import mmpos.rotary
from mmpos import Grid, Placeholders, SegmentTable, Text
from mmpos.integrations.sglang import item_segments, mrope_positions
from mmpos.rotary import Rotary, apply_rotary

PROMPT: list[Text | Grid] = [Text(3), Grid(2, 3), Text(2), Grid(4, 1), Text(1)]
LENGTH = 16
PLACED = mmpos.place(SegmentTable.from_documents([PROMPT]))


def test_a_prompt_has_three_rows_of_ids_and_a_delta_of_shape_1_1() -> None:
    prompt, delta = mrope_positions(PLACED)
    assert (prompt.shape, prompt.dtype, delta.shape, delta.dtype) == ((3, LENGTH), torch.int64, (1, 1), torch.int64)
    assert np.array_equal(prompt, PLACED.dense()[[0, 0, 1]])
    assert delta.tolist() == [[10]]


def item(*offsets: tuple[int, int], **grids: object) -> SimpleNamespace:
    return SimpleNamespace(offsets=list(offsets) or None, **grids)


def test_segments_from_items_equal_those_from_input_ids() -> None:
    image, second = [1, 4, 6], [1, 8, 2]
    ids = [5, 5, 5, *[9] * 6, 5, *[9] * 4, 5, *[8] * 2, 5, *[8] * 2, 5]
    items = [
        item((10, 13), image_grid_thw=torch.tensor([second])),  # in any order
        item((15, 16), (18, 19), video_grid_thw=np.array([[2, 2, 4]])),
        item((3, 8), image_grid_thw=image, video_grid_thw=None),
    ]
    got = item_segments(len(ids), items, spatial_merge_size=2)
    want = SegmentTable.from_input_ids(
        ids, Placeholders(image=9, video=8), [image, second], [[2, 2, 4]], spatial_merge_size=2, frames_apart=True
    )
    assert np.array_equal(got.kind, want.kind)
    assert np.array_equal(got.extents, want.extents)


def test_items_of_several_grids_and_whole_videos_are_supported() -> None:
    got = item_segments(16, [item((1, 4), (6, 7), image_grid_thw=[[1, 2, 2], [1, 1, 2]])])
    assert got.extents.T.tolist() == [[1, 1, 1], [1, 2, 2], [1, 1, 1], [1, 1, 2], [1, 1, 8]]
    videos = item((0, 7), (9, 16), video_grid_thw=[[2, 2, 2], [2, 2, 2]], second_per_grid_ts=torch.tensor([0.5, 2]))
    got = item_segments(19, [item((18, 18), image_grid_thw=[1, 1, 1]), videos])
    assert got.extents.T.tolist() == [[2, 2, 2], [1, 1, 1], [2, 2, 2], [1, 1, 1], [1, 1, 1]]
    assert got.seconds_per_frame is not None
    assert got.seconds_per_frame.T.tolist() == [[1, 2], [0, 1], [2, 1], [0, 1], [0, 1]]
    got = item_segments(9, [item((0, 7), video_grid_thw=[[2, 2, 2]])])
    assert got.extents.T.tolist() == [[2, 2, 2], [1, 1, 1]]
    both = SimpleNamespace(offsets=torch.tensor([[0, 1], [3, 4]]), image_grid_thw=torch.tensor([[1, 1, 2], [1, 1, 2]]))
    assert item_segments(5, [both]).extents.T.tolist() == [[1, 1, 2], [1, 1, 1], [1, 1, 2]]
    assert item_segments(4, []).extents.T.tolist() == [[1, 1, 4]]


TWICE = [item((0, 3), image_grid_thw=[1, 2, 2]), item((4, 5), image_grid_thw=[[1, 1, 2], [1, 1, 2]])]
TIMES = {"video_grid_thw": [2, 1, 2], "second_per_grid_ts": [1.0, 2.0]}
PROMPTS: dict[str, Any] = {
    "positions: got last ids [10, 10, 11], want a prompt that ends with text, with last id 13: SGLang resumes":
        mmpos.place(SegmentTable.from_documents([PROMPT[:2]])),
    "positions: got no tokens, want a prompt that ends": PLACED.slice(0, 0),
    "positions: got ndarray, want a PositionTable": PLACED.dense(),
    "positions: got 2 documents, want 1": mmpos.place(SegmentTable.from_documents([PROMPT, PROMPT])),
    "positions: got 4 axes, want at most 3": mmpos.place(SegmentTable.from_documents([PROMPT]), "xd-rope"),
    "positions: got padding, want none": PLACED.pad(20),
}  # fmt: skip
ITEMS: dict[str, Any] = {
    "mm_items[0]: got neither image_grid_thw nor video_grid_thw": [item((0, 3))],
    "mm_items: got None, want a sequence of items": None,
    "mm_items[0].offsets: got 0 pairs, want 1": [item(image_grid_thw=[1, 2, 2])],
    "mm_items[0].second_per_grid_ts: got 2 values, want 1, one per grid": [item((0, 3), **TIMES)],
    "mm_items[1].offsets: got 1 pairs, want 2, one per grid": TWICE,
    "offsets: got 4 placeholders from 0 to 3, want 6 for 1x2x3 after": [item((0, 3), image_grid_thw=[1, 2, 3])],
    "mm_items[0].grid_thw: got dtype float64": [item((0, 3), image_grid_thw=[1, 2.0, 2])],
    "mm_items[0].grid_thw: got Tensor on meta": [item((0, 3), image_grid_thw=torch.ones(1, 3, device="meta"))],
}


def test_invalid_prompts_and_items_are_refused() -> None:
    for message, positions in PROMPTS.items():
        assert_refused(message, partial(mrope_positions, positions), mmpos.MmposError)
    for message, items in ITEMS.items():
        assert_refused(message, partial(item_segments, 20, items), mmpos.MmposError)
    odd = partial(item_segments, 20, [item((0, 2), image_grid_thw=[1, 3, 4])], spatial_merge_size=2)
    assert_refused("mm_items[0]: got grid [1, 3, 4], want sides that are", odd)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import SGLang's kernels so that they run in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    return pytest.importorskip("sglang.kernels.ops.attention.rotary_triton", exc_type=ImportError)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_sglangs_ernie_kernel_alternates_rows_and_columns_over_unsorted_channels(
    pairing: Any, kernels: ModuleType
) -> None:
    rotary = Rotary(head_dim=64, pairing=pairing)
    cache = torch.cat(mmpos.rotary.cos_sin(rotary, torch.arange(256).expand(2, -1)), dim=1)  # type: ignore[arg-type]
    q, k = torch.randn(LENGTH, 4, 64), torch.randn(LENGTH, 2, 64)
    got = q.flatten(1).clone(), k.flatten(1).clone()
    prompt, _ = mrope_positions(PLACED)
    kernels.triton_ernie45_rope_fused_inplace(*got, cache, prompt, [16, 16, 0], 64, 64, pairing == "half")
    for rotated, want in zip(got, apply_rotary(q, k, PLACED, rotary), strict=True):
        assert want is not None
        assert torch.equal(rotated.view(want.shape), want)


SPEC = importlib.util.find_spec("sglang")
ON_POLICY = SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))
DEPTHS = [0, 1, 1, 2, 3]


def function(file: str, name: str) -> Callable[..., Any]:
    """Compile one function or method from SGLang's source."""
    assert SPEC is not None
    assert SPEC.origin is not None
    path = Path(SPEC.origin).parent / "srt" / file
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    (node,) = (node for node in functions if node.name == name)
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    names: dict[str, Any] = {"torch": torch, "get_exec": lambda: ON_POLICY}
    exec(compile(ast.fix_missing_locations(ast.Module([future, node], [])), str(path), "exec"), names)
    compiled: Callable[..., Any] = names[name]
    return compiled


def batch(seed: int) -> tuple[list[list[Text | Grid]], random.Random]:
    """Return up to four random prompts of text and images that end in text."""
    rng = random.Random(seed)

    def prompt() -> list[Text | Grid]:
        images = (Grid(rng.randint(1, 5), rng.randint(1, 5)) for _ in range(rng.randint(0, 4)))
        return [*(part for image in images for part in (Text(rng.randint(1, 6)), image)), Text(rng.randint(1, 6))]

    return [prompt() for _ in range(rng.randint(1, 4))], rng


def inputs(document: list[Text | Grid]) -> SimpleNamespace:
    """Return the positions of a request under the names that SGLang uses."""
    prompt, delta = mrope_positions(mmpos.place(SegmentTable.from_documents([document])))
    return SimpleNamespace(mrope_positions=prompt, mrope_position_delta=delta, mrope_position_delta_repeated_cache=None)


def forward(name: str, requests: list[SimpleNamespace], lengths: list[int], **scheduled: object) -> Tensor:
    """Return the ids that SGLang's ForwardBatch computes for a step."""
    ids = SimpleNamespace(seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths))
    reqs = [SimpleNamespace(session=None)] * len(requests)
    step = SimpleNamespace(multimodal_inputs=requests, reqs=reqs, **scheduled)
    function("model_executor/forward_batch_info.py", name)(ids, SimpleNamespace(device="cpu"), step)
    positions: Tensor = ids.mrope_positions
    return positions


def windows(table: mmpos.PositionTable, documents: Sequence[int], starts: list[int], lengths: list[int]) -> Tensor:
    """Return the three rows of ids of windows of a table with two axes."""
    return torch.from_numpy(table.window(documents, starts, lengths).dense(dtype=np.int64, axes=(0, 0, 1)))


@pytest.mark.skipif(SPEC is None, reason="needs sglang")
@pytest.mark.parametrize("seed", range(25))
def test_sglangs_steps_equal_windows_of_the_table(seed: int) -> None:
    documents, rng = batch(seed)
    table = mmpos.place(SegmentTable.from_documents(documents))
    requests = [inputs(document) for document in documents]
    lengths, rows = table.lengths.tolist(), range(len(documents))

    prefix = [rng.randrange(length) for length in lengths]
    extend = [rng.randint(1, length - start) for length, start in zip(lengths, prefix, strict=True)]
    stops = [start + count for start, count in zip(prefix, extend, strict=True)]
    chunks = forward("_compute_mrope_positions_extend", requests, stops, extend_lens=extend, prefix_lens=prefix)
    assert torch.equal(chunks, windows(table, rows, prefix, extend))

    longer = [length + rng.randint(1, 9) for length in lengths]
    last = [length - 1 for length in longer]
    decoded = forward("_compute_mrope_positions_decode", requests, longer)
    assert torch.equal(decoded, windows(table, rows, last, [1] * len(last)))

    tree = SimpleNamespace(positions=torch.tensor([start + depth for start in last for depth in DEPTHS]))
    drafts = forward("compute_spec_mrope_positions", requests, longer, spec_info=tree)
    want = [
        windows(table, [d] * len(DEPTHS), [start + depth for depth in DEPTHS], [1] * len(DEPTHS))
        for d, start in enumerate(last)
    ]
    assert torch.equal(drafts, torch.cat(want, dim=1))

    extended = function("managers/mm_utils.py", "extend_mrope_positions_for_retracted_request")
    for d, length in enumerate(longer):
        resumed = extended(requests[d].mrope_positions, length - lengths[d])
        assert torch.equal(resumed, windows(table, [d], [0], [length]))
