"""Figures as people read them: times, ratios and numbers with three or four significant digits."""

from __future__ import annotations

__all__ = ["UNITS", "number_text", "ratio_text", "seconds_text"]

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
"""Units of time and their seconds, the longest first."""


def seconds_text(seconds: float) -> str:
    """A time with three significant digits.

    >>> seconds_text(0.0012345), seconds_text(7.2e-7), seconds_text(0.0), seconds_text(0.009996), seconds_text(0.9999)
    ('1.23 ms', '720 ns', '0 ns', '10.0 ms', '1.00 s')
    """
    rounded = float(f"{seconds:.3g}")
    size, unit = next(((s, u) for s, u in UNITS if rounded >= s), UNITS[-1])
    return f"{_three(seconds / size)} {unit}"


def ratio_text(ratio: float | None) -> str:
    """A ratio with two or three significant digits, or nothing.

    >>> ratio_text(0.4567), ratio_text(9.996), ratio_text(1234.5), ratio_text(None)
    ('0.46×', '10.0×', '1,234×', '')
    """
    return "" if ratio is None else f"{_three(ratio)}×"


def _three(value: float) -> str:
    rounded = float(f"{value:.3g}")
    return f"{value:,.{0 if rounded >= 100 or rounded == 0 else 1 if rounded >= 10 else 2}f}"


def number_text(value: float) -> str:
    """A number beside times, without an exponent where it is large.

    >>> number_text(122975.4), number_text(0.99634)
    ('122,975', '0.9963')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
