"""XD-RoPE of HunYuan-VL: text as ever, images by column, row and number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mmpos.schemes.base import Grids, Placement, Scheme
from mmpos.support.checks import INT32_MAX, IntArray, integer, one_of


@dataclass(frozen=True)
class XDRope(Scheme):
    """XD-RoPE: patch (i, j) of image n at (its place among the tokens, j, i, n); text goes on at the next place.

    Columns, rows and images count from zero, whatever stands before the image; the token that ends a row has the column
    after its last patch. A prompt that ends in an image goes on at the place after it, also without an axis of places.
    Source: HunYuan-VL (HunyuanOCR): its released code, vLLM and Transformers.

    Args:
        axes: 4; 3 without the axis of places; more of those at the front.
        counting: "document": images are counted in each document, as in vLLM; "batch": over all, as in Transformers,
            where the next position is beyond the number of the last image, too.
        first_image: images before the first one, to go on with a document.
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
        places = self.axes - 3
        return Placement(
            [*[cursor] * places, 0, 0, self._numbers(grids)],
            step_row=[*[grids.row_tokens] * places, 0, 1, 0],
            step_col=[*[1] * places, 1, 0, 0],
        )

    def next_after(self, grids: Grids, cursor: IntArray) -> IntArray | None:
        return self._numbers(grids) + 1 if self.counting == "batch" else None

    def _numbers(self, grids: Grids) -> IntArray:
        """(grids,) images before each."""
        count = grids.number if self.counting == "document" else np.arange(grids.document.size)
        return count + self.first_image
