"""A cached_property without the lock that ``functools.cached_property`` takes before Python 3.12."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

__all__ = ["cached_property"]

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # noqa: N801  # the name used in functools
    """Decorator for a method whose value is computed on first access and stored in the instance.

    It takes no lock. In Python 3.11, ``functools.cached_property`` uses one lock for all instances: if a process forks
    while a thread holds this lock, it is never released in the child. If several threads access the property at the
    same time, each of them may compute the value; the value stored first is kept, so all of them receive the same
    object.

    Args:
        function: the method; instances of its class need a ``__dict__`` and may be frozen dataclasses.
    """

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self.function, self.__doc__ = function, function.__doc__
        self._name = function.__name__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None, /) -> Value: ...

    def __get__(self, instance: object, owner: type | None = None, /) -> Self | Value:
        if instance is None:
            return self
        value: Value = vars(instance).setdefault(self._name, self.function(instance))
        return value
