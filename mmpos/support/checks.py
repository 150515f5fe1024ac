"""Argument checks: each returns the checked value or raises an error with the name, the value and what was expected."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, MmposError, ServiceError

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

T = TypeVar("T")
Scalar = TypeVar("Scalar", bound=np.generic)

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]


def integer(name: str, value: object, *, minimum: int | None = None, maximum: int | None = None) -> int:
    """Check that a value is an integer within bounds; bools and floats are refused."""
    if type(value) is not int:
        try:
            if isinstance(value, bool | np.bool_):
                raise TypeError
            value = operator.index(value)  # type: ignore[arg-type]  # its TypeError is the check
        except TypeError:
            raise InvalidInputError(f"{name}: got {value!r}, want an integer") from None
    if minimum is not None and value < minimum:
        raise InvalidInputError(f"{name}: got {written(value)}, want >= {minimum}")
    if maximum is not None and value > maximum:
        raise InvalidInputError(f"{name}: got {written(value)}, want <= {maximum}")
    return value


@contextmanager
def naming(name: str, joint: str = ": ") -> Iterator[None]:
    """Prefix the messages of all mmpos errors raised in the block with a name.

    A ServiceError is passed on unchanged, because it says nothing about the input.

    >>> with naming("documents[3]", joint="."):
    ...     integer("height", 0, minimum=1)
    Traceback (most recent call last):
    mmpos.errors.InvalidInputError: documents[3].height: got 0, want >= 1
    """
    try:
        yield
    except ServiceError:
        raise
    except MmposError as error:
        raise type(error)(f"{name}{joint}{error}") from error


@contextmanager
def as_typed(**names: str) -> Iterator[None]:
    """Name what the user typed in errors that begin with arguments of the library, such as ``paths[0]``."""
    try:
        yield
    except InvalidInputError as error:
        head, joint, rest = str(error).partition(": ")
        typed = names.get(head.partition("[")[0])
        if typed is None:
            raise
        raise InvalidInputError(f"{typed}{joint}{rest}") from error


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return a hint with the name most similar to a mistyped word, or an empty string."""
    from difflib import get_close_matches

    likely = get_close_matches(word, names, n=1)
    return f" (did you mean {likely[0]!r}?)" if likely else ""


def written(value: object) -> str:
    """Format a number, even if it has more digits than Python can format."""
    try:
        return str(value)
    except ValueError:
        return "a number of more than 4300 digits"


def boolean(name: str, value: object) -> bool:
    """Check that a value is a bool, not just truthy or falsy."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidInputError(f"{name}: got {value!r}, want True or False")
    return bool(value)


def text(name: str, value: str) -> str:
    """Check that text has no lone surrogates, which cannot be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{name}: got text with a lone surrogate ({error}), want Unicode text") from None
    return value


def host_array(name: str, value: object) -> Array:
    """Convert a list, an array or a tensor on the host to a numpy array, which may be a view or a copy."""
    if isinstance(value, np.ndarray):
        if hasattr(value, "mask"):  # avoids importing numpy.ma, which mmpos does not need
            raise InvalidInputError(f"{name}: got a masked array, want an array without a mask, which would be lost")
        return value
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidInputError(f"{name}: got {_kind(value)}, want an array of numbers on the host ({error})") from None


def int_array(name: str, value: object, shape: tuple[int | None, ...]) -> IntArray:
    """Check integers of the given shape (None: any length), not floats or bools, and return them as int64."""
    array = host_array(name, value)
    if array.size == 0 and array.ndim == 1 and (None in shape or 0 in shape):
        array = array.reshape([n or 0 for n in shape])
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise InvalidInputError(f"{name}: got {array.max()}, want integers within int64")
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidInputError(f"{name}: got dtype {array.dtype}, want integers")
    fits = array.ndim == len(shape)
    for got, wanted in zip(array.shape, shape, strict=False):
        fits = fits and wanted in (None, got)
    if not fits:
        want = ", ".join("n" if n is None else str(n) for n in shape)
        raise InvalidInputError(f"{name}: got shape {array.shape}, want ({want}{',' if len(shape) == 1 else ''})")
    return array.astype(np.int64, copy=False)


def first_bad(name: str, values: IntArray, *, minimum: int | None = None, maximum: int | None = None) -> None:
    """Raise an error for the first element outside the bounds, and include its index."""
    if not values.size or (
        (minimum is None or values.min() >= minimum) and (maximum is None or values.max() <= maximum)
    ):
        return
    low = values < minimum if minimum is not None else np.zeros(values.shape, np.bool_)
    high = values > maximum if maximum is not None else np.zeros(values.shape, np.bool_)
    at = tuple(int(i) for i in np.unravel_index(int((low | high).argmax()), values.shape))
    want = f">= {minimum}" if low[at] else f"<= {maximum}"
    raise InvalidInputError(f"{name}[{', '.join(map(str, at))}]: got {values[at]}, want {want}")


