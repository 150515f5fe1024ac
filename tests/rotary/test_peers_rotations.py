"""Assertions of peers about their rotations, made of ours: their settings and tolerances, their formulas in our words.

flash-attention at 0251105a, tests/test_rotary.py and tests/layers/test_rotary.py: of 216 cases those in which every
    two settings meet, compiled or not, and all 8 of layers.
TransformerEngine at d0067d0d, tests/pytorch/test_fused_rope.py: of 3,456 + 4,608 cases of rows and 384 of packed
    sequences those in which every two settings meet, and all 8 + 1 of layouts and autocast.
FlashInfer at fb28d724, tests/attention/test_rope.py and tests/norm/test_fused_qk_rmsnorm_rope.py: of 4,608 + 18,432
    cases those in which every two settings meet, its 9 different tables, 13 kinds of heads, 8 videos, both pages.
vLLM 0.33, tests/kernels/core/test_pos_encoding.py, test_mrope.py, test_xdrope.py, test_fused_qk_norm_rope.py,
    test_fused_qk_norm_mrope.py and test_fused_qk_norm_rope_kvcache.py: of 384 rotations and 83 stores those in which
    every two settings meet, and all 24 + 18 + 24 + 24 of the rest.
SGLang 0.5.23, sgl-kernel/tests/test_rotary_embedding.py and test_fused_qk_norm_rope.py, jit_kernel/tests/test_rope.py:
    of 200 norms and 3,456 rotations those in which every two settings meet, all 6 tables, and 12 of 1,728 stores.

Their references hold float32 angles, as ``precision="hf"`` does. Some round cos and sin to 16 bits, which no mode of
ours does: there the bound says by how much that moves a result. Sizes that only repeat rows or heads are smaller here.
Left out: fp8, which we do not write, norms over all heads together, and counts of compiled kernels.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from peer_cases import DEVICE, Tolerance, agree, drawn, float32_angles, meeting, normal, turned
from torch import Tensor

import mmpos.rotary
from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.rotary import DevicePositions, Llama3, Rotary, apply_rotary, rotate_and_store

pytestmark = pytest.mark.slow

HALVES = (torch.float16, torch.bfloat16)


def text(lengths: list[int], starts: Any = 0) -> PositionTable:
    """Documents of text alone, each from its own start: seqlen_offsets, start_positions, indptr and offsets."""
    return place(SegmentTable.from_documents([[Text(n)] for n in lengths]), "flatten", start=starts)


def rope(head_dim: int, rotary_dim: int, adjacent: bool, theta: float = 10000.0, **more: Any) -> Rotary:
    """RoPE of one axis with their float32 angles."""
    pairing: Any = "adjacent" if adjacent else "half"
    given: dict[str, Any] = {"axes": 1, "precision": "hf"} | more
    return Rotary(head_dim, theta, rotary_dim=rotary_dim, pairing=pairing, **given)


# flash-attention: x, and q, k and v in one tensor, of padded rows or packed ones, each row from an offset of its own.

OFFSETS: dict[str, Any] = {"none": 0, "one": 23, "each": [53, 0, 5, 31]}
POSITIONS = torch.arange(106)


def flash(x: Tensor) -> Tolerance:
    """The tolerance of flash-attention: twice what adding a number and taking it away again does to the reference."""
    return Tolerance(1e-3, 2 * float(((x + 0.3 - 0.3) - x).abs().max()))


def of_rows(table: Tensor, lengths: list[int], starts: Any) -> Tensor:
    """The rows of a table of all positions that packed documents take."""
    begins = starts if isinstance(starts, list) else [starts] * len(lengths)
    return torch.cat([table[begin : begin + n] for n, begin in zip(lengths, begins, strict=True)])


@pytest.mark.parametrize(
    ("dtype", "offsets", "fraction", "adjacent", "inplace", "packed"),
    meeting(
        {
            "dtype": HALVES,
            "offsets": tuple(OFFSETS),
            "fraction": (1.0, 0.5),
            "adjacent": (False, True),
            "inplace": (False, True),
            "packed": (False, True),
        }
    ),
)
def test_flash_attentions_rotation_and_its_gradient(
    dtype: torch.dtype, offsets: str, fraction: float, adjacent: bool, inplace: bool, packed: bool
) -> None:
    lengths, width = ([53, 34, 39, 47] if packed else [53] * 4), int(128 * fraction)
    positions, rotary = text(lengths, OFFSETS[offsets]), rope(128, width, adjacent)
    angles = float32_angles(POSITIONS, width, 10000.0)
    cos, sin = (of_rows(t, lengths, OFFSETS[offsets])[:, None].to(DEVICE) for t in (angles.cos(), angles.sin()))
    x, gradient = (normal(sum(lengths), 2, 128, dtype=dtype, seed=seed) for seed in (0, 1))
    want = turned(x.float(), cos, sin, adjacent).to(dtype)
    want_gradient = turned(gradient.float(), cos, -sin, adjacent).to(dtype)

    shape = x.shape if packed else (4, 53, 2, 128)
    before, asked = x.clone(), x.view(shape).requires_grad_(not inplace)
    if inplace:  # where they also turn the gradient in place
        out, found = asked, gradient.clone().view(shape)
        assert apply_rotary(asked, None, positions, rotary, inplace=True)[0] is asked
        apply_rotary(found, None, positions, rotary, inplace=True, conjugate=True)
    else:
        out, _ = apply_rotary(asked, None, positions, rotary)
        out.backward(gradient.view(shape))
        assert torch.equal(x, before)
        assert asked.grad is not None
        found = asked.grad
    for ours, theirs, source in ((out, want, before), (found, want_gradient, gradient)):
        ours = ours.detach().reshape(theirs.shape)
        agree(ours, theirs, source, width // 2, adjacent, peer=flash(theirs))
        assert torch.equal(ours[..., width:], source[..., width:])


@pytest.mark.parametrize(
    ("dtype", "offsets", "fraction", "adjacent", "heads", "compiled"),
    meeting(
        {
            "dtype": HALVES,
            "offsets": tuple(OFFSETS),
            "fraction": (1.0, 0.5),
            "adjacent": (False, True),
            "heads": ((4, 4), (4, 2), (0, 4)),
            "compiled": (False, True),
        }
    ),
)
def test_flash_attentions_fused_qkv(
    dtype: torch.dtype, offsets: str, fraction: float, adjacent: bool, heads: tuple[int, int], compiled: bool
) -> None:
    """q and k are turned where they lie between v, or k alone in a tensor of k and v."""
    (q_heads, k_heads), seq, width = heads, 33, int(64 * fraction)
    positions, rotary = text([seq] * 4, OFFSETS[offsets]), rope(64, width, adjacent)
    angles = float32_angles(POSITIONS, width, 10000.0)
    cos, sin = (
        of_rows(t, [seq] * 4, OFFSETS[offsets]).view(4, seq, 1, -1).to(DEVICE) for t in (angles.cos(), angles.sin())
    )
    fused = normal(4, seq, q_heads + 2 * k_heads, 64, dtype=dtype)
    gradient = normal(4, seq, q_heads + 2 * k_heads, 64, dtype=dtype, seed=1)

    def call(qkv: Tensor) -> Tensor:
        q, k, v = qkv.split([q_heads, k_heads, k_heads], dim=2)
        if not q_heads:
            return torch.cat((apply_rotary(k, None, given, rotary)[0], v), dim=2)
        q_out, k_out = apply_rotary(q, k, given, rotary)
        assert k_out is not None
        return torch.cat((q_out, k_out, v), dim=2)

    given = DevicePositions.from_table(positions, DEVICE) if compiled else positions
    asked = fused.clone().requires_grad_()
    out = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(asked)
    out.backward(gradient)
    assert asked.grad is not None
    turning = q_heads + k_heads
    for ours, source, sign in ((out.detach(), fused, 1), (asked.grad, gradient, -1)):
        theirs = turned(source[:, :, :turning].float(), cos, sign * sin, adjacent).to(dtype)
        part = ours[:, :, :turning]
        agree(part, theirs, source[:, :, :turning], width // 2, adjacent, peer=flash(theirs))
        assert torch.equal(ours[:, :, turning:], source[:, :, turning:])
    q, k, _ = fused.split([q_heads, k_heads, k_heads], dim=2)  # in place, between what stays
    if q_heads:
        apply_rotary(q, k, positions, rotary, inplace=True)
    else:
        apply_rotary(k, None, positions, rotary, inplace=True)
    assert torch.equal(fused, out)


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_any_angles_are_the_ids_of_as_many_axes(dtype: torch.dtype, adjacent: bool) -> None:
    """flash-attention draws an angle per token and pair; with an axis of its own for every pair, so can we."""
    angles = torch.rand(64, 217, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 * torch.pi
    angles = angles.to(DEVICE)
    pairing: Any = "adjacent" if adjacent else "half"
    rotary = Rotary(128, axes=64, allocation=range(64), inv_freq=[1.0] * 64, pairing=pairing)
    x = normal(217, 4, 128, dtype=dtype)
    theirs = turned(x.float(), angles.T[:, None].cos().float(), angles.T[:, None].sin().float(), adjacent).to(dtype)
    ours, _ = apply_rotary(x, None, angles, rotary)
    agree(ours, theirs, x, 64, adjacent, peer=flash(theirs))
    # Its tables hold 16 bits: cos and sin rounded once move a pair by the rounding, relative to its length.
    cos, sin = (part.T[:, None].to(dtype).float() for part in (angles.cos(), angles.sin()))
    agree(ours, turned(x.float(), cos, sin, adjacent).to(dtype), x, 64, adjacent, phase=torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("offset", [0, 211])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("model", ["gpt_neox", "gptj"])
def test_flash_attentions_layers_are_those_of_transformers(model: str, fraction: float, offset: int) -> None:
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    seq, width, adjacent = 512 - offset, int(128 * fraction), model == "gptj"
    qkv = normal(1, seq, 3, 2, 128, dtype=torch.float16)
    q, k, _ = before = qkv.clone().unbind(2)
    if adjacent:
        sin, cos = modeling.create_sinusoidal_positions(512, width)[None, offset:].half().to(DEVICE).chunk(2, dim=-1)
        theirs = [modeling.apply_rotary_pos_emb(x[..., :width], sin, cos) for x in (q, k)]
    else:
        angles = float32_angles(torch.arange(offset, 512), width, 10000.0).repeat(1, 2)[None].to(DEVICE)
        found = modeling.apply_rotary_pos_emb(
            *(x[..., :width].transpose(1, 2) for x in (q, k)), angles.cos().half(), angles.sin().half()
        )
        theirs = [x.transpose(1, 2) for x in found]
    apply_rotary(qkv[:, :, 0], qkv[:, :, 1], text([seq], offset), rope(128, width, adjacent), inplace=True)
    # Cos and sin, products and sums in float16: a rounding of the length of the pair each.
    for i, theirs_x in enumerate(theirs):
        ours, x = qkv[:, :, i], before[i]
        agree(
            ours[..., :width],
            theirs_x,
            x[..., :width],
            width // 2,
            adjacent,
            phase=3.5 * 2**-11,
            peer=Tolerance(1e-3, 5e-3),
        )
        assert torch.equal(ours[..., width:], x[..., width:])
    assert torch.equal(qkv[:, :, 2], before[2])


# TransformerEngine: sequence first or batch first or packed, cut among context-parallel ranks, with any gradient.

ENGINE = {
    torch.float32: Tolerance(1.3e-6, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5),
    torch.float16: Tolerance(1e-3, 1e-5),
}
"""Those of torch.testing.assert_close."""

LENGTHS = [400, 142, 169, 16, 25, 518, 156, 24, 504, 90, 4]


def zigzag(angles: Tensor, tokens: int, rank: int, size: int) -> Tensor:
    """The rows of a sequence from position 0 that one of its ranks turns by, of so many tokens in all."""
    if size == 1:
        return angles[:tokens]
    half = tokens // size // 2
    return torch.cat(
        (angles[rank * half : (rank + 1) * half], angles[tokens - (rank + 1) * half : tokens - rank * half])
    )


def engine_turned(
    t: Tensor, theta_dim: int, lengths: list[int], starts: list[int], rank: int, size: int, adjacent: bool, sign: int
) -> Tensor:
    """Packed tokens of a rank turned as the engine's unfused formula does, in float32, and rounded once."""
    angles = float32_angles(torch.arange(max(lengths) + max(starts)), theta_dim, 10000.0).to(DEVICE)
    mine = torch.cat([zigzag(angles[start:], n, rank, size) for n, start in zip(lengths, starts, strict=True)])
    return turned(t.float(), mine.cos()[:, None], sign * mine.sin()[:, None], adjacent).to(t.dtype)


