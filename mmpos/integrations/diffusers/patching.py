"""patch and unpatch: a transformer of diffusers that takes a PositionTable for mixed sizes and packed images.

All its attentions turn q and k right before they attend, so that one place serves all: a copy of the function of each
processor, in whose globals the attention turns by positions. Blocks get the rows of a call among the transformer's own
arguments, also through checkpoints, and nothing is kept on a module between calls.
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
"""The argument of a transformer's call that brings a table."""

_KEY = "mm_rows"
"""The name among joint_attention_kwargs by which blocks get rows where no module makes their rotations."""


@dataclass(frozen=True)
class _Processing:
    """The rows of a processor that runs, and whether it is one that turns q and k."""

    rows: Rows
    turns: bool


_MARK = "_mmpos_turns"
"""The attribute of the classes of processors that turn by positions."""

_STREAMS: ContextVar[Streams | None] = ContextVar("mmpos_streams", default=None)
"""Streams of the transformer's forward that runs."""

_BLOCK: ContextVar[Rows | None] = ContextVar("mmpos_block", default=None)
"""Rows of the block that runs."""

_PROCESSING: ContextVar[_Processing | None] = ContextVar("mmpos_processing", default=None)


def patch(transformer: Transformer, rotary: Rotary | None = None) -> Transformer:
    """Let a transformer of diffusers take ``positions``: a PositionTable of images of mixed sizes, padded or packed.

    A call without positions gives what it gave before, bit for bit. With ``transformer(…, positions=table)`` every
    image and reference turns by its own positions, and the table replaces ids, shapes and masks of padding (img_ids,
    txt_ids, img_shapes, encoder_hidden_states_mask …). Rows of the batch are laid out in one of two ways:

    - a document in each row, its text and its images padded on the right to those of the longest;
    - all documents packed in one row, their texts one after the other, and their images; none sees another.

    Where texts are in cross-attention (Wan, LTX), or refined before they join (HunyuanVideo), encoder_hidden_states
    has a row for each document either way. All of a row has one timestep, but where tokens may have one each (Wan,
    LTX): there a packed row also takes one for each document. A transformer that cuts patches itself takes images of
    mixed sizes from ``pack_latents``.

    ``enable_parallelism`` of diffusers comes after ``patch``; ranks then get whole inputs and the whole table. A
    context-parallel rank that splits by hand takes the table's ``shard`` and the tokens at its ``shard_indices``.

    Args:
        transformer: of one of the classes of ``ANATOMIES``; changed in place.
        rotary: what turns its q and k, such as one with a scaling of its own; None is what ``from_diffusers`` reads.

    Returns:
        the transformer itself.

    Raises:
        UnsupportedError: a class or a processor that is not known, or a processor of another patched transformer.
        InvalidInputError: the transformer is patched already, or rotary has other heads, axes or pairs than it.
    """
    if is_patched(_checked_module(transformer)):
        raise InvalidInputError("transformer: got one that is patched, want unpatch before another patch")
    anatomy = anatomy_of(transformer)
    rotaries = _rotaries(rotary, transformer)
    rope = getattr(transformer, anatomy.rope)
    forward = Attribute(rope, "forward", RopeForward(rope, anatomy))
    hook = TransformerHook(transformer, anatomy, rotaries)
    processors = _processors(anatomy.attentions(transformer))
    Patch.install("transformer", transformer, lambda: _hooks(transformer, anatomy, hook), [forward], processors)
    return transformer


def unpatch(transformer: Transformer) -> Transformer:
    """Remove everything that ``patch`` added.

    Args:
        transformer: the one that was patched, or a copy of it; changed in place.

    Returns:
        the transformer itself.

    Raises:
        InvalidInputError: the transformer is not patched, or something else has since wrapped what patch set.
    """
    return unpatched("transformer", _checked_module(transformer))


def _checked_module(transformer: Transformer) -> Transformer:
    if not isinstance(transformer, nn.Module):
        raise InvalidInputError(f"transformer: got {type(transformer).__name__}, want a transformer of diffusers")
    return transformer


