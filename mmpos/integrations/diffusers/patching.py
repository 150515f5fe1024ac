"""patch and unpatch: a diffusers transformer that accepts a PositionTable for images of mixed sizes, padded or packed.

All attention processors rotate q and k directly before attention. ``patch`` therefore replaces each processor's
function with a copy whose globals contain an attention function that rotates by positions. Blocks receive the rows of a
call as arguments, even with gradient checkpointing, and no module keeps state between calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.diffusers.anatomy import Arguments, TransformerAnatomy, anatomy_of
from mmpos.integrations.diffusers.rows import Rows, Streams
from mmpos.integrations.diffusers.settings import from_diffusers
from mmpos.integrations.patches import Attribute, Patch, is_patched, unpatched
from mmpos.positions.table import PositionTable
from mmpos.rotary.config import Rotary
from mmpos.support.checks import counted

__all__ = ["patch", "unpatch"]

Transformer = TypeVar("Transformer", bound=nn.Module)
Call = tuple[tuple[object, ...], Arguments]

_ARGUMENT = "positions"
"""Name of the argument through which a call passes a table."""

_KEY = "mm_rows"
"""Key in joint_attention_kwargs under which blocks receive rows if no module computes their rotations."""


@dataclass(frozen=True)
class _Processing:
    """Rows of the running processor, and whether the processor rotates q and k."""

    rows: Rows
    rotates: bool


_MARK = "_mmpos_rotates"
"""Attribute that marks processor classes that rotate by positions."""

_STREAMS: ContextVar[Streams | None] = ContextVar("mmpos_streams", default=None)
"""Streams of the transformer call that is running."""

_BLOCK: ContextVar[Rows | None] = ContextVar("mmpos_block", default=None)
"""Rows of the block that is running."""

_PROCESSING: ContextVar[_Processing | None] = ContextVar("mmpos_processing", default=None)


def patch(transformer: Transformer, rotary: Rotary | None = None) -> Transformer:
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

    Call diffusers' ``enable_parallelism`` after ``patch``; every rank then takes the whole inputs and the whole table.
    A context-parallel rank that splits inputs itself passes the table's ``shard`` and the tokens at ``shard_indices``.

    Args:
        transformer: instance of a class in ``ANATOMIES``; changed in place.
        rotary: rotation of q and k, for example with another scaling; None uses the rotation that ``from_diffusers``
            reads.

    Returns:
        The transformer itself.

    Raises:
        UnsupportedError: the class or a processor is not supported, or another patched transformer shares a processor.
        InvalidInputError: the transformer is already patched, or the heads, axes or pairs of rotary differ from those
            of the transformer.
    """
    if is_patched(_checked_module(transformer)):
        raise InvalidInputError("transformer: got a patched transformer; call unpatch first")
    anatomy = anatomy_of(transformer)
    rotaries = _rotaries(rotary, transformer)
    rope = getattr(transformer, anatomy.rope)
    forward = Attribute(rope, "forward", partial(_rope_forward, rope, anatomy))
    hook = TransformerHook(transformer, anatomy, rotaries)
    processors = _processors(anatomy.attentions(transformer))
    Patch.install("transformer", transformer, lambda: _hooks(transformer, anatomy, hook), [forward], processors)
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
    return unpatched("transformer", _checked_module(transformer))


def _checked_module(transformer: Transformer) -> Transformer:
    if not isinstance(transformer, nn.Module):
        raise InvalidInputError(f"transformer: got {type(transformer).__name__}, want a diffusers transformer")
    return transformer


def _rotaries(rotary: Rotary | None, transformer: nn.Module) -> list[Rotary]:
    """Return the rotations of a transformer, or ``rotary`` after checking that its heads, axes and pairs match."""
    settings = from_diffusers(transformer)
    own = settings.rotary
    if rotary is None:
        return [own] if settings.second_rotary is None else [own, settings.second_rotary]
    if not isinstance(rotary, Rotary):
        raise InvalidInputError(f"rotary: got {type(rotary).__name__}, want a Rotary")
    if settings.second_rotary is not None:
        raise InvalidInputError("rotary: got a Rotary, want None because the channels of a pair rotate differently")
    for field in ("head_dim", "rotary_dim", "axes", "pairing", "kv_heads"):
        got, want = getattr(rotary, field), getattr(own, field)
        if got != want:
            raise InvalidInputError(f"rotary.{field}: got {got!r}, want {want!r} as in the transformer")
    return [rotary]


def _hooks(transformer: Any, anatomy: TransformerAnatomy, hook: TransformerHook) -> Iterator[RemovableHandle]:
    yield transformer.register_forward_pre_hook(hook, with_kwargs=True)
    yield transformer.register_forward_hook(hook.leave, with_kwargs=True, always_call=True)
    rope = getattr(transformer, anatomy.rope)
    yield rope.register_forward_hook(partial(_after_rope, anatomy))
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
        raise UnsupportedError(
            "processor: got one shared with another patched transformer, want one that is not shared"
        )
    return list(zip(processors, map(_patched_class, kinds), strict=True))


