"""Sections: an engine's formula on sorted channels equals the model's rotation, and its ids equal the table's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mmpos_vllm import Sections, install_cache, permute_qk, qk_channels, request_positions, window_positions
from torch import Tensor, nn

import mmpos
from mmpos import Grid, MmposError, PositionTable, SegmentTable, Text
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


class MRotaryEmbedding(nn.Module):
    """The M-RoPE module of vLLM 0.33 and SGLang 0.5.23: frequencies in their natural order, angles in float32."""

    cos_sin_cache: Tensor
    _ensure_cos_sin_cache_length: Callable[[int], None]  # SGLang's method, which install_cache replaces

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        mrope_section: list[int],
    ) -> None:
        super().__init__()
        self.head_size, self.rotary_dim = head_size, rotary_dim
        self.is_neox_style, self.mrope_section, self.mrope_interleaved = is_neox_style, mrope_section, False
        frequencies = base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
        angle = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
        cache = torch.cat([angle.cos(), angle.sin()], dim=1)
        self.register_buffer("cos_sin_cache", cache.to(dtype), persistent=False)

    def forward(self, ids: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Rotate (tokens, heads, head_size) tensors by (3, tokens) ids."""
        blocks = self.cos_sin_cache[ids].split([*self.mrope_section, *self.mrope_section], dim=-1)
        rows = [block[i % 3] for i, block in enumerate(blocks)]
        cos, sin = torch.cat(rows[:3], -1)[:, None], torch.cat(rows[3:], -1)[:, None]
        return tuple(self.rotate(x, cos.to(x.dtype), sin.to(x.dtype)) for x in tensors)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first rotary_dim channels of every head, with halves or adjacent channels as pairs."""
        x, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        a, b = x.chunk(2, dim=-1) if self.is_neox_style else (x[..., 0::2], x[..., 1::2])
        pairs = a * cos - b * sin, b * cos + a * sin
        rotated = torch.cat(pairs, dim=-1) if self.is_neox_style else torch.stack(pairs, dim=-1).flatten(-2)
        return torch.cat([rotated, rest], dim=-1)


def engine(sections: Sections, dtype: torch.dtype = torch.float32) -> MRotaryEmbedding:
    """Return an engine's module with the sizes of sections and without its cache."""
    sizes = sections.rotary.head_dim, sections.rotary.rotary_dim, sections.max_position
    return MRotaryEmbedding(*sizes, 1e4, sections.is_neox_style, dtype, list(sections.mrope_section))


def table(*documents: list[Text | Grid], axes: int = 2) -> PositionTable:
    scheme = {1: "flatten", 2: "rope-tie", 3: "mrope"}[axes]
    return mmpos.place(SegmentTable.from_documents(list(documents)), scheme)


@pytest.mark.parametrize("name", sorted(ROTARIES))
def test_an_engine_rotates_with_sorted_weights_like_mmpos_with_the_original_ones_bit_for_bit(name: str) -> None:
    rotary = ROTARIES[name]
    positions = table(DOCUMENT, axes=rotary.axes)
    sections = Sections(rotary, 64, permuted=True)
    module = engine(sections)
    assert install_cache(module, sections) == 1
    generator = torch.Generator().manual_seed(1)
    rows = {"q_proj.weight": 4 * rotary.head_dim, "k_proj.weight": 2 * rotary.head_dim}
    weights = {key: torch.randn(n, positions.num_tokens, generator=generator) for key, n in rows.items()}

    def projected(weights: dict[str, Tensor]) -> list[Tensor]:
        """Return q and k if the hidden states of the tokens are the rows of an identity matrix."""
        return [weight.T.unflatten(-1, (-1, rotary.head_dim)).contiguous() for weight in weights.values()]

    channels = torch.from_numpy(qk_channels(rotary))
    ids, delta = request_positions(positions, sections)
    assert ids.tolist() == positions.dense(axes=sections.rows).tolist()
    assert [delta] == positions.deltas.tolist()
    q, k = projected(weights)
    got = module(ids, *projected(permute_qk(weights, rotary)))
    for rotated, want in zip(got, apply_rotary(q, k, positions, rotary), strict=True):
        assert want is not None
        assert torch.equal(rotated, want[..., channels])
    if not np.array_equal(sections.order, np.arange(rotary.num_pairs)):
        assert not torch.equal(module(ids, q)[0], got[0])  # weights that are not sorted


@pytest.mark.parametrize(
    ("name", "section", "rows"),
    [
        ("odd pairs", (0, 3, 2), (0, 0, 1)),
        ("one axis", (8, 0, 0), (0, 0, 0)),
        ("HoPE", (2, 3, 3), (0, 1, 2)),
        ("axial", (0, 4, 4), (0, 0, 1)),
        ("split", (0, 4, 4), (0, 0, 1)),
        ("qwen2-vl", (16, 24, 24), (0, 1, 2)),
        ("qwen3-vl", (24, 20, 20), (0, 1, 2)),
    ],
)
def test_sections_count_the_pairs_of_every_axis(name: str, section: tuple[int, ...], rows: tuple[int, ...]) -> None:
    sections = Sections(ROTARIES[name], 8, permuted=True)
    assert (sections.mrope_section, sections.rows) == (section, rows)
    if name in ("axial", "one axis", "qwen2-vl", "split"):  # contiguous, so they require no permutation
        assert Sections(ROTARIES[name], 8).order.tolist() == list(range(ROTARIES[name].num_pairs))


