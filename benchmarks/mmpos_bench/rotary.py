"""Rotations of q and k: into new tensors, in place, with gradients, norms and stores, against a copy of the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle

from mmpos.support.checks import counted
from mmpos.support.extras import needed_for
from mmpos_bench.proofs import holds
from mmpos_bench.results import Point
from mmpos_bench.suites import Case, Contestant, Lineup, Options, Role
from mmpos_bench.timing import Budget, one_thread
from mmpos_bench.workloads import Document, workload

with needed_for("the rotary suite", extra="all"):
    import torch
    from torch import Tensor
    from torch.nn.functional import rms_norm

    from mmpos.rotary import DevicePositions, apply_rotary, cos_sin, rotate_and_store
    from mmpos.rotary.apply import Implementation
    from mmpos.rotary.device import Positions
    from mmpos_bench.cuda import by_events, capture, no_waits
    from mmpos_bench.layers import SHAPES, Layer, Pair, Shape, interleaved
    from mmpos_bench.peers.rotations import NORMS, ROTATIONS, Make, Rotate, Rotation

__all__ = ["cases"]

LineUp = Callable[[Layer, Options], Lineup]

_LONG = (2048, 8192, 32768, 131072, 262144)
_DECODE = 256
_REFERENCE = 8192  # tokens up to which plain torch takes part on a GPU: beyond, a call takes most of a second
_7B = SHAPES["7B layer"]
_BUDGET, _CURVE, _EVENTS = Budget(1.0, 15), Budget(0.5, 11), Budget(0.0, 61)
_EPS = 1e-6
_BLOCK = 16  # slots in a block of the cache


def cases(options: Options) -> Iterator[Case]:
    """Every case of the suite: on the GPU where there is one, else on one CPU thread, but where threads are counted."""
    with one_thread() as threads:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        yield from _shapes(device, options)
        yield from _stores(device, options)
        yield from _curves(device, options)
        if device == "cuda":
            yield from _graphs(options)
        else:
            yield from _over_threads(threads, options)


def _shapes(device: str, options: Options) -> Iterator[Case]:
    """Every layer at every length."""
    lengths = (8,) if options.quick else _LONG if device == "cuda" else (4096,)
    layers = [(name, tokens) for name in SHAPES for tokens in lengths if _fits(SHAPES[name], tokens, device)]
    # What is compiled takes seconds for each.
    layers = layers[::2] if options.quick else [*layers, ("7B layer", _DECODE)]
    few = layers[: 1 if options.quick else None]
    groups: tuple[tuple[str, torch.dtype, LineUp, list[tuple[str, int]]], ...] = (
        ("into new tensors, bfloat16", torch.bfloat16, fresh, layers),
        ("in place, bfloat16", torch.bfloat16, inplace, layers),
        ("into new tensors, float32", torch.float32, fresh, few),
        ("in place, float32", torch.float32, inplace, few),
    )
    for group, dtype, line_up, chosen in groups:
        for name, tokens in chosen:
            layer = partial(Layer, SHAPES[name], interleaved(tokens), dtype, device)
            yield _case(group, f"{name}, {tokens:,} tokens", line_up, layer, device, options)
    for name, tokens in few:
        layer = partial(Layer, SHAPES[name], interleaved(tokens), torch.bfloat16, device)
        title = f"{name}, {tokens:,} tokens"
        yield _case("norm and rotation, bfloat16", title, normalised, layer, device, options)
        yield _case("forward and backward, bfloat16", title, with_gradients, layer, device, options)


def _stores(device: str, options: Options) -> Iterator[Case]:
    """From the projection to attention, as servers do it, in prefill and in decode."""
    for tokens in (8,) if options.quick else (_DECODE, *_LONG[:3]) if device == "cuda" else (_DECODE, 4096):
        name, layer = f"7B layer, {tokens:,} tokens", _layer(tokens, device)
        yield _case("norm, rotation and store, bfloat16", name, stored, layer, device, options)


def _curves(device: str, options: Options) -> Iterator[Case]:
    """Time per token over tokens and over documents, in place, where nothing is allocated."""
    most = 64 if options.quick else 262144 if device == "cuda" else 32768
    for tokens in (16, 64, 256, 1024, 4096, 16384, 32768, 65536, 262144):
        if tokens <= most and _fits(_7B, tokens, device):
            point = Point("tokens, an image of 16×16 in every 320", tokens)
            name, layer = f"{tokens:,} tokens", _layer(tokens, device)
            yield _case("in place over tokens", name, inplace, layer, device, options, point)
    tokens = 64 if options.quick else 8192
    for count in (1, 2) if options.quick else (1, 2, 8, 64, 512):
        point = Point(f"documents, {tokens:,} tokens in all", count)
        name, layer = counted(count, "document"), _layer(tokens, device, count)
        yield _case("in place over documents", name, inplace, layer, device, options, point)


def _over_threads(threads: int, options: Options) -> Iterator[Case]:
    """In as many threads as torch would take here, a copy likewise."""
    layer = _layer(64 if options.quick else 4096, "cpu")
    for count in sorted({1, threads, *(2**i for i in range(threads.bit_length()) if 2**i <= threads)}):
        torch.set_num_threads(count)
        name, point = counted(count, "thread"), Point("threads", count)
        yield _case("in place over threads", name, inplace, layer, "cpu", options, point)


def _layer(tokens: int, device: str, documents: int = 1) -> Callable[[], Layer]:
    return partial(Layer, _7B, interleaved(tokens, documents), torch.bfloat16, device)


def _fits(shape: Shape, tokens: int, device: str) -> bool:
    """True where a GPU has memory for q and k in float32 a dozen times: contestants make copies of their own."""
    if device != "cuda":
        return True
    needed = 12 * 4 * tokens * (shape.q_heads + shape.k_heads) * shape.head_dim
    return needed <= torch.cuda.get_device_properties(0).total_memory


def _case(
    group: str,
    name: str,
    line_up: LineUp,
    layer: Callable[[], Layer],
    device: str,
    options: Options,
    point: Point | None = None,
) -> Case:
    """A case on a layer that is made when it is timed, as its device wants it."""

    def make() -> Lineup:
        return line_up(layer(), options)

    if device == "cuda":
        return Case(group, name, make, point=point, budget=_EVENTS, timer=by_events)
    return Case(group, name, make, point=point, budget=_BUDGET if point is None else _CURVE)


@dataclass(frozen=True)
class _Way:
    """A way to rotate q and k.

    Args:
        name: of the contestant.
        rotate: from q and k to what they become.
        role: of the contestant.
        rounded: whether cos and sin, or what a norm gives, are rounded to the dtype of q and k before.
    """

    name: str
    rotate: Rotate
    role: Role = Role.OURS
    rounded: bool = False

    def contestant(self, layer: Layer, before: Callable[[], Pair] | None = None) -> Contestant:
        """Rotate the q and k of a layer; before gives what should have been rotated, if anything else."""

        def prove() -> None:
            got = self.rotate(layer.q.clone(), layer.k.clone())
            layer.judge(got, (layer.q, layer.k) if before is None else before(), rounded=self.rounded)

        return Contestant(self.name, partial(self.rotate, layer.q, layer.k), self.role, prove)


def fresh(layer: Layer, options: Options) -> Lineup:
    """Into new tensors, against copies in new tensors."""
    contestants = [
        Contestant("copy into new tensors", lambda: (layer.q.clone(), layer.k.clone()), Role.LIMIT),
        *(way.contestant(layer) for way in _ours(layer)),
        _phases(layer),
        *(way.contestant(layer) for way in _peers(layer, options, lambda rotation: rotation.fresh)),
    ]
    return Lineup(contestants, layer.work)


def inplace(layer: Layer, options: Options) -> Lineup:
    """In place, against a copy into tensors that are there."""
    q, k = torch.empty_like(layer.q), torch.empty_like(layer.k)

    def limit() -> None:
        q.copy_(layer.q)
        k.copy_(layer.k)

    ways = [*_ours(layer, inplace=True), *_peers(layer, options, lambda rotation: rotation.inplace)]
    return Lineup([Contestant("copy", limit, Role.LIMIT), *(way.contestant(layer) for way in ways)], layer.work)


def with_gradients(layer: Layer, options: Options) -> Lineup:
    """Into new tensors, and then the gradients of q and k, against both copies."""
    gradients = layer.random(1)
    q, k = (x.clone().requires_grad_() for x in (layer.q, layer.k))

    def limit() -> tuple[Tensor, ...]:
        return layer.q.clone(), layer.k.clone(), gradients[0].clone(), gradients[1].clone()

    def contestant(way: _Way) -> Contestant:
        def call(incoming: Pair = gradients) -> Pair:
            return _both(torch.autograd.grad(way.rotate(q, k), (q, k), incoming))

        def prove() -> None:
            with torch.no_grad():
                layer.judge(way.rotate(layer.q.clone(), layer.k.clone()), (layer.q, layer.k), rounded=way.rounded)
            # Copies, since some write into the gradients that come, too.
            back = call((gradients[0].clone(), gradients[1].clone()))
            layer.judge(back, gradients, rounded=way.rounded, backwards=True)

        return Contestant(way.name, call, way.role, prove)

    ways = [*_ours(layer), *_peers(layer, options, lambda rotation: rotation.training or rotation.fresh)]
    contestants = [Contestant("copies into new tensors", limit, Role.LIMIT), *map(contestant, ways)]
    return Lineup(contestants, layer.work | {"bytes": 2 * layer.work["bytes"]})


def _ours(layer: Layer, *, inplace: bool = False) -> Iterator[_Way]:
    """From a table and from dense ids, and from a table by the reference in plain torch."""

    def by(positions: Positions, implementation: Implementation, q: Tensor, k: Tensor) -> Pair:
        return _both(apply_rotary(q, k, positions, layer.rotary, inplace=inplace, implementation=implementation))

    yield _Way("mmpos, table", partial(by, layer.table, "auto"))
    yield _Way("mmpos, dense ids", partial(by, layer.dense, "auto"))
    if layer.device == "cpu" or layer.tokens <= _REFERENCE:
        yield _Way("mmpos, reference", partial(by, layer.table, "reference"), Role.PART)


def _peers(layer: Layer, options: Options, choose: Callable[[Rotation], Make | None]) -> Iterator[_Way]:
    """Peers that rotate in the chosen way, and take such tensors."""
    for name, load in ROTATIONS.items():
        rotation = options.peers.get(name, load)
        make = None if rotation is None else choose(rotation)
        rotate = None if make is None else make(layer)
        if rotate is not None:
            yield _Way(name, rotate, Role.PEER, rounded=True)


def _both(pair: tuple[Tensor, Tensor | None] | tuple[Tensor, ...]) -> Pair:
    """q and k, where both were given."""
    q, k = pair
    assert k is not None
    return q, k


def _phases(layer: Layer) -> Contestant:
    """cos and sin alone, which peers are given: what a model spends on them once for all its layers."""

    def call() -> Pair:
        cos, sin = cos_sin(layer.rotary, layer.table, "transformers")
        return cos, sin

    def prove() -> None:
        # q of ones and zeros, turned, is cos and sin.
        half = layer.shape.head_dim // 2
        cos, sin = (table[0, :, None, :half] for table in call())
        ones = torch.cat((torch.ones_like(cos), torch.zeros_like(cos)), dim=-1)[None]
        turned = torch.cat((cos, sin), dim=-1)[None]
        layer.judge((turned, turned), (ones, ones))

    return Contestant("cos and sin alone", call, Role.PART, prove)


def normalised(layer: Layer, options: Options) -> Lineup:
    """Into new tensors, with a norm of each head before the rotation, against copies in new tensors."""
    generator = torch.Generator(layer.device).manual_seed(7)
    drawn = torch.rand(2, layer.shape.head_dim, generator=generator, device=layer.device) + 0.5
    weights = _both(drawn.to(layer.dtype).unbind())

    def at_once(q: Tensor, k: Tensor) -> Pair:
        rotated = apply_rotary(
            q, k, layer.table, layer.rotary, q_norm_weight=weights[0], k_norm_weight=weights[1], norm_eps=_EPS
        )
        return _both(rotated)

    def apart(q: Tensor, k: Tensor) -> Pair:
        return _both(apply_rotary(_norm(q, weights[0]), _norm(k, weights[1]), layer.table, layer.rotary))

    def before() -> Pair:
        return _norm(layer.q.double(), weights[0]), _norm(layer.k.double(), weights[1])

    ways = [_Way("mmpos, at once", at_once), _Way("torch's norm, then mmpos", apart, Role.PEER, rounded=True)]
    for name, load in NORMS.items():
        if make := options.peers.get(name, load):
            ways.append(_Way(name, make(layer, weights, _EPS), Role.PEER, rounded=True))
    limit = Contestant("copy into new tensors", lambda: (layer.q.clone(), layer.k.clone()), Role.LIMIT)
    return Lineup([limit, *(way.contestant(layer, before) for way in ways)], layer.work)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight.shape, weight.to(x.dtype), _EPS)


class _Step:
    """One layer of a server's step: q, k and v of all tokens, and a cache whose blocks are dealt out anew."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.q, self.k, self.v = layer.q, layer.k, layer.random(1)[1]
        heads, dim, blocks = layer.shape.k_heads, layer.shape.head_dim, -(-layer.tokens // _BLOCK)
        both = torch.zeros(2, blocks, _BLOCK, heads, dim, dtype=layer.dtype, device=layer.device)
        self.keys, self.values = both.unbind(0)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
        slots = (order[:, None] * _BLOCK + torch.arange(_BLOCK)).flatten()[: layer.tokens]
        self.slots = slots.to(layer.device)
        self.places = self.slots // _BLOCK, self.slots % _BLOCK
        generator = torch.Generator(layer.device).manual_seed(2)
        weights = torch.rand(2, dim, generator=generator, device=layer.device).to(layer.dtype)
        self.q_weight, self.k_weight = weights.unbind(0)

    def in_one_call(self) -> Tensor:
        """The norms, the rotation and the store together."""
        return rotate_and_store(
            self.q, self.k, self.v, self.layer.table, self.layer.rotary, self.keys, self.values, self.slots,
            q_norm_weight=self.q_weight, k_norm_weight=self.k_weight, norm_eps=_EPS,
        )[0]  # fmt: skip

    def with_the_norm(self) -> Tensor:
        """Norms and rotation together, and then the store."""
        rotated = apply_rotary(
            self.q, self.k, self.layer.table, self.layer.rotary,
            q_norm_weight=self.q_weight, k_norm_weight=self.k_weight, norm_eps=_EPS,
        )  # fmt: skip
        return self._store(*_both(rotated))

    def separately(self) -> Tensor:
        """Each operation by itself, each rounded."""
        q, k = _norm(self.q, self.q_weight), _norm(self.k, self.k_weight)
        return self._store(*_both(apply_rotary(q, k, self.layer.table, self.layer.rotary)))

    def copied(self) -> None:
        """The same bytes in and out."""
        self.q.clone()
        for x, cache in ((self.k, self.keys), (self.v, self.values)):
            cache.flatten(0, 1)[: self.layer.tokens].copy_(x[0])

    def prove(self, call: Callable[[], Tensor], rounded: bool) -> None:
        """q is right, and what the cache holds, as the formula in float64 has it."""
        self.keys.zero_()
        self.values.zero_()
        q = call()
        before = _norm(self.q.double(), self.q_weight), _norm(self.k.double(), self.k_weight)
        self.layer.judge((q, self.keys[self.places][None]), before, rounded=rounded)
        holds(torch.equal(self.values[self.places], self.v[0]), "other values in the cache", "v")

    def _store(self, q: Tensor, k: Tensor) -> Tensor:
        self.keys[self.places] = k[0]
        self.values[self.places] = self.v[0]
        return q


def stored(layer: Layer, options: Options) -> Lineup:
    """Everything between the projection and attention, against a copy of the same bytes."""
    step = _Step(layer)
    ways = (
        ("mmpos, one call", step.in_one_call, Role.OURS, False),
        ("norm and rotation, then store", step.with_the_norm, Role.PEER, False),
        ("separate operations", step.separately, Role.PEER, True),
    )
    contestants = [
        Contestant("copy", step.copied, Role.LIMIT),
        *(Contestant(who, call, role, partial(step.prove, call, rounded)) for who, call, role, rounded in ways),
    ]
    moved = 2 * (step.q.nbytes + step.k.nbytes + step.v.nbytes)
    return Lineup(contestants, layer.work | {"bytes": moved})


def _graphs(options: Options) -> Iterator[Case]:
    """CUDA graphs whose positions change at every replay, at the size of a decoding step and of a training step: no
    wait of the host, no kernel compiled anew.
    """
    for tokens in (64,) if options.quick else (256, 8192):
        group, name = "a CUDA graph replayed, positions changed every time", f"7B layer, {tokens:,} tokens"
        yield Case(group, name, partial(_replayed, tokens), budget=_EVENTS, timer=by_events)


def _replayed(tokens: int) -> Lineup:
    """Refresh the table and replay; the limit is the replay of a copy."""
    variants = _variants(tokens)
    layers = [Layer(SHAPES["7B layer"], documents, torch.bfloat16, "cuda") for documents in variants]
    layer = layers[0]
    capacity = max(one.positions.num_segments for one in layers)
    device = DevicePositions.from_table(layer.positions, "cuda", capacity)
    q_out, k_out = torch.empty_like(layer.q), torch.empty_like(layer.k)

    def copy() -> None:
        q_out.copy_(layer.q)
        k_out.copy_(layer.k)

    def rotate() -> None:
        q, k = _both(apply_rotary(layer.q, layer.k, device, layer.rotary))
        q_out.copy_(q)
        k_out.copy_(k)

    def rotate_in_place() -> None:
        apply_rotary(q_out, k_out, device, layer.rotary, inplace=True)

    copied, rotated, turned = (capture(call) for call in (copy, rotate_in_place, rotate))
    turns = cycle(layers)
    compiled = _compiled()

    def step(replay: Callable[[], object]) -> None:
        device.refresh(next(turns).positions)
        replay()

    def prove() -> None:
        for one in layers:
            with no_waits():
                device.refresh(one.positions)
                turned()
            one.judge((q_out, k_out), (layer.q, layer.k))
            copied()
            device.refresh(one.positions)
            rotated()
            one.judge((q_out, k_out), (layer.q, layer.k))
        holds(_compiled() == compiled, f"{_compiled()} kernels", f"{compiled}, those of the capture")

    def facts() -> Mapping[str, float]:
        return {"kernels compiled after the capture": _compiled() - compiled}

    contestants = (
        Contestant("copy, replayed", copied, Role.LIMIT),
        Contestant("refresh, and in place", lambda: step(rotated), proof=prove),
        Contestant("in place, the same positions", rotated, Role.PART, prove),
        Contestant("refresh alone", lambda: device.refresh(next(turns).positions), Role.PART, prove),
    )
    return Lineup(contestants, layer.work, facts)


def _variants(tokens: int) -> list[list[Document]]:
    """One document of so many tokens, with more and fewer images, at other places."""
    return [interleaved(tokens), workload(1, tokens, 1, 4), workload(1, tokens, 2, 4), workload(1, tokens, 0, 1)]


def _compiled() -> int:
    """Count the kernels that Triton has compiled in this process."""
    from mmpos.rotary.kernel.rotate import rotary_kernel

    return sum(len(caches[0]) for caches in rotary_kernel.device_caches.values())
