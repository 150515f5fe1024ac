"""A position table on a device: one small buffer that kernels read, at an address that may stay fixed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions import expand
from mmpos.positions.rows import AXES, OFFSET, padding_column
from mmpos.positions.table import PositionTable
from mmpos.support.checks import integer

__all__ = ["DevicePositions"]


@dataclass(frozen=True, eq=False)
class DevicePositions:
    """A placed table where kernels can read it; make it with ``from_table``.

    Args:
        table: (5 + 4·axes, capacity) int64; unused columns begin at the token count.
        num_tokens: tokens, padding included.
        row_length: tokens of every document when they are equal, else 0: what bshd and bhsd ask for.
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
        """Copy a table to a device: one small copy that does not block the host.

        Args:
            positions: the table.
            device: where to.
            capacity: columns to reserve, so that ``refresh`` can put other tables at the same address;
                None reserves as many as there are segments.

        Raises:
            LimitExceededError: more segments than the capacity.
        """
        columns = _columns(positions, capacity)
        table = torch.from_numpy(columns)
        device = torch.device(device)
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        elif device.type != "cpu":
            table = table.to(device)
        return cls(table, positions.num_tokens, _row_length(positions), positions.fractional)

    def refresh(self, positions: PositionTable) -> None:
        """Put another table of as many tokens into the same memory; valid between replays of a CUDA graph.

        Raises:
            InvalidInputError: axes, fractions, tokens or the length of documents differ.
            LimitExceededError: more segments than the capacity.
        """
        fresh = torch.from_numpy(_columns(positions, self.table.shape[1]))
        got = (positions.axes, positions.fractional, positions.num_tokens, _row_length(positions))
        want = (self.axes, self.fractional, self.num_tokens, self.row_length)
        if got != want:
            raise InvalidInputError(
                f"positions: got (axes, fractional, tokens, document length) {got}, want {want} as before"
            )
        if self.table.is_cuda:
            fresh = fresh.pin_memory()
        self.table.copy_(fresh, non_blocking=True)

    @property
    def axes(self) -> int:
        """Numbers in a position."""
        return (self.table.shape[0] - AXES) // 4

    @property
    def device(self) -> torch.device:
        """Where the table lies."""
        return self.table.device

    def pin_memory(self) -> DevicePositions:
        """The same in page-locked host memory, as DataLoaders ask of a batch."""
        return replace(self, table=self.table.pin_memory())

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> DevicePositions:
        """The same on another device."""
        return replace(self, table=self.table.to(device, non_blocking=non_blocking))

    def dense(self) -> Tensor:
        """(axes, tokens) ids, int32 or float64, made where the table lies: the bits of PositionTable.dense."""
        if self.table.is_cuda:
            from mmpos.rotary.kernel import launch_dense

            return launch_dense(self.table, self.num_tokens, self.axes, self.fractional)
        return torch.from_numpy(expand.dense(self.table.numpy(), self.num_tokens, self.fractional))


def _columns(positions: PositionTable, capacity: int | None) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """The table with unused columns behind it, which begin at the token count and are reached by no token."""
    if not isinstance(positions, PositionTable):
        raise InvalidInputError(f"positions: got {type(positions).__name__}, want a PositionTable")
    used = positions.num_segments
    reserved = max(used, 1) if capacity is None else integer("capacity", capacity, minimum=1)
    if used > reserved:
        raise LimitExceededError(f"capacity: got {reserved}, want >= {used}, the segments of the table")
    columns = padding_column(positions.axes)[:, None].repeat(reserved, axis=1)
    columns[OFFSET] = positions.num_tokens
    columns[:, :used] = positions.table
    return columns


def _row_length(positions: PositionTable) -> int:
    lengths = positions.lengths
    return int(lengths[0]) if lengths.size and (lengths == lengths[0]).all() else 0
