"""One small interface for every tokenizer, and a byte-level one that needs no vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mmpos.checks import integer
from mmpos.errors import InvalidInputError

__all__ = ["ByteTokenizer", "Tokenizer", "adapt"]


class Tokenizer(Protocol):
    """What a SequenceBuilder asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: nothing added in front or behind."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids."""

    def token_to_id(self, token: str) -> int | None:
        """The id of a special token, or None if there is none."""


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then the special tokens; text never encodes to a special token.

    >>> ByteTokenizer().encode("é")
    [195, 169]

    Args:
        special_tokens: their names; the first has id 256.
    """

    special_tokens: tuple[str, ...] = ("[IMG]", "[/IMG]", "[PATCH]")

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text; special tokens by their names, broken UTF-8 as replacement characters."""
        pieces = bytearray()
        for token in ids:
            token = integer("ids", token, minimum=0, maximum=255 + len(self.special_tokens))
            pieces += bytes([token]) if token < 256 else self.special_tokens[token - 256].encode()
        return pieces.decode(errors="replace")

    def token_to_id(self, token: str) -> int | None:
        """256 + the place of the token among the special tokens."""
        return 256 + self.special_tokens.index(token) if token in self.special_tokens else None


@dataclass(frozen=True)
class _TokenizersAdapter:
    """A Tokenizer of the tokenizers library."""

    inner: Any

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=False))

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self.inner.token_to_id(token)
        return found


@dataclass(frozen=True)
class _TransformersAdapter:
    """A tokenizer of the transformers library, slow or fast."""

    inner: Any

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids)))

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self.inner.convert_tokens_to_ids(token)
        # Unknown names come back as the id of the unknown token.
        return found if found is not None and self.inner.convert_ids_to_tokens(found) == token else None


@dataclass(frozen=True)
class _PlainAdapter:
    """Any object with encode and decode; a special token is a text that encodes to one id."""

    inner: Any

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.inner.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids)))

    def token_to_id(self, token: str) -> int | None:
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None


def adapt(tokenizer: Any) -> Tokenizer:
    """The interface over a tokenizers or transformers object, or over anything with encode and decode.

    Raises:
        InvalidInputError: the object has no encode and decode.
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