def test_a_cache_of_several_blocks_contains_exact_cosines_in_the_order_of_the_sections() -> None:
    rotary = Rotary(head_dim=8, theta=100.0)
    cache = Sections(rotary, 20000, permuted=True).cos_sin_cache()
    assert (cache.shape, cache.dtype) == ((20000, 8), torch.float32)
    angle = np.arange(20000)[:, None] * np.array([100.0 ** (-j / 4) for j in (0, 2, 1, 3)])
    want = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    np.testing.assert_allclose(cache, want, rtol=0, atol=2e-7)
    assert torch.equal(Sections(rotary, 20000, permuted=True).cos_sin_cache(torch.bfloat16), cache.bfloat16())


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(44, 30), (96, 34), (96, 96)])  # 44 · (30 / 44) is below 30
def test_an_engine_computes_the_same_rotary_dim_from_rope_parameters(head_dim: int, rotary_dim: int) -> None:
    sections = Sections(Rotary(head_dim=head_dim, rotary_dim=rotary_dim, theta=5e5), 8, permuted=True)
    parameters = sections.rope_parameters
    assert int(head_dim * parameters.pop("partial_rotary_factor")) == rotary_dim
    pairs = rotary_dim // 2
    section = [0, pairs - pairs // 2, pairs // 2]
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
        ("head_size", 32, "MRotaryEmbedding.head_size: got 32, want 16 as in sections"),
        ("rotary_dim", 8, "MRotaryEmbedding.rotary_dim: got 8, want 16 as in sections"),
        ("is_neox_style", False, "MRotaryEmbedding.is_neox_style: got False, want True as in sections"),
        ("mrope_section", (4, 2, 2), "MRotaryEmbedding.mrope_section: got [4, 2, 2], want [0, 4, 4] as in sections"),
        ("mrope_interleaved", True, "MRotaryEmbedding.mrope_interleaved: got True, want False; sections are blocks"),
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
    with pytest.raises(MmposError, match=re.escape(message)):
        install_cache(module, SECTIONS)
    assert module.cos_sin_cache is before


def whole(document: list[Text | Grid], generated: int) -> Tensor:
    """Return the (3, tokens) ids of a document followed by generated text."""
    return torch.from_numpy(table([*document, Text(generated)]).dense(dtype=np.int64)[[0, 0, 1]])


def test_a_step_with_several_requests_is_packed_in_the_order_of_the_scheduler() -> None:
    positions = table(DOCUMENT, [Text(4)])
    got = window_positions(positions, SECTIONS, [1, 0, 0, 0], [3, 5, 0, 14], [3, 2, 0, 6])
    want = [whole([Text(4)], 3)[:, 3:6], whole(DOCUMENT, 1)[:, 5:7], whole(DOCUMENT, 4)[:, 14:20]]
    assert torch.equal(got, torch.cat(want, dim=1))
    tree = window_positions(positions, SECTIONS, [1] * 4, [6, 7, 7, 8], [1] * 4)
    assert torch.equal(tree, whole([Text(4)], 5)[:, [6, 7, 7, 8]])


LENGTH = 16  # tokens of DOCUMENT
CURSOR = 3 + 11 + 2 + 9 + 1


def test_ids_and_cursors_up_to_the_last_row_of_the_cache_are_accepted() -> None:
    positions = table(DOCUMENT)
    request_positions(positions, Sections(SECTIONS.rotary, CURSOR, permuted=True))
    request_positions(positions, SECTIONS, max_new_tokens=64 - CURSOR)
    window_positions(positions, SECTIONS, [0], [LENGTH], [64 - CURSOR])


TWO = table([Text(1)], DOCUMENT)
NO_RUN = mmpos.place(SegmentTable.from_documents([DOCUMENT]), "rows")
FRACTIONS = mmpos.place(SegmentTable.from_documents([DOCUMENT]), "rope-tie-v2")
NEGATIVE = mmpos.place(SegmentTable.from_documents([[Grid(8, 8)]]), "videorope")
make: Any = Sections
request: Any = request_positions
window: Any = window_positions
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
    f"documents[0]: got id {CURSOR - 1}, want < max_position {CURSOR - 1}, the rows of the c": lambda: request(
        table(DOCUMENT), Sections(SECTIONS.rotary, CURSOR - 1, permuted=True)
    ),
    f"documents[0]: got cursor {CURSOR} plus max_new_tokens {65 - CURSOR}, want at most max_position 64": (
        lambda: request(table(DOCUMENT), SECTIONS, max_new_tokens=65 - CURSOR)
    ),
    "documents[1]: got id 64, want < max_position 64, the": lambda: window(
        TWO, SECTIONS, [1, 0, 1], [0, 0, LENGTH], [0, 1, 65 - CURSOR]
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
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_sections_and_positions_are_refused(message: str) -> None:
    with pytest.raises(MmposError, match=f"^{re.escape(message)}"):
        REFUSED[message]()
