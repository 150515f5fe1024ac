"""Calls with the C extension and with the Python code next to it, which must have equal outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from results import assert_equal

from mmpos import MmposError
from mmpos.support import native

assert native.core is not None, "the extension was not built"
CORE = native.core


class Narrow:
    """The extension without the vector instructions that only some CPUs support."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(CORE, name)
        return (lambda *arguments: function(*arguments[:-1], False)) if name == "expand" else function


class Recorder:
    """The extension, wrapped to record its calls: names, arguments and results."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments, getattr(CORE, name)(*arguments)))
            return self.calls[-1][2]

        return call

    def named(self, *, answered: bool) -> list[str]:
        """Return the names of the calls that the extension answered, or of those that it declined."""
        return [name for name, _, answer in self.calls if (answer is not None and answer is not False) == answered]


@contextmanager
def replaced_by(core: Any) -> Iterator[Any]:
    """Run the block with another extension, or with None."""
    native.core = core
    try:
        yield core
    finally:
        native.core = CORE


def outcome(call: Callable[[], object]) -> object:
    """Call a function, and return its result or its error."""
    try:
        return call()
    except MmposError as error:
        return error


def both(call: Callable[[], object]) -> Any:
    """Return the outcome of a call, and check that it is the same with and without the extension."""
    with replaced_by(None):
        want = outcome(call)
    for core in (Narrow(), CORE):
        with replaced_by(core):
            assert_equal(outcome(call), want)
    return want