def _rotaries(rotary: Rotary | None, transformer: nn.Module) -> list[Rotary]:
    """Return the rotations of a transformer, or another one that has its heads, axes and pairs."""
    settings = from_diffusers(transformer)
    own = settings.rotary
    if rotary is None:
        return [own] if settings.second_rotary is None else [own, settings.second_rotary]
    if not isinstance(rotary, Rotary):
        raise InvalidInputError(f"rotary: got {type(rotary).__name__}, want a Rotary")
    if settings.second_rotary is not None:
        raise InvalidInputError("rotary: got one, want None: the channels of a pair turn by a rotation each")
    for field in ("head_dim", "rotary_dim", "axes", "pairing", "kv_heads"):
        got, want = getattr(rotary, field), getattr(own, field)
        if got != want:
            raise InvalidInputError(f"rotary.{field}: got {got!r}, want {want!r} as the transformer has it")
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
    """List the processors of attentions, each once, with the class of those that turn by positions."""
    unique = {id(attention.processor): attention.processor for attention in attentions}
    kinds: list[tuple[Any, Any]] = [(one, type(one)) for one in unique.values()]
    if any(_MARK in vars(kind) for _, kind in kinds):
        raise UnsupportedError("processor: got one that another patched transformer has, want one of its own")
    return [(one, _turning(kind)) for one, kind in kinds]


