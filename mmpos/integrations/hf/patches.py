"""Patch: the changes that ``patch`` makes to a model, undone by ``unpatch``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from mmpos.errors import InvalidInputError, UnsupportedError

__all__ = ["Attribute", "Patch", "unpatched"]

Model = TypeVar("Model", bound=nn.Module)

_MARK = "_mmpos_patch"


@dataclass(frozen=True, eq=False)
class Attribute:
    """An attribute to set on a module."""

    module: nn.Module
    name: str
    value: Callable[..., object]


@dataclass(frozen=True, eq=False)
class Patch:
    """Hooks and attributes added to a model.

    Args:
        handles: handles of the registered hooks.
        attributes: attributes set on instances.
    """

    handles: Sequence[RemovableHandle]
    attributes: Sequence[Attribute]

    @classmethod
    def install(
        cls, model: nn.Module, hooks: Callable[[], Iterator[RemovableHandle]], attributes: Sequence[Attribute]
    ) -> None:
        """Set all attributes and register all hooks, or change nothing if one of these fails.

        ``hooks`` registers hooks and yields their handles.

        Raises:
            UnsupportedError: an attribute is already set on an instance.
        """
        for attribute in attributes:
            if attribute.name in vars(attribute.module):
                got = f"{type(attribute.module).__name__}.{attribute.name}"
                raise UnsupportedError(f"model: got {got} set on the instance, want the method of the class")
        handles = []
        with ExitStack() as undo:
            for attribute in attributes:
                setattr(attribute.module, attribute.name, attribute.value)
                undo.callback(delattr, attribute.module, attribute.name)
            for handle in hooks():
                undo.callback(handle.remove)
                handles.append(handle)
            setattr(model, _MARK, cls(handles, attributes))
            undo.pop_all()


def unpatched(model: Model) -> Model:
    """Remove everything that a patch added to a model; the model may be a copy of the patched model.

    Raises:
        InvalidInputError: the model is not patched, or other code has replaced an attribute set by the patch.
    """
    patch = vars(model).get(_MARK)
    if patch is None:
        raise InvalidInputError(f"model: got an unpatched {type(model).__name__}, want the patched module")
    for attribute in patch.attributes:
        if vars(attribute.module).get(attribute.name) is not attribute.value:
            got = f"{type(attribute.module).__name__}.{attribute.name}"
            raise InvalidInputError(f"model: got {got} that was replaced after patch, want the value that patch set")
    for handle in patch.handles:
        handle.remove()
    for attribute in patch.attributes:
        delattr(attribute.module, attribute.name)
    delattr(model, _MARK)
    return model
