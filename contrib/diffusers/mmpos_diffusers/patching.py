"""patch and unpatch: a diffusers transformer that accepts a PositionTable for images of mixed sizes, padded or packed.

All attention processors rotate q and k directly before attention. ``patch`` therefore replaces each processor's
function with a copy whose globals contain an attention function that rotates by positions. Blocks receive the rows of a
call as arguments, even with gradient checkpointing, and no module keeps state between calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mmpos import PositionTable
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.diffusers import TransformerSettings, from_diffusers
from mmpos.rotary import Rotary
from mmpos_diffusers.anatomy import Arguments, TransformerAnatomy, anatomy_of
from mmpos_diffusers.rows import Rows, Streams

__all__ = ["patch", "unpatch"]

Transformer = TypeVar("Transformer", bound=nn.Module)
Call = tuple[tuple[object, ...], Arguments]

_KEY = "mm_rows"
"""Key in joint_attention_kwargs under which blocks receive rows if no module computes their rotations."""


@dataclass(frozen=True, eq=False)
class _Patch:
    """Changes to a transformer, which ``unpatch`` undoes.

    Args:
        handles: handles of the registered hooks.
        rope: module whose forward was replaced.
        forward: the function that replaced it.
        processors: attention processors, each with the subclass that replaced its class.
    """

    handles: Sequence[RemovableHandle]
    rope: nn.Module
    forward: Callable[..., object]
    processors: Sequence[tuple[Any, type]]


_PATCH = "_mmpos_patch"
"""Attribute of a patched transformer that contains its _Patch."""

_MARK = "_mmpos_rotates"
"""Attribute that marks processor classes that rotate by positions."""

_STREAMS: ContextVar[Streams | None] = ContextVar("mmpos_streams", default=None)
"""Streams of the transformer call that is running."""

_BLOCK: ContextVar[Rows | None] = ContextVar("mmpos_block", default=None)
"""Rows of the block that is running."""

_ATTEND: ContextVar[Callable[..., Tensor] | None] = ContextVar("mmpos_attend", default=None)
"""Method of these rows by which the running processor attends."""


def patch(transformer: Transformer, rotary: Rotary | None = None, *, pipeline: object = None) -> Transformer:
    """Add a ``positions`` argument to a diffusers transformer, for images of mixed sizes, padded or packed.

    Calls without positions return the same bits as before. In ``transformer(…, positions=table)``, every image and
    reference is rotated by its own positions, and the table replaces ids, shapes and padding masks (img_ids, txt_ids,
    img_shapes, encoder_hidden_states_mask …). A batch has one of two layouts:

    - one document per row, with its text and its images padded on the right to the longest text and images;
    - all documents packed into one row, first all texts, then all images; documents do not attend to each other.

    If texts are used in cross-attention (Wan, LTX) or refined before they join the images (HunyuanVideo),
    encoder_hidden_states has one row per document in both layouts. Each row has one timestep, but if tokens may have
    separate timesteps (Wan, LTX), a packed row also accepts one timestep per document. A transformer that cuts patches
    itself accepts images of mixed sizes from ``pack_latents``.

    A context-parallel rank passes the table's ``shard`` and the tokens at ``shard_indices``; diffusers'
    ``enable_parallelism`` is not supported.

    Args:
        transformer: instance of a class in ``ANATOMIES``; changed in place.
        rotary: rotation of q and k, for example with another scaling; None uses the rotation that ``from_diffusers``
            reads.
        pipeline: see ``from_diffusers``.

    Returns:
        The transformer itself.

    Raises:
        UnsupportedError: the class or a processor is not supported, or another patched transformer shares a processor.
        InvalidInputError: the transformer is already patched, or the heads, axes or pairs of rotary differ from those
            of the transformer.
    """
    if hasattr(transformer, _PATCH):
        raise InvalidInputError("transformer: got a patched transformer; call unpatch first")
    anatomy = anatomy_of(transformer)
    settings = from_diffusers(transformer, pipeline)
    settings = settings if rotary is None else replace(settings, rotary=_checked_rotary(rotary, settings.rotary))
    hook = TransformerHook(transformer, anatomy, settings)
    rope = getattr(transformer, anatomy.rope)
    if "forward" in vars(rope):
        got = f"{type(rope).__name__}.forward"
        raise UnsupportedError(f"transformer: got {got} set on the instance, want the method of the class")
    processors = _processors(anatomy.attentions(transformer))
    for processor, kind in processors:
        processor.__class__ = kind
    rope.forward = partial(_rope_forward, rope, anatomy)
    setattr(transformer, _PATCH, _Patch([*_hooks(transformer, anatomy, hook)], rope, rope.forward, processors))
    return transformer


def unpatch(transformer: Transformer) -> Transformer:
    """Remove everything that ``patch`` added.

    Args:
        transformer: a patched transformer, or a copy of it; changed in place.

    Returns:
        The transformer itself.

    Raises:
        InvalidInputError: the transformer is not patched, or other code has replaced an attribute set by ``patch``.
    """
    patch = getattr(transformer, _PATCH, None)
    if patch is None:
        raise InvalidInputError(f"transformer: got an unpatched {type(transformer).__name__}, want the patched module")
    if patch.rope.forward is not patch.forward:
        got = f"{type(patch.rope).__name__}.forward"
        raise InvalidInputError(f"transformer: got {got} that was replaced after patch, want the value that patch set")
    for handle in patch.handles:
        handle.remove()
    del patch.rope.forward
    for processor, kind in patch.processors:
        if type(processor) is kind:
            processor.__class__ = kind.__base__
    delattr(transformer, _PATCH)
    return transformer


def _checked_rotary(rotary: Rotary, own: Rotary) -> Rotary:
    """Check that the heads, axes and pairs of a rotation match the transformer's own rotation."""
    if not isinstance(rotary, Rotary):
        raise InvalidInputError(f"rotary: got {type(rotary).__name__}, want a Rotary")
    for field in ("head_dim", "rotary_dim", "axes", "pairing", "kv_heads"):
        got, want = getattr(rotary, field), getattr(own, field)
        if got != want:
            raise InvalidInputError(f"rotary.{field}: got {got!r}, want {want!r} as in the transformer")
    return rotary


