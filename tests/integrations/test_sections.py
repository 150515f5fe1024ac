"""Sections: an engine's formula on sorted channels equals the model's rotation, and its ids equal the table's."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from refusals import assert_refused
from sections_engine import EngineRotary, step_ids
from tolerance import EXACT, assert_within

import mmpos
from mmpos import Grid, SegmentTable, Text
from mmpos.integrations.sections import (
    Sections,
    draft_positions,
    install_cache,
    qk_channels,
    request_positions,
    window_positions,
)
from mmpos.positions.table import PositionTable
from mmpos.rotary import Rotary, YaRN, apply_rotary

DOCUMENT: list[Text | Grid] = [Text(3), Grid(2, 3), Text(2), Grid(4, 1), Text(1)]
SECTIONS = Sections(Rotary(head_dim=16), max_position=64, permuted=True)
ROTARIES = {
    "hunyuan": Rotary(head_dim=128),
    "odd pairs": Rotary(head_dim=10, theta=100.0),
    "adjacent": Rotary(head_dim=16, pairing="adjacent"),
    "partial": Rotary(head_dim=24, rotary_dim=16),
    "partial adjacent": Rotary(head_dim=24, rotary_dim=16, pairing="adjacent"),
    "columns first": Rotary(head_dim=16, allocation=[1, 1, 0, 1, 0, 0, 0, 1]),
    "three axes": Rotary(head_dim=16, axes=3),
    "HoPE": Rotary(head_dim=16, allocation=[1, 2, 1, 2, 1, 2, -1, -1]),
    "qwen3-vl": Rotary(head_dim=128, allocation="mrope-interleaved", theta=5e6),
    "qwen2-vl": Rotary(head_dim=128, allocation="sections", mrope_section=[16, 24, 24], theta=1e6),
    "split": Rotary(head_dim=16, allocation="split"),
    "axial": Rotary(head_dim=16, allocation="axial"),
    "one axis": Rotary(head_dim=16, axes=1),
    "yarn": Rotary(head_dim=64, scaling=YaRN(4.0, 32)),
    "as transformers": Rotary(head_dim=16, precision="hf"),
}


def table(*documents: list[Text | Grid], axes: int = 2, start: int = 0) -> PositionTable:
    scheme = {1: "flatten", 2: "rope-tie", 3: "mrope"}[axes]
    return mmpos.place(SegmentTable.from_documents(list(documents)), scheme, start)


def engine(sections: Sections, dtype: torch.dtype = torch.float32) -> EngineRotary:
    rotary, section = sections.rotary, list(sections.mrope_section)
    base = float(np.ravel(rotary.theta)[0])
    rows, neox = sections.max_position, sections.is_neox_style
    return EngineRotary(rotary.head_dim, rotary.rotary_dim, rows, base, neox, section, dtype)


@pytest.mark.parametrize("name", sorted(ROTARIES))
def test_an_engine_rotates_sorted_channels_like_mmpos_rotates_the_original_ones_bit_for_bit(name: str) -> None:
    rotary = ROTARIES[name]
    positions = table(DOCUMENT, axes=rotary.axes)
    sections = Sections(rotary, 64, permuted=True)
    module = engine(sections)
    assert install_cache(module, sections) == 1
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(positions.num_tokens, heads, rotary.head_dim, generator=generator) for heads in (4, 2))
    want_q, want_k = apply_rotary(q, k, positions, rotary)
    channels = torch.from_numpy(qk_channels(rotary))
    ids, _ = request_positions(positions, sections)
    got_q, got_k = module(ids, q[..., channels], k[..., channels])
    assert want_k is not None
    assert torch.equal(got_q, want_q[..., channels])
    assert torch.equal(got_k, want_k[..., channels])


@pytest.mark.parametrize(
    ("name", "section", "rows"),
    [
        ("odd pairs", (0, 3, 2), (0, 0, 1)),
        ("one axis", (8, 0, 0), (0, 0, 0)),
        ("HoPE", (2, 3, 3), (0, 1, 2)),
        ("qwen2-vl", (16, 24, 24), (0, 1, 2)),
        ("qwen3-vl", (24, 20, 20), (0, 1, 2)),
    ],
)
def test_sections_count_the_pairs_of_every_axis(name: str, section: tuple[int, ...], rows: tuple[int, ...]) -> None:
    sections = Sections(ROTARIES[name], 8, permuted=True)
    assert (sections.mrope_section, sections.rows) == (section, rows)


@pytest.mark.parametrize("name", ["axial", "one axis", "qwen2-vl", "split"])
def test_contiguous_allocations_require_no_permutation(name: str) -> None:
    assert Sections(ROTARIES[name], 8).order.tolist() == list(range(ROTARIES[name].num_pairs))


def test_a_cache_of_several_blocks_contains_exact_cosines_in_the_order_of_the_sections() -> None:
    rotary = Rotary(head_dim=8, theta=100.0)
    cache = Sections(rotary, 20000, permuted=True).cos_sin_cache()
    assert (cache.shape, cache.dtype) == ((20000, 8), torch.float32)
    angle = np.arange(20000)[:, None] * np.array([100.0 ** (-j / 4) for j in (0, 2, 1, 3)])
    want = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    assert_within(cache, want, EXACT)
    assert torch.equal(Sections(rotary, 20000, permuted=True).cos_sin_cache(torch.bfloat16), cache.bfloat16())


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(44, 30), (96, 34), (96, 96)])  # 44 · (30 / 44) is below 30
def test_an_engine_computes_the_same_rotary_dim_from_rope_parameters(head_dim: int, rotary_dim: int) -> None:
    sections = Sections(Rotary(head_dim=head_dim, rotary_dim=rotary_dim, theta=5e5), 8, permuted=True)
    parameters = sections.rope_parameters
    assert int(head_dim * parameters.pop("partial_rotary_factor")) == rotary_dim
    pairs = rotary_dim // 2
    section = [0, math.ceil(pairs / 2), pairs // 2]
    assert parameters == {"rope_type": "default", "rope_theta": 5e5, "mrope_section": section}


@pytest.mark.parametrize(("name", "dtype"), [("hunyuan", torch.bfloat16), ("yarn", torch.float32)])
def test_a_cache_is_shared_and_grows_exactly_with_its_dtype_and_attention_factor(name: str, dtype: torch.dtype) -> None:
    sections = Sections(ROTARIES[name], 64, permuted=True)
    module, other = (engine(sections, dtype) for _ in range(2))
    assert install_cache(torch.nn.ModuleList([module, torch.nn.Linear(2, 2), other]), sections) == 2
    first = module.cos_sin_cache
    assert first is other.cos_sin_cache
    module._ensure_cos_sin_cache_length(63)
    assert module.cos_sin_cache is first
    copied = copy.deepcopy(module)
    copied._ensure_cos_sin_cache_length(64)
    assert module.cos_sin_cache is first
    rows = len(copied.cos_sin_cache)
    assert rows > 64
    assert torch.equal(copied.cos_sin_cache, Sections(sections.rotary, rows, permuted=True).cos_sin_cache(dtype))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("head_size", 32, "EngineRotary.head_size: got 32, want 16 as in sections"),
        ("rotary_dim", 8, "EngineRotary.rotary_dim: got 8, want 16 as in sections"),
        ("is_neox_style", False, "EngineRotary.is_neox_style: got False, want True as in sections"),
        ("mrope_section", (4, 2, 2), "EngineRotary.mrope_section: got [4, 2, 2], want [0, 4, 4] as in sections"),
        ("mrope_interleaved", True, "EngineRotary.mrope_interleaved: got True, want False; sections are blocks"),
        ("cos_sin_cache", torch.zeros(9, 16), "max_position: got 64, want 9, the rows of cos_sin_cache"),
        ("mrope_section", None, "model: got no module with cos_sin_cache and mrope_section, want at least one"),
    ],
)
def test_a_module_that_differs_from_the_sections_is_refused_and_left_unchanged(
    field: str, value: object, message: str
) -> None:
    module = engine(SECTIONS)
    setattr(module, field, value)
    before = module.cos_sin_cache
    assert_refused(message, lambda: install_cache(module, SECTIONS))
    assert module.cos_sin_cache is before


def whole(document: list[Text | Grid], generated: int) -> torch.Tensor:
    """Return the (3, tokens) ids of a document followed by generated text."""
    return torch.from_numpy(table([*document, Text(generated)]).dense(dtype=np.int64)[[0, 0, 1]])


def test_a_request_has_three_rows_of_ids_and_a_delta() -> None:
    ids, delta = request_positions(table([Text(3), Grid(2, 3), Text(2)]), SECTIONS)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [
        [0, 1, 2, 6, 6, 6, 10, 10, 10, 14, 15],
        [0, 1, 2, 6, 6, 6, 10, 10, 10, 14, 15],
        [0, 1, 2, 5, 8, 11, 5, 8, 11, 14, 15],
    ]
    assert delta == 5
    assert type(delta) is int


@pytest.mark.parametrize("ends", [[], [Grid(2, 2)]], ids=["text", "patches"])
def test_every_step_of_an_engine_is_a_window_of_the_table(ends: list[Grid]) -> None:
    document = [*DOCUMENT, *ends]
    positions = table([Text(2)], document)
    sections = Sections(SECTIONS.rotary, 128, permuted=True)
    prompt, delta = request_positions(table(document), sections)
    ids = whole(document, 6)
    length = prompt.shape[1]
    for computed in range(length + 4):
        for scheduled in (1, 2, length + 5 - computed):
            got = window_positions(positions, sections, [1], [computed], [scheduled])
            assert torch.equal(got, ids[:, computed : computed + scheduled])
            assert torch.equal(got, step_ids(prompt, delta, computed, scheduled))


def test_a_step_with_several_requests_is_packed_in_the_order_of_the_scheduler() -> None:
    positions = table(DOCUMENT, [Text(4)])
    got = window_positions(positions, SECTIONS, [1, 0, 0], [3, 5, 0], [3, 2, 0])
    assert torch.equal(got, torch.cat([whole([Text(4)], 3)[:, 3:6], whole(DOCUMENT, 1)[:, 5:7]], dim=1))


def test_ids_after_a_cached_prefix_depend_only_on_its_cursor_and_length() -> None:
    prefix, suffix = DOCUMENT[:3], DOCUMENT[3:]
    _, delta = request_positions(table(DOCUMENT), SECTIONS)
    before = table(prefix)
    after = table(suffix, start=int(before.next_positions[0]))
    ids, delta_after = request_positions(after, SECTIONS, computed=before.num_tokens)
    assert torch.equal(ids, whole(DOCUMENT, 1)[:, before.num_tokens : -1])
    assert delta_after == delta


def test_a_delta_accounts_for_the_start_and_for_pruned_tokens() -> None:
    positions = table(DOCUMENT, start=7)
    ids, delta = request_positions(positions, Sections(SECTIONS.rotary, 128, permuted=True))
    assert int(ids[0, 0]) == 7
    assert delta == positions.next_positions[0] - positions.num_tokens
    mask = np.ones(positions.num_tokens, np.bool_)
    mask[4:7] = False
    pruned, pruned_delta = request_positions(positions.keep(mask), Sections(SECTIONS.rotary, 128, permuted=True))
    assert torch.equal(pruned, ids[:, torch.from_numpy(mask)])
    assert pruned_delta == delta + 3


def test_drafts_at_the_same_depth_share_an_id() -> None:
    positions = table([Text(1)], DOCUMENT)
    start = int(positions.lengths[1]) + 4
    got = draft_positions(positions, SECTIONS, start, [0, 1, 1, 2, 3, 2], document=1)
    assert torch.equal(got, whole(DOCUMENT, 9)[:, [start + depth for depth in (0, 1, 1, 2, 3, 2)]])
    assert got.dtype == torch.int64


LENGTH = 16  # tokens of DOCUMENT
CURSOR = 3 + 11 + 2 + 9 + 1


def test_ids_and_cursors_up_to_the_last_row_of_the_cache_are_accepted() -> None:
    positions = table(DOCUMENT)
    assert positions.next_positions.tolist() == [CURSOR]
    assert positions.num_tokens == LENGTH
    request_positions(positions, Sections(SECTIONS.rotary, CURSOR, permuted=True))
    request_positions(positions, SECTIONS, max_new_tokens=64 - CURSOR)
    window_positions(positions, SECTIONS, [0], [LENGTH], [64 - CURSOR])
    draft_positions(positions, SECTIONS, LENGTH + 63 - CURSOR, [0])


TWO = table([Text(1)], DOCUMENT)
ROWS = "the rows of the cos/sin cache"
NO_RUN = mmpos.place(SegmentTable.from_documents([DOCUMENT]), "rows")
FRACTIONS = mmpos.place(SegmentTable.from_documents([DOCUMENT]), "rope-tie-v2")
NEGATIVE = mmpos.place(SegmentTable.from_documents([[Grid(8, 8)]]), "videorope")
make: Any = Sections
request: Any = request_positions
window: Any = window_positions
draft: Any = draft_positions
BY_HEADS = Rotary(16, allocation="heads", head_axes=[0, 1, 2])
PERMUTE = ", want contiguous sections, such as 'split', or weights from permute_qk and permuted=True"
REFUSED: dict[str, Any] = {
    "rotary: got 4 axes, want at most 3": lambda: make(Rotary(head_dim=16, axes=4), 8, permuted=True),
    "rotary: got dict, want a Rotary": lambda: make({}, 8),
    "rotary: got Sections, want a Rotary": lambda: qk_channels(SECTIONS),  # type: ignore[arg-type]
    "rotary: got a Rotary with head_axes, want one rotation for all heads, a": lambda: make(BY_HEADS, 8, permuted=True),
    "rotary: got a Rotary with head_axes, want one rotation for all heads": lambda: qk_channels(BY_HEADS),
    **{
        f"rotary: got allocation {ROTARIES[name].allocation!r}{PERMUTE}": lambda name=name: make(ROTARIES[name], 8)
        for name in ("adjacent", "columns first", "qwen3-vl", "three axes")
    },
    "max_position: got 0, want >= 1": lambda: make(Rotary(head_dim=16), 0, permuted=True),
    "permuted: got 1, want True or False": lambda: make(Rotary(head_dim=16), 8, permuted=1),
    "dtype: got torch.int64, want a floating-point torch dtype": lambda: SECTIONS.cos_sin_cache(torch.int64),
    f"documents[0]: got id {CURSOR - 1}, want < max_position {CURSOR - 1}, {ROWS}": lambda: request(
        table(DOCUMENT), Sections(SECTIONS.rotary, CURSOR - 1, permuted=True)
    ),
    f"documents[0]: got cursor {CURSOR} plus max_new_tokens {65 - CURSOR}, want at most max_position 64": (
        lambda: request(table(DOCUMENT), SECTIONS, max_new_tokens=65 - CURSOR)
    ),
    "documents[1]: got id 64, want < max_position 64, the": lambda: window(
        TWO, SECTIONS, [1, 0, 1], [0, 0, LENGTH], [0, 1, 65 - CURSOR]
    ),
    "documents[1]: got id 64, want < max_position 64": lambda: draft(
        TWO, SECTIONS, LENGTH + 63 - CURSOR, [0, 1], document=1
    ),
    "positions: got scheme 'rope-tie-v2', whose ids may be fractions, want integers": lambda: request(
        FRACTIONS, SECTIONS
    ),
    "documents[0]: got id -3, want >= 0": lambda: request(
        NEGATIVE, Sections(ROTARIES["three axes"], 64, permuted=True)
    ),
    "next_positions: got document 0 of rows, whose end is not one whole id": lambda: request(NO_RUN, SECTIONS),
    "positions: got ndarray, want a PositionTable": lambda: request(TWO.dense(), SECTIONS),
    "sections: got Rotary, want Sections": lambda: window(TWO, SECTIONS.rotary, [0], [0], [1]),
    "positions: got 2 documents, want 1": lambda: request(TWO, SECTIONS),
    "positions: got 3 axes, want 2 as in rotary": lambda: request(table(DOCUMENT, axes=3), SECTIONS),
    "positions: got padding, want none": lambda: request(table(DOCUMENT).pad(20), SECTIONS),
    "max_new_tokens: got -1, want >= 0": lambda: request(table(DOCUMENT), SECTIONS, max_new_tokens=-1),
    "computed: got -2, want >= 0": lambda: request(table(DOCUMENT), SECTIONS, computed=-2),
    f"start: got 3, want >= {LENGTH}": lambda: draft(table(DOCUMENT), SECTIONS, 3, [0]),
    f"start: got {2**63}, want <= {2**31 - 1}": lambda: draft(table(DOCUMENT), SECTIONS, 2**63, [0]),
    "depths[0]: got 2147483648, want <= 2147483647": lambda: draft(table(DOCUMENT), SECTIONS, LENGTH, [2**31]),
    "depths[1]: got -1, want >= 0": lambda: draft(table(DOCUMENT), SECTIONS, LENGTH, [0, -1]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_sections_and_positions_are_refused(message: str) -> None:
    assert_refused(message, REFUSED[message], mmpos.MmposError)
