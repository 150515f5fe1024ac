"""Recorders that give every token in a loaded model the same hidden state, and record the rotated keys."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.support.checks import instance
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["KeyRecorder", "LayerKeys", "diffusers", "transformers"]

Float32Array = npt.NDArray[np.float32]

_NORMS = ("k_norm", "key_layernorm", "k_layernorm")
_CACHES = ("cache", "past_key_values", "layer_past")
"""Names of the cache in an attention module, a model and its output; the first is used since Transformers 5.24."""


@dataclass(frozen=True, eq=False)
class LayerKeys:
    """Rotated keys of one layer, in the order of the calls.

    Args:
        layer: number of the layer in the model.
        keys: (batch, tokens, kv_heads, head_dim) as they enter the cache.
        reference: (kv_heads, head_dim) the key of every token before its rotation; None if the model does not expose
            it, because q, k and v are computed in one product or a norm follows the rotation.
    """

    layer: int
    keys: Float32Array
    reference: Float32Array | None


def transformers(model: nn.Module, *calls: Mapping[str, Any], generate: int = 0) -> tuple[LayerKeys, ...]:
    """Run a Transformers model and return the rotated keys of every layer.

    Attention receives the same hidden state for all tokens, whatever the weights, so that the keys of a layer differ
    only in their rotation. Keys are read as they enter the cache, wherever they are rotated.

    Args:
        model: a PreTrainedModel, with or without a head, with or without ``mmpos.integrations.hf.patch``.
        calls: the arguments of each call to forward, as returned by a processor; several calls are chunks of the same
            rows, and each uses the cache of the previous one. A cache in the first call, such as a StaticCache, is used
            for all calls.
        generate: number of tokens to generate after the single call, with ``model.generate``; their keys follow those
            of the prompt, except that of the last token, which never passes through forward.

    Returns:
        Layers with keys, in order; layers without their own keys (linear attention, convolutions, shared keys) are
        omitted.

    Raises:
        InvalidInputError: there is no call, or several with generate; a call is not a mapping; the model is not a
            module.
        UnsupportedError: no keys entered a cache, or a call returned no cache for the next one.
    """
    with needed_for("probe.transformers", extra="hf"):
        import torch

    if not calls or (generate and len(calls) > 1):
        raise InvalidInputError(f"calls: got {len(calls)}, want {'1 with generate' if generate else '1 or more'}")
    for index, call in enumerate(calls):
        instance(f"calls[{index}]", call, Mapping, "a processor")  # type: ignore[type-abstract]
    with KeyRecorder(model) as recorder, torch.no_grad():
        if generate:
            named: Any = {"max_new_tokens": generate, "min_new_tokens": generate, "do_sample": False}
            model.generate(**calls[0], **named)  # type: ignore[operator]
        else:
            cache: dict[str, Any] = {}
            for index, call in enumerate(calls, start=1):
                output = model(**{"use_cache": True, **cache, **call})
                name = next((name for name in _CACHES if name in output), None)
                if name is None and index < len(calls):
                    raise UnsupportedError("model: got an output without a cache, want a cache for the next call")
                cache = {} if name is None else {name: output[name]}
    return recorder.layers


def diffusers(transformer: nn.Module, call: Mapping[str, Any]) -> tuple[LayerKeys, ...]:
    """Run a diffusers transformer and return the rotated keys of every self-attention.

    All tokens get the same key right before the rotation: that key replaces the output of the last module before the
    rotation, which is a norm or else the projection. Keys are read from the calls to scaled_dot_product_attention.

    Args:
        transformer: a ModelMixin, with or without ``mmpos.integrations.diffusers.patch``.
        call: arguments of forward, as passed by the pipeline.

    Returns:
        Layers in the order of their attention calls, with tokens in the order in which attention receives them, and the
        key before the rotation.

    Raises:
        InvalidInputError: the call is not a mapping, or the transformer is not a module.
        UnsupportedError: no attention module of the transformer calls scaled_dot_product_attention.
    """
    with needed_for("probe.diffusers", extra="diffusers"):
        import torch

        from mmpos.analysis.probe.attending import Attending

    instance("transformer", transformer, torch.nn.Module, "a ModelMixin of diffusers")
    instance("call", call, Mapping, "the arguments from the pipeline")  # type: ignore[type-abstract]
    with torch.no_grad(), Attending(transformer) as attending:
        transformer(**call)
    if not attending.keys:
        got = f"transformer: got no keys from {type(transformer).__name__}"
        raise UnsupportedError(f"{got}, want attention that calls scaled_dot_product_attention")
    pairs = zip(attending.keys, attending.references, strict=True)
    return tuple(LayerKeys(n, _numpy(keys), _numpy(reference)) for n, (keys, reference) in enumerate(pairs))


class KeyRecorder:
    """Record the keys of every call of a model inside a ``with`` block, without changing the model.

    It records the calls made by your own code, such as a trainer or a pipeline. ``use_cache=False`` works as well.
    With gradient checkpointing, call ``backward`` inside the block: layers that ``backward`` recomputes are not
    recorded again.

    Args:
        model: a PreTrainedModel.

    Raises:
        InvalidInputError: the model is not a torch module.
        UnsupportedError: no attention module of the model accepts a cache.
    """

    def __init__(self, model: nn.Module) -> None:
        with needed_for("probe.KeyRecorder", extra="hf"):
            from torch import nn

        instance("model", model, nn.Module, "from_pretrained of Transformers")
        self._attentions = [
            module
            for module in model.modules()
            if re.search("(?<!Cross)Attention", type(module).__name__)
            and hasattr(module, "layer_idx")
            and _cache_of(module)
        ]
        if not self._attentions:
            raise UnsupportedError(f"model: got {type(model).__name__}, want a model with attention that takes a cache")
        self._taps: dict[int, _Tap] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> KeyRecorder:
        for attention in self._attentions:
            tap = self._taps.setdefault(attention.layer_idx, _Tap())  # type: ignore[arg-type]
            self._handles.append(attention.register_forward_pre_hook(tap.before, with_kwargs=True))
            self._handles.append(attention.register_forward_hook(tap.after, always_call=True))
            parts = (getattr(attention, name, None) for name in (*_NORMS, "k_proj"))
            part = next((part for part in parts if part is not None), None)
            if part is not None:
                self._handles.append(part.register_forward_hook(tap.unrotated))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def layers(self) -> tuple[LayerKeys, ...]:
        """The layers with keys, in order."""
        layers = tuple(
            LayerKeys(layer, np.concatenate(tap.keys, axis=1), tap.reference)
            for layer, tap in sorted(self._taps.items())
            if tap.keys
        )
        if not layers:
            raise UnsupportedError("model: got no keys from its calls, want a model with attention that fills a cache")
        return layers


class _Tap:
    """The recorded keys of one attention module."""

    def __init__(self) -> None:
        self.keys: list[Float32Array] = []
        self._state: Tensor | None = None
        self._cache: Any = None
        self._unrotated: Tensor | None = None
        self._outputs: list[Float32Array] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Give every token the hidden state with the largest norm in the first call, and record keys from the cache."""
        name = _cache_of(module)
        hidden = args[0] if args else kwargs["hidden_states"]
        if self._state is None:
            rows = hidden.detach().flatten(0, -2)
            self._state = rows[rows.norm(dim=-1).argmax()].clone()[None, None]  # padding may be zero
        hidden = self._state.to(hidden).expand_as(hidden)
        self._cache = kwargs.get(name)
        if self._cache is None:
            self._cache = kwargs[name] = _no_cache()
        update = self._cache.update

        def record(key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
            latent = getattr(module, "qk_rope_head_dim", key.shape[-1]) == value.shape[-1] != key.shape[-1]
            rotated = value if latent else key  # latent attention caches the rotated channels as the value
            if not _recomputing():
                self.keys.append(_numpy(rotated.transpose(1, 2)))
            return update(key, value, *rest, **named)

        self._cache.update = record
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def after(self, *_: object) -> None:
        """Stop recording from the cache, even after an exception."""
        if self._cache is not None:
            vars(self._cache).pop("update", None)
            self._cache = None

    def unrotated(self, module: nn.Module, args: object, output: Tensor) -> None:
        """Record the key before its rotation, from its projection or norm."""
        if not _recomputing():
            self._outputs.append(_numpy(output[:1]))

    @property
    def reference(self) -> Float32Array | None:
        """(kv_heads, head_dim) the key before its rotation."""
        heads, head_dim = self.keys[0].shape[2:]
        rows = []
        for output, keys in zip(self._outputs, self.keys, strict=False):
            wide = output.reshape(1, *keys.shape[1:]) if output.ndim == 3 else output
            if wide.size != keys[:1].size or wide.shape[-1] != head_dim:
                return None
            turned = wide.shape[1] == heads and (wide.shape[1] != wide.shape[2] or _varies(wide))
            rows.append(wide.swapaxes(1, 2) if turned else wide)
        if not rows:
            return None
        row = np.concatenate(rows, axis=1)
        return None if _varies(row) else row[0, 0]  # a norm after the rotation receives rotated keys


def _cache_of(attention: nn.Module) -> str:
    """Return the name of an attention module's cache argument, or an empty string."""
    parameters = inspect.signature(attention.forward).parameters
    return next((name for name in _CACHES if name in parameters), "")


def _recomputing() -> bool:
    """Return whether this is a backward pass, which repeats the forward pass of checkpointed layers."""
    from torch.utils.module_tracker import ModuleTracker

    return bool(ModuleTracker().is_bw)


def _varies(row: Float32Array) -> bool:
    """Return whether (1, tokens, …) keys differ between tokens by more than rounding."""
    return float(np.abs(row - row[:, :1]).max()) > 0.02 * float(np.abs(row).max())


def _no_cache() -> Any:
    """Return a cache that stores nothing."""
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    cache.update = lambda key, value, *_, **__: (key, value)
    return cache


def _numpy(tensor: Tensor) -> Float32Array:
    array: Float32Array = tensor.detach().float().cpu().clone().numpy()  # the cache may overwrite its tensors
    return array
