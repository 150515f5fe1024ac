"""Patch: what the ``patch`` of an integration adds to a module of another project, and ``unpatch`` takes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from mmpos.errors import InvalidInputError, UnsupportedError

__all__ = ["Attribute", "Patch", "is_patched", "unpatched"]

Module = TypeVar("Module", bound=nn.Module)

_MARK = "_mmpos_patch"


@dataclass(frozen=True, eq=False)
class Attribute:
    """Attribute that is set on a module."""

    module: nn.Module
    name: str
    value: Callable[..., object]


@dataclass(frozen=True, eq=False)
class Patch:
    """Hooks, attributes and classes that a module got.

    Args:
        handles: of hooks.
        attributes: set on instances.
        classes: objects and the class that each got, a subclass of its own.
    """

    handles: Sequence[RemovableHandle]
    attributes: Sequence[Attribute]
    classes: Sequence[tuple[Any, type]] = ()

    @classmethod
    def install(
        cls,
        what: str,
        module: nn.Module,
        hooks: Callable[[], Iterator[RemovableHandle]],
        attributes: Sequence[Attribute],
        classes: Sequence[tuple[Any, type]] = (),
    ) -> None:
        """Set all attributes and classes and register all hooks, or do nothing.

        Args:
            what: name of the module in errors.
            module: gets the patch.
            hooks: registers hooks and yields the handle of each.
            attributes: to set.
            classes: objects and the class that each gets.

        Raises:
            UnsupportedError: an attribute is set on an instance already.
        """
        for attribute in attributes:
            if attribute.name in vars(attribute.module):
                got = f"{type(attribute.module).__name__}.{attribute.name}"
                raise UnsupportedError(f"{what}: got {got} set on the instance, want that of the class")
        handles = []
        with ExitStack() as undo:
            for attribute in attributes:
                setattr(attribute.module, attribute.name, attribute.value)
                undo.callback(delattr, attribute.module, attribute.name)
            for one, kind in classes:
                undo.callback(setattr, one, "__class__", type(one))
                one.__class__ = kind
            for handle in hooks():
                undo.callback(handle.remove)
                handles.append(handle)
            setattr(module, _MARK, cls(handles, attributes, classes))
            undo.pop_all()


def is_patched(module: nn.Module) -> bool:
    """Tell whether a module is patched."""
    return _MARK in vars(module)


def unpatched(what: str, module: Module) -> Module:
    """Remove everything that a patch added to a module, or to the one that it is a copy of.

    Raises:
        InvalidInputError: the module is not patched, or something else has since wrapped what the patch set.
    """
    added = vars(module).get(_MARK)
    if added is None:
        raise InvalidInputError(f"{what}: got {type(module).__name__} that is not patched, want the one that was")
    for attribute in added.attributes:
        if vars(attribute.module).get(attribute.name) is not attribute.value:
            got = f"{type(attribute.module).__name__}.{attribute.name}"
            raise InvalidInputError(f"{what}: got {got} that was replaced after patch, want ours before unpatch")
    for handle in added.handles:
        handle.remove()
    for attribute in added.attributes:
        delattr(attribute.module, attribute.name)
    for one, kind in added.classes:
        if type(one) is kind:
            one.__class__ = kind.__base__
    delattr(module, _MARK)
    return module