class TransformerHook:
    """Hook before a transformer, which lays positions out in rows, and one after it.

    Args:
        transformer: that it is for.
        anatomy: of its class.
        rotaries: what turns q and k, as in Rows.
    """

    def __init__(self, transformer: nn.Module, anatomy: TransformerAnatomy, rotaries: Sequence[Rotary]) -> None:
        self.anatomy = anatomy
        self.rotaries = rotaries
        self.names = tuple(inspect.signature(type(transformer).forward).parameters)[1:]
        self.turning = anatomy.turning(transformer)

    def __call__(self, transformer: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> Call | None:
        """Return new arguments, if positions are among them."""
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
        arguments |= self.anatomy.instead(streams, arguments)
        if "joint_attention_kwargs" in self.names:
            given = arguments.get("joint_attention_kwargs") or {}
            arguments["joint_attention_kwargs"] = {**given, _KEY: streams.later}
        _STREAMS.set(streams)
        return (), arguments

    def leave(self, transformer: nn.Module, args: tuple[object, ...], kwargs: Arguments, output: object) -> None:
        """Raise after a call where an attention did not turn by its positions."""
        streams = _STREAMS.get()
        _STREAMS.set(None)
        if streams is None or output is None:
            return
        missing = self.turning - len(streams.reached)
        if missing > 0:
            got = f"{missing} of {self.turning} attentions that did not turn by positions"
            raise UnsupportedError(f"transformer: got {got}, want the processors that it had when it was patched")


class RopeForward:
    """Forward of the module that makes a transformer's rotations, which numbers tokens where the call has positions.

    Args:
        rope: the module.
        anatomy: of the transformer.
    """

    def __init__(self, rope: nn.Module, anatomy: TransformerAnatomy) -> None:
        self.rope = rope
        self.anatomy = anatomy

    def __call__(self, *args: Any, **kwargs: object) -> object:
        """Make rotations, or numbers."""
        streams = _STREAMS.get()
        if streams is None:
            return type(self.rope).forward(self.rope, *args, **kwargs)
        return self.anatomy.numbers(streams, *args)


def _after_rope(
    anatomy: TransformerAnatomy, rope: nn.Module, args: tuple[object, ...], output: Sequence[Tensor]
) -> object:
    """Hook after that module, and after what splits its output among ranks: rows of the tokens that are left."""
    streams = _STREAMS.get()
    if streams is None:
        return None
    tokens = np.unique(torch.cat([numbers.flatten() for numbers in output]).cpu().numpy())
    if anatomy.rows is None:
        return streams.rows(anatomy.order, tokens)
    return anatomy.rows(streams, anatomy.order, tokens, rope, *args)


def _mask_texts(module: nn.Module, args: tuple[Any, ...]) -> tuple[object, ...] | None:
    """Hook before the module through which texts go document by document; gives it their mask."""
    streams = _STREAMS.get()
    if streams is None:
        return None
    texts, timestep, *_ = args
    real = np.arange(texts.shape[1]) < streams.text_lengths[:, None]
    return texts, timestep, torch.from_numpy(real).to(texts.device)


def _texts_in_rows(module: nn.Module, args: tuple[object, ...], texts: Tensor) -> Tensor:
    """Hook after the module through which texts go document by document; they join their rows."""
    streams = _STREAMS.get()
    return texts if streams is None else streams.texts_in_rows(texts)


def _enter_block(block: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> None:
    """Hook before a block; notes the rows among its arguments."""
    for value in (*args, *kwargs.values()):
        candidates = value.get(_KEY, ()) if isinstance(value, Mapping) else [value]
        for rows in candidates:
            if isinstance(rows, Rows):
                _BLOCK.set(rows)


def _leave_block(block: nn.Module, args: tuple[object, ...], output: object) -> None:
    """Hook after a block, also after one that fails."""
    _BLOCK.set(None)


@cache
def _turning(kind: type) -> type:
    """Make the class of processors that turn by positions in a block that has rows, and else do what they did."""
    original: Any = vars(kind)["__call__"]
    names = {**original.__globals__, **_attentions(original.__globals__)}
    copied = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    copied.__kwdefaults__ = original.__kwdefaults__
    signature = inspect.signature(original)

    @wraps(original)
    def __call__(self: object, *args: object, **kwargs: Any) -> object:  # noqa: N807
        rows = _BLOCK.get()
        if rows is None:
            return original(self, *args, **kwargs)
        turns = kwargs.pop(_KEY, None) is not None
        bound = signature.bind(self, *args, **kwargs)
        if turns:
            bound.arguments["image_rotary_emb"] = None
        for name, value in bound.arguments.items():
            if isinstance(value, Rows):
                bound.arguments[name], turns = None, True
        token = _PROCESSING.set(_Processing(rows, turns))
        try:
            return copied(*bound.args, **bound.kwargs)
        finally:
            _PROCESSING.reset(token)

    # Attentions hand to their processor what its signature names.
    key = inspect.Parameter(_KEY, inspect.Parameter.KEYWORD_ONLY, default=None)
    extended = signature.replace(parameters=[*signature.parameters.values(), key])
    members = {"__call__": __call__, "__doc__": kind.__doc__, "__module__": kind.__module__, _MARK: True}
    __call__.__signature__ = extended  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), members)


def _attentions(names: Mapping[str, Any]) -> dict[str, object]:
    """Wrap the attention of a processor's module, so that it turns by the rows of the processor that runs."""

    def dispatch_attention_fn(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return _attend(names["dispatch_attention_fn"], query, key, value, options)

    if "dispatch_attention_fn" in names:
        return {"dispatch_attention_fn": dispatch_attention_fn}
    return {"F": Functional(names["F"])}


class Functional:
    """torch.nn.functional, whose scaled_dot_product_attention turns by the rows of the processor that runs.

    Args:
        functional: the module.
    """

    def __init__(self, functional: Any) -> None:
        self.functional = functional

    def __getattr__(self, name: str) -> object:
        return getattr(self.functional, name)

    def scaled_dot_product_attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attend over (batch, heads, seq, head_dim)."""

        def attention(*qkv: Tensor, **options: Any) -> Tensor:
            heads_first = (x.transpose(1, 2) for x in qkv)
            return self.functional.scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)

        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return _attend(attention, query, key, value, options).transpose(1, 2)


def _attend(
    attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
) -> Tensor:
    processing = _PROCESSING.get()
    assert processing is not None, "a processor without rows runs its own function"
    rows = processing.rows
    attend = rows.attend if processing.turns else rows.attend_across
    return attend(attention, query, key, value, options)
