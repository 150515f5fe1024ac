"""Rotation in C, with and without a norm: it equals the reference bit for bit at every vector width; declined inputs.

numpy and the compiler round each float32 sum, product, quotient and root according to IEEE 754, so the bits are the
same on every processor.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rotary_oracle import INT32_MAX, INT32_MIN, heads, packed
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from mmpos.rotary import Norm, Rotary, apply_rotary, cpu
from mmpos.rotary.device import ids_on, rotation_of
from mmpos.rotary.reference import DENSE_FIXED, DENSE_INTEGER, TABLE_FRACTIONAL, TABLE_INTEGER
from mmpos.support import native

if native.core is None:
    pytest.skip("the extension was not built", allow_module_level=True)

CORE = native.core
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
PAIRINGS = ("half", "adjacent")
SHORTER = {"longest": 0, "not longest": 128, "short": 64}
"""Flags of csrc/rotate.c that disable the wider vectors."""
WIDTHS = pytest.mark.parametrize("vectors", SHORTER)
EPS = 1e-5


def weight(size: int) -> Tensor:
    return torch.linspace(-0.5, 2, size)


@np.errstate(over="ignore", invalid="ignore")
def normalised(x: Tensor, w: Tensor) -> Tensor:
    """Normalise heads in float32: add channel c's square to partial sum c mod 16, then add sums 8, 4, 2 and 1 apart."""
    value = x.float().numpy()
    sums = np.zeros((*value.shape[:-1], 16), np.float32)
    for c in range(value.shape[-1]):
        sums[..., c % 16] += value[..., c] * value[..., c]
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half:]
    scale = np.float32(1) / np.sqrt(sums / np.float32(value.shape[-1]) + np.float32(EPS))
    return torch.from_numpy(value * scale) * w.detach().float()


def expected(
    x: Tensor, w: Tensor | None, positions: Any, rotary: Rotary, after: bool = False, **options: Any
) -> Tensor:
    """Normalise in the order of the C code and rotate with the reference, rounding once."""
    value = x.float() if w is None or after else normalised(x, w)
    rotated = apply_rotary(value, None, positions, rotary, implementation="reference", **options)[0]
    return (rotated if w is None or not after else normalised(rotated, w)).to(x.dtype)


def source(positions: Any, rotary: Rotary) -> tuple[Any, ...]:
    ids = ids_on(positions, rotary, CPU)
    return cpu.source_of(rotation_of(ids, rotary), ids.tokens, rotary.head_dim)


def assert_same(got: Tensor | None, want: Tensor | None) -> None:
    """Assert equal bits, except that any NaN equals any other NaN."""
    assert got is not None
    assert want is not None
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(got.isnan(), want.isnan())
    a, b = (x.contiguous().nan_to_num(0.0, torch.inf, -torch.inf).view(torch.uint8) for x in (got, want))
    assert torch.equal(a, b)


def assert_agrees(
    x: Tensor, positions: Any, rotary: Rotary, w: Tensor | None = None, *, conjugate: bool = False,
    vectors: str = "longest", after: bool = False,
) -> None:  # fmt: skip
    """Assert that the extension rotates (tokens, heads, head_dim) like the reference, out of place and in place."""
    want = expected(x, w, positions, rotary, after, conjugate=conjugate)
    norm = None if w is None else (EPS, w.numpy())
    flags = cpu.ADJACENT * (rotary.pairing == "adjacent") | cpu.CONJUGATE * conjugate | cpu.NORM_AFTER * after
    flags |= SHORTER[vectors]
    for out in (torch.full_like(x, torch.nan), x.clone()):
        start = x if out.isnan().all() else out
        target = None if start is out else to_dlpack(out)
        assert CORE.rotate((to_dlpack(start), target), source(positions, rotary), norm, 0, 1, flags)
        assert_same(out, want)


# Sizes and values.