class TransformerHook:
    """Forward pre-hook that arranges positions in rows, and forward hook that checks that they were used.

    Args:
        transformer: the patched transformer.
        anatomy: anatomy of its class.
        rotaries: rotations of q and k; see Rows.
    """

    def __init__(self, transformer: nn.Module, anatomy: TransformerAnatomy, rotaries: Sequence[Rotary]) -> None:
        self.anatomy = anatomy
        self.rotaries = rotaries
        self.names = tuple(inspect.signature(type(transformer).forward).parameters)[1:]
        self.num_rotating = anatomy.num_rotating(transformer)

    def __call__(self, transformer: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> Call | None:
        """Return new arguments if positions are passed, else None."""
        if _ARGUMENT not in kwargs:
            return None
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        positions = arguments.pop(_ARGUMENT)
        if positions is None:
            return (), arguments
        if not isinstance(positions, PositionTable):
            raise InvalidInputError(f"{_ARGUMENT}: got {type(positions).__name__}, want a PositionTable")
        axes = self.rotaries[0].axes
        if positions.axes != axes:
            got, want = counted(positions.axes, "axis"), f"{axes} as in rotary"
            raise InvalidInputError(f"{_ARGUMENT}: got {got}, want {want}")
        streams = self.anatomy.streams(transformer, positions, self.rotaries, arguments)
        arguments |= self.anatomy.replacements(streams, arguments)
        if "joint_attention_kwargs" in self.names:
            block_kwargs = arguments.get("joint_attention_kwargs") or {}
            arguments["joint_attention_kwargs"] = {**block_kwargs, _KEY: streams.deferred}
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
    """Replace the forward of the rotary module: return token numbers if the call has positions, else rotations."""
    streams = _STREAMS.get()
    return type(rope).forward(rope, *args, **kwargs) if streams is None else anatomy.token_numbers(streams, *args)


def _after_rope(
    anatomy: TransformerAnatomy, rope: nn.Module, args: tuple[object, ...], output: Sequence[Tensor]
) -> object:
    """Replace the output of the rotary module, already split among ranks, with the rows of this rank's tokens."""
    streams = _STREAMS.get()
    if streams is None:
        return None
    tokens = np.unique(torch.cat([numbers.flatten() for numbers in output]).cpu().numpy())
    if anatomy.rows is None:
        return streams.rows(anatomy.order, tokens)
    return anatomy.rows(streams, anatomy.order, tokens, rope, *args)


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
        candidates = value.get(_KEY, ()) if isinstance(value, Mapping) else [value]
        for rows in candidates:
            if isinstance(rows, Rows):
                _BLOCK.set(rows)


def _leave_block(block: nn.Module, args: tuple[object, ...], output: object) -> None:
    """Clear the rows after a block has run, even if it raised an exception."""
    _BLOCK.set(None)


@cache
def _patched_class(kind: type) -> type:
    """Derive a processor class that rotates by positions in blocks with rows, and works as before in other blocks."""
    original: Any = vars(kind)["__call__"]
    names = {**original.__globals__, **_patched_globals(original.__globals__)}
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
        token = _PROCESSING.set(_Processing(rows, rotates))
        try:
            return copied(*bound.args, **bound.kwargs)
        finally:
            _PROCESSING.reset(token)

    # Attention modules pass only the arguments in a processor's signature.
    key = inspect.Parameter(_KEY, inspect.Parameter.KEYWORD_ONLY, default=None)
    extended = signature.replace(parameters=[*signature.parameters.values(), key])
    members = {"__call__": __call__, "__doc__": kind.__doc__, "__module__": kind.__module__, _MARK: True}
    __call__.__signature__ = extended  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), members)


def _patched_globals(names: Mapping[str, Any]) -> dict[str, object]:
    """Wrap the attention functions of a processor's module to rotate by the rows of the running processor."""

    def dispatch_attention_fn(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return _attend(names["dispatch_attention_fn"], query, key, value, options)

    if "dispatch_attention_fn" in names:
        return {"dispatch_attention_fn": dispatch_attention_fn}
    return {"F": Functional(names["F"])}


class Functional:
    """torch.nn.functional with an attention function that rotates by the rows of the running processor.

    Args:
        functional: the module torch.nn.functional.
    """

    def __init__(self, functional: Any) -> None:
        self.functional = functional

    def __getattr__(self, name: str) -> object:
        return getattr(self.functional, name)

    def scaled_dot_product_attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Rotate and attend over (batch, heads, seq, head_dim)."""

        def attention(*qkv: Tensor, **options: Any) -> Tensor:
            heads_first = (x.transpose(1, 2) for x in qkv)
            return self.functional.scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)

        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return _attend(attention, query, key, value, options).transpose(1, 2)


def _attend(
    attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
) -> Tensor:
    processing = _PROCESSING.get()
    assert processing is not None, "a processor without rows runs its original function"
    rows = processing.rows
    attend = rows.attend if processing.rotates else rows.attend_to_text
    return attend(attention, query, key, value, options)
