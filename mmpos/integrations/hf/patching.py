"""patch and unpatch: a Llama-like model of Transformers driven by positions with any number of axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

from torch import nn

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.hf import generating
from mmpos.integrations.hf.anatomy import Anatomy, dissect, rotaries_of
from mmpos.integrations.hf.fused import FusedForward
from mmpos.integrations.hf.handing import HandDown, Take, check_reached
from mmpos.rotary.apply import Implementation
from mmpos.rotary.config import Rotary
from mmpos.support.checks import one_of

__all__ = ["patch", "unpatch"]

Model = TypeVar("Model", bound=nn.Module)

_MARK = "_mmpos_patch"


@dataclass(frozen=True, eq=False)
class _Patch:
    """What unpatch takes away: hooks, and attributes set on modules."""

    handles: tuple[Any, ...]
    attributes: tuple[tuple[nn.Module, str, Any], ...]


def patch(model: Model, rotary: Rotary | Mapping[str, Rotary], *, implementation: Implementation = "auto") -> Model:
    """Let a Llama-like model take ``mm_position_ids``, in forward and in generate.

    Without that argument the model stays what it was, bit for bit. With it, q and k of every layer turn by these
    positions under ``rotary``; ``position_ids`` goes on to speak of masks only. Everything else, weights included,
    is left alone.

    Args:
        model: a PreTrainedModel, with a head or without; changed in place.
        rotary: a Rotary with the head_dim, rotary_dim, pairing and attention factor of the model;
            or, where layer types turn differently (Gemma 3), a mapping with one for each layer type.
        implementation: "reference" gives the model's own function our cos and sin; "triton" rotates by
            ``mmpos.rotary.apply_rotary`` in its place; "auto" is triton on CUDA tensors where triton is installed
            and the attentions are ones that it can serve, else the reference.

    Returns:
        the model itself.

    Raises:
        UnsupportedError: the model is not built like Llama, or its rotation is not one that a Rotary replaces.
        InvalidInputError: rotary does not fit the model, or the model is patched already.
    """
    one_of("implementation", implementation, ("auto", "reference", "triton"))
    anatomy = dissect(model)
    if any(isinstance(hook, HandDown) for hook in anatomy.base._forward_pre_hooks.values()):
        raise InvalidInputError("model: got one that is patched, want unpatch before another patch")
    rotaries = rotaries_of(anatomy, rotary)
    fused = _fused(implementation, rotaries, anatomy)
    attributes: list[tuple[nn.Module, str, Any]] = []
    if fused != "never":
        attributes += [(one, "forward", FusedForward(one, implementation)) for one in anatomy.attentions]
    if hasattr(model, "prepare_inputs_for_generation") and hasattr(model, "generate"):
        prepare = partial(generating.prepare_inputs_for_generation, model)
        attributes.append((model, "prepare_inputs_for_generation", prepare))
        attributes.append((model, "generate", partial(generating.generate, model, list(rotaries.values()))))
    _set(attributes)
    hand_down = HandDown(rotaries, fused, anatomy.names, anatomy.packs)
    setattr(model, _MARK, _Patch(_hooks(anatomy, hand_down), tuple(attributes)))
    return model


def unpatch(model: Model) -> Model:
    """Take away all that ``patch`` added.

    Args:
        model: the model that was patched, or a copy of it; changed in place.

    Returns:
        the model itself.

    Raises:
        InvalidInputError: the model is not patched, or something else has since wrapped what patch set.
    """
    found = vars(model).get(_MARK)
    if found is None:
        raise InvalidInputError(f"model: got {type(model).__name__} that is not patched, want the one that was")
    for module, name, value in found.attributes:
        if vars(module).get(name) is not value:
            raise InvalidInputError(
                f"model: got {type(module).__name__}.{name} that was replaced after patch, want ours before unpatch"
            )
    for handle in found.handles:
        handle.remove()
    for module, name, _ in found.attributes:
        delattr(module, name)
    delattr(model, _MARK)
    return model


def _hooks(anatomy: Anatomy, hand_down: HandDown) -> tuple[Any, ...]:
    base = anatomy.base
    handles = [
        base.register_forward_pre_hook(hand_down, with_kwargs=True),
        base.register_forward_hook(check_reached, with_kwargs=True),
    ]
    for attention, layer_type in zip(anatomy.attentions, anatomy.layer_types, strict=True):
        handles.append(attention.register_forward_pre_hook(Take(layer_type), with_kwargs=True))
    return tuple(handles)


def _fused(implementation: Implementation, rotaries: Mapping[str | None, Rotary], anatomy: Anatomy) -> str:
    """When layers rotate by positions themselves: "never", "always", or on "cuda"."""
    if implementation == "reference":
        return "never"
    if implementation == "auto":
        wrapped = any("forward" in vars(attention) for attention in anatomy.attentions)  # offloaded by accelerate
        able = anatomy.fuses and not wrapped and all(one.rotary_dim == one.head_dim for one in rotaries.values())
        return "cuda" if able and find_spec("triton") is not None else "never"
    if not anatomy.fuses:
        name = type(anatomy.attentions[0]).__name__
        raise UnsupportedError(
            f"implementation: got 'triton' for {name}, which does not turn q and k by one call, want 'reference'"
        )
    partly = [one for one in rotaries.values() if one.rotary_dim != one.head_dim]
    if partly:
        one = partly[0]
        raise UnsupportedError(
            f"implementation: got 'triton' where {one.rotary_dim} of {one.head_dim} channels turn, want 'reference'"
        )
    return "always"


def _set(attributes: Sequence[tuple[nn.Module, str, Any]]) -> None:
    """Set them all, or none."""
    for module, name, _ in attributes:
        if name in vars(module):
            got = f"{type(module).__name__}.{name}"
            raise UnsupportedError(f"model: got {got} set on the instance, want that of the class")
    for module, name, value in attributes:
        setattr(module, name, value)
