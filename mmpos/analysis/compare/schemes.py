"""The properties of schemes, and the door to measuring them."""

from __future__ import annotations

from collections.abc import Iterable

from mmpos.analysis.compare import changes, costs, places, rotated
from mmpos.analysis.compare.finding import Property
from mmpos.analysis.compare.matrix import Matrix, measured
from mmpos.errors import InvalidInputError
from mmpos.schemes import SCHEMES, Scheme, get_scheme

__all__ = ["SCHEME_PROPERTIES", "every_scheme", "measure"]

SCHEME_PROPERTIES = (
    Property("axes", "axes", places.axes),
    Property("text-is-rope-1d", "text is RoPE-1D", places.text_is_rope_1d),
    Property("symmetric", "symmetric", places.symmetric),
    Property("unique", "unique", places.unique),
    Property("length-independent", "length-independent", changes.length_independent),
    Property("linear-shift", "linear shift", changes.linear_shift),
    Property("relative", "relative", rotated.relative),
    Property("delta-0", "delta 0", costs.delta_0),
    Property("integer", "integer", places.integer),
    Property("prefix-stable", "prefix-stable", changes.prefix_stable),
    Property("ids-of-a-square", "24×24", costs.ids_of_a_square),
    Property("ids-of-a-row", "1×576", costs.ids_of_a_row),
    Property("growth", "growth", costs.growth),
)
"""What is measured of every scheme, in the order of the table."""


def measure(schemes: Iterable[str | Scheme] | None = None) -> Matrix:
    """Every property of schemes, measured with exact ids on a fixed family of documents.

    Args:
        schemes: names, or objects such as your own; None is every scheme of mmpos, and again with three axes those
            that have the choice.

    Raises:
        InvalidInputError: an unknown scheme, none, or one twice.
    """
    if schemes is not None and (isinstance(schemes, str) or not isinstance(schemes, Iterable)):
        raise InvalidInputError(f"schemes: got {schemes!r}, want a list of names or Scheme objects")
    found = every_scheme() if schemes is None else [get_scheme(scheme) for scheme in schemes]
    return measured("scheme", ((scheme.label, scheme) for scheme in found), SCHEME_PROPERTIES)


def every_scheme() -> list[Scheme]:
    """Every scheme with its default parameters, then with three axes those that have the choice."""
    made: list[Scheme] = [scheme() for scheme in SCHEMES.values()]
    choice = [type(scheme) for scheme in made if "axes" in vars(scheme)]  # where the axes are a parameter
    return made + [scheme(axes=3) for scheme in choice]  # type: ignore[call-arg]
