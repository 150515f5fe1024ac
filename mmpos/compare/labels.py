"""What schemes and encodings are called in a table: their names, and the parameters that are not the defaults."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

__all__ = ["label", "parameters"]


def label(named: Any) -> str:
    """The name of a scheme or an encoding with those of its parameters that are not the defaults.

    >>> from mmpos.schemes import RopeTieV2
    >>> label(RopeTieV2(axes=3, rounding="floor"))
    'rope-tie-v2, axes=3, rounding=floor'
    """
    # Weights are long, and numbers that come of them are no choice.
    short = ((name, value) for name, value, default in parameters(named) if default is not MISSING and value != default)
    return str(named.name) + "".join(f", {name}={value}" for name, value in short)


def parameters(named: Any) -> list[tuple[str, Any, Any]]:
    """Name, value and default (or MISSING) of every field of a dataclass; nothing of anything else."""
    known = fields(named) if is_dataclass(named) else ()
    return [(field.name, getattr(named, field.name), field.default) for field in known]
