"""Table of all kinds of launches, with inputs and float64 references: full size on a GPU, toy size elsewhere.

To add a kind, add a function that takes a scene to `KINDS`, its options to `Launch`, and lines to `LAUNCHES`. Without a
GPU, launches with a norm are also compared for the reference and for "auto", which is the C extension there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from math import inf, isnan, pi, sqrt
from typing import Any, Literal

import torch
from mpmath import mp
from rotary_oracle import by_kv_head, frequencies, pair_axes
from store_oracle import CACHES, FILL, Held, bits, filled
from tolerance import ARITHMETIC, INTERPRETED, gamma, unit
from torch import Tensor

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.rotary import Cache, DevicePositions, Norm, Rotary, YaRN, apply_rotary, kernel, rerotate, rotate_and_store
from mmpos.rotary.device import frequencies_of
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

LAYERS: Mapping[str, tuple[int, int, int]] = {
    "by head": (32, 8, 128) if GPU else (6, 3, 16),
    "7B": (32, 8, 128) if GPU else (3, 1, 16),
    "72B": (64, 8, 128) if GPU else (4, 1, 16),
    "vision": (16, 16, 80) if GPU else (2, 2, 12),
    "FLUX": (24, 24, 128) if GPU else (2, 2, 16),
    **{f"heads of {dim}": (2, 1, dim) for dim in (2, 6, 16, 20, 64, 80, 96, 128, 256)},
}
"""The numbers of q heads, k heads, and channels per head."""


@dataclass(frozen=True)
class Turning:
    """The arguments of a Rotary as a function of head_dim, and the scheme of its ids."""

    options: Callable[[int], Mapping[str, Any]] = lambda dim: {}
    scheme: str = "rope-tie"


TURNINGS: Mapping[str, Turning] = {
    "interleaved": Turning(),
    "adjacent": Turning(lambda dim: {"pairing": "adjacent"}),
    "half of a head": Turning(lambda dim: {"rotary_dim": dim // 2}),
    "a quarter of a head, adjacent": Turning(lambda dim: {"rotary_dim": dim // 4, "pairing": "adjacent"}),
    "four channels": Turning(lambda dim: {"rotary_dim": 4}),
    "axial": Turning(lambda dim: {"allocation": "axial"}),
    "flux": Turning(
        lambda dim: {"allocation": "axial", "axes_dim": [dim // 4, 3 * dim // 8, 3 * dim // 8], "pairing": "adjacent"},
        "flux",
    ),
    "sections": Turning(
        lambda dim: {"allocation": "sections", "mrope_section": [dim // 8, 3 * dim // 16, 3 * dim // 16]}, "mrope"
    ),
    "one axis": Turning(lambda dim: {"axes": 1}, "flatten"),
    "as Transformers": Turning(lambda dim: {"precision": "hf"}),
    "YaRN": Turning(lambda dim: {"scaling": YaRN(4.0, 32768)}),
    "theta": Turning(lambda dim: {"theta": 1e6}),
    "unrotated frames": Turning(lambda dim: {"allocation": [1, 2] * (3 * dim // 16) + [-1] * (dim // 8)}, "mrope"),
    "by head": Turning(lambda dim: {"allocation": "heads", "head_axes": BY_HEAD}, "mrope"),
    "by head, adjacent, half of a head": Turning(
        lambda dim: {"allocation": "heads", "head_axes": BY_HEAD, "pairing": "adjacent", "rotary_dim": dim // 2},
        "mrope",
    ),
}

FOR_HEADS = [name for name in TURNINGS if "by head" in name]

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
    weights: torch.dtype | None = None  # dtype of norm weights; None: the dtype of the heads
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


def launches(kind: str, **options: Iterable[Any] | Any) -> Iterator[Launch]:
    """Yield a launch for each combination of the options given as lists."""
    choices = [value if isinstance(value, list) else [value] for value in options.values()]
    for values in product(*choices):
        yield Launch(kind, **dict(zip(options, values, strict=True)))


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

ROTATE = [
    *launches("rotate", tokens=[1, 2, 3, 15, 16, FEW, SOME, MANY, sized(40_000, 40)]),
    *launches("rotate", dtype=[F16, F32]),
    *launches("rotate", layer="72B", tokens=[FEW, MANY]),
    *launches("rotate", layer="vision", turning="axial", tokens=[FEW, MANY], dtype=[BF16, F32]),
    *launches("rotate", turning="adjacent", dtype=[BF16, F16, F32], tokens=[FEW, SOME]),
    *launches("rotate", form=["int32", "int64", "float64", "fractions", "capacity", "host"], dtype=[BF16, F32]),
    *launches("rotate", form="fractions", turning="adjacent"),
    *launches("rotate", turning=[name for name in TURNINGS if name not in FOR_HEADS], dtype=[BF16, F32]),
    *launches("rotate", turning="half of a head", inplace=True, tokens=[FEW, SOME]),
    *launches("rotate", turning="sections", form="int32"),
    *launches("rotate", layout=["bshd", "bhsd"], documents=3, dtype=[BF16, F32]),
    *launches("rotate", inplace=True, tokens=[FEW, SOME, MANY], turning=["interleaved", "adjacent"]),
    *launches("rotate", conjugate=True, form=["table", "fractions"], dtype=[BF16, F32]),
    *launches("rotate", strides=["fused", *STRIDES], dtype=[BF16, F32], inplace=[False, True]),
    *launches("rotate", strides="misaligned", tokens=FEW),
    *launches("rotate", only="q", inplace=[False, True]),
    *launches("rotate", layer=[name for name in LAYERS if "of" in name and name != "heads of 2"], dtype=F32),
    *launches("rotate", layer="heads of 2", dtype=F32, turning="one axis"),
    *launches("rotate", start=[-(2**31), 2**31 - 200_000], dtype=F32, form=["table", "int32"]),
    *launches("rotate", layer="by head", turning=FOR_HEADS, tokens=[1, FEW, SOME, MANY]),
    *launches("rotate", layer="by head", turning="by head", form=["int32", "capacity"], dtype=F32, conjugate=True),
    *launches("rotate", layer="by head", turning="by head", norm="qk", dtype=[BF16, F32], inplace=[False, True]),
    *launches("rotate", tokens=sized(8192, 32), documents=[sized(n, m) for n, m in ((64, 4), (512, 8), (4096, 16))]),
]

NORM = [
    *launches("rotate", norm="qk", after=[False, True], tokens=[1, FEW, SOME, MANY]),
    *launches("rotate", norm=["q", "k"], after=[False, True], dtype=[BF16, F32]),
    *launches("rotate", norm="qk", after=[False, True], dtype=[F16, F32], turning=["interleaved", "adjacent", "YaRN"]),
    *launches("rotate", norm="qk", after=[False, True], dtype=[F16, F32], turning="half of a head"),
    *launches("rotate", norm="qk", offset=1.0, dtype=[BF16, F32]),
    *launches("rotate", norm="qk", weights=F32),
    *launches("rotate", norm="qk", inplace=True, tokens=[FEW, SOME], turning=["interleaved", "four channels"]),
    *launches("rotate", norm="qk", after=[False, True], layer="vision", turning="axial", inplace=[False, True]),
    *launches("rotate", norm="qk", layer="vision", turning="axial", dtype=F32),
    *launches("rotate", norm="qk", layer="FLUX", turning="flux", tokens=[FEW, MANY], inplace=[False, True]),
    *launches("rotate", norm="qk", form="fractions"),
    *launches("rotate", norm="qk", strides=["fused", *STRIDES], inplace=True),
    *launches("rotate", norm="qk", conjugate=True, dtype=F32, turning=["YaRN", "sections"]),
    *launches("rotate", norm="qk", layout=["bshd", "bhsd"], documents=3, dtype=[BF16, F32]),
    *launches("rotate", norm="qk", after=[False, True], dtype=F32, layer=["heads of 6", "heads of 96"]),
    *launches("rotate", norm="qk", after=[False, True], dtype=F32, layer="heads of 2", turning="one axis"),
    *launches("rotate", norm="qk", after=True, dtype=F32, layer="by head", turning=FOR_HEADS),
]

BACKWARD = [
    *launches("backward", dtype=[F16, BF16, F32]),
    *launches("backward", turning=["adjacent", "half of a head"], dtype=[BF16, F32]),
    *launches("backward", layout=["bshd", "bhsd"], documents=3),
    *launches("backward", only=["q", "k"]),
    *launches("backward", norm=["q", "k", "qk"], dtype=F32, only=["", "q", "k", "weights"]),
    *launches("backward", norm="qk", tokens=[1, FEW, SOME, MANY]),
    *launches("backward", norm="qk", dtype=F32, turning=["adjacent", "half of a head", "four channels"]),
    *launches("backward", norm="qk", dtype=F32, layer="vision", turning="axial"),
    *launches("backward", norm="qk", dtype=F32, after=True, turning="YaRN", only=["", "q", "k", "weights"]),
    *launches("backward", norm=["q", "k"], dtype=F32, after=True, turning="half of a head"),
    *launches("backward", norm="qk", dtype=F32, offset=1.0, strides="fused"),
    *launches("backward", turning="unrotated frames", dtype=F32),
    *launches("backward", layer="by head", turning=FOR_HEADS, dtype=F32),
    *launches("backward", layer="by head", turning=FOR_HEADS, norm="qk", after=[False, True], dtype=F32),
]

STORE = [
    *launches("store", tokens=[1, FEW, SOME, MANY]),
    *launches("store", cache=list(CACHES)),
    *launches("store", norm="qk", tokens=[1, FEW, SOME], inplace=[False, True]),
    *launches("store", return_k=True, inplace=[False, True], norm=["", "qk"]),
    *launches("store", dtype=[F16, F32]),
    *launches("store", slots=["int32", "short", "none"]),
    *launches("store", turning=["adjacent", "half of a head"], norm=["", "qk"]),
    *launches("store", form=["int32", "fractions"]),
    *launches("store", strides=["fused", *STRIDES]),
    *launches("store", page=[1, 24]),
    *launches("store", value_dim=sized(64, 8)),
    *launches("store", layer="by head", turning="by head", norm=["", "qk"], return_k=True),
    *launches("store", cache="k and v side by side", norm="qk", return_k=True, layer="72B"),
]

REROTATE = [
    *launches("rerotate", tokens=[1, FEW, SOME, MANY]),
    *launches("rerotate", cache=list(CACHES)),
    *launches("rerotate", dtype=[F16, F32], turning=["interleaved", "adjacent", "half of a head"]),
    *launches("rerotate", form=["int32", "fractions"], slots=["int64", "int32", "none"]),
    *launches("rerotate", layer="vision", turning="axial"),
    *launches("rerotate", layer="by head", turning=FOR_HEADS),
]

CACHED = [
    *launches("cached", tokens=[1, FEW, SOME, MANY]),
    *launches("cached", dtype=[F16, F32], turning=["adjacent", "half of a head", "sections"]),
    *launches("cached", layer="heads of 96", dtype=F32, form=["int32", "host"]),
]

DENSE = [*launches("dense", tokens=[1, FEW, SOME, MANY], form=["table", "capacity", "fractions"])]

LAUNCHES = list(dict.fromkeys([*ROTATE, *NORM, *BACKWARD, *STORE, *REROTATE, *CACHED, *DENSE]))
if not GPU:
    LAUNCHES += [replace(launch, way=way) for launch in LAUNCHES if launch.norm for way in ("reference", "auto")]


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


@cache
def turns(rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    """Return (pairs,) turns per id modulo 1 in units of 2⁻⁶⁴, rad per id, and axes, from 60-digit frequencies."""
    with mp.workdps(60):
        omegas = frequencies(rotary)
        words = [int(mp.nint(omega / (2 * mp.pi) * mp.mpf(2) ** 64)) % 2**64 for omega in omegas]
    signed = torch.tensor([word - 2**64 if word >= 2**63 else word for word in words], device=DEVICE)
    rad = torch.tensor([float(omega) for omega in omegas], dtype=torch.float64, device=DEVICE)
    return signed, rad, torch.tensor(pair_axes(rotary), device=DEVICE)


def angles(ids: Tensor, rotary: Rotary) -> Tensor:
    """Compute (tokens, pairs) float64 angles of (axes, tokens) ids, exactly modulo one turn for integer parts.

    With head_axes the shape is (tokens, kv_heads, pairs).
    """
    if rotary.precision == "hf":
        inv_freq, axis = (x.to(DEVICE) for x in frequencies_of(rotary))
        return (ids.float()[axis].T * inv_freq).double()
    if rotary.head_axes is not None:
        return torch.stack([angles(ids, of_head) for of_head in by_kv_head(rotary)], 1)
    words, rad, axis = turns(rotary)
    whole = ids.floor()
    wrapped = whole.long()[axis].T * words
    return wrapped.double() * (2 * pi / 2**64) + (ids - whole)[axis].T * rad


class Scene:
    """Tensors and positions of a launch."""

    def __init__(self, launch: Launch, seed: int = 0) -> None:
        turning = TURNINGS[launch.turning]
        count = launch.documents
        scheme = "rope-tie-fractional" if launch.form == "fractions" else turning.scheme
        self.launch = replace(launch, tokens=launch.tokens - launch.tokens % count)
        self.table = placed(self.launch.tokens, scheme, count, launch.start)
        self.positions = FORMS[launch.form](self.table)
        self.ids = self.positions.double() if isinstance(self.positions, Tensor) else _dense(self.table).double()
        q_heads, k_heads, dim = LAYERS[launch.layer]
        self.rotary = Rotary(dim, **{"axes": self.table.axes, **turning.options(dim)})
        self.seed, self.results = seed, list[Tensor]()
        shapes = (q_heads, dim), (k_heads, dim), (k_heads, launch.value_dim or dim)
        tensors = [normal(self.launch.tokens, *s, seed=seed + i, dtype=launch.dtype) for i, s in enumerate(shapes)]
        if launch.strides == "fused":
            self.q, self.k, self.v = torch.cat(tensors, dim=1).split([q_heads, k_heads, k_heads], dim=1)
        else:
            self.q, self.k, self.v = (STRIDES[launch.strides](x) for x in tensors)
        kind = launch.weights or launch.dtype
        self.weights = [
            normal(dim, seed=seed + 7 + i, dtype=kind).abs() + 0.5 if name in launch.norm else None
            for i, name in enumerate("qk")
        ]

    @cached_property
    def angle(self) -> Tensor:
        """(tokens, pairs) or (tokens, kv_heads, pairs) float64 angles."""
        angle = angles(self.ids, self.rotary)
        return -angle if self.launch.conjugate else angle

    @property
    def norm(self) -> Norm | None:
        """Norm of q and k, or None."""
        launch = self.launch
        return Norm(self.weights[0], self.weights[1], EPS, launch.offset, launch.after) if launch.norm else None

    @property
    def how(self) -> dict[str, Any]:
        """Common arguments of all calls."""
        return {"implementation": self.launch.way, "norm": self.norm}

    def normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Compute the RMSNorm of heads in float64; autograd can differentiate the result."""
        x = x.double()
        if weight is None:
            return x
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (weight.double() + self.launch.offset)

    def normed_and_rotated(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Apply the norm and the rotation in float64, in the order of the launch."""
        if self.launch.after:
            return self.normed(rotated(x.double(), self.angle, self.rotary), weight)
        return rotated(self.normed(x, weight), self.angle, self.rotary)

    def error(self, got: Tensor, x: Tensor, weight: Tensor | None) -> float:
        """Return the largest error relative to a pair or, after a norm, to the largest number of a head."""
        if not self.launch.after:
            return distance(got, self.normed(x, weight), self.angle, self.rotary)
        want = self.normed_and_rotated(x, weight)
        return float(((got - want).abs() / want.abs().amax(-1, keepdim=True)).amax())

    @property
    def bound(self) -> float:
        """Error bound relative to the length of a pair: arithmetic, and one rounding of each channel."""
        dtype = self.launch.dtype
        rounding = unit(dtype) * (2 if dtype == BF16 and INTERPRETED else 1)  # the interpreter truncates bfloat16
        arithmetic = ARITHMETIC + (gamma(self.rotary.head_dim + 16) if self.launch.norm else 0)
        return rounding * (1 + arithmetic) + arithmetic

    def arranged(self, x: Tensor) -> Tensor:
        """View a (tokens, heads, head_dim) tensor in the layout of the launch."""
        if self.launch.layout == "thd":
            return x
        rows = x.unflatten(0, (self.launch.documents, -1))
        return rows.transpose(1, 2) if self.launch.layout == "bhsd" else rows

    def flat(self, x: Tensor) -> Tensor:
        """Reshape a tensor from the layout of the launch to (tokens, heads, head_dim)."""
        if self.launch.layout == "thd":
            return x
        return (x.transpose(1, 2) if self.launch.layout == "bhsd" else x).flatten(0, 1)

    def poison(self) -> None:
        """Fill freed memory with NaN, so that elements of new outputs that are never written show up."""
        for x in (self.q, self.k):
            torch.full((x.numel(),), torch.nan, dtype=x.dtype, device=DEVICE)


# Errors.

Check = tuple[str, float]
"""Name of a check, and its error as a fraction of the bound: correct up to 1."""


def same(name: str, equal: bool) -> Check:
    return name, 0.0 if equal else inf


def split(x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first channels of the pairs, their second channels, and the unrotated channels."""
    paired, rest = x[..., : rotary.rotary_dim], x[..., rotary.rotary_dim :]
    if rotary.pairing == "adjacent":
        return paired[..., 0::2], paired[..., 1::2], rest
    half = rotary.rotary_dim // 2
    return paired[..., :half], paired[..., half:], rest


def rotated(x: Tensor, angle: Tensor, rotary: Rotary) -> Tensor:
    """Rotate float64 heads by the formula; autograd can differentiate the result."""
    of_heads = angle.repeat_interleave(x.shape[1] // angle.shape[1], 1) if angle.dim() == 3 else angle[:, None]
    cos, sin = (f(of_heads) * rotary.attention_factor for f in (torch.cos, torch.sin))
    a, b, rest = split(x, rotary)
    first, second = a * cos - b * sin, b * cos + a * sin
    both = (
        torch.stack((first, second), -1).flatten(-2) if rotary.pairing == "adjacent" else torch.cat((first, second), -1)
    )
    return torch.cat((both, rest), -1)


def distance(got: Tensor, x: Tensor, angle: Tensor, rotary: Rotary) -> float:
    """Return the largest relative error of rotated pairs and of unrotated channels; inf for NaN."""
    worst, step = 0.0, 4096
    floor = 1e-3 if got.dtype == F16 else 1e-30  # smaller float16 numbers are subnormal
    for at in range(0, x.shape[0], step):
        part = slice(at, at + step)
        a, b, rest = split(rotated(x[part].double(), angle[part], rotary), rotary)
        got_a, got_b, got_rest = split(got[part].double(), rotary)
        shares = [torch.hypot(a - got_a, b - got_b) / torch.hypot(a, b).clamp_min(floor)]
        shares.append((rest - got_rest).abs() / rest.abs().clamp_min(floor))
        largest = max(float(share.amax()) for share in shares if share.numel())
        worst = inf if isnan(largest) else max(worst, largest)
    return worst


def relative(got: Tensor, want: Tensor) -> float:
    """Return ‖got − want‖ / ‖want‖, or infinity if any element is not finite."""
    if not bool(torch.isfinite(got).all()):
        return inf
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


# The kinds.


def rotate(scene: Scene) -> Iterator[Check]:
    """Rotate q and k, with or without a norm before or after, into new tensors or in place."""
    launch, rotary = scene.launch, scene.rotary
    untouched = scene.q.clone(), scene.k.clone()
    q, k = scene.arranged(scene.q), None if launch.only == "q" else scene.arranged(scene.k)
    options: Any = {"layout": launch.layout, "conjugate": launch.conjugate}
    scene.poison()
    got = apply_rotary(q, k, scene.positions, rotary, inplace=launch.inplace, **options, **scene.how)
    for name, x, weight, out in zip("qk", untouched, scene.weights, got, strict=True):
        if out is not None:
            yield name, scene.error(scene.flat(out), x, weight) / scene.bound
    if not launch.inplace or launch.only == "q":
        yield same("k unchanged", torch.equal(scene.k, untouched[1]))
    if not launch.inplace:
        yield same("q unchanged", torch.equal(scene.q, untouched[0]))
    scene.results += [x for x in got if x is not None]


def backward(scene: Scene) -> Iterator[Check]:
    """Compare the gradients of q, k and the weights with those of the float64 formula."""
    launch, only = scene.launch, scene.launch.only
    inputs = {"q": scene.q, "k": scene.k, "q weight": scene.weights[0], "k weight": scene.weights[1]}
    selected = {"": list(inputs), "weights": ["q weight", "k weight"]}.get(only, [only])
    names = [name for name in selected if inputs[name] is not None]
    # Leaves are detached views rather than copies, so they keep their strides.
    leaves = {name: None if x is None else x.detach().requires_grad_(name in names) for name, x in inputs.items()}
    doubles = {n: None if x is None else x.detach().double().requires_grad_(n in names) for n, x in inputs.items()}
    incoming = [normal(*x.shape, seed=scene.seed + 31, dtype=x.dtype) for x in (scene.q, scene.k)]

    def gradients(outs: Any, of: Mapping[str, Tensor | None], grads: list[Tensor]) -> Any:
        indices = [i for i, out in enumerate(outs) if out.requires_grad]
        sources: Any = [of[name] for name in names]
        return torch.autograd.grad([outs[i] for i in indices], sources, [grads[i] for i in indices])

    def by_kernel() -> Any:
        q, k = (scene.arranged(x) for x in (leaves["q"], leaves["k"]) if x is not None)
        norm = scene.norm
        if norm is not None:
            norm = norm._replace(q_weight=leaves["q weight"], k_weight=leaves["k weight"])
        options: Any = {"layout": launch.layout, "implementation": launch.way}
        outs = apply_rotary(q, k, scene.positions, scene.rotary, norm=norm, **options)
        return gradients(outs, leaves, [scene.arranged(x) for x in incoming])

    scene.poison()
    got = by_kernel()
    truth = [
        scene.normed_and_rotated(x, w)
        for x, w in ((doubles["q"], doubles["q weight"]), (doubles["k"], doubles["k weight"]))
        if x is not None
    ]
    want = gradients(truth, doubles, [x.double() for x in incoming])
    for name, gradient, expected in zip(names, got, want, strict=True):
        heads = LAYERS[launch.layer][0 if name[0] == "q" else 1]
        summed = 8 * sqrt(launch.tokens * heads) * unit(F32) if "weight" in name else 0.0
        rounding = unit(gradient.dtype) * (2 if gradient.dtype == BF16 and INTERPRETED else 1)
        bound = 2 * (rounding + ARITHMETIC + gamma(scene.rotary.head_dim + 16)) + summed
        yield name, relative(gradient, expected) / bound
    yield same("deterministic", all(torch.equal(a, b) for a, b in zip(got, by_kernel(), strict=True)))
    scene.results += got


def store(scene: Scene) -> Iterator[Check]:
    """Rotate q and k, write k and v to a cache, and check that all other cells stay unchanged."""
    launch, rotary, heads = scene.launch, scene.rotary, scene.k.shape[1]
    blocks, page = -(-launch.tokens // launch.page) + 3, launch.page
    cache = CACHES[launch.cache](blocks, page, heads, scene.k.shape[2], launch.dtype)
    if launch.value_dim:
        values = filled(blocks, page, heads, launch.value_dim, dtype=launch.dtype)
        cache = Held(cache.key, values, (cache.key, values), "NHD", page)
    slots = _slots(launch, blocks * page)
    untouched, values_before = (scene.q.clone(), scene.k.clone()), scene.v.clone()
    before = [scene.normed(x, w) for x, w in zip(untouched, scene.weights, strict=True)]
    scene.poison()
    layout: Any = cache.layout
    outs = rotate_and_store(
        scene.q, scene.k, scene.v, scene.positions, rotary, Cache(cache.key, cache.value, slots, layout),
        return_k=launch.return_k, inplace=launch.inplace, **scene.how,
    )  # fmt: skip
    for name, x, out in zip("qk", before, outs, strict=True):
        if out is not None:
            yield name, distance(out, x, scene.angle, rotary) / scene.bound
    if not launch.inplace:
        yield same("q and k unchanged", all(map(torch.equal, (scene.q, scene.k), untouched)))
    kept = (slots >= 0).nonzero()[:, 0]
    at = slots[kept].long() // cache.block_size, slots[kept].long() % cache.block_size
    keys, values = pages_of(cache, cache.key), pages_of(cache, cache.value)
    if len(kept):
        yield "keys", distance(keys[at], before[1][kept], scene.angle[kept], rotary) / scene.bound
    yield same("values", torch.equal(values[at], values_before[kept]))
    scene.results += [*(x for x in outs if x is not None), keys[at]]
    for held in (keys, values):
        held[at] = filled(1, 1, dtype=launch.dtype)
    yield same("other cells", all(bool((bits(whole) == FILL[launch.dtype]).all()) for whole in cache.whole))


def _slots(launch: Launch, capacity: int) -> Tensor:
    """Return slots in random order, some of them missing; "short": fewer slots than tokens; "none": no valid slots."""
    order = torch.randperm(capacity, generator=torch.Generator().manual_seed(launch.tokens))[: launch.tokens]
    order[:: max(2, launch.tokens // 7)] = -1
    if launch.slots == "none":
        order[:] = -1
    if launch.slots == "short":
        order = order[: launch.tokens // 2]
    return order.to(DEVICE, torch.int32 if launch.slots == "int32" else torch.int64)


def pages_of(cache: Held, view: Tensor) -> Tensor:
    """View a cache of any layout as (blocks, block_size, heads, head_dim)."""
    if view.dim() == 3:
        return view.unsqueeze(1)
    return view if cache.layout == "NHD" else view.transpose(1, 2)


def move(scene: Scene) -> Iterator[Check]:
    """Rerotate stored keys to new positions, and check that all other cells stay unchanged."""
    launch, rotary, heads = scene.launch, scene.rotary, scene.k.shape[1]
    blocks = -(-launch.tokens // launch.page) + 3
    cache = CACHES[launch.cache](blocks, launch.page, heads, scene.k.shape[2], launch.dtype)
    slots = _slots(launch, blocks * launch.page)
    kept = (slots >= 0).nonzero()[:, 0]
    at = slots[kept].long() // cache.block_size, slots[kept].long() % cache.block_size
    keys = pages_of(cache, cache.key)
    keys[at] = scene.k[kept]
    scheme = "rope-tie-fractional" if launch.form == "fractions" else TURNINGS[launch.turning].scheme
    new = placed(launch.tokens, scheme, launch.documents, launch.start + 12_345)
    to_positions = FORMS[launch.form](new)
    nhd = cache.key.transpose(1, 2) if cache.layout == "HND" else cache.key
    rerotate(nhd, slots, scene.positions, to_positions, rotary, implementation=launch.way)
    scene.results.append(keys[at])
    if len(kept):
        ids = to_positions if isinstance(to_positions, Tensor) else _dense(new)
        between = angles(ids.double(), rotary) - scene.angle
        yield "keys", distance(keys[at], scene.k[kept], between[kept], rotary) / scene.bound
    keys[at] = filled(1, 1, dtype=launch.dtype)
    yield same("other cells", all(bool((bits(whole) == FILL[launch.dtype]).all()) for whole in cache.whole))


def cached(scene: Scene) -> Iterator[Check]:
    """Rotate with an engine's float32 cache of cos and sin."""
    rows = int(scene.ids.max()) + 1
    row_angles = angles(torch.arange(rows, device=DEVICE).double().expand(scene.table.axes, rows), scene.rotary)
    cos_sin = torch.cat((row_angles.cos(), row_angles.sin()), -1).float()
    scene.poison()
    got = apply_rotary(scene.q, scene.k, scene.positions, scene.rotary, cos_sin=cos_sin, **scene.how)
    for name, x, out in zip("qk", (scene.q, scene.k), got, strict=True):
        assert out is not None
        yield name, distance(out, x.double(), scene.angle, scene.rotary) / scene.bound
        scene.results.append(out)


def dense(scene: Scene) -> Iterator[Check]:
    """Compute the dense ids of a table."""
    table, columns = scene.table, scene.positions.table
    ids = kernel.launch_dense(columns, table.num_tokens, table.axes, table.fractional)
    yield same("ids", torch.equal(ids, _dense(table)))


KINDS: Mapping[str, Callable[[Scene], Iterator[Check]]] = {
    "rotate": rotate,
    "backward": backward,
    "store": store,
    "rerotate": move,
    "cached": cached,
    "dense": dense,
}
"""The function of each kind, which launches it and yields checks of everything that it writes."""


def checks(launch: Launch, seed: int) -> Iterator[Check]:
    """Run a launch and yield its checks: within bounds of the float64 formula, and without a norm the reference's bits.

    The kernel sums the squares of a norm in an order of its own, the cos and sin of precision "hf" are a library's, and
    the interpreter truncates bfloat16.
    """
    scene, reference = Scene(launch, seed), Scene(replace(launch, way="reference"), seed)
    yield from KINDS[launch.kind](scene)
    exact = not launch.norm and scene.rotary.precision == "exact" and not (INTERPRETED and launch.dtype == BF16)
    if exact and launch.way == TRITON and launch.tokens <= 2100 and launch.kind != "dense":
        assert list(KINDS[launch.kind](reference))
        pairs = zip(scene.results, reference.results, strict=True)
        yield same("bits of the reference", all(torch.equal(a, b) for a, b in pairs))
