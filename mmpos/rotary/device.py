"""Keep positions and frequencies on a device, in tables whose addresses can stay fixed; select implementations."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from math import gcd, prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.positions import expand
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import AXES, FIRST_TOKEN, OFFSET, padding_column
from mmpos.rotary import reference
from mmpos.rotary.config import Rotary
from mmpos.rotary.memory import Form, check_floats, checked_once, form_of
from mmpos.rotary.reference import DENSE_FIXED, DENSE_INTEGER, TABLE_FRACTIONAL, TABLE_INTEGER
from mmpos.support.checks import INT32_MAX, INT32_MIN, counted, integer, one_of
from mmpos.support.extras import missing


@dataclass(frozen=True, eq=False)
class DevicePositions:
    """Position table on the device where the kernels run; create it with ``from_table``.

    Args:
        table: (5 + 4·axes, capacity) int64; the offset of unused columns is the token count.
        num_tokens: number of tokens, including padding.
        row_length: tokens per document if all documents have equal length, as layouts bshd and bhsd require, else 0.
        fractional: whether ids may be fractions.
    """

    table: Tensor
    num_tokens: int
    row_length: int
    fractional: bool

    @classmethod
    def from_table(
        cls, positions: PositionTable, device: torch.device | str | int = "cpu", capacity: int | None = None
    ) -> DevicePositions:
        """Copy a table to a device in one small transfer that does not block the host.

        Args:
            positions: the table to copy.
            device: the target device.
            capacity: number of columns to reserve so that ``refresh`` can write other tables to the same address; None
                reserves one column per segment.

        Raises:
            LimitExceededError: the table has more segments than the capacity.
        """
        if not isinstance(positions, PositionTable):
            raise InvalidInputError(f"positions: got {type(positions).__name__}, want a PositionTable")
        used, tokens = positions.table.shape[1], positions.num_tokens
        if capacity is None and used:
            columns = positions.table.copy()
        else:
            reserved = 1 if capacity is None else integer("capacity", capacity, minimum=1)
            if used > reserved:
                raise LimitExceededError(f"capacity: got {reserved}, want >= {used}, the number of segments")
            columns = padding_column(positions.axes)[:, None].repeat(reserved, axis=1)
            columns[OFFSET] = tokens  # No token has this offset, so no kernel reads the unused columns.
            columns[:, :used] = positions.table
        table = torch.from_numpy(columns)
        device = torch.device(device)
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        elif device.type != "cpu":
            table = table.to(device)
        return cls(table, tokens, row_length_of(positions), positions.fractional)

    def refresh(self, positions: PositionTable) -> None:
        """Write a table with the same number of tokens to the same memory; allowed between CUDA graph replays.

        Raises:
            InvalidInputError: the axes, the value of fractional, the token count or the document length differ.
            LimitExceededError: the table has more segments than the capacity.
        """
        fresh = DevicePositions.from_table(positions, capacity=self.table.shape[1])
        got, want = ((x.axes, x.fractional, x.num_tokens, x.row_length) for x in (fresh, self))
        if got != want:
            raise InvalidInputError(
                f"positions: got (axes, fractional, tokens, document length) {got}, want {want} as before"
            )
        if self.table.is_cuda:
            fresh = fresh.pin_memory()
        self.table.copy_(fresh.table, non_blocking=True)

    @property
    def axes(self) -> int:
        """Number of position axes."""
        return (self.table.shape[0] - AXES) // 4

    @property
    def device(self) -> torch.device:
        """Device of the table."""
        return self.table.device

    def pin_memory(self) -> DevicePositions:
        """Copy the positions to page-locked host memory; a DataLoader calls this method on its batches."""
        return replace(self, table=self.table.pin_memory())

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> DevicePositions:
        """Move the positions to another device."""
        return replace(self, table=self.table.to(device, non_blocking=non_blocking))

    def dense(self) -> Tensor:
        """Expand the table to (axes, tokens) int32 or float64 ids on its device, bit-equal to PositionTable.dense."""
        if self.table.is_cuda:
            from mmpos.rotary.kernel import launch_dense

            return launch_dense(self.table, self.num_tokens, self.axes, self.fractional)
        return torch.from_numpy(expand.dense(self.table.numpy(), self.num_tokens, self.fractional))


def row_length_of(positions: PositionTable) -> int:
    """Return the common number of tokens per document, or 0 if documents differ in length."""
    starts = positions.documents[FIRST_TOKEN].tolist()
    length = positions.num_tokens // max(len(starts), 1)
    return length if length and starts == list(range(0, positions.num_tokens, length)) else 0


Positions = DevicePositions | PositionTable | Tensor


class PositionIds(NamedTuple):
    """Positions in the form that the operators expect.

    Args:
        tensor: a table or (axes, tokens) ids, depending on mode.
        mode: a mode of ``reference``, such as TABLE_INTEGER.
        tokens: number of tokens, including padding.
        shape: (batch, seq), or (tokens,) if documents differ in length.
    """

    tensor: Tensor
    mode: int
    tokens: int
    shape: tuple[int, ...]

    def as_rows(self, x: Tensor) -> Tensor:
        """Reshape (tokens, …) to (batch, seq, …) if all documents have the same length."""
        return x.reshape(*self.shape, *x.shape[1:])


def ids_on(
    positions: Positions,
    rotary: Rotary,
    device: torch.device,
    validate: bool = False,
    name: str = "positions",
    like: str | None = None,
) -> PositionIds:
    """Convert positions of any type to one tensor and check their axes; a PositionTable is copied to the device.

    If ``like`` names a tensor on the device, positions of other types must be on the device as well. With ``validate``,
    dense ids on a device are also checked. Error messages call the positions ``name``.
    """
    if isinstance(positions, PositionTable):
        positions = DevicePositions.from_table(positions, device)
    if isinstance(positions, DevicePositions):
        tensor, counts = positions.table, (positions.num_tokens, positions.row_length, positions.fractional)
        return PositionIds(tensor, *_check_ids(form_of(tensor), counts, rotary.axes, device, name, like))
    mode, tokens, shape = _check_ids(form_of(positions), None, rotary.axes, device, name, like)
    ids = positions.flatten(1).contiguous()  # the kernel assumes a stride of 1 between tokens
    on_host = ids.is_cpu and not torch.compiler.is_compiling()
    if (validate or on_host) and ids.dtype != torch.int32 and ids.numel():
        low, high = (float(bound) for bound in torch.aminmax(ids.detach()))
        if not (low >= INT32_MIN and high < INT32_MAX + 1):
            raise InvalidInputError(f"{name}: got ids from {low:.0f} to {high:.0f}, want finite ids within int32")
    return PositionIds(reference.fixed_from_float(ids) if ids.is_floating_point() else ids, mode, tokens, shape)


@checked_once
def _check_ids(
    form: Form | type,
    counts: tuple[int, int, bool] | None,
    axes: int,
    device: torch.device,
    name: str,
    like: str | None,
) -> tuple[int, int, tuple[int, ...]]:
    """Check a table with its number of tokens, row length and kind, or dense ids; return mode, tokens and shape."""
    if not isinstance(form, Form):
        want = "DevicePositions, a PositionTable or a tensor of ids"
        raise InvalidInputError(f"{name}: got {form.__name__}, want {want}")
    shape = form.shape[1:]
    if counts is not None:
        tokens, seq, fractional = counts
        shape = torch.Size((tokens // seq, seq) if seq else (tokens,))
        mode = TABLE_FRACTIONAL if fractional else TABLE_INTEGER
    elif len(form.shape) not in (2, 3) or not form.shape[0]:
        raise InvalidInputError(f"{name}: got shape {tuple(form.shape)}, want (axes, tokens) or (axes, batch, seq)")
    elif form.dtype not in (torch.int32, torch.int64, torch.float64):
        raise InvalidInputError(f"{name}: got dtype {form.dtype}, want int32, int64 or float64 ids")
    else:
        mode = DENSE_FIXED if form.dtype == torch.float64 else DENSE_INTEGER
    if like is not None and form.device != device:
        raise InvalidInputError(f"{name}: got a tensor on {form.device}, want {device} as for {like}")
    rows = form.shape[0] if counts is None else (form.shape[0] - AXES) // 4
    if rows != axes:
        raise InvalidInputError(f"{name}: got {counted(rows, 'axis')}, want {axes} as in rotary")
    return mode, prod(shape), tuple(shape)


def check_heads(name: str, heads: int, rotary: Rotary, *, shared: bool = False) -> None:
    """Check a number of heads; ``shared`` allows several q heads per kv head."""
    want = rotary.own_heads
    if want and heads != want and (not shared or heads % want):
        words = f"a multiple of {want}" if shared else str(want)
        raise InvalidInputError(f"{name}: got {counted(heads, 'head')}, want {words} as {rotary.varies_by} in rotary")


def frequencies_of(rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Build the frequencies and pair axes in the form that the operators expect.

    Returns:
        Frequencies, as (3, pairs) int64 words of exact turns or, for "hf", as (pairs,) float32; and (pairs,) int32
        axes, −1 for pairs that are not rotated. If heads rotate differently, the axes have the shape (groups, pairs),
        one row per group of consecutive heads that rotate alike. With kv_heads, the frequencies have the shape (groups,
        3, pairs) or (groups, 1, pairs).
    """
    size = _group_size(rotary) if rotary.own_heads else None
    frequency_step = size if rotary.kv_heads is not None else None
    pair_axis = torch.from_numpy(rotary.pair_axis[::size].astype(np.int32))
    if rotary.precision == "hf":
        # Transformers computes frequencies with torch's float32 powers, which are not always correctly rounded.
        inv_freq = torch.tensor(rotary.inv_freq_as_hf(_torch_power)[::frequency_step])
        return inv_freq if frequency_step is None else inv_freq.unsqueeze(1), pair_axis
    hi, lo = rotary.turns >> np.uint64(32), rotary.turns & np.uint64(0xFFFFFFFF)
    # Whole turns per id, which rotary.turns omits; negative for negative frequencies.
    rounds = np.rint(rotary.inv_freq_array / (2 * np.pi) - hi * 2.0**-32)
    words = np.stack([hi, lo, rounds], axis=-2).astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(words[::frequency_step])), pair_axis


