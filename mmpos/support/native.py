"""The optional extension in C, which does the same as the Python beside it; ``core`` is None where it was not built.

Its functions answer or decline. What they decline, mistakes included, takes the way in Python, which has the words.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

__all__ = ["core", "int64"]


class Core(Protocol):
    """The functions of csrc/, each described there; arrays are anything with a buffer."""

    def columns(
        self, kind: Any, segment_offsets: Any, start: Any, end: Any, block: Any, texts: int, grids: int,
        of_text: Any, of_grids: Any, table: Any, documents: Any, /,
    ) -> int | None:  # fmt: skip
        """Fill the columns of a placed table from the placements of texts and grids; returns its tokens."""

    def cursors(
        self, kind: Any, segment_offsets: Any, start: Any, of_text: Any, of_grids: Any, cursors: Any, end: Any, /
    ) -> bool | None:
        """Fill in the cursor before every text and grid, and after every document."""

    def documents(self, documents: Any, text: type, grid: type, names: tuple[str, ...], /) -> Any:
        """Read kind, extents and segment offsets, as bytes, of lists of Text and Grid."""

    def elements(self, raw: bytes, schema: Any, most: int, /) -> int | None:
        """Fields and packed numbers of a message, counted until there are more than most; -1 for what is none."""

    def expand(
        self, table: Any, num_tokens: int, fractional: bool, out: Any, axes: bytes | None, wide: bool, /
    ) -> bool:
        """Write the ids of these axes into the rows of out, by the widest vectors of the CPU or by those of all."""

    def integers(self, raw: bytes, fields: bytes, /) -> tuple[bytes, ...] | None:
        """The numbers of these repeated fields of a message, each as the bytes of an array."""

    def joined(self, parts: tuple[Any, ...], /) -> bytes | None:
        """The bytes of these buffers, one after the other; other threads run meanwhile."""

    def ones(self, mask: Any, left: Any, right: Any, /) -> bool:
        """Fill in the zeros left and right of the ones of every row, if they are one run."""

    def patches(self, pixels: Any, patch: int, block: int, levels: Any, frames: int, out: Any, /) -> bool:
        """Write pixels (h, w, 3) as patches, their levels looked up in a (3, 256) table if there is one.

        Patches of a block lie side by side. With frames they are planes of floats, each repeated so many times.
        """

    def rotate(
        self,
        tensors: tuple[Any, ...],
        source: tuple[Any, ...],
        first: int,
        stop: int,
        adjacent: bool,
        conjugate: bool,
        wide: bool,
        /,
    ) -> bool:
        """Rotate tokens first to stop of q, and of k, into their outs; False, and nothing written, for anything else.

        Args:
            tensors: (q, q_out) or (q, q_out, k, k_out), each (batch, seq, heads, head_dim) of float32, or of int16
                that hold bfloat16; an out may be what it comes from.
            source: (cos, sin), or positions, frequencies and coefficients, as csrc/rotate.c has them.
            first: a token, from 0 to batch · seq.
            stop: likewise.
            adjacent: whether pair j is channels (2j, 2j + 1).
            conjugate: rotate backwards.
            wide: by the widest vectors of the CPU instead of those that all have; the bits are the same.
        """

    def runs(self, input_ids: Any, starts: Any, stops: Any, token: int, other: int, /) -> bytes | None:
        """Document, first token, tokens, and whether of the other token, of every run of either."""

    def sound(self, kind: Any, extents: Any, segment_offsets: Any, row_separator: Any, /) -> bool:
        """Whether these are the arrays of a segment table."""

    def spans(self, lengths: Any, offsets: Any, grid_thw: Any, documents: Any, separators: bool, /) -> Any:
        """Kind, extents, segment offsets and the segment of each span, as bytes."""

    def split(
        self, kind: Any, extents: Any, segment_offsets: Any, row_separator: Any, start: Any, block: Any, /
    ) -> tuple[int, int, bool, bool] | None:
        """Fill in which segments are texts and grids; how many, whether grids touch, and whether any has frames."""

    def walk(self, data: bytes, format: int, most: int, /) -> tuple[int, bytes] | None:
        """Walk through an image file: how the walk ended, and kind, start and length of the chunks that matter."""


def int64(data: bytes) -> npt.NDArray[np.int64]:
    """Read int64 numbers from bytes; read-only, not copied."""
    return np.frombuffer(data, np.int64)


core: Core | None
try:
    core = cast(Core, import_module("mmpos._native"))
except ImportError:
    core = None
