"""The figure on which pictures are drawn; this module alone imports matplotlib at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["DPI", "METADATA", "Picture", "style"]

DPI = 200
"""Pixels per inch of a file."""

METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""The metadata to leave out of each kind of file, so that the same data gives the same bytes."""


@contextmanager
def style() -> Iterator[None]:
    """Draw as if there were no matplotlibrc: a reader's own must not change the picture."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        # Fixed ids of elements, for the same bytes; text stays text that can be searched.
        matplotlib.rcParams.update(
            {
                "svg.hashsalt": "mmpos",
                "svg.fonttype": "none",
                "pdf.fonttype": 42,
                "font.size": 10.0,
                "font.family": "sans-serif",
            }
        )
        yield


class Picture(Figure):
    """A figure that notebooks show, also where pyplot was never imported, and that is laid out in inches."""

    def png(self, dpi: float = DPI) -> bytes:
        """The bytes of a .png file."""
        data = BytesIO()
        with style():
            self.savefig(data, format="png", dpi=dpi, metadata=METADATA["png"])
        return data.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png(dpi=100)

    def box(self, left: float, top: float, width: float, height: float) -> Axes:
        """Add axes, in inches from the left and from the top of the page."""
        x, y = self.place(left, top + height)
        page_width, page_height = self.get_size_inches()
        return self.add_axes((x, y, width / page_width, height / page_height))

    def words(self, left: float, top: float, words: str, **options: Any) -> None:
        """Write words at a place in inches, from the left and from the top of the page."""
        self.text(*self.place(left, top), words, **options)

    def place(self, left: float, top: float) -> tuple[float, float]:
        """Convert inches from the left and from the top of the page to matplotlib's coordinates of the figure."""
        width, height = self.get_size_inches()
        return left / width, 1 - top / height
