"""Define Rotary, the frozen description of a rotation, from which frequencies, axes and turns are derived."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.rotary.allocation import (
    ALLOCATIONS,
    HEADS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    STILL,
    PairLayout,
    allocate,
    default_axes,
)
from mmpos.rotary.frequencies import (
    MAX_INV_FREQ,
    Arithmetic,
    Exact,
    Float32,
    Float32Array,
    Float64Array,
    Number,
    Power,
    UInt64Array,
    fixed_point_turns,
)
from mmpos.rotary.hf_config import hf_arguments
from mmpos.rotary.scaling import Scaling, scaling_from_dict
from mmpos.support.cached import cached_property
from mmpos.support.checks import IntArray, even, finite, integer, integers, numbers, one_of

__all__ = ["Rotary"]

_DERIVED: Any = None  # typed like the field; __post_init__ replaces it with a value
DEFAULT_THETA = 10000.0
MAX_AXES = 256
"""Largest number of position axes."""

_Scalar = TypeVar("_Scalar", bound=np.generic)
_Kind: TypeAlias = tuple[float, int, Scaling | None]


@dataclass(frozen=True)
class Rotary:
    """Rotation of q and k: channel pair j is rotated by the angle position[axis of j] · inv_freq[j].

    All allocations except "axial" and "pixtral" share one frequency ladder among the axes: inv_freq[j] is
    θ_j = theta^(−2j/rotary_dim). Text has the same id on all axes and is therefore rotated as in RoPE-1D.

    >>> Rotary(head_dim=8).pair_axis.tolist()
    [0, 1, 0, 1]

    Args:
        head_dim: channels per head; even, at most 65,536.
        theta: base >= 1, or one base per axis: a pair uses the ladder of its axis.
        axes: number of position axes; None means the number that the allocation implies, else 2.
        allocation: "interleaved" (axis j mod axes), "split" (contiguous blocks of nearly equal size, the first ones
            larger), "sections" (contiguous blocks of mrope_section), "mrope-interleaved" (Qwen3-VL), "axial"
            (consecutive blocks, one per axis, each with a full ladder of rotary_dim/axes or axes_dim channels),
            "pixtral" (even-indexed θ to rows, odd-indexed θ to columns, row block first), "heads" (all pairs of a head
            use its axis in head_axes), or a (pairs,) vector with the axis of each pair, or −1 for a pair that is not
            rotated. For example, HoPE (arXiv 2505.20444) is [1, 2] * 24 + [-1] * 16 with three axes and 64 pairs.
        pairing: "half" pairs channels (j, j + rotary_dim/2), "adjacent" pairs channels (2j, 2j + 1).
        rotary_dim: number of leading channels that are rotated; even; None means all.
        scaling: a scaling from ``mmpos.rotary.scaling``, which is applied to each ladder before allocation; or a
            sequence with a scaling or None per axis, as in Cosmos, which has an NTK factor per axis. "axial" scales the
            short ladder of each axis by its own theta and channels, "pixtral" scales the full ladder. The attention
            factor must be the same on all axes.
        precision: "exact" (64-bit turns) or "hf" (float32 angles as in Transformers, TransformerEngine and others, with
            an error of 0.06 rad at id 1,000,000); use "hf" to reproduce their tests or checkpoints.
        mrope_section: (axes,) pairs per axis, for "sections" and "mrope-interleaved"; None means 24, 20, 20 for
            "mrope-interleaved" with 64 pairs.
        inv_freq: (pairs,) rad per position, used exactly, instead of theta and scaling; with kv_heads, the pairs of all
            kv heads.
        length: upper bound on the ids, used by scalings that depend on the length and set by ``for_length``; None means
            the original length.
        axes_dim: (axes,) channels per axis. With "axial", the axes may have different sizes: FLUX and HunyuanVideo have
            16, 56, 56 and Wan has 44, 42, 42, all with adjacent pairs; equal sizes are stored as None. With a vector as
            allocation, the pairs of each axis use its full ladder in the order of the vector, as in the encoders of
            Kimi K2.5 (columns and rows alternate) and Step 3.7 (columns before rows).
        head_axes: (kv_heads,) axis of each kv head and of the q heads that share it, for "heads"; −1 marks a head that
            is not rotated. MHRoPE (arXiv 2510.23095) has [0, 0, 1, 1, 1, 2, 2, 2]. At most 256 heads.
        kv_heads: number of kv heads that share one layout, as in LTX, which rotates all channels of a token as one long
            head. In this case, allocation, sections, axes_dim and inv_freq cover kv_heads · rotary_dim channels, at
            most 65,536, and each kv head, with the q heads that share it, takes the next pairs. At most 256; None means
            that all heads are alike.

    Raises:
        InvalidInputError: an argument is invalid; the message names it.
    """

    head_dim: int
    theta: float | Sequence[float] = DEFAULT_THETA
    axes: int = _DERIVED
    allocation: str | Sequence[int] = "interleaved"
    pairing: Literal["half", "adjacent"] = "half"
    rotary_dim: int = _DERIVED
    scaling: Scaling | Sequence[Scaling | None] | None = None
    precision: Literal["exact", "hf"] = "exact"
    mrope_section: Sequence[int] | None = None
    inv_freq: Sequence[float] | None = None
    length: int | None = None
    axes_dim: Sequence[int] | None = None
    head_axes: Sequence[int] | None = None
    kv_heads: int | None = None
    # Computed eagerly: torch.compile cannot trace their computation.
    text: str = field(init=False, repr=False, compare=False)
    """``to_dict`` as JSON."""
    shares_ladder: bool = field(init=False, repr=False, compare=False)
    """Whether pair j has the j-th frequency of a single ladder."""
    attention_factor: float = field(init=False, repr=False, compare=False)
    """Factor by which cos and sin are multiplied; 1.0 except for YaRN and LongRoPE."""
    _layout: PairLayout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._set("head_dim", even("head_dim", self.head_dim, maximum=MAX_HEAD_DIM))
        self._set("rotary_dim", even("rotary_dim", self.head_dim if self.rotary_dim is None else self.rotary_dim))
        if self.rotary_dim > self.head_dim:
            raise InvalidInputError(f"rotary_dim: got {self.rotary_dim}, want <= head_dim {self.head_dim}")
        one_of("pairing", self.pairing, ("half", "adjacent"))
        one_of("precision", self.precision, ("exact", "hf"))
        self._check_allocation()
        self._check_theta_and_scaling()
        kinds, rungs = self._kinds, self._layout.rung
        if self.inv_freq is not None:
            self._check_inv_freq(self.inv_freq)
        if self.length is not None:
            length = integer("length", self.length, minimum=1)
            lengths = [scaling.effective_length(length) for *_, scaling in kinds if scaling is not None]
            self._set("length", max((each for each in lengths if each is not None), default=None))
        self._set("text", json.dumps(self.to_dict()))
        one_ladder = len(set(kinds)) == 1 and self.kv_heads is None
        self._set("shares_ladder", one_ladder and rungs == tuple(range(len(rungs))))

    def __hash__(self) -> int:
        return hash(self.text)  # a string keeps its hash

    @classmethod
    def from_hf_config(cls, config: object, *, layer_type: str | None = None, **overrides: Any) -> Rotary:
        """Read the rotation from a Transformers config; see ``hf_arguments`` for fields and unsupported model types.

        Args:
            config: a config object, the mapping from its config.json, or the path of that file or its folder.
            layer_type: the layer type whose rope parameters are read if the config has them per layer type.
            overrides: arguments of Rotary that override those from the config.
        """
        return cls(**hf_arguments(config, layer_type=layer_type, overrides=overrides))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Rotary:
        """Create a Rotary from the JSON object that ``to_dict`` returns."""
        known = [each.name for each in fields(cls) if each.init]
        for key in values:
            one_of("Rotary.from_dict", key, known)
        if "head_dim" not in values:
            raise InvalidInputError(f"Rotary.from_dict: got {sorted(values)}, want head_dim among them")
        scaling = values.get("scaling")
        if isinstance(scaling, list | tuple):
            scaling = [None if each is None else scaling_from_dict(each) for each in scaling]
        elif scaling is not None:
            scaling = scaling_from_dict(scaling)
        return cls(**{**values, "scaling": scaling})

    def to_dict(self) -> dict[str, Any]:
        """Return the exact arguments as a JSON object."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        listed = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        scaling: Any = self.scaling
        if isinstance(scaling, tuple):
            return {**listed, "scaling": [None if each is None else each.to_dict() for each in scaling]}
        return {**listed, "scaling": None if scaling is None else scaling.to_dict()}

    def for_length(self, length: int) -> Rotary:
        """Return a copy with length-dependent scaling for ids below length (the next position, not a token count)."""
        return replace(self, length=integer("length", length, minimum=1))

    @property
    def num_pairs(self) -> int:
        """Number of rotated channel pairs per head."""
        return self.rotary_dim // 2

    @property
    def own_heads(self) -> int:
        """Number of kv heads if head_axes or kv_heads rotate each head in its own way; 0 if all heads rotate alike."""
        return self.kv_heads or len(self.head_axes or ())

    @property
    def varies_by(self) -> str:
        """Name of the argument that makes heads rotate differently: "head_axes" or "kv_heads"."""
        return "head_axes" if self.kv_heads is None else "kv_heads"

    @cached_property
    def pair_axis(self) -> IntArray:
        """(pairs,) int64 axis of each pair, −1 if it is not rotated; (kv_heads, pairs) if own_heads; read-only."""
        if self.head_axes is None:
            return _read_only(self._by_head(np.array(self._layout.axis, np.int64)))
        return np.broadcast_to(np.array(self.head_axes, np.int64)[:, None], (len(self.head_axes), self.num_pairs))

    def pair_ids(self, ids: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        """Return the position ids of each pair.

        Args:
            ids: (axes, tokens) position ids.

        Returns:
            a new array (pairs, tokens), or (kv_heads, pairs, tokens) if own_heads; 0 for pairs that are not rotated.
        """
        return np.concatenate([ids, np.zeros_like(ids[:1])])[self.pair_axis]

    @cached_property
    def exact_inv_freq(self) -> tuple[Decimal, ...]:
        """(pairs,) rad per position as decimals of 100 digits; with kv_heads, the pairs of all kv heads in order."""
        return tuple(self._pairs(Exact()))

    @cached_property
    def inv_freq_array(self) -> Float64Array:
        """(pairs,) float64 rad per position, exact_inv_freq rounded; (kv_heads, pairs) with kv_heads; read-only."""
        return _read_only(self._by_head(np.array([float(value) for value in self.exact_inv_freq], np.float64)))

    @cached_property
    def turns(self) -> UInt64Array:
        """(pairs,) uint64 turns per position in units of 2⁻⁶⁴, modulo one turn, rounded to nearest; read-only.

        With kv_heads the shape is (kv_heads, pairs).
        """
        return _read_only(self._by_head(fixed_point_turns(self.exact_inv_freq)))

    def inv_freq_as_hf(self, power: Power) -> Float32Array:
        """Compute (pairs,) or (kv_heads, pairs) float32 rad per position with the operations of Transformers.

        All operations except the power are rounded according to IEEE 754, so torch's power gives the same bits.

        Args:
            power: function from a float base and (n,) float32 exponents to (n,) float32 powers.
        """
        return self._by_head(np.array(self._pairs(Float32(power)), np.float32))

    def _by_head(self, values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        """Reshape per-pair values to (kv_heads, pairs) if kv_heads is set."""
        return values.reshape(-1 if self.kv_heads is None else (self.kv_heads, self.num_pairs))

    def _pairs(self, arithmetic: Arithmetic) -> list[Number]:
        layout, kinds = self._layout, self._kinds
        if self.inv_freq is not None:
            values = list(arithmetic.array(self.inv_freq))
        else:
            with arithmetic.context():
                ladders = {kind: self._ladder(arithmetic, *kind) for kind in set(kinds)}
            values = [ladders[kinds[axis]][rung] for axis, rung in zip(layout.axis, layout.rung, strict=True)]
        return [0 * value if axis == STILL else value for axis, value in zip(layout.axis, values, strict=True)]

    @property
    def _kinds(self) -> tuple[_Kind, ...]:
        """(axes,) theta, channels and scaling of each axis's ladder."""
        theta, scaling = self.theta, self.scaling
        thetas = (theta,) * self.axes if isinstance(theta, float) else theta
        scalings = scaling if isinstance(scaling, tuple) else (scaling,) * self.axes
        return tuple(zip(thetas, (2 * rungs for rungs in self._layout.rungs), scalings, strict=True))

    def _ladder(self, arithmetic: Arithmetic, theta: float, dim: int, scaling: Scaling | None) -> Number:
        if scaling is None:
            return 1 / arithmetic.powers(arithmetic.number(theta), dim)
        # Another axis's scaling may have a larger effective length.
        length = None if self.length is None else scaling.effective_length(self.length)
        return scaling.inv_freq(arithmetic, theta, dim, length)

    def _check_allocation(self) -> None:
        if isinstance(self.allocation, str):
            one_of("allocation", self.allocation, ALLOCATIONS)
        else:
            self._set("allocation", integers("allocation", self.allocation, minimum=STILL))
        section = self.mrope_section
        if section is None and self.allocation == "mrope-interleaved" and self.num_pairs == 64:
            section = (24, 20, 20)  # of Qwen3-VL
        self._set("mrope_section", None if section is None else integers("mrope_section", section))
        if self.axes_dim is not None:
            self._set("axes_dim", integers("axes_dim", self.axes_dim))
        if self.head_axes is not None:
            self._set("head_axes", integers("head_axes", self.head_axes, minimum=STILL))
        if self.kv_heads is not None:
            self._check_kv_heads(self.kv_heads)
        axes: int | None = self.axes
        if axes is None:
            axes = default_axes(self.allocation, self.mrope_section, self.axes_dim, self.head_axes)
        self._set("axes", integer("axes", axes, minimum=1, maximum=MAX_AXES))
        pairs = self.rotary_dim // 2 * (self.kv_heads or 1)
        layout = allocate(self.allocation, self.axes, pairs, self.mrope_section, self.axes_dim, self.head_axes)
        self._set("_layout", layout)
        if len(set(layout.rungs)) == 1 and isinstance(self.allocation, str):
            self._set("axes_dim", None)

    def _check_kv_heads(self, kv_heads: int) -> None:
        if self.allocation == HEADS:
            raise InvalidInputError(f"kv_heads: got {kv_heads}, want None for allocation 'heads', which uses head_axes")
        self._set("kv_heads", integer("kv_heads", kv_heads, minimum=1, maximum=MAX_HEADS))
        channels = kv_heads * self.rotary_dim
        if channels > MAX_HEAD_DIM:
            raise InvalidInputError(
                f"kv_heads: got {kv_heads} of {self.rotary_dim} channels, want <= {MAX_HEAD_DIM} channels in total"
            )

    def _check_theta_and_scaling(self) -> None:
        """Replace equal values for all axes by one, and set the attention factor, which must be the same for all."""
        one = isinstance(self.theta, str | bytes) or not isinstance(self.theta, Sequence | np.ndarray)
        thetas = (finite("theta", self.theta, minimum=1),) if one else numbers("theta", self.theta, 1)
        if not one and len(thetas) != self.axes:
            raise InvalidInputError(f"theta: got {len(thetas)} bases, want one, or {self.axes}, one per axis")
        self._set("theta", thetas[0] if len(set(thetas)) == 1 else thetas)
        if self.head_axes is not None and not isinstance(self.theta, float):
            raise InvalidInputError(f"theta: got {self.theta}, want a single base for allocation 'heads'")
        if isinstance(self.scaling, list | tuple):
            if len(self.scaling) != self.axes:
                got = f"{len(self.scaling)} scalings"
                raise InvalidInputError(f"scaling: got {got}, want one, or {self.axes}, one per axis")
            equal = all(scaling == self.scaling[0] for scaling in self.scaling)
            self._set("scaling", self.scaling[0] if equal else tuple(self.scaling))
        if self.head_axes is not None and isinstance(self.scaling, tuple):
            raise InvalidInputError(
                f"scaling: got {self.scaling}, want one for allocation 'heads', the same for all axes, or None"
            )
        factors = []
        for axis, (theta, dim, scaling) in enumerate(self._kinds):
            name = f"scaling[{axis}]" if isinstance(self.scaling, tuple) else "scaling"
            if not isinstance(scaling, Scaling | None):
                raise InvalidInputError(f"{name}: got {scaling!r}, want a Scaling such as Linear(2.0), or None")
            if scaling is not None:
                scaling.check(theta, dim)
            factors.append(1.0 if scaling is None else scaling.scaled_attention())
            if factors[-1] != factors[0]:
                raise InvalidInputError(
                    f"{name}: got attention factor {factors[-1]}, want {factors[0]} as in scaling[0]"
                )
        self._set("attention_factor", factors[0])

    def _check_inv_freq(self, inv_freq: Sequence[float]) -> None:
        if self.scaling is not None or self.theta != DEFAULT_THETA:
            raise InvalidInputError("inv_freq cannot be combined with theta or scaling")
        values = numbers("inv_freq", inv_freq, -MAX_INV_FREQ)
        if len(values) != (pairs := len(self._layout.axis)):
            raise InvalidInputError(f"inv_freq: got {len(values)} numbers, want {pairs}, one per pair")
        if max(values) > MAX_INV_FREQ:
            raise InvalidInputError(f"inv_freq: got {max(values)}, want <= {MAX_INV_FREQ:g}")
        self._set("inv_freq", values)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _read_only(values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    values.setflags(write=False)
    return values