def read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Make an array that a table computes read-only, since the table would not see what is written into it."""
    array.flags.writeable = False
    return array


def per_document(name: str, value: object, num_documents: int, *, minimum: int, maximum: int = INT32_MAX) -> IntArray:
    """Check integers within bounds, one for all documents or one for each; return a (documents,) array."""
    if isinstance(value, int) or host_array(name, value).ndim == 0:
        same = np.empty(num_documents, np.int64)  # np.full takes twice as long for short arrays
        same.fill(integer(name, value, minimum=minimum, maximum=maximum))
        return same
    array = int_array(name, value, (num_documents,))
    first_bad(name, array, minimum=minimum, maximum=maximum)
    return array


def finite(name: str, value: object, *, minimum: float | None = None, above: float | None = None) -> float:
    """Check that a value is a finite real number within bounds, not a bool, and return it as a float."""
    want = "a finite number"
    if minimum is not None or above is not None:
        want += f" >= {minimum:g}" if minimum is not None else f" > {above:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidInputError(f"{name}: got {value!r}, want {want}")
    try:
        number = float(value)
    except OverflowError:
        raise InvalidInputError(f"{name}: got {written(value)}, want {want}") from None
    low = (minimum is not None and number < minimum) or (above is not None and number <= above)
    if low or not math.isfinite(number):
        raise InvalidInputError(f"{name}: got {value!r}, want {want}")
    return number


def even(name: str, value: object, *, maximum: int | None = None) -> int:
    """Check that a value is an even integer >= 2."""
    number = integer(name, value, minimum=2, maximum=maximum)
    if number % 2:
        raise InvalidInputError(f"{name}: got {number}, want an even number")
    return number


def listed(name: str, values: object, what: str = "numbers") -> list[Any]:
    """Check that a value is a sequence, and return its items as a list."""
    try:
        return list(values)  # type: ignore[call-overload]  # its TypeError is the check
    except TypeError:
        raise InvalidInputError(f"{name}: got {values!r}, want a sequence of {what}") from None


def integers(name: str, values: object, *, minimum: int = 0, maximum: int | None = None) -> tuple[int, ...]:
    """Check that a value is a sequence of integers >= 0, or >= ``minimum``."""
    every = enumerate(listed(name, values))
    return tuple(integer(f"{name}[{i}]", value, minimum=minimum, maximum=maximum) for i, value in every)


def numbers(name: str, values: object, minimum: float) -> tuple[float, ...]:
    """Check that a value is a sequence of finite numbers."""
    return tuple(finite(f"{name}[{i}]", value, minimum=minimum) for i, value in enumerate(listed(name, values)))


def one_of(name: str, value: T, options: Collection[object]) -> T:
    """Check that a value is one of the options."""
    if value not in options:
        raise InvalidInputError(f"{name}: got {value!r}, want one of {', '.join(map(repr, options))}")
    return value


def instance(name: str, value: object, kind: type[T], source: str) -> T:
    """Check that a value is an instance of a class; ``source`` is the call that returns instances of it."""
    if not isinstance(value, kind):
        raise InvalidInputError(f"{name}: got {type(value).__name__}, want a {kind.__name__}, as returned by {source}")
    return value


def counted(count: int, noun: str, style: str = "") -> str:
    """Format a number and its noun, which is plural unless the number is 1.

    >>> counted(1, "document"), counted(0, "axis"), counted(2, "property"), counted(4096, "token", ",")
    ('1 document', '0 axes', '2 properties', '4,096 tokens')
    """
    if count != 1:
        endings = {"y": (1, "ies"), "is": (2, "es"), "s": (0, "es"), "ch": (0, "es"), "": (0, "s")}
        cut, plural = next(change for ending, change in endings.items() if noun.endswith(ending))
        noun = noun[: len(noun) - cut] + plural
    return f"{count:{style}} {noun}"


def shown(values: IntArray) -> str:
    """Format values as a list, shortened if there are too many."""
    if values.size <= 8:
        return str(values.tolist())
    head, tail = ", ".join(map(str, values[:3].tolist())), values[-1]
    return f"[{head}, … {tail}] ({values.size} values)"


def _kind(value: object) -> str:
    device = getattr(value, "device", None)
    return type(value).__name__ + (f" on {device}" if device is not None else "")
