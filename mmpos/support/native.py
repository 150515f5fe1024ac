"""The optional extension in C, which does the same as the Python beside it; ``core`` is None where it was not built.

Its functions answer or decline. What they decline, mistakes included, takes the way in Python, which has the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

import numpy as np

from mmpos.support.checks import Array, IntArray

__all__ = ["Core", "core", "int64"]


class Core(Protocol):
    """The functions of csrc/, each described there; arrays are anything with a buffer."""

    def documents(
        self, documents: Sequence[Sequence[object]], text: type, audio: type, grid: type, names: tuple[str, ...], /
    ) -> tuple[bytes, bytes, bytes] | None:
        """Read kind, extents and segment offsets, as bytes, of lists of Text, Audio and Grid."""

    def elements(self, raw: bytes, schema: Array, most: int, /) -> int | None:
        """Fields and packed numbers of a message, counted until there are more than most; -1 for what is none."""

    def enter(self, plan: Array, rows: Array, /) -> bool | None:
        """Enter rows into the hash table of a plan, which has more empty slots."""

    def expand(
        self, table: Array, num_tokens: int, fractional: bool, out: Array, axes: bytes | None, wide: bool, /
    ) -> bool:
        """Write the ids of these axes into the rows of out, by the widest vectors of the CPU or by those of all."""

    def integers(self, raw: bytes, fields: bytes, /) -> tuple[bytes, ...] | None:
        """Read the numbers of these repeated fields of a message, each as the bytes of an array."""

    def joined(self, parts: tuple[Array | bytes | memoryview, ...], /) -> bytes | None:
        """Join the bytes of these buffers, one after the other; other threads run meanwhile."""

    def ones(self, mask: Array, left: Array, right: Array, /) -> bool:
        """Fill in the zeros left and right of the ones of every row, if they are one run."""

    def patches(self, pixels: Array, patch: int, block: int, levels: Array | None, frames: int, out: Array, /) -> bool:
        """Write pixels (h, w, 3) as patches, their levels looked up in a (3, 256) table if there is one.

        Patches of a block lie side by side. With frames they are planes of floats, each repeated so many times.
        """

    def place(
        self, kind: Array, extents: Array, segment_offsets: Array, row_separator: Array | None, timed: bool,
        start: object, plan: Array, rules: tuple[bool, bool, bool], table: Array, documents: Array, /,
    ) -> int | None:  # fmt: skip
        """Fill a placed table by a plan; its tokens, or -1 - s where the plan does not have the shape of segment s."""

    def placed(self, table: Array, documents: Array, num_tokens: int, fractional: bool, /) -> bool:
        """Check whether these are surely the arrays of a placed table; False is for Python to look at."""

    def rotate(
        self, tensors: tuple[object, ...], source: tuple[object, ...], norm: tuple[object, ...] | None, first: int,
        stop: int, flags: int, /,
    ) -> bool:  # fmt: skip
        """Normalise and rotate tokens first to stop of q, and of k, into their outs; False, and nothing written, else.

        Args:
            tensors: (q, q_out) or (q, q_out, k, k_out), capsules of DLPack; an out may be what it comes from.
            source: positions and what turns by them, or cos and sin, as csrc/rotate.c has them.
            norm: None, or eps and, for each of q and k, (head_dim,) float32 weights or None.
            first: a token, from 0 to batch · seq.
            stop: likewise.
            flags: those of csrc/rotate.c.
        """

    def runs(self, input_ids: Array, starts: Array, stops: Array, token: int, other: int, /) -> bytes | None:
        """Find every run of either token: document, first token, tokens, and whether of the other, as int64 bytes."""

    def sound(self, kind: Array, extents: Array, segment_offsets: Array, row_separator: Array | None, /) -> bool:
        """Check whether these are the arrays of a segment table without clips, thumbnails and tiles."""

    def spans(
        self, lengths: Array, offsets: Array, grid_thw: Array, documents: Array | None, separators: bool, /
    ) -> tuple[bytes, bytes, bytes, bytes] | None:
        """Lay out segments: kind, extents, segment offsets and the segment of each span, as bytes."""


def int64(data: bytes) -> IntArray:
    """Read int64 numbers from bytes; read-only, not copied."""
    return np.frombuffer(data, np.int64)


core: Core | None
try:
    core = cast(Core, import_module("mmpos._native"))
except ImportError:
    core = None
