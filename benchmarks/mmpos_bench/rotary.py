"""Rotations of q and k: into new tensors, in place, with gradients, norms and stores, against a copy of the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

from mmpos.support.checks import counted
from mmpos.support.extras import needed_for
from mmpos_bench.proofs import holds
from mmpos_bench.results import Point
from mmpos_bench.suites import Comparison, Contestant, Lineup, Role, SuiteOptions, limit
from mmpos_bench.timing import Budget, one_thread
from mmpos_bench.workloads import workload

with needed_for("the rotary suite", extra="all"):
    import torch
    from torch import Tensor
    from torch.nn.functional import rms_norm

    from mmpos.rotary import Cache, DevicePositions, Norm, apply_rotary, cos_sin, rotate_and_store
    from mmpos.rotary.device import Implementation, Positions
    from mmpos_bench.cuda import by_events, capture, no_waits
    from mmpos_bench.layers import SHAPES, Layer, Pair, Shape, interleaved
    from mmpos_bench.peers.rotations import NORMS, ROTATIONS, Make, Rotate, Rotation

_LONG = (2048, 8192, 32768, 131072, 262144)
_DECODE = 256
_REFERENCE = 8192  # tokens up to which plain torch takes part on a GPU: beyond, a call takes most of a second
_BUDGET, _CURVE, _EVENTS = Budget(1.0, 15), Budget(0.5, 11), Budget(0.0, 61)
_EPS = 1e-6
_BLOCK = 16  # slots in a block of the cache


def cases(options: SuiteOptions) -> Iterator[Comparison]:
    """Yield every case: on the GPU where there is one, else on one CPU thread, but where threads are counted."""
    with one_thread() as threads:
        suite = _Suite("cuda" if torch.cuda.is_available() else "cpu", options)
        yield from suite.shapes()
        yield from suite.stores()
        yield from suite.curves()
        yield from suite.graphs() if suite.device == "cuda" else suite.over_threads(threads)


@dataclass(frozen=True)
class _Suite:
    """The cases of a device."""

    device: str
    options: SuiteOptions

    def case(
        self,
        group: str,
        line_up: Callable[[Layer, SuiteOptions], Lineup],
        tokens: int,
        shape: str = "7B layer",
        dtype: torch.dtype = torch.bfloat16,
    ) -> Comparison:
        """Make a case on a layer that is made when it is timed, as its device wants it."""
        name, layer = f"{shape}, {tokens:,} tokens", partial(Layer, SHAPES[shape], interleaved(tokens), dtype)
        return self.timed(Comparison(group, name, lambda: line_up(layer(self.device), self.options), budget=_BUDGET))

    def on_curve(self, group: str, name: str, point: Point, tokens: int, documents: int = 1) -> Comparison:
        """Make a case in place, where nothing is allocated."""
        layer = partial(Layer, SHAPES["7B layer"], interleaved(tokens, documents), torch.bfloat16, self.device)
        return self.timed(Comparison(group, name, lambda: inplace(layer(), self.options), point=point, budget=_CURVE))

    def timed(self, case: Comparison) -> Comparison:
        """Time a case by the clock of the device."""
        return replace(case, budget=_EVENTS, timer=by_events) if self.device == "cuda" else case

    def shapes(self) -> Iterator[Comparison]:
        """Yield every layer at every length."""
        lengths = (8,) if self.options.quick else _LONG if self.device == "cuda" else (4096,)
        layers = [(name, tokens) for name in SHAPES for tokens in lengths if self.fits(SHAPES[name], tokens)]
        # What is compiled takes seconds for each.
        layers = layers[::2] if self.options.quick else [*layers, ("7B layer", _DECODE)]
        few = layers[: 1 if self.options.quick else None]
        for dtype, chosen in ((torch.bfloat16, layers), (torch.float32, few)):
            for way, line_up in (("into new tensors", fresh), ("in place", inplace)):
                for name, tokens in chosen:
                    yield self.case(f"{way}, {str(dtype).removeprefix('torch.')}", line_up, tokens, name, dtype)
        for name, tokens in few:
            yield self.case("norm and rotation, bfloat16", normalised, tokens, name)
            yield self.case("forward and backward, bfloat16", with_gradients, tokens, name)

    def stores(self) -> Iterator[Comparison]:
        """Yield the way from the projection to attention, as servers go it, in prefill and in decode."""
        long = (_DECODE, *_LONG[:3]) if self.device == "cuda" else (_DECODE, 4096)
        for tokens in (8,) if self.options.quick else long:
            yield self.case("norm, rotation and store, bfloat16", stored, tokens)

    def curves(self) -> Iterator[Comparison]:
        """Yield time per token over tokens and over documents."""
        most = 64 if self.options.quick else 262144 if self.device == "cuda" else 32768
        for tokens in (16, 64, 256, 1024, 4096, 16384, 32768, 65536, 262144):
            if tokens <= most and self.fits(SHAPES["7B layer"], tokens):
                point = Point("tokens, an image of 16×16 in every 320", tokens)
                yield self.on_curve("in place over tokens", f"{tokens:,} tokens", point, tokens)
        tokens = 64 if self.options.quick else 8192
        for count in (1, 2) if self.options.quick else (1, 2, 8, 64, 512):
            point = Point(f"documents, {tokens:,} tokens in all", count)
            yield self.on_curve("in place over documents", counted(count, "document"), point, tokens, count)

    def over_threads(self, threads: int) -> Iterator[Comparison]:
        """Yield as many threads as torch would take here, a copy likewise."""
        tokens = 64 if self.options.quick else 4096
        for count in sorted({1, threads, *(2**i for i in range(threads.bit_length()) if 2**i <= threads)}):
            torch.set_num_threads(count)
            yield self.on_curve("in place over threads", counted(count, "thread"), Point("threads", count), tokens)

    def graphs(self) -> Iterator[Comparison]:
        """Yield CUDA graphs whose positions change at every replay, at the size of a decoding step and of a training
        step: no wait of the host, no kernel compiled anew.
        """
        group = "a CUDA graph replayed, positions changed every time"
        for tokens in (64,) if self.options.quick else (256, 8192):
            yield self.timed(Comparison(group, f"7B layer, {tokens:,} tokens", partial(_replayed, tokens)))

    def fits(self, shape: Shape, tokens: int) -> bool:
        """True where a GPU has memory for q and k in float32 a dozen times: contestants make copies of their own."""
        if self.device != "cuda":
            return True
        needed = 12 * 4 * tokens * (shape.q_heads + shape.k_heads) * shape.head_dim
        return needed <= torch.cuda.get_device_properties(0).total_memory


@dataclass(frozen=True)
class _Way:
    """A way to rotate q and k."""

    name: str
    rotate: Rotate
    role: Role = Role.OURS
    rounded: bool = False  # whether cos and sin, or the result of a norm, are rounded to the dtype of q and k before

    def contestant(self, layer: Layer, before: Callable[[], Pair] | None = None) -> Contestant:
        """Rotate the q and k of a layer; before gives what should have been rotated, if anything else."""

        def prove() -> None:
            rotated = self.rotate(layer.q.clone(), layer.k.clone())
            layer.judge(rotated, (layer.q, layer.k) if before is None else before(), rounded=self.rounded)

        return Contestant(self.name, partial(self.rotate, layer.q, layer.k), prove, self.role)


def _new_copies(layer: Layer) -> Contestant:
    return limit("copy into new tensors", lambda: (layer.q.clone(), layer.k.clone()))


def fresh(layer: Layer, options: SuiteOptions) -> Lineup:
    """Line up rotations into new tensors, against copies in new tensors."""
    ours = [way.contestant(layer) for way in _ours(layer)]
    peers = [way.contestant(layer) for way in _peers(layer, options, lambda rotation: rotation.fresh)]
    return Lineup([_new_copies(layer), *ours, _phases(layer), *peers], layer.work)


def inplace(layer: Layer, options: SuiteOptions) -> Lineup:
    """Line up rotations in place, against a copy into tensors that are there."""
    q, k = torch.empty_like(layer.q), torch.empty_like(layer.k)
    ways = [*_ours(layer, inplace=True), *_peers(layer, options, lambda rotation: rotation.inplace)]
    copy = limit("copy", lambda: (q.copy_(layer.q), k.copy_(layer.k)))
    return Lineup([copy, *(way.contestant(layer) for way in ways)], layer.work)


def with_gradients(layer: Layer, options: SuiteOptions) -> Lineup:
    """Line up rotations into new tensors, and then the gradients of q and k, against both copies."""
    gradients = layer.random(1)
    q, k = (x.clone().requires_grad_() for x in (layer.q, layer.k))

    def contestant(way: _Way) -> Contestant:
        def call(incoming: Pair = gradients) -> Pair:
            return _both(torch.autograd.grad(way.rotate(q, k), (q, k), incoming))

        def prove() -> None:
            with torch.no_grad():
                layer.judge(way.rotate(layer.q.clone(), layer.k.clone()), (layer.q, layer.k), rounded=way.rounded)
            # Copies, since some write into the gradients that come, too.
            back = call((gradients[0].clone(), gradients[1].clone()))
            layer.judge(back, gradients, rounded=way.rounded, backwards=True)

        return Contestant(way.name, call, prove, way.role)

    ways = [*_ours(layer), *_peers(layer, options, lambda rotation: rotation.training or rotation.fresh)]
    copies = limit("copies into new tensors", lambda: [x.clone() for x in (layer.q, layer.k, *gradients)])
    return Lineup([copies, *map(contestant, ways)], layer.work | {"bytes": 2 * layer.work["bytes"]})


def _ours(layer: Layer, *, inplace: bool = False) -> Iterator[_Way]:
    """Rotate from a table and from dense ids, and from a table by the reference in plain torch."""

    def by(positions: Positions, implementation: Implementation, q: Tensor, k: Tensor) -> Pair:
        return _both(apply_rotary(q, k, positions, layer.rotary, inplace=inplace, implementation=implementation))

    yield _Way("mmpos, table", partial(by, layer.table, "auto"))
    yield _Way("mmpos, dense ids", partial(by, layer.dense, "auto"))
    if layer.device == "cpu" or layer.tokens <= _REFERENCE:
        yield _Way("mmpos, reference", partial(by, layer.table, "reference"), Role.PART)


def _peers(layer: Layer, options: SuiteOptions, choose: Callable[[Rotation], Make | None]) -> Iterator[_Way]:
    """Yield the peers that rotate in the chosen way, and take such tensors."""
    for name, load in ROTATIONS.items():
        rotation = options.peer(name, load)
        if rotation and (make := choose(rotation)) and (rotate := make(layer)):
            yield _Way(name, rotate, Role.PEER, rounded=True)


def _both(pair: tuple[Tensor, Tensor | None] | tuple[Tensor, ...]) -> Pair:
    """Return q and k, where both were given."""
    q, k = pair
    assert k is not None
    return q, k


def _phases(layer: Layer) -> Contestant:
    """Compute cos and sin alone, which peers are given: what a model spends on them once for all its layers."""
    call = partial(cos_sin, layer.rotary, layer.table, "transformers")

    def prove() -> None:
        # q of ones and zeros, turned, is cos and sin.
        half = layer.shape.head_dim // 2
        cos, sin = (table[0, :, None, :half] for table in call())
        ones = torch.cat((torch.ones_like(cos), torch.zeros_like(cos)), dim=-1)[None]
        turned = torch.cat((cos, sin), dim=-1)[None]
        layer.judge((turned, turned), (ones, ones))

    return Contestant("cos and sin alone", call, prove, Role.PART)


def normalised(layer: Layer, options: SuiteOptions) -> Lineup:
    """Line up rotations into new tensors after a norm of each head, against copies in new tensors."""
    drawn = torch.rand(2, layer.shape.head_dim, generator=layer.generator(7), device=layer.device) + 0.5
    weights = _both(drawn.to(layer.dtype).unbind())
    norm = Norm(*weights, _EPS)

    def at_once(q: Tensor, k: Tensor) -> Pair:
        return _both(apply_rotary(q, k, layer.table, layer.rotary, norm=norm))

    def apart(q: Tensor, k: Tensor) -> Pair:
        return _both(apply_rotary(*_norms(q, k, weights), layer.table, layer.rotary))

    ways = [_Way("mmpos, at once", at_once), _Way("torch's norm, then mmpos", apart, Role.PEER, rounded=True)]
    for name, load in NORMS.items():
        if make := options.peer(name, load):
            ways.append(_Way(name, make(layer, weights, _EPS), Role.PEER, rounded=True))
    before = partial(_norms, layer.q.double(), layer.k.double(), weights)
    return Lineup([_new_copies(layer), *(way.contestant(layer, before) for way in ways)], layer.work)


def _norms(q: Tensor, k: Tensor, weights: Pair) -> Pair:
    """Normalise the heads of q and k, each by its own weight."""
    q, k = (rms_norm(x, weight.shape, weight.to(x.dtype), _EPS) for x, weight in zip((q, k), weights, strict=True))
    return q, k


def stored(layer: Layer, options: SuiteOptions) -> Lineup:
    """Line up everything between the projection and attention, against a copy of the same bytes: q, k and v of all
    tokens, and a cache whose blocks are dealt out anew.
    """
    (_, v), tokens, dim = layer.random(1), layer.tokens, layer.shape.head_dim
    blocks = -(-tokens // _BLOCK)
    both = torch.zeros(2, blocks, _BLOCK, layer.shape.k_heads, dim, dtype=layer.dtype, device=layer.device)
    keys, values = both.unbind(0)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
    slots = (order[:, None] * _BLOCK + torch.arange(_BLOCK)).flatten()[:tokens].to(layer.device)
    at = slots // _BLOCK, slots % _BLOCK
    weights = _both(torch.rand(2, dim, generator=layer.generator(2), device=layer.device).to(layer.dtype).unbind(0))
    norm = Norm(*weights, _EPS)

    def in_one_call() -> Tensor:
        cache = Cache(keys, values, slots)
        return rotate_and_store(layer.q, layer.k, v, layer.table, layer.rotary, cache, norm=norm)[0]

    def with_the_norm() -> Tensor:
        return store(*_both(apply_rotary(layer.q, layer.k, layer.table, layer.rotary, norm=norm)))

    def separately() -> Tensor:
        return store(*_both(apply_rotary(*_norms(layer.q, layer.k, weights), layer.table, layer.rotary)))

    def store(q: Tensor, k: Tensor) -> Tensor:
        keys[at], values[at] = k[0], v[0]
        return q

    def copy() -> None:
        layer.q.clone()
        for x, cache in ((layer.k, keys), (v, values)):
            cache.flatten(0, 1)[:tokens].copy_(x[0])

    def prove(call: Callable[[], Tensor], rounded: bool) -> None:
        both.zero_()
        q = call()
        before = _norms(layer.q.double(), layer.k.double(), weights)
        layer.judge((q, keys[at][None]), before, rounded=rounded)
        holds(torch.equal(values[at], v[0]), "other values in the cache", "v")

    ways = (
        ("mmpos, one call", in_one_call, Role.OURS, False),
        ("norm and rotation, then store", with_the_norm, Role.PEER, False),
        ("separate operations", separately, Role.PEER, True),
    )
    contestants = [Contestant(who, call, partial(prove, call, rounded), role) for who, call, role, rounded in ways]
    moved = 2 * (layer.q.nbytes + layer.k.nbytes + v.nbytes)
    return Lineup([limit("copy", copy), *contestants], layer.work | {"bytes": moved})


def _replayed(tokens: int) -> Lineup:
    """Refresh the table and replay; the limit is the replay of a copy."""
    # One document of so many tokens, with more and fewer images, at other places.
    variants = [interleaved(tokens), workload(1, tokens, 1, 4), workload(1, tokens, 2, 4), workload(1, tokens, 0, 1)]
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
        limit("copy, replayed", copied),
        Contestant("refresh, and in place", lambda: step(rotated), proof=prove),
        Contestant("in place, the same positions", rotated, prove, Role.PART),
        Contestant("refresh alone", lambda: device.refresh(next(turns).positions), prove, Role.PART),
    )
    return Lineup(contestants, layer.work, facts)


def _compiled() -> int:
    """Count the kernels that Triton has compiled in this process."""
    from mmpos.rotary.kernel.rotate import rotary_kernel

    return sum(len(caches[0]) for caches in rotary_kernel.device_caches.values())
