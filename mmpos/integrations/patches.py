"""Patch: the changes that an integration's ``patch`` makes to another project's module, undone by ``unpatch``."""

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
    """An attribute to set on a module."""

    module: nn.Module
    name: str
    value: Callable[..., object]


@dataclass(frozen=True, eq=False)
class Patch:
    """Hooks, attributes and classes added to a module.

    Args:
        handles: handles of the registered hooks.
        attributes: attributes set on instances.
        classes: objects, each with the subclass that replaces its class.
    """

    handles: Sequence[RemovableHandle]
    attributes: Sequence[Attribute]
    classes: Sequence[tuple[Any, type]] = ()

    @classmethod
    def install(
        cls,
        name: str,
        module: nn.Module,
        hooks: Callable[[], Iterator[RemovableHandle]],
        attributes: Sequence[Attribute],
        classes: Sequence[tuple[Any, type]] = (),
    ) -> None:
        """Set all attributes and classes and register all hooks, or change nothing if one of these fails.

        ``name`` is the name of the module in error messages; ``hooks`` registers hooks and yields their handles.

        Raises:
            UnsupportedError: an attribute is already set on an instance.
        """
        for attribute in attributes:
            if attribute.name in vars(attribute.module):
                got = f"{type(attribute.module).__name__}.{attribute.name}"
                raise UnsupportedError(f"{name}: got {got} set on the instance, want the method of the class")
        handles = []
        with ExitStack() as undo:
            for attribute in attributes:
                setattr(attribute.module, attribute.name, attribute.value)
                undo.callback(delattr, attribute.module, attribute.name)
            for instance, subclass in classes:
                undo.callback(setattr, instance, "__class__", type(instance))
                instance.__class__ = subclass
            for handle in hooks():
                undo.callback(handle.remove)
                handles.append(handle)
            setattr(module, _MARK, cls(handles, attributes, classes))
            undo.pop_all()


def is_patched(module: nn.Module) -> bool:
    """Return whether a module is patched."""
    return _MARK in vars(module)


def unpatched(name: str, module: Module) -> Module:
    """Remove everything that a patch added to a module; the module may be a copy of the patched module.

    Raises:
        InvalidInputError: the module is not patched, or other code has replaced an attribute set by the patch.
    """
    patch = vars(module).get(_MARK)
    if patch is None:
        raise InvalidInputError(f"{name}: got an unpatched {type(module).__name__}, want the patched module")
    for attribute in patch.attributes:
        if vars(attribute.module).get(attribute.name) is not attribute.value:
            got = f"{type(attribute.module).__name__}.{attribute.name}"
            raise InvalidInputError(f"{name}: got {got} that was replaced after patch, want the value that patch set")
    for handle in patch.handles:
        handle.remove()
    for attribute in patch.attributes:
        delattr(attribute.module, attribute.name)
    for instance, subclass in patch.classes:
        if type(instance) is subclass:
            instance.__class__ = subclass.__base__
    delattr(module, _MARK)
    return module
