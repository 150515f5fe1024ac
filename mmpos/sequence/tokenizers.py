"""A small common interface for tokenizers, and a byte-level tokenizer without a vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mmpos.errors import InvalidInputError
from mmpos.support.cached import cached_property
from mmpos.support.checks import IntArray, integer

__all__ = ["ByteTokenizer", "Tokenizer", "adapt"]


class _Codec(Protocol):
    """Methods of every tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Encode the text without adding special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text."""


class Tokenizer(_Codec, Protocol):
    """The methods of a tokenizer that SequenceBuilder calls."""

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a special token, or None if the tokenizer has no such token."""


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then the special tokens; text never encodes to a special token.

    >>> ByteTokenizer().encode("é")
    [195, 169]

    Args:
        special_tokens: names of the special tokens, with ids from 256.
    """

    special_tokens: tuple[str, ...] = ("[IMG]", "[/IMG]", "[PATCH]")

    def encode(self, text: str) -> list[int]:
        """Encode the text to its bytes."""
        return list(text.encode())

    def encode_array(self, text: str) -> IntArray:
        """Encode the text to its bytes as an array, without creating Python integers."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text: special tokens to their names, invalid UTF-8 to replacement characters."""
        pieces = bytearray()
        for token in ids:
            token = integer("ids", token, minimum=0, maximum=255 + len(self.special_tokens))
            pieces += bytes([token]) if token < 256 else self.special_tokens[token - 256].encode()
        return pieces.decode(errors="replace")

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a special token, 256 plus its index, or None."""
        return 256 + self.special_tokens.index(token) if token in self.special_tokens else None


@dataclass(frozen=True)
class _HuggingFaceAdapter:
    """A tokenizer of the tokenizers or transformers library.

    Its tokenizer.json, its owner, or (in transformers) the last call by its owner may enable truncation or padding. The
    texts of a sequence must stay whole, so while either is enabled, a copy with neither encodes them. The copy is made
    when first needed, and the owner's tokenizer is not changed.
    """

    inner: Any

    @property
    def _whole(self) -> Any:
        """The caller's tokenizer, or the copy if the caller's truncates or pads."""
        backend = _backend(self.inner)
        settings = (getattr(backend, name, None) for name in ("truncation", "padding"))
        return self.inner if all(setting is None for setting in settings) else self._copy

    @cached_property
    def _copy(self) -> Any:
        try:
            own = copy.deepcopy(self.inner)
        except Exception as error:  # the extension raises a plain Exception for components written in Python
            want = "neither (no_truncation(), no_padding()), or a tokenizer that can be copied"
            raise InvalidInputError(f"tokenizer: got truncation or padding, want {want} ({error})") from error
        _backend(own).no_truncation()
        _backend(own).no_padding()
        return own


@dataclass(frozen=True)
class _TokenizersAdapter(_HuggingFaceAdapter):
    """A Tokenizer of the tokenizers library."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._whole.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=False))

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self.inner.token_to_id(token)
        return token_id


@dataclass(frozen=True)
class _TransformersAdapter(_HuggingFaceAdapter):
    """A tokenizer of the transformers library, slow or fast."""

    def encode(self, text: str) -> list[int]:
        return list(self._whole.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids)))

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self.inner.convert_tokens_to_ids(token)
        # The library returns the id of the unknown token for unknown names.
        known = token_id is not None and self.inner.convert_ids_to_tokens(token_id) == token
        return token_id if known else None


@dataclass(frozen=True)
class _PlainAdapter:
    """Any object with encode and decode; text that encodes to a single id is a special token."""

    inner: _Codec

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids)))

    def token_to_id(self, token: str) -> int | None:
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None


def _backend(tokenizer: Any) -> Any:
    """Return the tokenizer that truncates and pads: in a fast transformers tokenizer, its tokenizers object."""
    return getattr(tokenizer, "backend_tokenizer", tokenizer)


def adapt(tokenizer: Any) -> Tokenizer:
    """Adapt a tokenizers or transformers object, or any object with encode and decode, to the interface.

    Raises:
        InvalidInputError: the object lacks encode or decode.
    """
    if isinstance(tokenizer, ByteTokenizer | _TokenizersAdapter | _TransformersAdapter | _PlainAdapter):
        return tokenizer
    if not all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode")):
        raise InvalidInputError(f"tokenizer: got {type(tokenizer).__name__}, want an object with encode and decode")
    if hasattr(tokenizer, "convert_tokens_to_ids"):
        return _TransformersAdapter(tokenizer)
    if type(tokenizer).__module__.partition(".")[0] == "tokenizers":
        return _TokenizersAdapter(tokenizer)
    own: Tokenizer = tokenizer
    return own if callable(getattr(tokenizer, "token_to_id", None)) else _PlainAdapter(tokenizer)