def _hooks(transformer: Any, anatomy: TransformerAnatomy, hook: TransformerHook) -> Iterator[RemovableHandle]:
    yield transformer.register_forward_pre_hook(hook, with_kwargs=True)
    yield transformer.register_forward_hook(hook.leave, with_kwargs=True, always_call=True)
    if anatomy.text_module:
        texts = getattr(transformer, anatomy.text_module)
        yield texts.register_forward_pre_hook(_mask_texts)
        yield texts.register_forward_hook(_texts_in_rows)
    for name in anatomy.blocks:
        for block in getattr(transformer, name):
            yield block.register_forward_pre_hook(_enter_block, with_kwargs=True)
            yield block.register_forward_hook(_leave_block, always_call=True)


def _processors(attentions: Sequence[Any]) -> list[tuple[Any, type]]:
    """Return each distinct processor of the attentions, and the class that makes it rotate by positions."""
    processors = {id(attention.processor): attention.processor for attention in attentions}.values()
    kinds: list[Any] = [type(processor) for processor in processors]
    if any(_MARK in vars(kind) for kind in kinds):
        raise UnsupportedError("processor: got that of another patched transformer, want one that is not shared")
    return list(zip(processors, map(_patched_class, kinds), strict=True))


class TransformerHook:
    """Forward pre-hook that arranges positions in rows, and forward hook that checks that they were used.

    Args:
        transformer: the patched transformer.
        anatomy: anatomy of its class.
        settings: its scheme and the rotation of q and k.
    """

    def __init__(self, transformer: nn.Module, anatomy: TransformerAnatomy, settings: TransformerSettings) -> None:
        self.anatomy = anatomy
        self.settings = settings
        self.names = tuple(inspect.signature(type(transformer).forward).parameters)[1:]
        self.num_rotating = anatomy.num_rotating(transformer)

    def __call__(self, transformer: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> Call | None:
        """Return new arguments if positions are passed, else None."""
        if "positions" not in kwargs:
            return None
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        positions = arguments.pop("positions")
        if positions is None:
            return (), arguments
        if not isinstance(positions, PositionTable):
            raise InvalidInputError(f"positions: got {type(positions).__name__}, want a PositionTable")
        scheme = self.settings.scheme.label
        if positions.scheme != scheme:
            raise InvalidInputError(f"positions.scheme: got {positions.scheme!r}, want {scheme!r}, the transformer's")
        streams = self.anatomy.streams(transformer, positions, self.settings.rotary, arguments)
        arguments |= self.anatomy.replacements(streams, arguments)
        if self.anatomy.by_kwargs:
            block_kwargs = arguments.get("joint_attention_kwargs") or {}
            rows = streams.rows(self.anatomy.order)
            arguments["joint_attention_kwargs"] = {**block_kwargs, _KEY: rows}
        _STREAMS.set(streams)
        return (), arguments

    def leave(self, transformer: nn.Module, args: tuple[object, ...], kwargs: Arguments, output: object) -> None:
        """Raise UnsupportedError if an attention did not rotate by positions during the call."""
        streams = _STREAMS.get()
        _STREAMS.set(None)
        if streams is None or output is None:
            return
        missing = self.num_rotating - len(streams.reached)
        if missing > 0:
            got = f"{missing} of {self.num_rotating} attentions that did not rotate by positions"
            raise UnsupportedError(f"transformer: got {got}, want the processors that it had when it was patched")


def _rope_forward(rope: nn.Module, anatomy: TransformerAnatomy, *args: Any, **kwargs: object) -> object:
    """Replace the forward of the rotary module: return rows if the call has positions, else rotations."""
    streams = _STREAMS.get()
    if streams is None:
        return type(rope).forward(rope, *args, **kwargs)
    return (args[0], args[0]) if anatomy.by_kwargs else streams.rows(anatomy.order)


def _mask_texts(module: nn.Module, args: tuple[Any, ...]) -> tuple[object, ...] | None:
    """Pass a mask to the module that processes the text of each document."""
    streams = _STREAMS.get()
    if streams is None:
        return None
    texts, timestep, *_ = args
    real = np.arange(texts.shape[1]) < streams.text_lengths[:, None]
    return texts, timestep, torch.from_numpy(real).to(texts.device)


def _texts_in_rows(module: nn.Module, args: tuple[object, ...], texts: Tensor) -> Tensor:
    """Move texts into their rows after the text module has processed them per document."""
    streams = _STREAMS.get()
    return texts if streams is None else streams.texts_in_rows(texts)


def _enter_block(block: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> None:
    """Record the rows in the arguments of a block before the block runs."""
    for value in (*args, *kwargs.values()):
        rows = value.get(_KEY) if isinstance(value, Mapping) else value
        if isinstance(rows, Rows):
            _BLOCK.set(rows)


def _leave_block(block: nn.Module, args: tuple[object, ...], output: object) -> None:
    """Clear the rows after a block has run, even if it raised an exception."""
    _BLOCK.set(None)


@cache
def _patched_class(kind: type) -> type:
    """Derive a processor class that rotates by positions in blocks with rows, and works as before in other blocks."""
    original: Any = vars(kind)["__call__"]
    names = {**original.__globals__, "dispatch_attention_fn": partial(_attend, original.__globals__)}
    copied = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    copied.__kwdefaults__ = original.__kwdefaults__
    signature = inspect.signature(original)

    @wraps(original)
    def __call__(self: object, *args: object, **kwargs: Any) -> object:  # noqa: N807
        rows = _BLOCK.get()
        if rows is None:
            return original(self, *args, **kwargs)
        rotates = kwargs.pop(_KEY, None) is not None
        bound = signature.bind(self, *args, **kwargs)
        if rotates:
            bound.arguments["image_rotary_emb"] = None
        for name, value in bound.arguments.items():
            if isinstance(value, Rows):
                bound.arguments[name], rotates = None, True
        token = _ATTEND.set(rows.attend if rotates else rows.attend_to_text)
        try:
            return copied(*bound.args, **bound.kwargs)
        finally:
            _ATTEND.reset(token)

    # Attention modules pass only the arguments in a processor's signature.
    key = inspect.Parameter(_KEY, inspect.Parameter.KEYWORD_ONLY, default=None)
    extended = signature.replace(parameters=[*signature.parameters.values(), key])
    members = {"__call__": __call__, "__doc__": kind.__doc__, "__module__": kind.__module__, _MARK: True}
    __call__.__signature__ = extended  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), members)


def _attend(names: Mapping[str, Any], query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attend by the rows of the running processor, with the attention function among the names of its module."""
    attend = _ATTEND.get()
    assert attend is not None, "a processor without rows runs its original function"
    return attend(names["dispatch_attention_fn"], query, key, value, options)
