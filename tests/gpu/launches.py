"""Launches of every kind, drawn from all combinations of options, each compared with the reference.

They have full size on a GPU, and toy size elsewhere. To add a kind, add a function that takes a scene to `KINDS`, its
options to `Launch` and `OPTIONS`, and a line to `BASES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import inf, sqrt
from random import Random
from typing import Any, Literal

import torch
from store_oracle import CACHES, Held, bits, filled, poisoned
from tolerance import ARITHMETIC, INTERPRETED, cos_sin, gamma, unit
from torch import Tensor

from mmpos import Grid, InvalidInputError, PositionTable, SegmentTable, Text, place
from mmpos.rotary import DevicePositions, Norm, Rotary, YaRN, apply_rotary, kernel, rerotate, rotate_and_store
from mmpos.schemes import get_scheme
from mmpos.support.cached import cached_property

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TRITON: Literal["triton"] = "triton"

EPS = 1e-6


def sized(full: int, toy: int) -> int:
    """Return the full size on a GPU, and the toy size in the interpreter, which runs programs one after another."""
    return full if GPU else toy


FEW, SOME, MANY = sized(255, 5), sized(2049, 19), sized(8200, 33)
"""Token counts for one warp per program, for several warps, and for a full device."""

BY_HEAD = [0, 0, 1, 1, 1, 2, 2, 2] if GPU else [0, 2, 1]
"""The axis of each kv head in the layer "by head"."""

LAYERS: dict[str, tuple[int, int, int]] = {
    "by head": (32, 8, 128) if GPU else (6, 3, 16),
    "7B": (32, 8, 128) if GPU else (3, 1, 16),
    "72B": (64, 8, 128) if GPU else (4, 1, 16),
    "vision": (16, 16, 80) if GPU else (2, 2, 12),
    "FLUX": (24, 24, 128) if GPU else (2, 2, 16),
    **{f"heads of {dim}": (2, 1, dim) for dim in (2, 6, 16, 20, 64, 80, 96, 128, 256)},
}
"""The numbers of q heads, k heads, and channels per head."""


TURNINGS: Mapping[str, tuple[str, Callable[[int], Mapping[str, Any]]]] = {
    "interleaved": ("rope-tie", lambda dim: {}),
    "adjacent": ("rope-tie", lambda dim: {"pairing": "adjacent"}),
    "half of a head": ("rope-tie", lambda dim: {"rotary_dim": dim // 2}),
    "a quarter of a head, adjacent": ("rope-tie", lambda dim: {"rotary_dim": dim // 4, "pairing": "adjacent"}),
    "four channels": ("rope-tie", lambda dim: {"rotary_dim": 4}),
    "axial": ("rope-tie", lambda dim: {"allocation": "axial"}),
    "flux": (
        "flux",
        lambda dim: {"allocation": "axial", "axes_dim": [dim // 4, *[3 * dim // 8] * 2], "pairing": "adjacent"},
    ),
    "sections": (
        "mrope", lambda dim: {"allocation": "sections", "mrope_section": [dim // 8, *[3 * dim // 16] * 2]},
    ),
    "one axis": ("flatten", lambda dim: {"axes": 1}),
    "as Transformers": ("rope-tie", lambda dim: {"precision": "hf"}),
    "YaRN": ("rope-tie", lambda dim: {"scaling": YaRN(4.0, 32768)}),
    "theta": ("rope-tie", lambda dim: {"theta": 1e6}),
    "unrotated frames": ("mrope", lambda dim: {"allocation": [1, 2] * (3 * dim // 16) + [-1] * (dim // 8)}),
    "by head": ("mrope", lambda dim: {"allocation": "heads", "head_axes": BY_HEAD}),
    "own frequencies": (
        "rope-tie", lambda dim: {"allocation": [0, 1] * (dim // 4 * len(BY_HEAD)), "kv_heads": len(BY_HEAD)},
    ),
    "by head, adjacent, half of a head": (
        "mrope",
        lambda dim: {"allocation": "heads", "head_axes": BY_HEAD, "pairing": "adjacent", "rotary_dim": dim // 2},
    ),
}  # fmt: skip
"""The scheme of the ids, and the arguments of a Rotary as a function of head_dim."""

FORMS: Mapping[str, Callable[[PositionTable], Any]] = {
    "table": lambda table: DevicePositions.from_table(table, DEVICE),
    "fractions": lambda table: DevicePositions.from_table(table, DEVICE),
    "capacity": lambda table: DevicePositions.from_table(table, DEVICE, table.num_segments + 100),
    "host": lambda table: table,
    "int32": lambda table: _dense(table).to(torch.int32),
    "int64": lambda table: _dense(table).to(torch.int64),
    "float64": lambda table: _dense(table).double() + 0.25,
}
"""Forms of positions; "fractions" uses a fractional scheme."""


def _dense(table: PositionTable) -> Tensor:
    return torch.from_numpy(table.dense()).to(DEVICE)


def _copied(target: Tensor, x: Tensor) -> Tensor:
    return target.view(x.shape).copy_(x) if target.dim() == 1 else target.copy_(x)


STRIDES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "misaligned": lambda x: _copied(x.new_empty(x.numel() + 1)[1:], x),  # by one element
    "odd rows": lambda x: _copied(x.new_empty(*x.shape[:2], x.shape[2] + 1)[..., :-1], x),  # not a multiple of 16 bytes
    "strided channels": lambda x: _copied(x.new_empty(*x.shape[:2], 2 * x.shape[2])[..., ::2], x),
}
"""Memory layouts of heads; Scene handles "fused", a view of a packed qkv."""


@dataclass(frozen=True)
class Launch:
    """A description of one launch; options that its kind does not use keep their defaults."""

    kind: str = "rotate"
    tokens: int = SOME
    layer: str = "7B"
    dtype: torch.dtype = torch.bfloat16
    turning: str = "interleaved"
    form: str = "table"
    layout: str = "thd"
    documents: int = 1
    start: int = 0
    strides: str = "contiguous"
    inplace: bool = False
    conjugate: bool = False
    norm: str = ""  # normalised tensors: "q", "k" or "qk"
    offset: float = 0.0
    after: bool = False  # whether the norm follows the rotation
    weights: torch.dtype | None = None  # dtype of norm weights, or of cos and sin; None: as the heads, or float32
    only: str = ""  # "q": without k, or only gradients of q; "k", "weights": only these gradients
    cache: str = "NHD"
    page: int = 16
    value_dim: int | None = None
    slots: str = "int64"
    return_k: bool = False
    way: Any = TRITON

    def __str__(self) -> str:
        """Return the kind, the tokens and all options that differ from their defaults."""
        words = [self.kind]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default or field.name == "tokens":
                words.append(f"{field.name}={str(value).removeprefix('torch.')}")
        return " ".join(words)


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

BASES: Mapping[str, Launch] = {
    "rotate": Launch("rotate"),
    "backward with norm": Launch("backward", norm="qk"),
    "store": Launch("store", norm="qk", return_k=True),
    "rerotate": Launch("rerotate"),
    "dense": Launch("dense"),
    "rotate in place": Launch("rotate", inplace=True),
    "rotate as Transformers": Launch("rotate", turning="as Transformers"),
    "rotate by cos and sin": Launch("cached"),
    "rotate by head": Launch("rotate", layer="by head", turning="by head"),
    "rotate far away": Launch("rotate", dtype=F32, start=2**31 - 200_000),
    "norm": Launch("rotate", norm="qk"),
    "norm after": Launch("rotate", norm="qk", after=True),
    "norm in place": Launch("rotate", norm="q", inplace=True, offset=1.0),
    "backward": Launch("backward"),
    "backward with norm after": Launch("backward", norm="qk", after=True),
    "own frequencies": Launch("rotate", layer="by head", turning="own frequencies"),
    "backward by head": Launch("backward", layer="by head", turning="by head", norm="k"),
    "store without norm": Launch("store"),
    "store in place": Launch("store", inplace=True, return_k=True, slots="int32"),
    "rerotate other caches": Launch("rerotate", cache="HND", slots="int32"),
}
"""Kinds of launches; the first five use every kernel."""

COMMON: Mapping[str, list[Any]] = {
    "tokens": [1, 2, 3, 15, 16, FEW, SOME, MANY],
    "layer": list(LAYERS),
    "dtype": [F16, BF16, F32],
    "turning": list(TURNINGS),
    "form": list(FORMS),
    "strides": ["contiguous", "fused", "fused", *STRIDES],
}
LAYOUTS: Mapping[str, list[Any]] = {
    "layout": ["thd", "thd", "bshd", "bhsd"],
    "documents": [1, 3],
    "conjugate": [False, True],
}
PAGES: Mapping[str, list[Any]] = {"cache": list(CACHES), "page": [16, 1, 24], "slots": ["int64", "int32", "none"]}
NORMS: Mapping[str, list[Any]] = {"norm": ["", "q", "k", "qk"], "weights": [None, F32]}
OPTIONS: Mapping[str, Mapping[str, list[Any]]] = {
    "rotate": {**LAYOUTS, **NORMS, "only": ["", "", "q"]},
    "backward": {**LAYOUTS, **NORMS, "only": ["", "", "q", "k", "weights"], "conjugate": [False]},
    "store": {**PAGES, **NORMS, "slots": ["int64", "int32", "short", "none"], "value_dim": [None, None, sized(64, 8)]},
    "rerotate": PAGES,
    "cached": {"form": ["table", "capacity", "host", "int32", "int64"]},
    "dense": {"form": ["table", "capacity", "fractions"]},
}
"""The values of options that a kind draws from, besides or instead of the common ones."""


def drawn(base: Launch, draw: Random) -> Launch:
    """Draw about half of a launch's options, such that they go together."""
    options = {**COMMON, **OPTIONS[base.kind]}
    changes = {name: draw.choice(values) for name, values in options.items() if draw.random() < 0.5}
    launch = replace(base, **changes)
    return launch if goes_together(launch) else drawn(base, draw)