def check_engine(
    t: Tensor, layout: Any, lengths: list[int], starts: list[int], width: int, size: int, adjacent: bool, expanded: bool
) -> None:
    """Forward and backward of every rank; t is "thd" or "bshd", of any strides."""
    heads, head_dim = t.shape[-2:]
    positions, rotary = text(lengths, starts), rope(head_dim, width, adjacent)
    for rank in range(size):
        shard = positions.shard(rank, size)
        asked = t.detach().requires_grad_()
        out, _ = apply_rotary(asked, None, shard, rotary, layout=layout)
        gradient = torch.full_like(out, 2.0)
        if expanded:  # the gradient of a sum: one number that stands for all
            (2 * out.sum()).backward()
        else:
            (2 * out * torch.ones_like(out)).sum().backward()
        assert asked.grad is not None
        for ours, source, sign in ((out.detach(), t, 1), (asked.grad, gradient, -1)):
            source = source.reshape(-1, heads, head_dim)
            theirs = engine_turned(source, width, lengths, starts, rank, size, adjacent, sign)
            agree(ours.reshape(theirs.shape), theirs, source, width // 2, adjacent, peer=ENGINE[t.dtype])
        if t.is_contiguous():
            assert out.is_contiguous()


MARGINS = ((0, False), (10, False), (10, True))
"""Tokens less than the table of angles has, and whether rows start anywhere in that margin."""


@pytest.mark.parametrize(
    ("dtype", "seq", "head_dim", "percent", "margin", "exchanged", "first", "expanded", "size", "adjacent"),
    meeting(
        {
            "dtype": (torch.float32, torch.bfloat16, torch.float16),
            "seq": (2048, 4096, 16),
            "head_dim": (128, 256, 64),
            "percent": (0.5, 1.0),
            "margin": MARGINS,
            "exchanged": (None, (0, 1), (2, 3)),
            "first": ("seq", "batch"),
            "expanded": (True, False),
            "size": (1, 2),
            "adjacent": (True, False),
        }
    ),
)
def test_transformer_engines_rows(
    dtype: torch.dtype, seq: int, head_dim: int, percent: float, margin: tuple[int, bool], exchanged: Any, first: str,
    expanded: bool, size: int, adjacent: bool,
) -> None:  # fmt: skip
    less, started = margin
    starts = drawn(less, 2).tolist() if started else [0, 0]
    mine = (seq - less) // 2 * 2
    shape = (mine, 2, 1, head_dim) if first == "seq" else (2, mine, 1, head_dim)
    t = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    if exchanged is not None:
        t = t.transpose(*exchanged).contiguous().transpose(*exchanged)
    rows = t.transpose(0, 1) if first == "seq" else t
    check_engine(rows, "bshd", [mine * size] * 2, starts, int(head_dim * percent), size, adjacent, expanded)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "percent", "exchanged", "expanded", "size", "adjacent", "started"),
    meeting(
        {
            "dtype": (torch.float32, torch.bfloat16, torch.float16),
            "head_dim": (128, 256),
            "percent": (0.5, 1.0),
            "exchanged": (None, (1, 2)),
            "expanded": (True, False),
            "size": (1, 2),
            "adjacent": (True, False),
            "started": (True, False),
        }
    ),
)
def test_transformer_engines_packed_sequences(
    dtype: torch.dtype, head_dim: int, percent: float, exchanged: Any, expanded: bool, size: int, adjacent: bool,
    started: bool,
) -> None:  # fmt: skip
    lengths = [-(-n // (2 * size)) * 2 * size for n in LENGTHS] if size > 1 else LENGTHS
    starts = drawn(10, len(lengths)).tolist() if started else [0] * len(lengths)
    t = torch.rand(sum(lengths) // size, 3, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    if exchanged is not None:
        t = t.transpose(*exchanged).contiguous().transpose(*exchanged)
    check_engine(t, "thd", lengths, starts, int(head_dim * percent), size, adjacent, expanded)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("adjacent", [False, True])
def test_transformer_engines_layouts_are_one(adjacent: bool, head_dim: int, started: bool) -> None:
    """Packed, batch first and sequence first: the same bits of the same tokens."""
    positions = text([16] * 4, [0, 16, 32, 48] if started else 0)
    rotary = rope(head_dim, head_dim, adjacent)
    for rank in range(2):
        thd = normal(32, 8, head_dim, dtype=torch.bfloat16)
        bshd = thd.view(4, 8, 8, head_dim)
        shard = positions.shard(rank, 2)
        want, _ = apply_rotary(thd, None, shard, rotary)
        rows = (
            apply_rotary(bshd, None, shard, rotary)[0],
            apply_rotary(bshd.transpose(0, 1).contiguous().transpose(0, 1), None, shard, rotary)[0],
        )
        heads_first = apply_rotary(bshd.transpose(1, 2), None, shard, rotary, layout="bhsd")[0].transpose(1, 2)
        for found in (*rows, heads_first):
            assert torch.equal(found.reshape(want.shape), want)


@pytest.mark.parametrize("precision", ["exact", "hf"])
def test_autocast_changes_no_angle(precision: Any) -> None:
    rotary, positions, q = Rotary(128, axes=1, precision=precision), text([1024]), normal(1024, 2, 128)
    plain = *mmpos.rotary.cos_sin(rotary, positions), apply_rotary(q, None, positions, rotary)[0]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        cast = *mmpos.rotary.cos_sin(rotary, positions), apply_rotary(q, None, positions, rotary)[0]
    for one, other in zip(plain, cast, strict=True):
        assert torch.equal(one, other)


# FlashInfer: packed requests by indptr and offsets or by ids, Llama 3.1's frequencies, tables of float32, pages.

LLAMA31: dict[str, Any] = {"theta": 5e5, "scaling": Llama3(8.0, 1.0, 4.0, 8192)}


def llama31_frequencies(rotary_dim: int) -> Tensor:
    """Llama 3.1's, one by one in float32 numbers: kept, divided by 8, or between the two by their wavelength."""
    plain = 1.0 / torch.pow(5e5, torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    found = []
    for theta in plain:
        wavelength = 2 * torch.pi / theta
        if wavelength < 8192 / 4:
            found.append(theta)
        elif wavelength > 8192:
            found.append(theta / 8)
        else:
            smooth = (8192 / wavelength - 1) / 3
            found.append((1 - smooth) * theta / 8 + smooth * theta)
    return torch.stack(found)


@pytest.mark.parametrize(
    ("batch", "length", "q_heads", "offset", "head_dim", "llama31", "partial", "inplace", "adjacent", "id_dtype"),
    meeting(
        {
            "batch": (1, 3, 19),
            "length": (1, 4, 19, 204),
            "q_heads": (2, 4),
            "offset": (0, 15, 99),
            "head_dim": (64, 128, 256),
            "llama31": (False, True),
            "partial": (0.25, 0.5, 0.75, 1.0),
            "inplace": (False, True),
            "adjacent": (True, False),
            "id_dtype": (torch.int32, torch.int64),
        }
    ),
)
def test_flashinfers_packed_requests(
    batch: int, length: int, q_heads: int, offset: int, head_dim: int, llama31: bool, partial: float, inplace: bool,
    adjacent: bool, id_dtype: torch.dtype,
) -> None:  # fmt: skip
    width, tokens = int(head_dim * partial), batch * length
    rotary = rope(head_dim, width, adjacent, **(LLAMA31 if llama31 else {}))
    qkv = normal(tokens, (q_heads + 4) * head_dim, dtype=torch.float16)
    q, k, _ = (
        x.unflatten(1, (-1, head_dim)) for x in qkv.split([q_heads * head_dim, 2 * head_dim, 2 * head_dim], dim=1)
    )
    ids = torch.arange(offset, offset + length).repeat(batch).to(DEVICE)
    if llama31:
        angles = ids.float()[:, None] * llama31_frequencies(width).to(DEVICE)
    else:
        angles = float32_angles(ids, width, 10000.0)
    want = [turned(x.float(), angles.cos()[:, None], angles.sin()[:, None], adjacent).half() for x in (q, k)]
    before = q.clone(), k.clone()
    by_ids = apply_rotary(q, k, ids[None].to(id_dtype), rotary)
    found = apply_rotary(q, k, text([length] * batch, offset), rotary, inplace=inplace)
    # Blended frequencies have four roundings more than powers: two ulp of an angle of offset + length at most.
    phase = 4 * (offset + length) * 2.0**-24 if llama31 else 0.0
    for ours, theirs, same, x in zip(found, want, by_ids, before, strict=True):
        assert ours is not None
        assert torch.equal(ours, same)  # type: ignore[arg-type]
        agree(ours, theirs, x, width // 2, adjacent, phase=phase, peer=Tolerance(1e-3, 1e-3))


CACHES = [
    (64, 64, 8000.0, True, 32, 32, 1, 1),
    (256, 128, 10000.0, True, 2, 512, 4, 2),
    (64, 32, 8432.0, True, 2, 199, 4, 1),
    (64, 64, 8000.0, False, 32, 32, 1, 1),
    (256, 128, 9231.0, False, 3, 231, 4, 2),
    (192, 128, 9231.0, True, 3, 231, 3, 2),
    (80, 64, 10000.0, False, 4, 64, 2, 2),
    (112, 64, 12000.0, True, 5, 77, 2, 1),
    (160, 96, 10000.0, False, 2, 128, 6, 3),
    (512, 128, 10000.0, True, 3, 39, 4, 2),
    (128, 128, 10000.0, False, 2, 512, 32, 8),
    (128, 128, 10000.0, False, 2, 512, 16, 4),
    (512, 128, 10000.0, False, 3, 39, 4, 2),
]
"""head_dim, rotary_dim, theta, halves, batch, length, heads of q and of k: FlashInfer's, then SGLang's."""


@pytest.mark.parametrize("case", CACHES, ids=lambda case: "-".join(map(str, case)))
def test_tables_of_float32_turn_bfloat16(case: Any) -> None:
    head_dim, width, theta, halves, batch, length, q_heads, k_heads = case
    angles = float32_angles(torch.arange(length).to(DEVICE), width, theta).repeat(batch, 1)[:, None]
    q, k = (normal(batch * length, heads, head_dim, dtype=torch.bfloat16) for heads in (q_heads, k_heads))
    found = apply_rotary(q, k, text([length] * batch), rope(head_dim, width, not halves, theta))
    for ours, x in zip(found, (q, k), strict=True):
        theirs = turned(x.float(), angles.cos(), angles.sin(), not halves).bfloat16()
        agree(ours, theirs, x, width // 2, not halves, peer=Tolerance(1e-2, 1e-2))


HEADS = [
    (128, 1, 64, 512), (64, 1, 128, 256), (128, 1, 64, 128), (32, 1, 32, 96), (32, 8, 64, 64), (64, 16, 128, 128),
    (24, 6, 32, 96), (32, 8, 128, 0), (64, 8, 128, 0), (64, 8, 64, 0), (32, 32, 64, 64), (16, 16, 128, 128),
    (8, 8, 32, 96),
]  # fmt: skip
"""Heads of q and of k, channels that turn and channels that do not, of latent, grouped and plain attention."""


@pytest.mark.parametrize(("place_of_case", "heads"), list(enumerate(HEADS)), ids=str)
@pytest.mark.parametrize("dtype", HALVES)
def test_flashinfers_heads_of_latent_grouped_and_plain_attention(
    dtype: torch.dtype, place_of_case: int, heads: tuple[int, int, int, int]
) -> None:
    """The rotation of rope_quantize before it is quantised; the key of latent attention has no axis of heads."""
    q_heads, k_heads, width, rest = heads
    tokens = (1, 19, 128, 199, 899, 2047)[place_of_case % 6]
    q = normal(tokens, q_heads if tokens < 200 else 2, width + rest, dtype=dtype)
    k = normal(tokens, *([k_heads] if k_heads > 1 else []), width + rest, dtype=dtype)
    angles = float32_angles(torch.arange(tokens).to(DEVICE), width, 10000.0)[:, None]
    key = k[:, None] if k_heads == 1 else k
    found = apply_rotary(q, key, text([tokens]), rope(width + rest, width, True))
    for ours, x in zip(found, (q, key), strict=True):
        theirs = turned(x.float(), angles.cos(), angles.sin(), True).to(dtype)
        agree(ours, theirs, x, width // 2, True, peer=Tolerance(2e-1, 1e-2))


WAN = [
    (1, 5, 12, 32), (1, 5, 12, 8), (1, 5, 48, 32), (2, 5, 12, 32), (1, 5, 6, 4), (4, 5, 12, 32), (1, 5, 12, 16),
    (1, 10, 12, 32),
]  # fmt: skip
"""Videos, frames, rows and columns."""


@pytest.mark.parametrize("video", WAN, ids=lambda video: "x".join(map(str, video)))
def test_flashinfers_videos_of_three_unequal_axes(video: tuple[int, int, int, int]) -> None:
    """Frames, rows and columns take 44, 42 and 42 channels, each with a ladder of its own, counted from 0."""
    batch, frames, height, width = video
    sizes = (44, 42, 42)
    ladders = [[10000.0 ** (-2 * i / size) for i in range(size // 2)] for size in sizes]
    rotary = Rotary(
        128,
        allocation=[axis for axis, ladder in enumerate(ladders) for _ in ladder],
        inv_freq=[theta for ladder in ladders for theta in ladder],
        pairing="adjacent",
    )
    grid = [[Grid(height, width, frames=frames)]] * batch
    positions = place(SegmentTable.from_documents(grid), "mrope")
    ids = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in (frames, height, width)))
    angles = torch.cat([ids[:, [axis]] * torch.tensor(ladder).double() for axis, ladder in enumerate(ladders)], dim=1)
    angles = angles.repeat(batch, 1)[:, None].to(DEVICE)
    x = normal(positions.num_tokens, 2, 128, dtype=torch.bfloat16)
    ours, _ = apply_rotary(x, None, positions, rotary)
    agree(ours, turned(x.float(), angles.cos().float(), angles.sin().float(), True).bfloat16(), x, 64, True)
    # Theirs rounds cos and sin, products and sums to bfloat16, and allows 0.1.
    theirs = turned(x, angles.cos().bfloat16(), angles.sin().bfloat16(), True)
    agree(ours, theirs, x, 64, True, phase=3.1 * 2**-8, peer=Tolerance(0, 0.1))


# vLLM: flat and sliced tensors, sections of three axes in turn or alternating, four axes, norms before, pages behind.

VLLM = {torch.float32: Tolerance(1.3e-6, 1e-5), torch.bfloat16: Tolerance(1.6e-2, 1e-3)}


@pytest.mark.parametrize(
    ("halves", "shape", "seq", "head_dim", "rotary_dim", "dtype", "with_key"),
    meeting(
        {
            "halves": (True, False),
            "shape": ("heads", "flat", "sliced"),
            "seq": (11, 1024),
            "head_dim": (64, 80, 120, 256),
            "rotary_dim": (None, 32),
            "dtype": (torch.bfloat16, torch.float32),
            "with_key": (True, False),
        }
    ),
)
def test_vllms_rotation(
    halves: bool, shape: str, seq: int, head_dim: int, rotary_dim: int | None, dtype: torch.dtype, with_key: bool
) -> None:
    width = rotary_dim or head_dim
    room = 64 if shape == "sliced" else 0
    whole = [normal(2, seq, 3, head_dim + room, dtype=dtype, seed=seed) for seed in range(1 + with_key)]
    q, *keys = [x[..., :head_dim] for x in whole]
    if shape == "flat":
        q, *keys = [x.flatten(2).unflatten(2, (3, head_dim)) for x in (q, *keys)]
    ids = drawn(8192, 2, seq)
    found = apply_rotary(q, keys[0] if keys else None, ids[None], rope(head_dim, width, not halves))
    angles = float32_angles(ids, width, 10000.0)[:, :, None]
    assert (found[1] is None) != with_key
    for ours, x in zip(found, (q, *keys), strict=False):
        theirs = turned(x.float(), angles.cos(), angles.sin(), not halves).to(dtype)
        agree(ours, theirs, x, width // 2, not halves, peer=VLLM[dtype])
        if dtype == torch.bfloat16:  # its native formula rounds tables, products and sums
            native = turned(x, angles.cos().to(dtype), angles.sin().to(dtype), not halves)
            agree(ours, native, x, width // 2, not halves, phase=3.1 * 2**-8)


MROPE: dict[str, Any] = {
    "GLM-4.1V-9B": (32, 2, 128, 0.5, 1e4, [8, 12, 12], False, 65536),
    "Qwen2-VL-7B": (28, 4, 128, 1.0, 1e6, [16, 24, 24], False, 32768),
    "Qwen2-VL-72B": (64, 8, 128, 1.0, 1e6, [16, 24, 24], False, 32768),
    "Qwen2.5-VL-72B": (64, 8, 128, 1.0, 1e6, [16, 24, 24], False, 128000),
    "Qwen3-VL-4B": (32, 8, 128, 1.0, 5e6, [24, 20, 20], True, 262144),
    "Qwen3-VL-30B-A3B": (32, 4, 128, 1.0, 5e6, [24, 20, 20], True, 262144),
}
"""Heads of q and k, head_dim, share that turns, theta, mrope_section, whether axes alternate, max_position."""


def section_axes(section: list[int], alternating: bool) -> Tensor:
    """(pairs,) which row of ids turns each pair."""
    axes = torch.repeat_interleave(torch.arange(len(section)), torch.tensor(section))
    if alternating:
        axes = torch.zeros_like(axes)
        for axis in (1, 2):
            axes[axis : 3 * section[axis] : 3] = axis
    return axes


@pytest.mark.parametrize("tokens", [11, 256])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MROPE)
def test_vllms_mrope(model: str, ranks: int, tokens: int) -> None:
    q_heads, k_heads, head_dim, share, theta, section, alternating, most = MROPE[model]
    width = int(head_dim * share)
    heads = [max(1, count // ranks) if tokens == 11 else 2 // ranks for count in (q_heads, k_heads)]
    allocation = "mrope-interleaved" if alternating else "sections"
    rotary = Rotary(head_dim, theta, rotary_dim=width, allocation=allocation, mrope_section=section, precision="hf")
    ids = drawn(most // 4, 3, tokens)
    angles = float32_angles(ids, width, theta)
    by_pair = section_axes(section, alternating).to(DEVICE).expand(1, tokens, -1)
    angles = angles.gather(0, by_pair)[0][:, None]
    q, k = (normal(tokens, count, head_dim, dtype=torch.bfloat16) for count in heads)
    for ours, x in zip(apply_rotary(q, k, ids, rotary), (q, k), strict=True):
        theirs = turned(x.float(), angles.cos(), angles.sin(), False).bfloat16()
        agree(ours, theirs, x, width // 2, False, peer=Tolerance(1.6e-2, 1e-2))
        native = turned(x, angles.cos().bfloat16(), angles.sin().bfloat16(), False)
        agree(ours, native, x, width // 2, False, phase=3.1 * 2**-8)


@pytest.mark.parametrize("tokens", [1, 11, 128])
@pytest.mark.parametrize("dtype", HALVES)
def test_vllms_four_axes_keep_the_dtype(dtype: torch.dtype, tokens: int) -> None:
    rotary = Rotary(128, axes=4, allocation="sections", mrope_section=[16] * 4, precision="hf")
    ids = drawn(1024, 4, tokens)
    angles = float32_angles(ids, 128, 10000.0).gather(0, section_axes([16] * 4, False).to(DEVICE).expand(1, tokens, -1))
    q, k = (normal(tokens, heads, 128, dtype=dtype) for heads in (8, 2))
    for ours, x in zip(apply_rotary(q, k, ids, rotary), (q, k), strict=True):
        theirs = turned(x.float(), angles[0][:, None].cos(), angles[0][:, None].sin(), False).to(dtype)
        agree(ours, theirs, x, 64, False, peer=Tolerance(1.6e-2, 1e-2))


def of_a_norm(x: Tensor) -> float:
    """Error of a norm in float32, relative: the sum of a square per channel, a root, a quotient, two products."""
    return (x.shape[-1] + 8) * 2.0**-24


def normed(x: Tensor, weight: Tensor, eps: float, rounding: torch.dtype = torch.float32) -> Tensor:
    """Every head over its root mean square, rounded, times a weight, rounded."""
    wide = x.float()
    unit = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(rounding)
    return unit * weight.to(rounding)


def check_normed(
    q: Tensor,
    k: Tensor,
    weights: list[Tensor],
    eps: float,
    ids: Tensor,
    angles: Tensor,
    rotary: Rotary,
    peer: Tolerance,
) -> None:
    """A norm and a rotation of each head, in one call, and in the roundings of engines that make two of it."""
    pairs, adjacent = angles.shape[-1], rotary.pairing == "adjacent"
    cos, sin, unit = angles.cos(), angles.sin(), torch.finfo(q.dtype).eps / 2
    found = apply_rotary(q, k, ids, rotary, q_norm_weight=weights[0], k_norm_weight=weights[1], norm_eps=eps)
    for ours, x, weight in zip(found, (q, k), weights, strict=True):
        wide = normed(x, weight, eps)
        theirs = turned(wide, cos, sin, adjacent).to(x.dtype)
        agree(ours, theirs, wide, pairs, adjacent, before=of_a_norm(x), peer=peer)
        # Two roundings before, of the unit vector and of its product; then tables, products and sums as without a norm.
        native = turned(normed(x, weight, eps, x.dtype), cos.to(x.dtype), sin.to(x.dtype), adjacent)
        agree(ours, native, wide, pairs, adjacent, before=2.1 * unit, phase=3.1 * unit)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_vllms_norm_and_rotation(dtype: torch.dtype, halves: bool, eps: float, share: float) -> None:
    width, ids = int(128 * share), torch.arange(4).to(DEVICE)
    weights = [1 + 0.1 * normal(128, seed=seed).to(dtype) for seed in (2, 3)]
    q, k = (normal(4, heads, 128, dtype=dtype) for heads in (16, 4))
    angles = float32_angles(ids, width, 10000.0)[:, None]
    peer = Tolerance(2e-3, 2e-3) if dtype == torch.float16 else Tolerance(1e-2, 1e-2)
    check_normed(q, k, weights, eps, ids[None], angles, rope(128, width, not halves), peer)


@pytest.mark.parametrize(
    ("q_heads", "k_heads", "section"), [(16, 4, [16, 24, 24]), (16, 2, [8, 12, 12]), (8, 8, [32, 48, 48])]
)
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_vllms_norm_and_mrope(
    dtype: torch.dtype, halves: bool, eps: float, q_heads: int, k_heads: int, section: list[int]
) -> None:
    dim, ids = 2 * sum(section), drawn(1000, 3, 7)
    weights = [1 + 0.1 * normal(dim, seed=seed).to(dtype) for seed in (2, 3)]
    q, k = (normal(7, heads, dim, dtype=dtype) for heads in (q_heads, k_heads))
    angles = float32_angles(ids, dim, 10000.0)
    angles = angles.gather(0, section_axes(section, False).to(DEVICE).expand(1, 7, -1))[0][:, None]
    pairing: Any = "half" if halves else "adjacent"
    rotary = Rotary(dim, allocation="sections", mrope_section=section, pairing=pairing, precision="hf")
    peer = Tolerance(2e-3, 2e-3) if dtype == torch.float16 else Tolerance(4e-2, 4e-2)
    check_normed(q, k, weights, eps, ids, angles, rotary, peer)


PAGES = [(32, 8, 128, 128), (16, 4, 64, 64), (8, 2, 256, 256), (8, 8, 128, 128), (32, 8, 128, 64)]
SLOTS = [(1, 1, 0), (5, 5, 0), (300, 300, 0), (64, 64, 7), (64, 40, 0), (300, 290, 5)]
"""Tokens, slots of the first of them, and how many of those slots are −1, as CUDA graphs pad."""


def paged(layout: str, blocks: int, size: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Caches of k and v, of FlashInfer's two layouts or side by side in a tensor as FlashAttention has them in vLLM."""
    if layout == "side by side":
        both = normal(blocks, heads, size, 2 * head_dim, dtype=dtype, seed=5).transpose(1, 2)
        return both[..., :head_dim], both[..., head_dim:]
    shape = (blocks, size, heads, head_dim) if layout == "NHD" else (blocks, heads, size, head_dim)
    return normal(*shape, dtype=dtype, seed=5), normal(*shape, dtype=dtype, seed=6)


@pytest.mark.parametrize(
    ("dtype", "adjacent", "heads", "slots", "layout", "with_norm", "slot_dtype"),
    meeting(
        {
            "dtype": HALVES,
            "adjacent": (False, True),
            "heads": PAGES,
            "slots": SLOTS,
            "layout": ("side by side", "NHD", "HND"),
            "with_norm": (True, False),
            "slot_dtype": (torch.int32, torch.int64),
        }
    ),
)
def test_one_call_writes_the_pages_that_two_would(
    dtype: torch.dtype, adjacent: bool, heads: tuple[int, int, int, int], slots: tuple[int, int, int], layout: str,
    with_norm: bool, slot_dtype: torch.dtype,
) -> None:  # fmt: skip
    """Bit for bit: q and k as of a rotation alone, their rows and those of v in their slots, and no other cell."""
    q_heads, k_heads, dim, width = heads
    tokens, named, padded = slots
    qkv = normal(tokens, q_heads + 2 * k_heads, dim, dtype=dtype)
    q, k, v = qkv.split([q_heads, k_heads, k_heads], dim=1)
    weights = [1 + 0.1 * normal(dim, seed=seed).to(dtype) if with_norm else None for seed in (2, 3)]
    norms: dict[str, Any] = {"q_norm_weight": weights[0], "k_norm_weight": weights[1], "norm_eps": 1e-6}
    ids, rotary = drawn(4096, 1, tokens), rope(dim, width, adjacent)
    blocks = -(-tokens // 16) + 2
    mapping = torch.randperm(16 * blocks, generator=torch.Generator().manual_seed(0))[:named].to(slot_dtype).to(DEVICE)
    mapping[named - padded :] = -1
    keys, values = paged(layout, blocks, 16, k_heads, dim, dtype)
    want_keys, want_values = keys.clone(), values.clone()
    want_q, want_k = apply_rotary(q, k, ids, rotary, **norms)
    assert want_k is not None
    for token, slot in enumerate(mapping.tolist()):
        if slot >= 0:
            at = (slot // 16, slice(None), slot % 16) if layout == "HND" else (slot // 16, slot % 16)
            want_keys[at], want_values[at] = want_k[token], v[token]
    was = qkv.clone()
    found = rotate_and_store(
        q, k, v, ids, rotary, keys, values, mapping,
        cache_layout="HND" if layout == "HND" else "NHD", return_k=True, **norms,
    )  # fmt: skip
    assert torch.equal(qkv, was)
    for ours, want in zip((*found, keys, values), (want_q, want_k, want_keys, want_values), strict=True):
        assert ours is not None
        assert torch.equal(ours, want)


# SGLang: norms with wide weights, ids beyond 100,000, any number of tokens.


@pytest.mark.parametrize(
    ("dim", "heads", "tokens", "halves", "share"),
    meeting(
        {
            "dim": (64, 128),
            "heads": ((16, 8), (32, 8), (40, 8), (64, 8), (12, 1)),
            "tokens": (1, 3, 8, 32, 256),
            "halves": (False, True),
            "share": (1.0, 0.5),
        }
    ),
)
def test_sglangs_norm_and_rotation(dim: int, heads: tuple[int, int], tokens: int, halves: bool, share: float) -> None:
    q_heads, k_heads = heads if tokens < 256 else (2, 1)
    width, ids = int(dim * share), torch.arange(100, 100 + tokens).to(DEVICE)
    weights = [5 * normal(dim, seed=seed).bfloat16() for seed in (2, 3)]
    q, k = (normal(tokens, count, dim, dtype=torch.bfloat16) for count in (q_heads, k_heads))
    angles = float32_angles(ids, width, 10000.0)[:, None]
    check_normed(q, k, weights, 1e-5, ids[None].int(), angles, rope(dim, width, not halves), peer=Tolerance(5e-2, 1e-1))


COUNTS = (1, 2, 3, 17, 129, 513)


@pytest.mark.parametrize(
    ("tokens", "ratio", "k_heads", "dim", "halves", "dtype", "id_dtype"),
    meeting(
        {
            "tokens": COUNTS,
            "ratio": (1, 4, 8),
            "k_heads": (1, 2, 8),
            "dim": (64, 128, 256, 512),
            "halves": (False, True),
            "dtype": (torch.bfloat16, torch.float16),
            "id_dtype": (torch.int32, torch.int64),
        }
    ),
)
def test_sglangs_rotation_of_long_contexts(
    tokens: int, ratio: int, k_heads: int, dim: int, halves: bool, dtype: torch.dtype, id_dtype: torch.dtype
) -> None:
    heads = (k_heads * ratio, k_heads) if tokens < 64 else (2, 1)
    q, k = (normal(tokens, count, dim, dtype=dtype) for count in heads)
    ids = drawn(131_072, tokens)
    angles = float32_angles(ids, dim, 10000.0)[:, None]
    for ours, x in zip(apply_rotary(q, k, ids[None].to(id_dtype), rope(dim, dim, not halves)), (q, k), strict=True):
        theirs = turned(x.float(), angles.cos(), angles.sin(), not halves).to(dtype)
        agree(ours, theirs, x, dim // 2, not halves, peer=Tolerance(1e-2, 1e-2))


@pytest.mark.parametrize("tokens", [1, 2, 17, 1024])
@pytest.mark.parametrize(
    ("ratio", "k_heads", "dim", "halves"), [(4, 2, 64, True), (8, 1, 512, False), (1, 8, 128, True)]
)
def test_sglangs_store_of_rotated_keys(tokens: int, ratio: int, k_heads: int, dim: int, halves: bool) -> None:
    """Rows of a cache without pages, (slots, heads, head_dim)."""
    q, k, v = (normal(tokens, count, dim, dtype=torch.bfloat16) for count in (k_heads * ratio, k_heads, k_heads))
    ids, rotary = drawn(131_072, 1, tokens), rope(dim, dim, not halves)
    slots = torch.randperm(4096, generator=torch.Generator().manual_seed(0))[:tokens].to(DEVICE)
    keys, values = (torch.zeros(4096, k_heads, dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    want = apply_rotary(q, k, ids, rotary)
    q_out, _ = rotate_and_store(q, k, v, ids, rotary, keys, values, slots)
    assert torch.equal(q_out, want[0])
    assert torch.equal(keys[slots], want[1])  # type: ignore[arg-type]
    assert torch.equal(values[slots], v)
    assert int(keys.abs().sum(dim=(1, 2)).count_nonzero()) == tokens


# Their settings in the kernel: on a machine without a GPU in Triton's interpreter, whose cost allows a few.


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("dtype", "adjacent", "width", "starts", "norm"),
    [
        (torch.float16, False, 128, [217, 0, 5], False),
        (torch.float32, True, 64, 0, False),
        (torch.bfloat16, False, 32, 711, True),
        (torch.float16, True, 96, [3, 70_000, 131_000], True),
    ],
)
def test_the_kernel_does_what_was_asserted_above(
    dtype: torch.dtype, adjacent: bool, width: int, starts: Any, norm: bool, inplace: bool
) -> None:
    lengths = [7, 5, 9]
    positions, rotary = text(lengths, starts), rope(128, width, adjacent)
    q, k = (normal(21, heads, 128, dtype=dtype) for heads in (3, 1))
    weights = [1 + 0.1 * normal(128, seed=seed).to(dtype) if norm else None for seed in (2, 3)]
    angles = float32_angles(torch.from_numpy(positions.dense()[0]).to(DEVICE), width, 10000.0)[:, None]
    before = q.clone(), k.clone()
    found = apply_rotary(
        q,
        k,
        positions,
        rotary,
        inplace=inplace,
        implementation="triton",
        q_norm_weight=weights[0],
        k_norm_weight=weights[1],
    )
    for ours, x, weight in zip(found, before, weights, strict=True):
        wide = x.float() if weight is None else normed(x, weight, 1e-6)
        theirs = turned(wide, angles.cos(), angles.sin(), adjacent).to(dtype)
        assert ours is not None
        # The interpreter cuts float32 to bfloat16 instead of rounding: half an ulp more.
        room = 2**-8 if dtype == torch.bfloat16 else 0.0
        agree(ours, theirs, wide, width // 2, adjacent, before=of_a_norm(x) if norm else 0.0, phase=room)
