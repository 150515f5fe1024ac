"""patch and unpatch: a Llama-like model of Transformers driven by positions with any number of axes.

Positions become cos and sin once a call, and travel to the attentions beside the hidden states. Nothing is kept on a
module between calls: what a call brings is in its own arguments, also through checkpoints.
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
from mmpos.integrations.hf.anatomy import APPLY, Anatomy, dissect, rotaries_of, turning_forward
from mmpos.integrations.hf.positions import (
    ARGUMENT,
    apart,
    generate,
    prepare_inputs_for_generation,
    rows_of,
    tokens_of,
)
from mmpos.integrations.patches import Attribute, Patch, unpatched
from mmpos.positions.table import PositionTable
from mmpos.rotary.apply import apply_rotary, cos_sin
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions, Implementation
from mmpos.support.checks import one_of

__all__ = ["patch", "unpatch"]

Arguments = dict[str, Any]
Call = tuple[tuple[object, ...], Arguments]

_ROTATIONS = "mm_rotations"
"""The argument by which layers get them."""


Model = TypeVar("Model", bound=nn.Module)


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
    if any(isinstance(hook, ModelHook) for hook in anatomy.base._forward_pre_hooks.values()):
        raise InvalidInputError("model: got one that is patched, want unpatch before another patch")
    rotaries = rotaries_of(anatomy, rotary)
    fused = _fused(implementation, rotaries, anatomy)
    attributes: list[Attribute] = []
    if fused != "never":
        attributes += [Attribute(one, "forward", FusedForward(one, implementation)) for one in anatomy.attentions]
    if hasattr(model, "prepare_inputs_for_generation") and hasattr(model, "generate"):
        prepare = partial(prepare_inputs_for_generation, model)
        attributes.append(Attribute(model, "prepare_inputs_for_generation", prepare))
        attributes.append(Attribute(model, "generate", partial(generate, model, list(rotaries.values()))))
    hook = ModelHook(rotaries, fused, anatomy.names, anatomy.packs)
    Patch.install("model", model, lambda: _hooks(anatomy, hook), attributes)
    return model


def unpatch(model: Model) -> Model:
    """Remove everything that ``patch`` added.

    Args:
        model: the model that was patched, or a copy of it; changed in place.

    Returns:
        the model itself.

    Raises:
        InvalidInputError: the model is not patched, or something else has since wrapped what patch set.
    """
    return unpatched("model", model)


def _hooks(anatomy: Anatomy, hook: ModelHook) -> Iterator[RemovableHandle]:
    base = anatomy.base
    yield base.register_forward_pre_hook(hook, with_kwargs=True)
    yield base.register_forward_hook(_check_reached, with_kwargs=True)
    for attention, layer_type in zip(anatomy.attentions, anatomy.layer_types, strict=True):
        yield attention.register_forward_pre_hook(AttentionHook(layer_type), with_kwargs=True)


def _fused(implementation: Implementation, rotaries: Mapping[str | None, Rotary], anatomy: Anatomy) -> str:
    """Decide when layers rotate by positions themselves: "never", "always", or on "cuda".

    Heads with axes of their own have no cos and sin that a model's function takes: they always rotate by positions.
    """
    by_head = any(one.own_heads for one in rotaries.values())
    if by_head and (not anatomy.fuses or any(one.rotary_dim != one.head_dim for one in rotaries.values())):
        raise UnsupportedError(
            "rotary: got one with head_axes, want one for all heads: the model does not turn whole q and k by one call"
        )
    if by_head:
        return "always"
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


class Rotations:
    """Rotations that a call hands to its attentions: per layer type cos and sin, or positions and their Rotary."""

    def __init__(self, pairs: Mapping[str | None, tuple[Any, Any]]) -> None:
        self.pairs = pairs
        self.reached = False


class ModelHook:
    """Hook before the model below the head; replaces positions in its arguments by rotations for the layers.

    Args:
        rotaries: one per layer type; None stands for all layers.
        fused: "always", "never", or on "cuda": whether layers are given positions in place of cos and sin.
        names: arguments of the model, in order.
        packs: whether the model keeps documents of one row apart.
    """

    def __init__(self, rotaries: Mapping[str | None, Rotary], fused: str, names: Sequence[str], packs: bool) -> None:
        self.rotaries = dict(rotaries)
        self.fused = fused
        self.names = tuple(names)
        self.packs = packs

    def __call__(self, base: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> Call | None:
        """Return new arguments, if positions are among them."""
        position_ids = kwargs.get("position_ids")
        if isinstance(position_ids, PositionTable | DevicePositions):
            raise InvalidInputError(f"position_ids: got {type(position_ids).__name__}, want it as {ARGUMENT}")
        if ARGUMENT not in kwargs:
            return None
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        ids = arguments.pop(ARGUMENT)
        if ids is None:
            return (), arguments
        tokens = tokens_of(arguments.get("inputs_embeds"), arguments.get("input_ids"))
        arguments |= apart(ids, tokens, arguments, self.packs)
        return (), {**arguments, _ROTATIONS: self._rotations(ids, tokens)}

    def _rotations(self, ids: object, tokens: Tensor) -> Rotations:
        positions = rows_of(ids, tokens, list(self.rotaries.values()))
        if self.fused == "always" or (self.fused == "cuda" and tokens.device.type == "cuda"):
            return Rotations({kind: (positions, rotary) for kind, rotary in self.rotaries.items()})
        pairs = {kind: cos_sin(rotary, positions, "transformers") for kind, rotary in self.rotaries.items()}
        rows = (*tokens.shape[:2], -1)
        return Rotations({kind: (cos.reshape(rows), sin.reshape(rows)) for kind, (cos, sin) in pairs.items()})


class AttentionHook:
    """Hook before an attention; puts the rotations of the call in the place of the model's own cos and sin."""

    def __init__(self, layer_type: str | None) -> None:
        self.layer_type = layer_type

    def __call__(self, attention: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> Call | None:
        """Return new arguments, if rotations are among them."""
        if _ROTATIONS not in kwargs:
            return None
        arguments = dict(kwargs)
        rotations = arguments.pop(_ROTATIONS)
        rotations.reached = True
        first, second = rotations.pairs[self.layer_type]
        # Autocast, offloading and split models decide on dtype and device late: follow the model's own.
        own = arguments["position_embeddings"][0]
        fused = isinstance(second, Rotary)
        width = second.rotary_dim if fused else first.shape[-1]
        if own.dim() != 3 or own.shape[-1] != width:
            got = f"{type(attention).__name__}, whose cos has shape {tuple(own.shape)}"
            raise UnsupportedError(f"model: got {got}, want (batch, seq, {width}) as in Llama")
        first, second = (first.to(own.device), second) if fused else (first.to(own), second.to(own))
        return args, {**arguments, "position_embeddings": (first, second)}


def _check_reached(base: nn.Module, args: tuple[object, ...], kwargs: Arguments, output: object) -> None:
    """Hook after the model below the head; raises if its layers never got the rotations."""
    rotations = kwargs.get(_ROTATIONS)
    if rotations is not None and not rotations.reached:
        name = type(base).__name__
        raise UnsupportedError(
            f"model: got {name}, which hands no arguments of others to its layers, want one that does"
        )


class FusedForward:
    """Forward of an attention's class, whose ``apply_rotary_pos_emb`` also takes positions and their Rotary.

    It is the same code with another name in its globals, so that no other model sees a difference.

    Args:
        attention: the module that it is the forward of.
        implementation: as for ``apply_rotary``.
    """

    def __init__(self, attention: nn.Module, implementation: Implementation) -> None:
        forward = turning_forward(attention)
        assert forward is not None, "dissect has looked"
        rotate = _or_positions(forward.__globals__[APPLY], implementation)
        names = {**forward.__globals__, APPLY: rotate}
        copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        copied.__kwdefaults__ = forward.__kwdefaults__
        self.attention = attention
        self.implementation = implementation
        self.method = MethodType(copied, attention)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the attention."""
        return self.method(*args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return FusedForward, (self.attention, self.implementation)


def _or_positions(original: Callable[..., object], implementation: Implementation) -> Callable[..., object]:
    """Wrap ``apply_rotary_pos_emb`` of a model, so that it rotates by positions where they come in place of cos."""

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor | DevicePositions, sin: Tensor | Rotary, *args: object, **kwargs: object
    ) -> object:
        if isinstance(sin, Rotary):
            return apply_rotary(q, k, cos, sin, layout="bhsd", implementation=implementation)
        return original(q, k, cos, sin, *args, **kwargs)

    return apply_rotary_pos_emb
