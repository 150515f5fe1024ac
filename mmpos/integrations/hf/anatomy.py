"""The structure of Llama-like models in Transformers: where they rotate q and k, and which Rotary fits them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary.config import Rotary
from mmpos.rotary.hf_config import hf_pairing

__all__ = ["APPLY", "Anatomy", "dissect", "rotaries_of", "rotating_forward"]

APPLY = "apply_rotary_pos_emb"
"""Name of the function that the attention of every Llama-like model calls to rotate q and k."""

_MASKS_IGNORE_POSITIONS = ("afmoe", "granitemoehybrid")
"""Model types that build their masks without ``position_ids`` in Transformers 5.24."""


@dataclass(frozen=True, eq=False)
class Anatomy:
    """Parts of a Llama-like model that use positions.

    Args:
        base: the model below the head; it embeds the tokens and computes cos and sin in its rotary_emb once per call.
        attentions: the attention module of each layer, which receives cos and sin as ``position_embeddings``.
        layer_types: the layer type of each attention; None if all layers use the same rotation.
    """

    base: nn.Module
    attentions: tuple[nn.Module, ...]
    layer_types: tuple[str | None, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the base's parameters, in order."""
        return tuple(_parameters(type(self.base).forward))[1:]

    @property
    def packs(self) -> bool:
        """Whether the documents of a row stay separate: only attention mixes tokens, and its masks separate them."""
        mixes = any(isinstance(module, nn.Conv1d) for module in self.base.modules())
        return not mixes and getattr(self.base.config, "model_type", "") not in _MASKS_IGNORE_POSITIONS

    @property
    def fuses(self) -> bool:
        """Whether attentions can rotate by positions: one call rotates q and k, and nothing else uses cos and sin."""
        return all(_rotates_q_and_k(attention) for attention in self.attentions)

    def rotation(self, layer_type: str | None) -> tuple[int, float]:
        """Return the number of channels that layers of a type rotate, and the factor applied to their cos and sin."""
        prefix, rotary_emb = "" if layer_type is None else f"{layer_type}_", self.base.rotary_emb
        scaling = "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling"
        return 2 * getattr(rotary_emb, f"{prefix}inv_freq").shape[-1], float(getattr(rotary_emb, scaling, 1.0))


def dissect(model: nn.Module) -> Anatomy:
    """Return the parts of a model, or raise UnsupportedError if it is not built like Llama."""
    base: Any = getattr(model, "base_model", model)
    rotary_emb = getattr(base, "rotary_emb", None)
    if not isinstance(rotary_emb, nn.Module) or not isinstance(getattr(base, "layers", None), nn.ModuleList):
        raise _unlike(model, "has no rotary_emb next to its layers")
    rotations = sum(isinstance(module, type(rotary_emb)) for module in base.modules())
    if rotations > 1:
        raise _unlike(model, f"has {rotations} modules of type {type(rotary_emb).__name__}")
    attentions: list[nn.Module] = []
    for i, layer in enumerate(base.layers):
        attention = getattr(layer, "self_attn", None)
        forward = rotating_forward(attention) if isinstance(attention, nn.Module) else None
        if attention is None or forward is None or "position_embeddings" not in _parameters(forward):
            raise _unlike(model, f"does not call {APPLY} with position_embeddings in the self_attn of layer {i}")
        if not hasattr(attention, "head_dim"):
            raise _unlike(model, f"has no head_dim in the self_attn of layer {i}")
        attentions.append(attention)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters(type(base).forward).values()):
        raise _unlike(model, "does not forward extra keyword arguments to its layers")
    types: tuple[str | None, ...] = (None,) * len(attentions)
    if "layer_type" in _parameters(type(rotary_emb).forward):
        types = tuple(base.config.layer_types[: len(attentions)])
        for kind in dict.fromkeys(types):
            if not hasattr(rotary_emb, f"{kind}_inv_freq"):
                raise _unlike(model, f"does not rotate its layers of type {kind!r}")
    elif not hasattr(rotary_emb, "inv_freq"):
        raise _unlike(model, "has a rotary_emb without inv_freq")
    return Anatomy(base, tuple(attentions), types)