def _group_size(rotary: Rotary) -> int:
    """Return the largest group size such that the heads within each group of consecutive heads rotate alike."""
    axis, frequency = rotary.pair_axis, np.broadcast_to(rotary.inv_freq_array, rotary.pair_axis.shape)
    changes = (axis[1:] != axis[:-1]) | (frequency[1:] != frequency[:-1])
    return gcd(len(axis), *(np.flatnonzero(changes.any(axis=1)) + 1).tolist())


@cache
def _constants(text: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tensors that are never freed, a few kilobytes each: a captured CUDA graph holds their addresses.

    The rotary is passed as text because some versions of torch accept no other objects as constants of a graph.
    """
    with torch.inference_mode(False):  # the first caller may run inference and a later one may train
        frequencies, pair_axis = frequencies_of(Rotary.from_dict(json.loads(text)))
        return frequencies.to(device), pair_axis.to(device)


def _constant_in_graphs(function: Any) -> Any:
    """Mark a function like ``torch.compiler.assume_constant_result``, which imports the compiler for seconds."""
    function._dynamo_marked_constant = True
    return function


@_constant_in_graphs
def _constants_of(text: str, device: torch.device) -> tuple[Tensor, Tensor]:
    return _constants(text, device)


def rotation_of(
    ids: PositionIds, rotary: Rotary, conjugate: bool = False, implementation: int = reference.REFERENCE
) -> reference.RotationArguments:
    """Return a rotation by these ids in the form that the operators expect; its constants are those of a graph."""
    device = ids.tensor.device
    if torch.compiler.is_compiling():
        frequencies, pair_axis = _constants_of(rotary.text, device)
    else:
        # Tensors created under FakeTensorMode have no data and must not be cached for later calls.
        faked = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        frequencies, pair_axis = (_constants.__wrapped__ if faked else _constants)(rotary.text, device)
    factor, adjacent = rotary.attention_factor, rotary.pairing == "adjacent"
    return reference.RotationArguments(
        ids.tensor, frequencies, pair_axis, ids.mode, adjacent, factor, conjugate, implementation
    )


def _torch_power(base: float, exponents: Any) -> Any:
    return torch.pow(base, torch.from_numpy(exponents)).numpy()


def cache_of(cos_sin: Tensor, rotary: Rotary, positions: Positions, ids: PositionIds, validate: bool) -> Tensor:
    """Check that an engine's cache of cos and sin matches a rotary and ids, and return it without a copy."""
    form = check_floats("cos_sin", form_of(cos_sin))
    if cos_sin.dim() != 2 or cos_sin.shape[1] != rotary.rotary_dim or not cos_sin.shape[0]:
        want = f"(max_position, {rotary.rotary_dim}), cos of all pairs of rotary, then sin"
        raise InvalidInputError(f"cos_sin: got shape {tuple(cos_sin.shape)}, want {want}")
    if cos_sin.device != ids.tensor.device:
        raise InvalidInputError(f"cos_sin: got a tensor on {cos_sin.device}, want {ids.tensor.device} as for q")
    if not cos_sin.is_contiguous():
        raise InvalidInputError(f"cos_sin: got strides {cos_sin.stride()}, want a contiguous tensor")
    if not rotary.shares_ladder:
        raise InvalidInputError(
            f"cos_sin requires a rotary whose pair j has the j-th frequency, got allocation {rotary.allocation!r}, "
            "whose axes have their own frequencies"
        )
    if ids.mode in (TABLE_FRACTIONAL, DENSE_FIXED):
        raise InvalidInputError("positions: got fractional ids, want integers, the only ids with rows in cos_sin")
    if form.graded:
        raise UnsupportedError("cos_sin: got a tensor that requires gradients, want one that does not")
    on_host = isinstance(positions, PositionTable) or ids.tensor.device.type == "cpu"
    if ids.tokens and (validate or on_host) and not torch.compiler.is_compiling():
        _check_rows(cos_sin.shape[0], positions)
    return cos_sin


def _check_rows(rows: int, positions: Positions) -> None:
    ids = positions if isinstance(positions, Tensor) else positions.dense()
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        raise InvalidInputError(f"positions: got id {low}, want >= 0, because the rows of cos_sin begin at id 0")
    if high >= rows:
        raise InvalidInputError(f"cos_sin: got {rows} rows, want > {high}, the largest id")


Implementation = Literal["auto", "reference", "triton"]
"""Names of implementations."""


def number_of(implementation: Implementation, device: torch.device) -> int:
    """Return an implementation's number in the operators, after checking that it can run on the device."""
    if implementation == "auto":
        return reference.TRITON if device.type == "cuda" and _has_triton() else reference.AUTO
    one_of("implementation", implementation, ("auto", "reference", "triton"))
    if implementation == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidInputError(f"implementation: got 'triton' for tensors on {device}, want 'reference'")
    if implementation == "triton" and not _has_triton():
        raise missing('implementation "triton"', "triton", extra="all")
    return reference.TRITON if implementation == "triton" else reference.REFERENCE


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


@_constant_in_graphs  # a graph cannot trace find_spec either
def _has_triton() -> bool:
    return _triton_is_installed()
