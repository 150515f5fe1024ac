"""patch and unpatch: multi-axis positions for Llama-like models in Transformers.

Each call converts positions to cos and sin once and passes these to the attention modules as arguments. Modules keep no
state between calls, so gradient checkpointing works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.hf.anatomy import APPLY, Anatomy, dissect, rotaries_of, rotating_forward
from mmpos.integrations.hf.positions import (
    ARGUMENT,
    checked_positions,
    generate,
    prepare_inputs_for_generation,
    separating_arguments,
    tokens_of,
)
from mmpos.positions.table import PositionTable
from mmpos.rotary.apply import apply_rotary, cos_sin
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions, Implementation
from mmpos.support.checks import one_of

__all__ = ["patch", "unpatch"]

Arguments = dict[str, Any]
Call = tuple[tuple[object, ...], Arguments]
Attribute = tuple[nn.Module, str, Callable[..., object]]
"""A module, and the name and value of an attribute set on it."""

_MARK = "_mmpos_patch"
"""Attribute of a patched model: the handles of the hooks and the attributes that ``patch`` added."""

_ROTATIONS = "mm_rotations"
"""Name of the argument that passes rotations to the layers."""

Model = TypeVar("Model", bound=nn.Module)


def patch(model: Model, rotary: Rotary | Mapping[str, Rotary], *, implementation: Implementation = "auto") -> Model:
    """Add the argument ``mm_position_ids`` to ``forward`` and ``generate`` of a Llama-like model.

    Without this argument, the model's outputs stay bit-identical. With it, every layer uses ``rotary`` to rotate q
    and k by these positions, and ``position_ids`` affects only masks. Weights and everything else stay unchanged.

    Args:
        model: a PreTrainedModel with or without a head; changed in place.
        rotary: a Rotary with the head_dim, rotary_dim, pairing and attention factor of the model. Models whose layer
            types have different rotations (Gemma 3) require a mapping from each layer type to a Rotary.
        implementation: "reference" passes cos and sin to the model's own function; "triton" replaces this function with
            ``mmpos.rotary.apply_rotary``; "auto" selects "triton" for CUDA tensors if triton is installed and supports
            the attention modules, else "reference".

    Returns:
        The model itself.

    Raises:
        UnsupportedError: the model is not built like Llama, or its rotation cannot be replaced by a Rotary.
        InvalidInputError: rotary does not fit the model, or the model is already patched.
    """
    one_of("implementation", implementation, ("auto", "reference", "triton"))
    anatomy = dissect(model)
    if any(isinstance(hook, ModelHook) for hook in anatomy.base._forward_pre_hooks.values()):
        raise InvalidInputError("model: got a patched model; call unpatch first")
    rotaries = rotaries_of(anatomy, rotary)
    fused = _fused(implementation, rotaries, anatomy)
    attributes: list[Attribute] = []
    if fused != "never":
        attributes += [
            (attention, "forward", FusedForward(attention, implementation)) for attention in anatomy.attentions
        ]
    if hasattr(model, "prepare_inputs_for_generation") and hasattr(model, "generate"):
        prepare = partial(prepare_inputs_for_generation, model)
        attributes.append((model, "prepare_inputs_for_generation", prepare))
        attributes.append((model, "generate", partial(generate, model, list(rotaries.values()))))
    for module, name, _ in attributes:
        if name in vars(module):
            got = f"{type(module).__name__}.{name}"
            raise UnsupportedError(f"model: got {got} set on the instance, want the method of the class")
    for attribute in attributes:
        setattr(*attribute)
    hook = ModelHook(rotaries, fused, anatomy.names, anatomy.packs)
    setattr(model, _MARK, ([*_hooks(anatomy, hook)], attributes))
    return model


def unpatch(model: Model) -> Model:
    """Remove everything that ``patch`` added.

    Args:
        model: a patched model or a copy of one; changed in place.

    Returns:
        The model itself.

    Raises:
        InvalidInputError: the model is not patched, or other code has replaced an attribute set by ``patch``.
    """
    mark = vars(model).get(_MARK)
    if mark is None:
        raise InvalidInputError(f"model: got an unpatched {type(model).__name__}, want the patched module")
    handles, attributes = mark
    for module, name, value in attributes:
        if vars(module).get(name) is not value:
            got = f"{type(module).__name__}.{name}"
            raise InvalidInputError(f"model: got {got} that was replaced after patch, want the value that patch set")
    for handle in handles:
        handle.remove()
    for module, name, _ in attributes:
        delattr(module, name)
    delattr(model, _MARK)
    return model


def _hooks(anatomy: Anatomy, hook: ModelHook) -> Iterator[RemovableHandle]:
    base = anatomy.base
    yield base.register_forward_pre_hook(hook, with_kwargs=True)
    yield base.register_forward_hook(_check_reached, with_kwargs=True)
    for attention, layer_type in zip(anatomy.attentions, anatomy.layer_types, strict=True):
        yield attention.register_forward_pre_hook(AttentionHook(layer_type), with_kwargs=True)


def _fused(implementation: Implementation, rotaries: Mapping[str | None, Rotary], anatomy: Anatomy) -> str:
    """Return when layers rotate by positions directly: "never", "always", or only on CUDA ("cuda").

    A model's function takes a single cos and sin for all heads, so heads with separate axes must rotate by positions.
    """
    by_head = any(each.own_heads for each in rotaries.values())
    partial_rotaries = [each for each in rotaries.values() if each.rotary_dim != each.head_dim]
    if by_head and (partial_rotaries or not anatomy.fuses):
        raise UnsupportedError(
            "rotary: got head_axes, want the same axes for all heads, "
            "because the model does not rotate whole q and k in one call"
        )
    if by_head:
        return "always"
    if implementation == "reference":
        return "never"
    if implementation == "auto":
        wrapped = any("forward" in vars(attention) for attention in anatomy.attentions)  # offloaded by accelerate
        supported = anatomy.fuses and not wrapped and not partial_rotaries
        return "cuda" if supported and find_spec("triton") is not None else "never"
    if not anatomy.fuses:
        name = type(anatomy.attentions[0]).__name__
        raise UnsupportedError(
            f"implementation: got 'triton' for {name}, which does not rotate q and k in one call, want 'reference'"
        )
    for each in partial_rotaries:
        raise UnsupportedError(
            f"implementation: got 'triton' for {each.rotary_dim} of {each.head_dim} channels, want 'reference'"
        )
    return "always"


class Rotations:
    """Rotations for attention modules: for each layer type, either cos and sin or positions and a Rotary."""

    def __init__(self, pairs: Mapping[str | None, tuple[Any, Any]]) -> None:
        self.pairs = pairs
        self.reached = False


class ModelHook:
    """Forward pre-hook of the model below the head; it replaces positions in the arguments with the layers' rotations.

    Args:
        rotaries: a Rotary for each layer type; the key None means all layers.
        fused: when layers receive positions instead of cos and sin: "always", "never", or only on CUDA ("cuda").
        names: names of the parameters of the model's ``forward``, in order.
        packs: whether the model keeps the documents of a row separate.
    """

    def __init__(self, rotaries: Mapping[str | None, Rotary], fused: str, names: Sequence[str], packs: bool) -> None:
        self.rotaries = dict(rotaries)
        self.fused = fused
        self.names = tuple(names)
        self.packs = packs

    def __call__(self, base: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> Call | None:
        """Return new arguments if the call's arguments include positions, else None."""
        position_ids = kwargs.get("position_ids")
        if isinstance(position_ids, PositionTable | DevicePositions):
            raise InvalidInputError(f"position_ids: got {type(position_ids).__name__}, want it in {ARGUMENT}")
        if ARGUMENT not in kwargs:
            return None
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        ids = arguments.pop(ARGUMENT)
        if ids is None:
            return (), arguments
        tokens = tokens_of(arguments.get("inputs_embeds"), arguments.get("input_ids"))
        arguments |= separating_arguments(ids, tokens, arguments, self.packs)
        return (), {**arguments, _ROTATIONS: self._rotations(ids, tokens)}

    def _rotations(self, ids: object, tokens: Tensor) -> Rotations:
        positions = checked_positions(ids, tokens, list(self.rotaries.values()))
        if self.fused == "always" or (self.fused == "cuda" and tokens.device.type == "cuda"):
            return Rotations({kind: (positions, rotary) for kind, rotary in self.rotaries.items()})
        pairs = {kind: cos_sin(rotary, positions, "transformers") for kind, rotary in self.rotaries.items()}
        rows = (*tokens.shape[:2], -1)
        return Rotations({kind: (cos.reshape(rows), sin.reshape(rows)) for kind, (cos, sin) in pairs.items()})


