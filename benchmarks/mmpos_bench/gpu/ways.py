"""Ways to do the work of a layer, ours and those of peers: one table for timing, host cost, profilers and sanitizers.

A further kind of launch is an entry of `WAYS`; a further peer is one of `mmpos_bench.peers.rotations`.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from mmpos.rotary import Cache, DevicePositions, Norm, Rotary, apply_rotary, rerotate, rotate_and_store
from mmpos.support.cached import cached_property
from mmpos_bench.gpu.journal import shortened
from mmpos_bench.layers import SHAPES, Layer, Pair, Shape, interleaved
from mmpos_bench.peers.rotations import NORMS, ROTATIONS, Make, NormRotate, Rotation
from mmpos_bench.proofs import holds
from mmpos_bench.suites import Role

_EPS = 1e-6
_PAGE = 16
_SETS = 64  # at most: of so many short calls, the start of a graph is no part
_COLD = 128 << 20  # bytes that all sets together read and write, where there are fewer
_PROVED = 8192  # tokens up to which results are compared with the formula in float64

DRY_SHAPE = Shape(2, 1, 16)


@dataclass(frozen=True)
class Size:
    """The work to do: a layer of a model, tokens, and the documents that they are of."""

    shape: str
    tokens: int
    documents: int = 1

    def __str__(self) -> str:
        of = f" of {self.documents:,} documents" if self.documents > 1 else ""
        return f"{self.shape}, {self.tokens:,} tokens{of}"


class Work:
    """Several sets of q, k and v of one layer, so that each call finds its own cold, and a cache with slots for each.

    Args:
        size: of the layer; toys have few heads.
        device: where everything lies.
        sets: how many; None is as many as a caching device needs.
    """

    def __init__(self, size: Size, device: str, sets: int | None = None) -> None:
        shape = SHAPES[size.shape] if device == "cuda" else DRY_SHAPE
        # The interpreter truncates bfloat16, which no proof passes.
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.size, self.layer = size, Layer(shape, interleaved(size.tokens, size.documents), dtype, device)
        self.how: Literal["auto", "triton"] = "auto" if device == "cuda" else "triton"
        q, k = self.layer.q, self.layer.k
        self.moved = 2 * (q.nbytes + k.nbytes)
        if sets is None:
            sets = max(2, min(_SETS, math.ceil(_COLD / self.moved))) if device == "cuda" else 2
        self.sets: list[Pair] = [(q, k), *(self.layer.random(seed) for seed in range(1, sets))]

    @cached_property
    def values(self) -> list[Tensor]:
        """v of each set."""
        return [torch.randn_like(k) for _, k in self.sets]

    @cached_property
    def caches(self) -> Pair:
        """Paged keys and values, with room for all sets."""
        tokens, k = self.layer.tokens, self.layer.k
        blocks = len(self.sets) * -(-tokens // _PAGE)
        keys, values = torch.zeros(2, blocks, _PAGE, *k.shape[2:], dtype=k.dtype, device=k.device).unbind(0)
        return keys, values

    @cached_property
    def slots(self) -> list[Tensor]:
        """Slots of each set, in blocks that are dealt out anew."""
        tokens, device = self.layer.tokens, self.layer.device
        order = torch.randperm(self.caches[0].shape[0], generator=torch.Generator().manual_seed(0))
        rows = (order[:, None] * _PAGE + torch.arange(_PAGE)).view(len(self.sets), -1)
        return [row[:tokens].to(device) for row in rows]

    @cached_property
    def weights(self) -> Pair:
        """Of the norms of q and of k."""
        drawn = torch.rand(2, self.layer.shape.head_dim, device=self.layer.device) + 0.5
        q, k = drawn.to(self.layer.dtype).unbind(0)
        return q, k

    @property
    def norm(self) -> Norm:
        """Of q and k."""
        return Norm(*self.weights, _EPS)

    def normed(self, pair: Pair) -> Pair:
        """Normalise q and k in float64."""
        q, k = (rms_norm(x.double(), w.shape, w.double(), _EPS) for x, w in zip(pair, self.weights, strict=True))
        return q, k


Call = Callable[[int], Any]
"""Does the work on the set of that number, and gives what came of it."""

Prove = Callable[[Work, Any, Pair], None]
"""Receives what a call gave for the first set, and q and k as they were before; raises NotEqualError."""


@dataclass(frozen=True)
class Way:
    """One way to do the work."""

    name: str
    make: Callable[[Work], Call | None]  # None for work that it does not do
    role: Role = Role.OURS
    moved: Callable[[Work], int] = lambda work: work.moved  # bytes that must be read and written
    prove: Prove | None = None
    most: int = 1 << 62  # tokens beyond which it would take all the time

    def check(self, work: Work, call: Call) -> None:
        """Prove the way on the first set, which is as it was afterwards."""
        if self.prove is None or work.size.tokens > _PROVED:
            return
        q, k = work.sets[0]
        before = q.clone(), k.clone()
        self.prove(work, call(0), before)
        q.copy_(before[0])
        k.copy_(before[1])


def _rotated(work: Work, got: Any, before: Pair, *, rounded: bool = False, backwards: bool = False) -> None:
    work.layer.judge((got[0], got[1]), before, rounded=rounded, backwards=backwards)


def _normalised(work: Work, got: Any, before: Pair, *, rounded: bool = False) -> None:
    work.layer.judge((got[0], got[1]), work.normed(before), rounded=rounded)


def _stored(work: Work, got: Any, before: Pair, *, norm: bool) -> None:
    at = work.slots[0] // _PAGE, work.slots[0] % _PAGE
    keys, values = work.caches
    work.layer.judge((got[0], keys[at][None]), work.normed(before) if norm else before)
    holds(torch.equal(values[at], work.values[0][0]), "other values in the cache", "v")


# Ours.


def _copies(work: Work) -> Call:
    outs = [(torch.empty_like(q), torch.empty_like(k)) for q, k in work.sets]
    return lambda i: [out.copy_(x) for out, x in zip(outs[i], work.sets[i], strict=True)]


def _copy(work: Work) -> Call:
    """Copy as many bytes in one launch."""
    size = work.moved // 2 // work.layer.dtype.itemsize
    pairs = [torch.randn(2, size, device=work.layer.device).to(work.layer.dtype) for _ in work.sets]
    return lambda i: pairs[i][0].copy_(pairs[i][1])


def _by_table(work: Work, **options: Any) -> Call:
    layer = work.layer
    return lambda i: apply_rotary(*work.sets[i], layer.table, layer.rotary, implementation=work.how, **options)


def _by_ids(work: Work) -> Call:
    layer = work.layer
    return lambda i: apply_rotary(*work.sets[i], layer.dense, layer.rotary, inplace=True, implementation=work.how)


def _by_cache(work: Work) -> Call:
    """Rotate by the rows of an engine's cache of cos and sin."""
    layer = work.layer
    angle = torch.arange(int(layer.dense.max()) + 1)[:, None] * torch.from_numpy(layer.rotary.inv_freq_array.copy())
    rows = torch.cat((angle.cos(), angle.sin()), -1).to(layer.device, torch.float32)
    return lambda i: apply_rotary(*work.sets[i], layer.table, layer.rotary, cos_sin=rows, implementation=work.how)