@WIDTHS
@pytest.mark.parametrize("normed", ["not", "before", "after"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("rotary_dim", [2, 6, 14, 16, 24, 40, 66, 80, 128, 512])
def test_any_number_of_rotated_and_unrotated_channels_is_supported(
    rotary_dim: int, pairing: Any, dtype: torch.dtype, normed: str, vectors: str
) -> None:
    ids = torch.tensor([[0, 1, -1, 77, INT32_MAX, INT32_MIN, 123_456_789]])
    for rest in (0, 2, 6, 30):
        rotary = Rotary(rotary_dim + rest, rotary_dim=rotary_dim, axes=1, pairing=pairing)
        w = None if normed == "not" else weight(rotary.head_dim)
        assert_agrees(heads(7, 3, rotary.head_dim, dtype), ids, rotary, w, vectors=vectors, after=normed == "after")


@WIDTHS
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_every_kind_of_number_is_rotated(pairing: Any, vectors: str) -> None:
    every_third = torch.arange(0, 3 << 14, 3, dtype=torch.int32)  # all exponents and low bits, without infinity
    bits = torch.cat((every_third, every_third + (1 << 15)))
    bits[:6] = torch.tensor([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FFF])
    numbers = bits.to(torch.int16).view(torch.bfloat16).view(8, -1, 16)
    rotary = Rotary(32, axes=1, pairing=pairing, inv_freq=[1.0] * 16)
    for other in (-0.0, 3e38, -1e-39, torch.inf):
        pair = numbers, torch.full_like(numbers, other)
        x = torch.cat(pair, -1) if pairing == "half" else torch.stack(pair, -1).flatten(-2)
        assert_agrees(x, torch.arange(8)[None], rotary, vectors=vectors)
    assert_agrees(x.float(), torch.arange(8)[None], rotary, vectors=vectors)


@WIDTHS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_every_kind_of_number_is_normalised(pairing: Any, dtype: torch.dtype, vectors: str) -> None:
    numbers = torch.tensor([0.0, -0.0, 1e-40, 1e-30, -3.0, 1e18, -3e38, torch.inf, -torch.inf, torch.nan])
    rotary, ids = Rotary(48, rotary_dim=32, axes=1, pairing=pairing), torch.arange(10)[None]
    mixed, w = heads(10, 2, 48), weight(48)
    mixed[..., 17] = numbers[:, None]
    w[40], w[41] = torch.inf, 0.0
    w[5:7] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN with all bits set
    for x in (numbers[:, None, None].repeat(1, 2, 48), mixed):
        for some_weight in (weight(48), w):
            assert_agrees(x.to(dtype), ids, rotary, some_weight, vectors=vectors)


def test_a_norm_of_q_or_k_alone_leaves_the_bits_of_the_other_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary, ids, w = Rotary(24, rotary_dim=16, axes=1), torch.arange(13)[None], weight(48).bfloat16()[::2]
    for dtype in DTYPES:
        q, k = heads(13, 5, 24, dtype), heads(13, 2, 48, dtype, seed=1)[..., ::2]
        for q_weight, k_weight in ((w, None), (None, w), (w.float().requires_grad_(), w + 1)):
            for after in (False, True):
                wants = [expected(x, y, ids, rotary, after) for x, y in ((q, q_weight), (k, k_weight))]
                with monkeypatch.context() as patch, torch.no_grad():
                    patch.setattr("mmpos.rotary.reference.rotate", None)  # only the extension may rotate
                    got = apply_rotary(q, k, ids, rotary, norm=Norm(q_weight, k_weight, EPS, after=after))
                for out, want in zip(got, wants, strict=True):
                    assert_same(out, want)


# Parts and threads.


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_several_threads_give_the_same_bits_as_one(normed: bool) -> None:
    rotary, ids = Rotary(64, axes=1), torch.arange(1100, dtype=torch.int32).repeat(4).view(1, 4, 1100)
    q, w = heads((4, 1100), 9, 64, torch.bfloat16), weight(64) if normed else None
    want, before = expected(q, w, ids, rotary), torch.get_num_threads()
    norm = None if w is None else Norm(w, eps=EPS)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            rotated, _ = apply_rotary(q.clone(), None, ids, rotary, norm=norm, inplace=True)  # reveals skipped tokens
            assert_same(rotated, want)
        pools = cpu._pool.cache_info().currsize
        for tokens in (300, 500, 800):  # sizes that use one, two and three additional threads
            apply_rotary(q[:, :tokens], None, ids[:, :, :tokens], rotary)
        assert cpu._pool.cache_info().currsize == pools, "tensors of each size have their own pool"
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_thread_that_outlives_the_main_thread_still_rotates() -> None:
    code = """
import threading, torch
from mmpos.rotary import Rotary, apply_rotary

torch.set_num_threads(4)
q, ids, rotary = torch.ones(4096, 8, 64), torch.arange(4096)[None], Rotary(64, axes=1)

def late():
    threading.main_thread().join()
    want = apply_rotary(q, None, ids, rotary, implementation="reference")[0]
    print(torch.equal(apply_rotary(q, None, ids, rotary)[0], want))

threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


# Declined inputs.


def test_the_reference_rotates_if_the_extension_returns_false(monkeypatch: pytest.MonkeyPatch) -> None:
    q, table = heads(32, 3, 24), packed("rope-tie")
    want, _ = apply_rotary(q, None, table, Rotary(24), implementation="reference")
    monkeypatch.setattr(native, "core", SimpleNamespace(rotate=lambda *_: False))
    assert_same(apply_rotary(q.clone(), None, table, Rotary(24), inplace=True)[0], want)


X = torch.zeros(1, 4, 2, 16)
WEIGHT = np.ones(16, np.float32)
ROTARY = Rotary(16, axes=2)
CONSTANTS: bytes = source(torch.zeros(2, 4, dtype=torch.int32), ROTARY)[4]
TABLE = packed("rope-tie").take([0], [4]).table
COS = np.ones((4, 8), np.float32)


def dense(
    ids: Any = None, mode: int = DENSE_INTEGER, tokens: Any = 4, row: Any = 0, constants: Any = CONSTANTS
) -> tuple[Any, ...]:
    """Return a source of ids."""
    return np.zeros((2, 4), np.int32) if ids is None else ids, mode, tokens, row, constants


def capsule(*shape: int, dtype: torch.dtype = torch.int32, **options: Any) -> tuple[Any, ...]:
    """Return a source of zero ids in a capsule, whose shape determines the number of tokens."""
    return dense(to_dlpack(torch.zeros(shape, dtype=dtype)), tokens=0, **options)


def numbers(ids: Any = None, **changed: int) -> tuple[Any, ...]:
    """Return a source with some integers of the constants changed."""
    names = ("pairs", "groups", "axes", "channels")
    values = {**dict(zip(names, struct.unpack("=4q", CONSTANTS[:32]), strict=True)), **changed}
    return dense(ids, constants=struct.pack("=4q", *(values[name] for name in names)) + CONSTANTS[32:])


def with_axis(axis: int) -> tuple[Any, ...]:
    return dense(constants=CONSTANTS[:-4] + struct.pack("=i", axis))


def cos_sin(cos: Any = COS, sin: Any = COS, groups: Any = 1) -> tuple[Any, ...]:
    return cos, sin, groups


SOURCE, TENSOR = dense(), torch.from_numpy(TABLE.copy())
STRIDED, ROWS = torch.zeros(1, 4, 2, 32)[..., ::2], X.view(2, 2, 2, 16)

DECLINED: dict[str, list[Any]] = {
    "x": [
        X[0, 0], X[None], X.double(), X.half(), X.short(), STRIDED,
        X[..., :15], X[:, :3], X[:, :0], X[:, :, :0],  # channels, tokens and heads
    ],
    "out": [X[:, :, :1], X.bfloat16(), STRIDED],
    "k": [X.bfloat16(), X[0], torch.zeros(1, 5, 1, 16), torch.zeros(1, 4, 1, 18)],
    "tensors": [(X, X), (), *(tuple(to_dlpack(X) for _ in range(count)) for count in (3, 6))],
    "part": [-1, 1, 1 << 70],
    "parts": [0, (1 << 20) + 1],
    "source": [
        [*SOURCE], SOURCE[:2],
        # The shape and type of ids.
        *(dense(np.zeros(shape, np.int32)) for shape in ((2, 5), 4, (3, 4))),
        dense(np.zeros((2, 4))), dense(np.zeros((2, 8), np.int32)[:, ::2]), numbers(np.zeros((9, 4), np.int32), axes=9),
        *(capsule(*shape) for shape in ((2, 5), (8,), (2, 1, 1, 4), (3, 4), (0, 4))),
        capsule(2, 4, dtype=torch.float32), capsule(2, 4, dtype=torch.int16),
        dense(to_dlpack(torch.zeros(2, 8, dtype=torch.int32)[:, ::2])),
        # The mode, tokens and row; fixed point requires int64.
        *(dense(np.zeros((2, 4), np.int64), mode) for mode in (4, -1)), dense(mode=DENSE_FIXED),
        capsule(2, 4, mode=DENSE_FIXED), dense(tokens=4.0), dense(row=4.0),
        # Tables.
        dense(to_dlpack(TENSOR[:, None]), TABLE_INTEGER), dense(TABLE.astype(np.int32), TABLE_INTEGER),
        *(dense(table, TABLE_INTEGER) for table in (TABLE[:, :0], TABLE[:5], np.concatenate([TABLE, TABLE[-4:]]))),
        # Constants.
        *(dense(constants=one) for one in ([1.0] * 8, CONSTANTS[:64], CONSTANTS[:-4], CONSTANTS + b"0")),
        numbers(pairs=0), numbers(pairs=9), numbers(groups=0), numbers(groups=1 << 61), numbers(channels=18),
        with_axis(2), with_axis(-2),
        # cos and sin: their tokens, types, pairs and groups.
        *(cos_sin(one, one) for one in (np.ones((5, 8), np.float32), COS.astype(np.float64), COS[:, :0])),
        *(cos_sin(sin=np.ones(shape, np.float32)) for shape in ((3, 8), (4, 7))),
        cos_sin(*[np.ones((4, 9), np.float32)] * 2), *(cos_sin(groups=groups) for groups in (0, 3, 4)),
    ],
    "norm": [
        [1e-6, WEIGHT], (1e-6,), (1e-6, WEIGHT, WEIGHT), (1, WEIGHT),
        *((1e-6, weight) for weight in (WEIGHT[:15], WEIGHT.astype(np.float64), WEIGHT.astype(np.int16))),
        *((1e-6, weight) for weight in (WEIGHT[:, None], np.ones(32, np.float32)[::2], tuple(WEIGHT))),
    ],
}  # fmt: skip
"""Arguments and invalid values of each."""

TOGETHER: list[dict[str, Any]] = [
    {"x": X[0].transpose(0, 1), "flags": cpu.HEADS_FIRST},
    {"x": X[:, :0], "source": capsule(2, 0)},
    *({"x": ROWS, "source": source} for source in (dense(row=4), capsule(2, 1, 4))),
    {"x": ROWS, "source": dense(to_dlpack(torch.zeros(2, 2, 4, dtype=torch.int32)[..., :2]))},
    *({"source": dense(np.full((2, 4), far)), "flags": cpu.CHECKED} for far in (1 << 31, -(1 << 31) - 1)),
    {"norm": (1e-6, WEIGHT), "k": X[:, :, :1]},
    {"out": X[:, :1].expand(X.shape), "flags": cpu.APART},  # tokens share memory
    {"out": torch.zeros(200).as_strided(X.shape, (64, 32, 15, 1)), "flags": cpu.APART},  # heads overlap
    {"k": X, "k_out": "out", "flags": cpu.APART},
]
"""Values that are invalid together."""


def attempt(
    x: Any = X, out: Any = None, k: Any = None, k_out: Any = None, tensors: Any = None, norm: Any = None,
    source: Any = SOURCE, part: int = 0, parts: int = 1, flags: int = 0,
) -> bool:  # fmt: skip
    out = torch.full_like(x, 7) if out is None else out
    before = out.clone()
    pairs = (x, out) if k is None else (x, out, k, out if k_out == "out" else torch.zeros_like(k))
    tensors = tuple(map(to_dlpack, pairs)) if tensors is None else tensors
    done = CORE.rotate(tensors, source, norm, part, parts, flags)
    assert done or torch.equal(out, before)
    return done


ACCEPTED: list[dict[str, Any]] = [
    {},
    *({"source": source} for source in (
        cos_sin(), cos_sin(groups=2), with_axis(-1),  # not rotated
        dense(TABLE, TABLE_INTEGER), dense(TABLE, TABLE_FRACTIONAL),
        dense(to_dlpack(TENSOR), TABLE_INTEGER),
        dense(np.zeros((2, 4), np.int64), DENSE_FIXED), dense(row=4), capsule(2, 4),
    )),
    *({"x": ROWS, "source": source} for source in (dense(row=2), capsule(2, 2, 2, dtype=torch.int64))),
    {"source": dense(np.full((2, 4), (1 << 31) - 1)), "flags": cpu.CHECKED},
    {"x": X[0]},
    {"x": X.transpose(1, 2).contiguous(), "flags": cpu.HEADS_FIRST},
    {"k": torch.zeros(1, 4, 1, 16), "flags": cpu.APART},
    {"x": X.bfloat16()},
    {"part": 3, "parts": 4},
    {"norm": (1e-6, WEIGHT)},
    {"norm": (1e-6, None, WEIGHT), "k": torch.zeros(1, 4, 1, 16)},
]  # fmt: skip


def test_valid_arguments_are_accepted() -> None:
    assert [case for case in ACCEPTED if not attempt(**case)] == []


def test_invalid_arguments_are_declined_and_nothing_is_written() -> None:
    cases = [{name: value} for name, values in DECLINED.items() for value in values]
    assert [case for case in cases + TOGETHER if attempt(**case)] == []


def test_any_numbers_in_a_table_are_read_safely() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        table = draw.choice(np.array([0, 1, -1, 3, -(2**63), 2**63 - 1, 2**31]), TABLE.shape)
        assert attempt(source=dense(table, int(draw.integers(2))))


def test_arguments_of_wrong_types_raise_a_type_error() -> None:
    both = to_dlpack(X), to_dlpack(X)
    for arguments in ((), (both, SOURCE), ([*both], SOURCE, None, 0, 1, 0), (both, SOURCE, None, 0, 1.0, 0)):
        with pytest.raises(TypeError, match="rotate takes"):
            CORE.rotate(*arguments)
