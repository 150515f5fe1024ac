"""Times in words: exact numbers of seconds as the text between the frames of a video."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from string import Formatter

from mmpos.errors import InvalidInputError

__all__ = ["QWEN3_VL", "Timestamp", "timestamps"]

QWEN3_VL = "<{seconds:.1f} seconds>"
"""How Qwen3-VL writes the time of a frame."""

Timestamp = str | Callable[[Fraction], str]
"""A format whose one field is seconds, or what makes a text of seconds."""

_SPEC = re.compile(r"0?\d{0,2}\.(\d{1,2})f", re.ASCII)


def timestamps(name: str, timestamp: Timestamp, times: Sequence[Fraction]) -> tuple[str, ...]:
    """The text of each time.

    >>> timestamps("timestamp", "<{seconds:.1f} seconds>", [Fraction(1, 3), Fraction(5, 4)])
    ('<0.3 seconds>', '<1.2 seconds>')

    Args:
        name: of the timestamp, for errors.
        timestamp: a format such as "<{seconds:.1f} seconds>", "{seconds:05.2f} s" or "", or a callable. The digits of
            a format are those of the rational itself, halves rounded to even; no binary float is on the way.
        times: exact seconds.

    Raises:
        InvalidInputError: a format with other fields or other than a number of decimals; a callable that gives no text.
    """
    write = _format(name, timestamp) if isinstance(timestamp, str) else timestamp
    if not callable(write):
        raise InvalidInputError(f"{name}: got {timestamp!r}, want a format of seconds or a callable")
    found = tuple(write(time) for time in times)
    for text in found:
        if not isinstance(text, str):
            raise InvalidInputError(f"{name}: got a callable that gives {text!r}, want text")
    return found


def _format(name: str, template: str) -> Callable[[Fraction], str]:
    """What a format does, with its digits counted once."""
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise InvalidInputError(f"{name}: got {template!r}, want a format of seconds ({error})") from None
    for _, field, spec, conversion in pieces:
        if field is not None and (field != "seconds" or conversion or not _SPEC.fullmatch(spec or "")):
            raise InvalidInputError(f"{name}: got {template!r}, want fields such as {{seconds:.1f}} only")

    def write(time: Fraction) -> str:
        return "".join(
            literal if field is None else literal + _digits(time, spec or "") for literal, field, spec, _ in pieces
        )

    return write


def _digits(time: Fraction, spec: str) -> str:
    decimals = int(spec.rpartition(".")[2][:-1])
    return format(Decimal(f"{round(time * 10**decimals)}e-{decimals}"), spec)