def _half_turned(work: Work) -> Call:
    half = Rotary(work.layer.shape.head_dim, rotary_dim=work.layer.shape.head_dim // 2)
    return lambda i: apply_rotary(*work.sets[i], work.layer.table, half, implementation=work.how)


def _there_and_back(work: Work, norm: Norm | None = None) -> Call:
    layer, leaves = work.layer, [tuple(x.detach().requires_grad_() for x in pair) for pair in work.sets]
    of_weights = [] if norm is None else [x.detach().requires_grad_() for x in norm[:2] if x is not None]
    given = None if norm is None else Norm(of_weights[0], of_weights[1], norm.eps)
    grads = work.sets[::-1]

    def call(i: int) -> tuple[Tensor, ...]:
        q, k = leaves[i]
        outs = apply_rotary(q, k, layer.table, layer.rotary, implementation=work.how, norm=given)
        return torch.autograd.grad([x for x in outs if x is not None], [q, k, *of_weights], grads[i])

    return call


def _store(work: Work, **options: Any) -> Call:
    layer, (keys, values) = work.layer, work.caches
    return lambda i: rotate_and_store(
        *work.sets[i], work.values[i], layer.table, layer.rotary, Cache(keys, values, work.slots[i]),
        implementation=work.how, **options,
    )  # fmt: skip


def _store_apart(work: Work) -> Call:
    """Norm and rotation in one launch, and then the stores."""
    rotate, (keys, values) = _by_table(work, norm=work.norm), work.caches
    places = [(slots // _PAGE, slots % _PAGE) for slots in work.slots]

    def call(i: int) -> Any:
        q, k = rotate(i)
        keys[places[i]], values[places[i]] = k[0], work.values[i][0]
        return q, k

    return call


def _store_in_8_bits(work: Work) -> Call:
    keys, values = (torch.zeros_like(cache, dtype=torch.float8_e4m3fn) for cache in work.caches)
    scale, layer = torch.full((1,), 0.25, device=work.layer.device), work.layer
    return lambda i: rotate_and_store(
        *work.sets[i], work.values[i], layer.table, layer.rotary,
        Cache(keys, values, work.slots[i], k_scale=scale, v_scale=scale), implementation=work.how,
    )  # fmt: skip


def _move(work: Work) -> Call:
    """Turn stored keys to where they stand in reverse."""
    layer, keys = work.layer, work.caches[0]
    there = layer.dense.flip(1)
    return lambda i: rerotate(keys, work.slots[i], layer.table, there, layer.rotary, implementation=work.how)


def _with_8_bits(work: Work) -> int:
    """Bytes of q, k and v, read, of q written, and one for each number that is stored."""
    q, k = work.sets[0]
    return 2 * q.nbytes + 2 * k.nbytes + 2 * k.numel()


def _with_values(work: Work) -> int:
    """Bytes of q, k and v, read and written."""
    return work.moved + 2 * work.layer.k.nbytes


WAYS: tuple[Way, ...] = (
    Way("copy", _copy, Role.LIMIT),
    Way("copies of q and of k", _copies, Role.PART),
    Way("in place", partial(_by_table, inplace=True), prove=_rotated),
    Way("in place, dense ids", _by_ids, prove=_rotated),
    Way("new tensors", _by_table, prove=_rotated),
    Way("conjugate", partial(_by_table, conjugate=True), prove=partial(_rotated, backwards=True)),
    Way("by an engine's cache", _by_cache, prove=_rotated),
    Way("half of each head", _half_turned),
    Way("there and back", _there_and_back, moved=lambda work: 2 * work.moved),
    Way("norm", lambda work: _by_table(work, norm=work.norm), prove=_normalised),
    Way("norm after", lambda work: _by_table(work, norm=work.norm._replace(after=True))),
    Way("norm, in place", lambda work: _by_table(work, inplace=True, norm=work.norm)),
    # Back it reads q and k once more, beside their gradients.
    Way("norm, there and back", lambda work: _there_and_back(work, work.norm), moved=lambda work: 5 * work.moved // 2),
    Way("store", _store, moved=_with_values, prove=partial(_stored, norm=False)),
    Way(
        "norm and store",
        lambda work: _store(work, norm=work.norm),
        moved=_with_values,
        prove=partial(_stored, norm=True),
    ),
    Way("store in 8 bits", _store_in_8_bits, moved=_with_8_bits),
    Way("rerotate", _move, moved=lambda work: 2 * work.layer.k.nbytes),
    Way("norm, then store", _store_apart, Role.PART, moved=_with_values, prove=partial(_stored, norm=True)),
)
"""Ours, the limit among them first; what peers do is beside "in place", "new tensors" and "norm"."""


# Peers.


def peers(folder: Path | None, missing: Callable[[str, str], None]) -> Iterator[Way]:
    """Yield the peers that can be imported here.

    Args:
        folder: of what was brought along, where a library of FlashInfer's kernel may lie.
        missing: receives the name of each that cannot be had, and why.
    """
    loads: Mapping[str, Callable[[], Rotation]] = {**ROTATIONS, "FlashInfer's kernel": partial(_flashinfer, folder)}
    for name, load in loads.items():
        try:
            rotation = load()
        # Peers of other versions may lack names, and fail in their own ways while they are imported.
        except Exception as error:
            missing(name, f"{type(error).__name__}: {shortened(error, 120)}")
            continue
        most = {"eager formula": 8192, "torch.compile": 32768, "Transformers": 32768}.get(name, 1 << 62)
        for place, make in (("", rotation.fresh), (", in place", rotation.inplace)):
            if make is not None:
                yield Way(
                    name + place, partial(_of_peer, make), Role.PEER, prove=partial(_rotated, rounded=True), most=most
                )
    for name, load_norm in NORMS.items():
        try:
            norm = load_norm()
        except Exception as error:
            missing(name, f"{type(error).__name__}: {shortened(error, 120)}")
            continue
        yield Way(name, partial(_of_norm, norm), Role.PEER, prove=partial(_normalised, rounded=True), most=32768)


def _of_peer(make: Make, work: Work) -> Call | None:
    rotate = make(work.layer)
    return None if rotate is None else lambda i: rotate(*work.sets[i])


def _of_norm(make: NormRotate, work: Work) -> Call:
    rotate = make(work.layer, work.weights, _EPS)
    return lambda i: rotate(*work.sets[i])


def _flashinfer(folder: Path | None) -> Rotation:
    """Load FlashInfer's kernel from a library of its own, built as benchmarks/flashinfer_rope.cu says."""
    path = (folder or Path(os.curdir)) / "flashinfer_rope.so"
    if not path.exists():
        raise ImportError(f"there is no {path}")
    rope = ctypes.CDLL(str(path.resolve())).rope_bf16
    rope.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_uint32] * 4, *[ctypes.c_int64] * 4, ctypes.c_void_p]

    def rotate(layer: Layer) -> Callable[[Tensor, Tensor], Pair]:
        cache = torch.cat((layer.angles.cos(), layer.angles.sin()), dim=-1).float()
        rows = torch.arange(layer.tokens, device=layer.device)

        def call(q: Tensor, k: Tensor) -> Pair:
            code = rope(
                *(x.data_ptr() for x in (q, k, cache, rows)), layer.tokens, q.shape[2], k.shape[2], q.shape[3],
                q.stride(1), q.stride(2), k.stride(1), k.stride(2), torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
            holds(code == 0, f"CUDA error {code}", "none")
            return q, k

        return call

    return Rotation(inplace=rotate)


def refreshed(work: Work) -> dict[str, Call]:
    """Give what a host does once for a batch, beside the launches: a table in new memory, and in the same."""
    positions, device = work.layer.positions, work.layer.device
    held = DevicePositions.from_table(positions, device)
    return {
        "a table to the device": lambda i: DevicePositions.from_table(positions, device),
        "a table refreshed": lambda i: held.refresh(positions),
    }