def goes_together(launch: Launch) -> bool:
    """Return whether the options of a launch form a valid call."""
    scheme, options = TURNINGS[launch.turning]
    axes, dim = 2 if launch.form == "fractions" else get_scheme(scheme).axes, LAYERS[launch.layer][2]
    try:
        rotary = Rotary(dim, **{"axes": axes, **options(dim)})
    except InvalidInputError:  # too few channels
        return False
    return (
        rotary.axes == axes
        and (rotary.own_heads > 0) == (launch.layer == "by head")
        and (rotary.shares_ladder or launch.kind != "cached")
        and launch.tokens >= launch.documents
        and not (launch.start and (launch.turning, launch.form) != ("interleaved", "table"))
        and not (launch.value_dim and (launch.cache != "NHD" or launch.strides == "fused"))
        and not (launch.kind == "rotate" and launch.only == "q" and "k" in launch.norm)
        and not (launch.only == "weights" and not launch.norm)
    )


def sample(seed: int, count: int) -> list[Launch]:
    """Draw launches, equally many of each kind."""
    draw, bases = Random(seed), list(BASES.values())
    return [drawn(bases[i % len(bases)], draw) for i in range(count)]


LAUNCHES = sample(1, sized(400, 57))


# Inputs.


def documents(tokens: int, count: int = 1) -> list[list[Text | Grid]]:
    """Build equally long documents with a 16×16 image every 320 tokens or, if they are too short, a 2×2 one every 8."""
    length = tokens // count
    side, every = (16, 320) if length >= 320 else (2, 8)
    parts: list[Text | Grid] = [Text(every - side * side), Grid(side, side)] * (length // every)
    if length % every:
        parts.append(Text(length % every))
    return [parts] * count


def placed(tokens: int, scheme: str = "rope-tie", count: int = 1, start: int = 0) -> PositionTable:
    return place(SegmentTable.from_documents(documents(tokens, count)), scheme, start)


def normal(*shape: int, seed: int, dtype: torch.dtype = F32) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


class Scene:
    """Tensors and positions of a launch."""

    def __init__(self, launch: Launch, seed: int = 0) -> None:
        scheme, options = TURNINGS[launch.turning]
        count = launch.documents
        self.scheme = "rope-tie-fractional" if launch.form == "fractions" else scheme
        self.launch = replace(launch, tokens=launch.tokens - launch.tokens % count)
        self.table = placed(self.launch.tokens, self.scheme, count, launch.start)
        self.positions = FORMS[launch.form](self.table)
        q_heads, k_heads, dim = LAYERS[launch.layer]
        self.rotary = Rotary(dim, **{"axes": self.table.axes, **options(dim)})
        shapes = (q_heads, dim), (k_heads, dim), (k_heads, launch.value_dim or dim)
        tensors = [normal(self.launch.tokens, *s, seed=seed + i, dtype=launch.dtype) for i, s in enumerate(shapes)]
        if launch.strides == "fused":
            self.q, self.k, self.v = torch.cat(tensors, dim=1).split([q_heads, k_heads, k_heads], dim=1)
        else:
            self.q, self.k, self.v = (STRIDES[launch.strides](x) for x in tensors)
        self.grads = [normal(*x.shape, seed=seed + 31, dtype=x.dtype) for x in (self.q, self.k)]
        kind = launch.weights or launch.dtype
        self.weights = [
            normal(dim, seed=seed + 7 + i, dtype=kind).abs() + 0.5 if name in launch.norm else None
            for i, name in enumerate("qk")
        ]

    @property
    def norm(self) -> Norm | None:
        """Norm of q and k, or None."""
        launch = self.launch
        return Norm(self.weights[0], self.weights[1], EPS, launch.offset, launch.after) if launch.norm else None

    @property
    def how(self) -> dict[str, Any]:
        """Common arguments of all calls."""
        return {"implementation": self.launch.way, "norm": self.norm}

    @property
    def exact(self) -> bool:
        """Whether implementations give the same bits.

        They add the squares of a norm in different orders, the cos and sin of precision "hf" are a library's, and the
        interpreter truncates bfloat16.
        """
        truncated = INTERPRETED and self.launch.dtype == BF16 and self.launch.way == TRITON
        return not (self.launch.norm or self.rotary.precision == "hf" or truncated)

    @property
    def bound(self) -> float:
        """Bound on the difference of two implementations, relative to the largest number of a head."""
        rounding = unit(self.launch.dtype) * (2 if self.launch.dtype == BF16 and INTERPRETED else 1)
        arithmetic = ARITHMETIC + gamma(self.rotary.head_dim + 16) + 2 * cos_sin()
        return 2 * sqrt(2) * (rounding + arithmetic)

    def arranged(self, x: Tensor) -> Tensor:
        """View a (tokens, heads, head_dim) tensor in the layout of the launch."""
        if self.launch.layout == "thd":
            return x
        rows = x.unflatten(0, (self.launch.documents, -1))
        return rows.transpose(1, 2) if self.launch.layout == "bhsd" else rows

    @cached_property
    def slots(self) -> Tensor:
        """Slots in random order, some of them missing; "short": fewer slots than tokens; "none": no valid slots."""
        launch = self.launch
        order = torch.randperm(self.blocks * launch.page, generator=torch.Generator().manual_seed(launch.tokens))
        order = order[: launch.tokens // (2 if launch.slots == "short" else 1)]
        order[:: 1 if launch.slots == "none" else max(2, launch.tokens // 7)] = -1
        return order.to(DEVICE, torch.int32 if launch.slots == "int32" else torch.int64)

    @property
    def blocks(self) -> int:
        """Blocks of a cache with room for all tokens."""
        return -(-self.launch.tokens // self.launch.page) + 3

    @cached_property
    def held(self) -> Held:
        """A cache without contents, or with the keys of the tokens if they are to be rerotated."""
        launch, (_, heads, dim) = self.launch, self.k.shape
        held = CACHES[launch.cache](self.blocks, launch.page, heads, dim, launch.dtype)
        if launch.value_dim:
            values = filled(self.blocks, launch.page, heads, launch.value_dim, dtype=launch.dtype)
            held = Held(held.key, values, (held.key, values), "NHD", launch.page)
        for token, slot in enumerate(self.slots.tolist() if launch.kind == "rerotate" else []):
            if slot >= 0:
                held.at(held.key, slot).copy_(self.k[token])
        return held

    @cached_property
    def target(self) -> Any:
        """The positions to which keys are rerotated."""
        launch = self.launch
        return FORMS[launch.form](placed(launch.tokens, self.scheme, launch.documents, launch.start + 12_345))


# The kinds. Each returns what it computes, and all memory that it may write or must leave unchanged.

Results = Mapping[str, Tensor | None]


def rotate(scene: Scene) -> Results:
    """Rotate q and k, with or without a norm before or after, into new tensors or in place."""
    launch = scene.launch
    q, k = scene.arranged(scene.q), None if launch.only == "q" else scene.arranged(scene.k)
    options: Any = {"layout": launch.layout, "conjugate": launch.conjugate, "inplace": launch.inplace}
    outs = apply_rotary(q, k, scene.positions, scene.rotary, **options, **scene.how)
    return {"q": outs[0], "k": outs[1], "given q": scene.q, "given k": scene.k}


def backward(scene: Scene) -> Results:
    """Compute the gradients of q, k and the weights, or of those that the launch names."""
    launch, only = scene.launch, scene.launch.only
    inputs = {"q": scene.q, "k": scene.k, "q weight": scene.weights[0], "k weight": scene.weights[1]}
    selected = {"": list(inputs), "weights": ["q weight", "k weight"]}.get(only, [only])
    names = [name for name in selected if inputs[name] is not None]
    # Leaves are detached views rather than copies, so they keep their strides.
    leaves = {name: None if x is None else x.detach().requires_grad_(name in names) for name, x in inputs.items()}
    q, k, *weights = leaves.values()
    assert q is not None
    assert k is not None
    how: Any = {**scene.how, "layout": launch.layout}
    if scene.norm is not None:
        how |= {"norm": scene.norm._replace(q_weight=weights[0], k_weight=weights[1])}
    outs = apply_rotary(scene.arranged(q), scene.arranged(k), scene.positions, scene.rotary, **how)
    pairs = [(out, scene.arranged(g)) for out, g in zip(outs, scene.grads, strict=True) if out is not None]
    of, grads = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
    sources: Any = [leaves[name] for name in names]
    return dict(zip(names, torch.autograd.grad(of, sources, grads), strict=True))


def store(scene: Scene) -> Results:
    """Rotate q and k, and write k and v to a cache."""
    outs = rotate_and_store(
        scene.q, scene.k, scene.v, scene.positions, scene.rotary, scene.held.with_slots(scene.slots),
        return_k=scene.launch.return_k, inplace=scene.launch.inplace, **scene.how,
    )  # fmt: skip
    whole = {f"cache {i}": x for i, x in enumerate(scene.held.whole)}
    return {"q": outs[0], "k": outs[1], "given q": scene.q, "given k": scene.k, "given v": scene.v, **whole}


def move(scene: Scene) -> Results:
    """Rerotate stored keys to new positions."""
    held, way = scene.held, scene.launch.way
    nhd = held.key.transpose(1, 2) if held.layout == "HND" else held.key
    rerotate(nhd, scene.slots, scene.positions, scene.target, scene.rotary, implementation=way)
    return {f"cache {i}": x for i, x in enumerate(held.whole)}


def cached(scene: Scene) -> Results:
    """Rotate with an engine's cache of cos and sin."""
    shape = int(scene.table.dense().max()) + 1, scene.rotary.rotary_dim
    rows = normal(*shape, seed=5, dtype=scene.launch.weights or F32)
    outs = apply_rotary(scene.q, scene.k, scene.positions, scene.rotary, cos_sin=rows, **scene.how)
    return {"q": outs[0], "k": outs[1]}


def dense(scene: Scene) -> Results:
    """Compute the dense ids of a table."""
    table, columns = scene.table, scene.positions.table
    if scene.launch.way != TRITON:
        return {"ids": _dense(table)}
    return {"ids": kernel.launch_dense(columns, table.num_tokens, table.axes, table.fractional)}


KINDS: Mapping[str, Callable[[Scene], Results]] = {
    "rotate": rotate, "backward": backward, "store": store, "rerotate": move, "cached": cached, "dense": dense,
}  # fmt: skip
"""The function of each kind, which launches it."""


def checks(launch: Launch, seed: int) -> Iterator[tuple[str, float]]:
    """Run a launch and the reference; yield each result's difference as a share of its bound: correct up to 1."""
    scene, judge = (Scene(replace(launch, way=way), seed) for way in (launch.way, "reference"))
    with poisoned():
        got = KINDS[launch.kind](scene)
    want = KINDS[launch.kind](judge)
    for name, x in got.items():
        y = want[name]
        if x is not None and y is not None:
            yield name, difference(x, y, 0.0 if scene.exact else scene.bound, "weight" in name)
        elif x is not y:
            yield name, inf


def difference(got: Tensor, want: Tensor, bound: float = 0.0, summed: bool = False) -> float:
    """Return the largest difference as a share of the bound times the largest number of a head; 0 for equal bits.

    A gradient of weights sums over tokens and heads, so its bound is relative to all its numbers.
    """
    if (got.shape, got.dtype, got.stride()) != (want.shape, want.dtype, want.stride()):
        return inf
    if torch.equal(*(x.contiguous().view(torch.uint8) for x in (got, want))):
        return 0.0
    if not bound:
        return inf
    same = bits(got) == bits(want)
    largest = want.double().nan_to_num(0.0).abs().amax(-1, keepdim=True).clamp_min(1e-30)
    share = (got.double() - want.double()).abs() / (bound * (8 if summed else 1) * largest)
    worst = share.masked_fill(same.to(DEVICE), 0.0).amax()
    return inf if bool(worst.isnan()) else float(worst)
