"""cos, sin and angles as tensors, in the layouts that models and engines expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.support.checks import counted, one_of
from mmpos.support.extras import needed_for

with needed_for("rotations", extra="all"):
    import torch
    from torch import Tensor

    from mmpos.rotary import operator, phases
    from mmpos.rotary.device import DevicePositions
    from mmpos.rotary.sources import Positions, Source, constants, source_of

if TYPE_CHECKING:
    from mmpos.rotary.config import Rotary

TableLayout = Literal["pairs", "transformers", "torchtitan"]


def cos_sin(
    rotary: Rotary, positions: Positions, layout: TableLayout, device: torch.device | str | None
) -> tuple[Tensor, Tensor] | Tensor:
    """See ``Rotary.cos_sin``."""
    one_of("layout", layout, ("pairs", "transformers", "torchtitan"))
    source = _source(rotary, positions, device)
    frequencies, pair_axis = constants(rotary, source.positions.device)
    cos, sin = operator.cos_sin(
        source.positions, frequencies, pair_axis, source.mode, source.tokens, rotary.attention_factor
    )
    if layout == "torchtitan" and rotary.pairing == "adjacent":
        return _rows(torch.complex(cos, sin), source)
    if layout == "pairs":
        return _rows(cos, source), _rows(sin, source)
    cos, sin = _per_channel(cos, rotary), _per_channel(sin, rotary)
    if layout == "torchtitan":
        return _rows(torch.cat((cos, sin), dim=-1), source)
    cos, sin = _rows(cos, source), _rows(sin, source)
    return (cos, sin) if cos.dim() == 3 else (cos.unsqueeze(0), sin.unsqueeze(0))


def angles(rotary: Rotary, positions: Positions, device: torch.device | str | None) -> Tensor:
    """See ``Rotary.angles``."""
    if rotary.precision != "exact":
        raise UnsupportedError(
            "angles: got precision 'hf', want 'exact': wrapped angles would not be those of the peer"
        )
    source = _source(rotary, positions, device)
    frequencies, pair_axis = constants(rotary, source.positions.device)
    fixed = phases.fixed_positions(source.positions, source.mode, source.tokens)
    wrapped = phases.angles_of_turns(phases.turns(fixed, pair_axis.to(torch.int64), frequencies))
    rows = _rows(_per_channel(wrapped, rotary), source)
    return rows.unsqueeze(1).unsqueeze(1) if rows.dim() == 2 else rows.transpose(0, 1).unsqueeze(2)


def _source(rotary: Rotary, positions: Positions, device: torch.device | str | None) -> Source:
    if device is None:
        device = positions.device if isinstance(positions, DevicePositions | Tensor) else "cpu"
    source = source_of(positions, torch.device(device))
    if source.axes != rotary.axes:
        raise InvalidInputError(f"positions: got {counted(source.axes, 'axis')}, want {rotary.axes} as in rotary")
    return source


def _rows(x: Tensor, source: Source) -> Tensor:
    """(tokens, …) as (batch, seq, …) where all documents have one length."""
    return x.reshape(*source.shape, *x.shape[1:])


def _per_channel(x: Tensor, rotary: Rotary) -> Tensor:
    """(tokens, pairs) repeated to (tokens, rotary_dim), in the order of the channels."""
    return x.repeat_interleave(2, dim=-1) if rotary.pairing == "adjacent" else torch.cat((x, x), dim=-1)
