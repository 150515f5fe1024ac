"""XD-RoPE of HunYuan-VL: images are placed by token index, column, row and image number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mmpos.schemes.base import Grids, Placement, Scheme
from mmpos.support.checks import INT32_MAX, IntArray, integer, one_of


@dataclass(frozen=True)
class XDRope(Scheme):
    """Patch (i, j) of image n at (token index, j, i, n); text continues at the next token index.

    Columns, rows and images are counted from zero, independently of the tokens before the image; the token that ends a
    row has the column after that of the last patch. After a prompt that ends in an image, the next position is the next
    token index, even without an axis of token indices. Source: HunYuan-VL (HunyuanOCR): its released code and
    Transformers.

    Args:
        axes: 4; 3 without the axis of token indices; above 4, more axes of token indices at the front.
        counting: "document" counts images in each document; "batch" counts images over the batch, as in
            Transformers, where the next position also exceeds the number of the last image.
        first_image: number of the first image, to continue a document.
    """

    name: ClassVar[str] = "xd-rope"
    frames = False
    row_separators = True
    axes: int = 4
    counting: Literal["document", "batch"] = "document"
    first_image: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", integer("XDRope.axes", self.axes, minimum=3, maximum=256))
        one_of("XDRope.counting", self.counting, ("document", "batch"))
        first = integer("XDRope.first_image", self.first_image, minimum=0, maximum=INT32_MAX)
        object.__setattr__(self, "first_image", first)

    def advance(self, grids: Grids) -> IntArray:
        return grids.tokens

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        indices = self.axes - 3
        return Placement(
            [*[cursor] * indices, 0, 0, self._numbers(grids)],
            step_row=[*[grids.row_tokens] * indices, 0, 1, 0],
            step_col=[*[1] * indices, 1, 0, 0],
        )

    def next_after(self, grids: Grids, cursor: IntArray) -> IntArray | None:
        return self._numbers(grids) + 1 if self.counting == "batch" else None

    def _numbers(self, grids: Grids) -> IntArray:
        """Return the number of each image, (grids,)."""
        count = grids.number if self.counting == "document" else np.arange(grids.document.size)
        return count + self.first_image
