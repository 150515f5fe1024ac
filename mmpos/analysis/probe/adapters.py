"""Keys of a model that is at hand, as its attention gets them, while every token has one hidden state."""

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
"""How an attention, a model and its output may call the cache; the first since Transformers 5.24."""


@dataclass(frozen=True, eq=False)
class LayerKeys:
    """Rotated keys of one layer, in the order in which calls brought them.

    Args:
        layer: its number in the model.
        keys: (batch, tokens, kv_heads, head_dim) as they enter the cache.
        reference: (kv_heads, head_dim) the key of every token before its rotation; None where the model does not show
            it: q, k and v are one product, or a norm stands after the rotation.
    """

    layer: int
    keys: Float32Array
    reference: Float32Array | None


def transformers(model: nn.Module, *calls: Mapping[str, Any], generate: int = 0) -> tuple[LayerKeys, ...]:
    """Run a model of Transformers and return the rotated keys of every layer.

    Its attention sees one hidden state for all tokens, whatever the weights are, so that keys of a layer differ by
    their rotation alone. Where they are rotated does not matter: what enters the cache is read.

    Args:
        model: a PreTrainedModel, with a head or without, patched by ``mmpos.integrations.hf.patch`` or not.
        calls: arguments of forward, as a processor gives them; several are chunks of the same rows, and each goes on
            with the cache of the one before. A cache in the first, a StaticCache perhaps, is that of all.
        generate: how many tokens to generate after the only call, by ``model.generate``; their keys follow those of the
            prompt, but for the last of them, which no forward has seen.

    Returns:
        layers with keys, in order; layers of other kinds (linear attention, convolutions, keys shared with another) are
        not among them.

    Raises:
        InvalidInputError: there is no call, or several with generate; a call is no mapping, or the model no module.
        UnsupportedError: nothing entered a cache, or a call gave none for the next one.
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
                    raise UnsupportedError("model: got an output without a cache, want one for the next call")
                cache = {} if name is None else {name: output[name]}
    return recorder.layers


def diffusers(transformer: nn.Module, call: Mapping[str, Any]) -> tuple[LayerKeys, ...]:
    """Run a transformer of diffusers and return the rotated keys of every self-attention.

    All tokens get one key right before it is rotated, in place of what the last module before that gives: a norm, or
    else the projection. Keys are read where torch attends.

    Args:
        transformer: a ModelMixin, patched by ``mmpos.integrations.diffusers.patch`` or not.
        call: arguments of forward, as its pipeline gives them.

    Returns:
        layers in the order in which they attend, their tokens in the order of their attention; each with its key before
        the rotation.

    Raises:
        InvalidInputError: the call is no mapping, or the transformer no module.
        UnsupportedError: no attention of the transformer attended by scaled_dot_product_attention.
    """
    with needed_for("probe.diffusers", extra="diffusers"):
        import torch

        from mmpos.analysis.probe.attending import Attending

    instance("transformer", transformer, torch.nn.Module, "a ModelMixin of diffusers")
    instance("call", call, Mapping, "what the pipeline gives")  # type: ignore[type-abstract]
    with torch.no_grad(), Attending(transformer) as attending:
        transformer(**call)
    if not attending.keys:
        got = f"transformer: got no keys from {type(transformer).__name__}"
        raise UnsupportedError(f"{got}, want attentions that end in scaled_dot_product_attention")
    pairs = zip(attending.keys, attending.references, strict=True)
    return tuple(LayerKeys(n, _numpy(keys), _numpy(reference)) for n, (keys, reference) in enumerate(pairs))


class KeyRecorder:
    """Record the keys of every call of a model, inside a ``with`` block, and leave the model as it was.

    It is for calls of your own: a trainer's, a pipeline's. ``use_cache=False`` works as well. Under gradient
    checkpointing call ``backward`` inside the block: it computes layers anew, which is not recorded again.

    Args:
        model: a PreTrainedModel.

    Raises:
        InvalidInputError: it is no module of torch.
        UnsupportedError: no attention of the model takes a cache.
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
            raise UnsupportedError(f"model: got {type(model).__name__}, want one whose attention takes a cache")
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
        """Layers with keys, in order."""
        layers = tuple(
            LayerKeys(layer, np.concatenate(tap.keys, axis=1), tap.reference)
            for layer, tap in sorted(self._taps.items())
            if tap.keys
        )
        if not layers:
            raise UnsupportedError("model: got no keys from its calls, want one whose attention fills a cache")
        return layers


class _Tap:
    """What one attention takes and gives."""

    def __init__(self) -> None:
        self.keys: list[Float32Array] = []
        self._state: Tensor | None = None
        self._cache: Any = None
        self._unrotated: Tensor | None = None
        self._outputs: list[Float32Array] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Give every token one hidden state, the longest of the first call, and listen to the cache."""
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

        def listen(key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
            latent = getattr(module, "qk_rope_head_dim", key.shape[-1]) == value.shape[-1] != key.shape[-1]
            rotated = value if latent else key  # latent attention caches what turns beside what does not
            if not _recomputing():
                self.keys.append(_numpy(rotated.transpose(1, 2)))
            return update(key, value, *rest, **named)

        self._cache.update = listen
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def after(self, *_: object) -> None:
        """Let the cache be, also after an exception."""
        if self._cache is not None:
            vars(self._cache).pop("update", None)
            self._cache = None

    def unrotated(self, module: nn.Module, args: object, output: Tensor) -> None:
        """Keep the product that makes the key, or its norm."""
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
        return None if _varies(row) else row[0, 0]  # a norm after the rotation sees keys that are turned


def _cache_of(attention: nn.Module) -> str:
    """Find the argument by which an attention takes its cache; empty if none."""
    parameters = inspect.signature(attention.forward).parameters
    return next((name for name in _CACHES if name in parameters), "")


def _recomputing() -> bool:
    """Tell whether this runs in a backward pass, as the forward of a checkpointed layer does again."""
    from torch.utils.module_tracker import ModuleTracker

    return bool(ModuleTracker().is_bw)


def _varies(row: Float32Array) -> bool:
    """Tell whether tokens, (1, tokens, …), differ by more than rounding."""
    return float(np.abs(row - row[:, :1]).max()) > 0.02 * float(np.abs(row).max())


def _no_cache() -> Any:
    """Make a cache that keeps nothing."""
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    cache.update = lambda key, value, *_, **__: (key, value)
    return cache


def _numpy(tensor: Tensor) -> Float32Array:
    array: Float32Array = tensor.detach().float().cpu().clone().numpy()  # the cache may overwrite its tensors
    return array
