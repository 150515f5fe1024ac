"""Positions of any sort, and frequencies, as the tensors that the operator takes."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable
from mmpos.rotary import phases
from mmpos.rotary.device import DevicePositions
from mmpos.support.checks import INT32_MAX, INT32_MIN

if TYPE_CHECKING:
    from mmpos.rotary.config import Rotary

Positions = DevicePositions | PositionTable | Tensor


class Source(NamedTuple):
    """Positions as the operator takes them; shape is (batch, seq), or (tokens,) when documents differ in length."""

    positions: Tensor
    mode: int
    axes: int
    tokens: int
    shape: tuple[int, ...]


def source_of(positions: Positions, device: torch.device, validate: bool = False) -> Source:
    """Positions of any sort as a tensor and what it holds."""
    if isinstance(positions, PositionTable):
        positions = DevicePositions.from_table(positions, device)
    if isinstance(positions, DevicePositions):
        mode = phases.TABLE_FRACTIONAL if positions.fractional else phases.TABLE_INTEGER
        tokens, seq = positions.num_tokens, positions.row_length
        return Source(positions.table, mode, positions.axes, tokens, (tokens // seq, seq) if seq else (tokens,))
    if not isinstance(positions, Tensor):
        raise InvalidInputError(
            f"positions: got {type(positions).__name__}, want DevicePositions, a PositionTable or a tensor of ids"
        )
    return _dense_source(positions, validate)


def frequencies_of(rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Frequencies and (pairs,) int32 axes: (3, pairs) int64 words of exact turns, or (pairs,) float32 for "hf"."""
    pair_axis = torch.from_numpy(rotary.pair_axis.astype(np.int32))
    if rotary.precision == "hf":
        # Transformers' frequencies are torch's float32 powers, which are not always the nearest.
        return torch.from_numpy(rotary.inv_freq_as_hf(_torch_power)), pair_axis
    hi, lo = rotary.turns >> np.uint64(32), rotary.turns & np.uint64(0xFFFFFFFF)
    # Whole turns per id, which the turns leave out: below 0 for negative frequencies.
    rounds = np.rint(rotary.inv_freq_array / (2 * np.pi) - hi * 2.0**-32)
    return torch.from_numpy(np.stack([hi, lo, rounds]).astype(np.int64)), pair_axis


@cache
def _constants(rotary: Rotary, device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept for good, a few kilobytes each: a captured CUDA graph holds their addresses."""
    with torch.inference_mode(False):  # whoever comes first, training may come next
        frequencies, pair_axis = frequencies_of(rotary)
        return frequencies.to(device), pair_axis.to(device)


def _made_once(rotary: Rotary, device: torch.device) -> tuple[Tensor, Tensor]:
    """Frequencies and axes on a device, made once; a compiled graph takes them as constants."""
    return _constants(rotary, device)


constants: Any = _made_once
# The mark of torch.compiler.assume_constant_result, which would import the compiler to set it: seconds, for everybody.
constants._dynamo_marked_constant = True


def _torch_power(base: float, exponents: Any) -> Any:
    return torch.pow(base, torch.from_numpy(exponents)).numpy()


def _dense_source(ids: Tensor, validate: bool) -> Source:
    if ids.dim() not in (2, 3) or not ids.shape[0]:
        raise InvalidInputError(f"positions: got shape {tuple(ids.shape)}, want (axes, tokens) or (axes, batch, seq)")
    flat = ids.flatten(1).contiguous()  # the kernel steps from token to token by one
    if ids.dtype in (torch.int32, torch.int64):
        mode = phases.DENSE_INTEGER
    elif ids.dtype == torch.float64:
        mode = phases.DENSE_FIXED
    else:
        raise InvalidInputError(f"positions: got dtype {ids.dtype}, want int32, int64 or float64 ids")
    on_host = flat.device.type == "cpu" and not torch.compiler.is_compiling()
    if (validate or on_host) and ids.dtype != torch.int32 and flat.numel():
        low, high = (float(bound) for bound in torch.aminmax(flat.detach()))
        if not (low >= INT32_MIN and high < INT32_MAX + 1):
            raise InvalidInputError(f"positions: got ids from {low:.0f} to {high:.0f}, want finite ids within int32")
    flat = phases.fixed_from_float(flat) if mode == phases.DENSE_FIXED else flat
    return Source(flat, mode, flat.shape[0], flat.shape[1], tuple(ids.shape[1:]))
