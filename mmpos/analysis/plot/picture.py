"""The figure class of all plots; only this module imports matplotlib at import time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import IO, Any

import matplotlib
from matplotlib.figure import Figure

DPI = 200
"""Pixels per inch of an image file."""

METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Metadata that each kind of file omits, so that equal data gives equal bytes."""

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "mmpos",  # fixes element ids, so that equal figures have equal bytes
    "svg.fonttype": "none",  # keeps text searchable
    "pdf.fonttype": 42,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.hspace": 0.04,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw with matplotlib's default settings, whatever the user's matplotlibrc."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


class Picture(Figure):
    """A figure that notebooks show even if pyplot was never imported."""

    def write(self, file: IO[bytes], kind: str, dpi: float = DPI) -> None:
        """Write the figure as a file of this kind: png, svg or pdf."""
        with style():
            self.savefig(file, format=kind, dpi=dpi, metadata=METADATA[kind])

    def png(self, dpi: float = DPI) -> bytes:
        """Return the bytes of a .png file."""
        data = BytesIO()
        self.write(data, "png", dpi)
        return data.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png(dpi=100)