class AttentionHook:
    """Forward pre-hook of an attention module; it replaces the model's own cos and sin with the call's rotations."""

    def __init__(self, layer_type: str | None) -> None:
        self.layer_type = layer_type

    def __call__(self, attention: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> Call | None:
        """Return new arguments if the call's arguments include rotations, else None."""
        if _ROTATIONS not in kwargs:
            return None
        arguments = dict(kwargs)
        rotations = arguments.pop(_ROTATIONS)
        rotations.reached = True
        first, second = rotations.pairs[self.layer_type]
        # Autocast, offloading and split models determine dtype and device late, so use those of the model's own cos.
        own = arguments["position_embeddings"][0]
        fused = isinstance(second, Rotary)
        width = second.rotary_dim if fused else first.shape[-1]
        if own.dim() != 3 or own.shape[-1] != width:
            got = f"cos of shape {tuple(own.shape)} in {type(attention).__name__}"
            raise UnsupportedError(f"model: got {got}, want (batch, seq, {width}) as in Llama")
        first, second = (first.to(own.device), second) if fused else (first.to(own), second.to(own))
        return args, {**arguments, "position_embeddings": (first, second)}


def _check_reached(base: nn.Module, args: tuple[object, ...], kwargs: Arguments, output: object) -> None:
    """Raise an error, in a forward hook of the model below the head, if layers did not receive a call's rotations."""
    rotations = kwargs.get(_ROTATIONS)
    if rotations is not None and not rotations.reached:
        raise UnsupportedError(
            f"model: got {type(base).__name__}, which does not forward extra keyword arguments to its layers, "
            "want a model built like Llama"
        )


class FusedForward:
    """The ``forward`` of an attention class, with an ``apply_rotary_pos_emb`` that also accepts positions and a Rotary.

    It runs the same code with a copy of the globals, so no other model is affected.

    Args:
        attention: the module whose ``forward`` is replaced.
        implementation: as for ``apply_rotary``.
    """

    def __init__(self, attention: nn.Module, implementation: Implementation) -> None:
        forward = rotating_forward(attention)
        assert forward is not None, "checked by dissect"
        rotate = _with_positions(forward.__globals__[APPLY], implementation)
        scope = {**forward.__globals__, APPLY: rotate}
        copied = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
        copied.__kwdefaults__ = forward.__kwdefaults__
        self.attention = attention
        self.implementation = implementation
        self.method = MethodType(copied, attention)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Compute the attention."""
        return self.method(*args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return FusedForward, (self.attention, self.implementation)


def _with_positions(original: Callable[..., object], implementation: Implementation) -> Callable[..., object]:
    """Wrap a model's ``apply_rotary_pos_emb`` so that it also rotates by positions, passed instead of cos."""

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor | DevicePositions, sin: Tensor | Rotary, *args: object, **kwargs: object
    ) -> object:
        if isinstance(sin, Rotary):
            return apply_rotary(q, k, cos, sin, layout="bhsd", implementation=implementation)
        return original(q, k, cos, sin, *args, **kwargs)

    return apply_rotary_pos_emb
