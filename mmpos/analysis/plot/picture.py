"""The figure on which pictures are drawn; this module alone imports matplotlib at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import IO, Any

import matplotlib
from matplotlib.figure import Figure

DPI = 200
"""Pixels per inch of a file."""

METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""The metadata to leave out of each kind of file, so that the same data gives the same bytes."""

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "mmpos",  # fixed ids of elements, for the same bytes
    "svg.fonttype": "none",  # text that can be searched
    "pdf.fonttype": 42,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.hspace": 0.04,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw as if there were no matplotlibrc: a reader's own must not change the picture."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


class Picture(Figure):
    """A figure that notebooks show, also where pyplot was never imported."""

    def write(self, file: IO[bytes], kind: str, dpi: float = DPI) -> None:
        """Write a file of this kind: png, svg or pdf."""
        with style():
            self.savefig(file, format=kind, dpi=dpi, metadata=METADATA[kind])

    def png(self, dpi: float = DPI) -> bytes:
        """The bytes of a .png file."""
        data = BytesIO()
        self.write(data, "png", dpi)
        return data.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png(dpi=100)
