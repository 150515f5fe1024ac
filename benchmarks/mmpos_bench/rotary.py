"""Rotations of q and k (into new tensors or in place, and with gradients, norms or stores), compared with a copy.

To add a launch, add a `Way` to a group in `GROUPS`; `mmpos bench` and `make gpu` use these groups. To add a
peer, add it to `mmpos_bench.peers.rotations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from mmpos.support.checks import counted
from mmpos.support.extras import needed_for
from mmpos_bench.proofs import holds
from mmpos_bench.suites import Comparison, Contestant, Lineup, Role, SuiteOptions
from mmpos_bench.timing import Budget, compare, one_thread

with needed_for("the rotary suite", extra="all"):
    import torch
    from torch import Tensor

    from mmpos.rotary import Cache, apply_rotary, cos_sin, rotate_and_store
    from mmpos_bench.cuda import Replays, by_events
    from mmpos_bench.layers import PAGE, SHAPES, Layer, Pair
    from mmpos_bench.peers.rotations import DIFFUSERS, ROTATIONS, Make

_BUDGET, _EVENTS = Budget(0.7, 15), Budget(0.0, 15)
_REFERENCE = 8192  # maximum tokens for plain torch on a GPU; with more, a call takes most of a second
_COLD, _MOST_SETS = 128 << 20, 64  # minimum bytes moved by all sets together, and maximum number of sets

Call = Callable[[int], Any]
"""Function that does the work on the set with the given index and returns the result."""


@dataclass(frozen=True)
class Size:
    """Size of the work: a model layer, and the number of tokens and of documents."""

    shape: str
    tokens: int
    documents: int = 1

    def __str__(self) -> str:
        of = f" of {self.documents:,} documents" if self.documents > 1 else ""
        return f"{self.shape}, {counted(self.tokens, 'token', ',')}{of}"


SIZES = (
    *(Size("7B layer", tokens) for tokens in (1, 256)),
    *(Size(shape, 4096) for shape in ("7B layer", "72B layer", "vision encoder")),
)
"""Sizes for a CPU, from a decoding step on."""

FUSED = "generation, norm and rotation"

FLUX = Size("FLUX.1 layer", 4608)
"""Size for an image generation model: 512 tokens of text with an image of 64×64."""

# The most important sizes come first, so that a run cut off by the time limit still includes them.
GPU_SIZES = (
    *(Size("7B layer", tokens) for tokens in (8192, 2048, 256, 64, 16, 1)),
    Size("7B layer", 256, 256),
    Size("72B layer", 8192),
    Size("vision encoder", 8192),
    Size("7B layer", 32768),
    Size("72B layer", 256),
    Size("vision encoder", 2048),
    Size("7B layer", 21504),
    Size("72B layer", 2048),
    Size("7B layer", 8192, 512),
    Size("7B layer", 131072),
    Size("72B layer", 32768),
    Size("vision encoder", 32768),
)


@dataclass(frozen=True)
class Bench:
    """Device of the layers; toy layers in Triton's interpreter serve only to test the GPU code."""

    device: Literal["cuda", "cpu"]
    toy: bool = False

    def layer(self, size: Size, sets: int | None = None) -> Layer:
        """Create a layer; on a GPU, the default number of sets is large enough to exceed the caches."""
        shape = SHAPES[size.shape]
        documents = [shape.document(size.tokens // size.documents)] * size.documents
        if self.toy:  # float32, since the interpreter truncates bfloat16 and would fail the proofs
            return Layer(shape.toy, documents, torch.float32, "cpu", sets or 2, "triton")
        moved = 4 * size.tokens * (shape.q_heads + shape.k_heads) * shape.head_dim
        cold = max(2, min(_MOST_SETS, math.ceil(_COLD / moved))) if self.device == "cuda" else 1
        return Layer(shape, documents, torch.bfloat16, self.device, sets or cold)

    def compare(self, group: str, size: Size, options: SuiteOptions) -> Comparison:
        """Return the comparison of a group at the given size."""
        line_up = partial(self._line_up, group, size, options)
        timer, budget = (by_events, _EVENTS) if self.device == "cuda" else (compare, _BUDGET)
        return Comparison(f"{group}, bfloat16", str(size), line_up, budget=budget, timer=timer)

    def _line_up(self, group: str, size: Size, options: SuiteOptions) -> Lineup:
        layer, work_of_group = self.layer(size), ALL_GROUPS[group]
        ways = [*work_of_group.ways, *work_of_group.peers(layer, options)]
        if self.device == "cuda" and layer.tokens > _REFERENCE:
            ways = [way for way in ways if way.name != "mmpos, reference"]
        work = {"tokens": layer.tokens, "documents": size.documents, "bytes": work_of_group.moved(layer)}
        return Lineup([contestant(way, layer) for way in ways], work)


def cases(options: SuiteOptions) -> Iterator[Comparison]:
    """Yield every case, running on the GPU if there is one and otherwise on one CPU thread."""
    with one_thread():
        yield from compared(Bench("cuda" if torch.cuda.is_available() else "cpu"), options)


def compared(bench: Bench, options: SuiteOptions) -> Iterator[Comparison]:
    """Yield every group at every size."""
    yield bench.compare(FUSED, replace(FLUX, tokens=42) if options.quick else FLUX, options)
    sizes: Sequence[Size] = [Size("7B layer", 8), Size("vision encoder", 8)][: 1 if bench.toy else 2]
    if not options.quick:
        sizes = GPU_SIZES if bench.device == "cuda" else SIZES
    for size in filter(partial(fits, bench), sizes):
        # Compiling takes seconds per group.
        groups = list(GROUPS)[: 2 if options.quick and size is not sizes[0] else None]
        yield from (bench.compare(group, size, options) for group in groups)


def fits(bench: Bench, size: Size) -> bool:
    """Return whether a GPU has memory for 24 float32 copies of q and k, since contestants make their own copies."""
    if bench.device != "cuda":
        return True
    shape = SHAPES[size.shape]
    needed = 24 * 4 * size.tokens * (shape.q_heads + shape.k_heads) * shape.head_dim
    return needed <= torch.cuda.get_device_properties(0).total_memory


# Ways.

Prove = Callable[[Layer, Any, Pair], None]
"""Function of a layer, the result of a call on the first set, and the original q and k; raises NotEqualError."""


@dataclass(frozen=True)
class Way:
    """One implementation of a layer's work."""

    name: str
    make: Callable[[Layer], Call]
    prove: Prove = lambda layer, got, before: None  # required except for limits
    role: Role = Role.OURS


@dataclass(frozen=True)
class WaysOfWork:
    """Several ways to do the same work, with the limit first."""

    ways: Sequence[Way]
    moved: Callable[[Layer], int] = lambda layer: layer.moved  # number of bytes that are read and written
    peers: Callable[[Layer, SuiteOptions], Iterator[Way]] = lambda layer, options: iter(())


def contestant(way: Way, layer: Layer) -> Contestant:
    """Return the contestant for a way: a call on the first set or, on a GPU, replays of a graph with all sets."""
    calls: list[Call] = []

    def call(i: int) -> Any:
        if not calls:
            calls.append(way.make(layer))
        return calls[0](i)

    timed: Any = partial(call, 0)
    if layer.device == "cuda":
        timed = Replays([partial(call, i) for i in range(len(layer.sets))])

    def prove() -> None:
        q, k = layer.sets[0]
        before = q.clone(), k.clone()
        way.prove(layer, call(0), before)
        q.copy_(before[0])
        k.copy_(before[1])
        if isinstance(timed, Replays):
            timed.capture()

    return Contestant(way.name, timed, prove, way.role)


def _rotated(layer: Layer, got: Any, before: Pair, *, rounded: bool = False) -> None:
    layer.judge(got[:2], before, rounded=rounded)


def _rotated_back(layer: Layer, got: Any, before: Pair, *, rounded: bool = False) -> None:
    layer.judge(got[:2], before, rounded=rounded, back=True)


def _normalised(layer: Layer, got: Any, before: Pair, *, rounded: bool = False) -> None:
    layer.judge(got[:2], before, rounded=rounded, norm=True)


def _stored(layer: Layer, got: Any, before: Pair, *, norm: bool = True, rounded: bool = False) -> None:
    at = layer.slots[0] // PAGE, layer.slots[0] % PAGE
    keys, values = layer.caches
    layer.judge((got[0], keys[at][None]), before, rounded=rounded, norm=norm)
    holds(torch.equal(values[at], layer.values[0][0]), "other values in the cache", "v")
    keys.zero_()
    values.zero_()


def _copy(layer: Layer, *, tensors: str = "qk", fresh: bool = False, times: int = 1) -> Call:
    """Copy the inputs of a rotation to existing memory or to new tensors."""

    def sources(i: int) -> list[Tensor]:
        q, k = layer.sets[i]
        by_name = {"q": q, "k": k} | ({"v": layer.values[i]} if "v" in tensors else {})
        return [by_name[name] for name in tensors] * times

    if fresh:
        return lambda i: [x.clone() for x in sources(i)]
    outs = [[torch.empty_like(x) for x in sources(i)] for i in range(len(layer.sets))]
    return lambda i: [out.copy_(x) for out, x in zip(outs[i], sources(i), strict=True)]


def _rotate(layer: Layer, *, dense: bool = False, norm: bool = False, **options: Any) -> Call:
    """Rotate by a position table or by dense ids."""
    positions = layer.dense if dense else layer.table
    arguments = {"implementation": layer.how} | options
    if norm:
        arguments["norm"] = layer.norm
    return lambda i: apply_rotary(*layer.sets[i], positions, layer.rotary, **arguments)


def _phases(layer: Layer) -> Call:
    """Compute only cos and sin, which peers receive as inputs and models compute once for all layers."""
    return lambda i: cos_sin(layer.rotary, layer.table, "transformers")


def _check_phases(layer: Layer, got: Any, before: Pair) -> None:
    """Check that rotating a head of ones and zeros results in cos and sin."""
    cos, sin = (table[0, :, None, : layer.shape.head_dim // 2] for table in got)
    ones = torch.cat((torch.ones_like(cos), torch.zeros_like(cos)), dim=-1)[None]
    rotated = torch.cat((cos, sin), dim=-1)[None]
    layer.judge((rotated, rotated), (ones, ones))


def _norm_first(layer: Layer, **options: Any) -> Call:
    """Normalise with torch, then rotate."""
    arguments = {"implementation": layer.how} | options
    return lambda i: apply_rotary(*layer.normed(layer.sets[i]), layer.table, layer.rotary, **arguments)


def _both_ways(layer: Layer, *, dense: bool = False, **options: Any) -> Call:
    positions = layer.dense if dense else layer.table
    arguments = {"implementation": layer.how} | options
    return _with_gradients(layer, lambda q, k: apply_rotary(q, k, positions, layer.rotary, **arguments))


def _with_gradients(layer: Layer, rotate: Callable[[Tensor, Tensor], Any]) -> Call:
    """Rotate copies of q and k and compute gradients; q and k also serve as the gradients of the outputs."""
    leaves = [tuple(x.detach().clone().requires_grad_() for x in pair) for pair in layer.sets]

    def call(i: int) -> tuple[Tensor, ...]:
        q, k = leaves[i]
        outs = [x for x in rotate(q, k) if x is not None]
        return torch.autograd.grad(outs, [q, k], layer.sets[i])

    return call


def _store(layer: Layer, *, norm: bool = True) -> Call:
    caches, weights = [Cache(*layer.caches, slots) for slots in layer.slots], layer.norm if norm else None
    return lambda i: rotate_and_store(
        *layer.sets[i], layer.values[i], layer.table, layer.rotary, caches[i], norm=weights, implementation=layer.how
    )


def _rotate_then_store(layer: Layer, *, norm: bool = False) -> Call:
    """Normalise and rotate, in one call with ``norm`` or in two calls, then store."""
    rotate, (keys, values) = _rotate(layer, norm=True) if norm else _norm_first(layer), layer.caches
    indices = [(slots // PAGE, slots % PAGE) for slots in layer.slots]

    def call(i: int) -> Any:
        q, k = rotate(i)
        keys[indices[i]], values[indices[i]] = k[0], layer.values[i][0]
        return q, k

    return call


def _peers(layer: Layer, options: SuiteOptions, kind: str) -> Iterator[Way]:
    """Yield the peers that support a kind of rotation: into new tensors ("fresh"), "inplace" or "training"."""
    for name, load in ROTATIONS.items():
        rotation = options.peer(name, load)
        if rotation is None or layer.tokens > rotation.most:
            continue
        make: Make | None = getattr(rotation, kind) or (rotation.fresh if kind == "training" else None)
        if make and (rotate := options.peer(name, partial(make, layer))):
            if kind == "training":
                prove = partial(_rotated_back, rounded=True)
                yield Way(name, partial(_with_gradients, rotate=rotate), prove, Role.PEER)
            else:
                yield Way(name, partial(_on_sets, rotate=rotate), partial(_rotated, rounded=True), Role.PEER)


def _on_sets(layer: Layer, rotate: Callable[[Tensor, Tensor], Pair]) -> Call:
    return lambda i: rotate(*layer.sets[i])


def _norms(layer: Layer, options: SuiteOptions) -> Iterator[Way]:
    """Yield the peers that normalise as well."""
    for name, make in DIFFUSERS.items():
        if rotate := options.peer(name, partial(make, layer)):
            yield Way(name, partial(_on_sets, rotate=rotate), partial(_normalised, rounded=True), Role.PEER)


def _ours(**options: Any) -> list[Way]:
    """Return our ways: rotating by a table, by dense ids, and by a table with the reference in plain torch."""
    return [
        Way("mmpos, table", partial(_rotate, **options), _rotated),
        Way("mmpos, dense ids", partial(_rotate, dense=True, **options), _rotated),
        Way("mmpos, reference", partial(_rotate, implementation="reference", **options), _rotated, Role.PART),
    ]


GROUPS: Mapping[str, WaysOfWork] = {
    "into new tensors": WaysOfWork(
        [
            Way("copy into new tensors", partial(_copy, fresh=True), role=Role.LIMIT),
            *_ours(),
            Way("cos and sin alone", _phases, _check_phases, Role.PART),
        ],
        peers=partial(_peers, kind="fresh"),
    ),
    "in place": WaysOfWork(
        [Way("copy", _copy, role=Role.LIMIT), *_ours(inplace=True)], peers=partial(_peers, kind="inplace")
    ),
    "forward and backward": WaysOfWork(
        [
            Way("copies into new tensors", partial(_copy, fresh=True, times=2), role=Role.LIMIT),
            Way("mmpos, table", _both_ways, _rotated_back),
            Way("mmpos, dense ids", partial(_both_ways, dense=True), _rotated_back),
            Way("mmpos, reference", partial(_both_ways, implementation="reference"), _rotated_back, Role.PART),
        ],
        lambda layer: 2 * layer.moved,
        partial(_peers, kind="training"),
    ),
    "norm, rotation and store": WaysOfWork(
        [
            Way("copy", partial(_copy, tensors="qkv"), role=Role.LIMIT),
            Way("mmpos, one call", _store, _stored),
            Way("without a norm", partial(_store, norm=False), partial(_stored, norm=False), Role.PART),
            Way("norm and rotation, then store", partial(_rotate_then_store, norm=True), _stored, Role.PEER),
            Way("separate operations", _rotate_then_store, partial(_stored, rounded=True), Role.PEER),
        ],
        lambda layer: layer.moved + 2 * layer.values[0].nbytes,
    ),
}
"""Groups of ways by name."""


GENERATION = WaysOfWork(
    [
        Way("copy into new tensors", partial(_copy, fresh=True), role=Role.LIMIT),
        Way("mmpos, at once", partial(_rotate, norm=True), _normalised),
        Way("mmpos, at once, in place", partial(_rotate, norm=True, inplace=True), _normalised),
        Way("torch's norm, then mmpos", _norm_first, partial(_normalised, rounded=True), Role.PEER),
    ],
    peers=_norms,
)
"""Work of a layer of an image generation model."""

ALL_GROUPS: Mapping[str, WaysOfWork] = {**GROUPS, FUSED: GENERATION}
"""Groups of all devices."""