def rotating_forward(attention: nn.Module) -> FunctionType | None:
    """Return the forward of an attention's class if it calls a global ``apply_rotary_pos_emb``, else None."""
    forward = inspect.unwrap(type(attention).forward)
    if not isinstance(forward, FunctionType) or APPLY not in forward.__code__.co_names:
        return None
    return forward if callable(forward.__globals__.get(APPLY)) else None


def _rotates_q_and_k(attention: nn.Module) -> bool:
    forward = rotating_forward(attention)
    assert forward is not None, "checked by dissect"
    parameters = tuple(_parameters(forward.__globals__[APPLY]))[:4]
    inner = [module for module in attention.modules() if module is not attention]
    return parameters == ("q", "k", "cos", "sin") and not any(
        "position_embeddings" in _parameters(type(module).forward) for module in inner
    )


def rotaries_of(anatomy: Anatomy, rotary: Rotary | Mapping[str, Rotary]) -> dict[str | None, Rotary]:
    """Return the Rotary for each layer type, after checking that it fits the model."""
    types = sorted({kind for kind in anatomy.layer_types if kind is not None})
    rotaries: dict[str | None, Rotary]
    if not types:
        if not isinstance(rotary, Rotary):
            raise InvalidInputError(
                f"rotary: got {type(rotary).__name__}, want one Rotary, because all layers use the same rotation"
            )
        rotaries = {None: rotary}
    else:
        if not isinstance(rotary, Mapping) or sorted(rotary) != types:
            got = sorted(rotary) if isinstance(rotary, Mapping) else type(rotary).__name__
            raise InvalidInputError(f"rotary: got {got}, want a mapping from each layer type of {types} to a Rotary")
        rotaries = {kind: rotary[kind] for kind in types}
    for kind, checked in rotaries.items():
        _check_rotary("rotary" if kind is None else f"rotary[{kind!r}]", checked, anatomy, kind)
    axes = sorted({checked.axes for checked in rotaries.values()})
    if len(axes) > 1:
        raise InvalidInputError(f"rotary: got {axes} axes, want the same number for all layer types")
    return rotaries


def _check_rotary(name: str, rotary: Rotary, anatomy: Anatomy, layer_type: str | None) -> None:
    if not isinstance(rotary, Rotary):
        raise InvalidInputError(f"{name}: got {type(rotary).__name__}, want a Rotary")
    model = getattr(anatomy.base.config, "model_type", "")
    if hf_pairing(anatomy.base.config) == "adjacent":
        raise UnsupportedError(f"model: got {model!r}, which has pairing 'adjacent', want pairing 'half'")
    head_dim = anatomy.attentions[anatomy.layer_types.index(layer_type)].head_dim
    rotary_dim, attention_factor = anatomy.rotation(layer_type)
    # Transformers sometimes stores this factor as float32.
    close = math.isclose(rotary.attention_factor, attention_factor, rel_tol=1e-6)
    wanted: dict[str, tuple[object, object]] = {
        "head_dim": (rotary.head_dim, head_dim),
        "rotary_dim": (rotary.rotary_dim, rotary_dim),
        "pairing": (rotary.pairing, "half"),
        "attention_factor": (rotary.attention_factor, rotary.attention_factor if close else attention_factor),
    }
    for field, (got, want) in wanted.items():
        if got != want:
            raise InvalidInputError(f"{name}.{field}: got {got!r}, want {want!r} as in the model")


def _parameters(forward: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(forward).parameters


def _unlike(model: nn.Module, why: str) -> UnsupportedError:
    return UnsupportedError(f"model: got {type(model).__name__}, which {why}, want a model built like Llama")
