"""Tokenizers behind one small interface, a byte-level one that needs no vocabulary, and the markers of images."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from mmpos.errors import InvalidInputError
from mmpos.segments.placeholders import Placeholders
from mmpos.support.cached import cached_property
from mmpos.support.checks import INT32_MAX, IntArray, integer

__all__ = ["ByteTokenizer", "MarkerIds", "Markers", "Tokenizer", "adapt"]


class _Codec(Protocol):
    """The methods that every tokenizer has."""

    def encode(self, text: str) -> list[int]:
        """Encode the text alone: nothing added in front or behind."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text."""


class Tokenizer(_Codec, Protocol):
    """The methods of a tokenizer that SequenceBuilder calls."""

    def token_to_id(self, token: str) -> int | None:
        """Look up the id of a special token; None if there is none."""


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
        """Encode the text to its bytes."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; special tokens by their names, broken UTF-8 as replacement characters."""
        pieces = bytearray()
        for token in ids:
            token = integer("ids", token, minimum=0, maximum=255 + len(self.special_tokens))
            pieces += bytes([token]) if token < 256 else self.special_tokens[token - 256].encode()
        return pieces.decode(errors="replace")

    def token_to_id(self, token: str) -> int | None:
        """Look up a special token: 256 and its index."""
        return 256 + self.special_tokens.index(token) if token in self.special_tokens else None


@dataclass(frozen=True)
class _HuggingFaceAdapter:
    """A tokenizer of either library of Hugging Face.

    A tokenizer may be set to cut or to pad whatever it encodes: by its tokenizer.json, by its owner, or by the last
    call of its owner (of transformers). The texts of a sequence stay whole: while the tokenizer is set so, they are
    encoded by a copy without, taken when it is first needed, and the owner's tokenizer stays as it is.
    """

    inner: Any

    @property
    def _whole(self) -> Any:
        """Get the tokenizer that encodes: the caller's, unless it cuts or pads."""
        backend = _backend(self.inner)
        settings = (getattr(backend, name, None) for name in ("truncation", "padding"))
        return self.inner if all(setting is None for setting in settings) else self._copy

    @cached_property
    def _copy(self) -> Any:
        try:
            own = copy.deepcopy(self.inner)
        except Exception as error:  # the extension's plain Exception, of steps written in Python
            want = "one without (no_truncation(), no_padding()), or one that can be copied"
            raise InvalidInputError(f"tokenizer: got one with truncation or padding, want {want} ({error})") from error
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
        # Unknown names come back as the id of the unknown token.
        known = token_id is not None and self.inner.convert_ids_to_tokens(token_id) == token
        return token_id if known else None


@dataclass(frozen=True)
class _PlainAdapter:
    """Any object with encode and decode; a special token is a text that encodes to one id."""

    inner: _Codec

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids)))

    def token_to_id(self, token: str) -> int | None:
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None


def _backend(tokenizer: Any) -> Any:
    """Get the tokenizer of tokenizers inside a fast one of transformers, which cuts and pads."""
    return getattr(tokenizer, "backend_tokenizer", tokenizer)


def adapt(tokenizer: Any) -> Tokenizer:
    """Adapt a tokenizers or transformers object, or anything with encode and decode, to the interface.

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


class MarkerIds(NamedTuple):
    """The ids of Markers; None for those that there are not."""

    begin: int | None
    end: int | None
    patch: int
    row: int | None = None
    last_row: int | None = None
    video: int | None = None
    audio: int | None = None
    audio_begin: int | None = None
    audio_end: int | None = None

    @property
    def margins(self) -> tuple[int, int]:
        """Tokens before the patches of an image, and after them."""
        return int(self.begin is not None), int(self.end is not None)

    @property
    def audio_margins(self) -> tuple[int, int]:
        """Tokens before a run of audio, and after it."""
        return int(self.audio_begin is not None), int(self.audio_end is not None)

    @property
    def placeholders(self) -> Placeholders:
        """The markers that stand for patches and audio, and those that end rows."""
        last_row = self.row if self.last_row is None else self.last_row
        rows = None if self.row is None or last_row is None else (self.row, last_row)
        return Placeholders(self.patch, self.video, self.audio, rows)

    def write(
        self, input_ids: IntArray, image_spans: IntArray, separators: IntArray, audio_spans: IntArray | None = None
    ) -> None:
        """Put the markers around and between patches, and around audio.

        Args:
            input_ids: (tokens,), changed in place.
            image_spans: (images, 2) first token of each image's patches and one past the last, separators included.
            separators: (separators,) the tokens that end rows.
            audio_spans: (audios, 2) first token of each run of audio, or what is merged in a clip, and one past the
                last; None for none.
        """
        sound = image_spans[:0] if audio_spans is None else audio_spans
        for token_id, tokens in (
            (self.begin, image_spans[:, 0] - 1),
            (self.end, image_spans[:, 1]),
            (self.row, separators),
            (self.last_row, image_spans[:, 1] - 1),
            (self.audio_begin, sound[:, 0] - 1),
            (self.audio_end, sound[:, 1]),
        ):
            if token_id is not None:
                input_ids[tokens] = token_id


@dataclass(frozen=True)
class Markers:
    """The special tokens around and inside images, videos and audio, by name or by id.

    Pixtral and Mistral Small write ``Markers(None, None, "[IMG]", "[IMG_BREAK]", "[IMG_END]")``, Qwen2.5-Omni
    ``Markers("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", video="<|VIDEO|>", audio="<|AUDIO|>",
    audio_begin="<|audio_bos|>", audio_end="<|audio_eos|>")``.

    Args:
        begin: stands before the patches of an image; None where nothing does.
        end: stands after them, and after the row marker of the last row; None likewise.
        patch: stands for every patch in input_ids, where its embedding will go.
        row: stands after the patches of every row, for models that generate patch by patch or read rows of any length;
            None where rows follow each other. With it every image has row separators.
        last_row: stands after the last row instead of row; None is row.
        video: stands for every patch of a Clip and of a Grid with several frames; None is patch.
        audio: stands for every token of audio; None for a builder that takes no audio.
        audio_begin: stands before a run of audio; None where nothing does.
        audio_end: stands after it; None likewise.
    """

    begin: str | int | None = "[IMG]"
    end: str | int | None = "[/IMG]"
    patch: str | int = "[PATCH]"
    row: str | int | None = None
    last_row: str | int | None = None
    video: str | int | None = None
    audio: str | int | None = None
    audio_begin: str | int | None = None
    audio_end: str | int | None = None

    def ids(self, tokenizer: Tokenizer) -> MarkerIds:
        """Look up the id of each marker.

        Raises:
            InvalidInputError: a name is not one token of the tokenizer, or two markers share an id.
        """
        if self.last_row is not None and self.row is None:
            raise InvalidInputError(f"markers.last_row: got {self.last_row!r}, want markers.row, too")
        for name in ("audio_begin", "audio_end"):
            if getattr(self, name) is not None and self.audio is None:
                raise InvalidInputError(f"markers.{name}: got {getattr(self, name)!r}, want markers.audio, too")
        marker_ids = MarkerIds(*(self._id(field.name, tokenizer) for field in fields(self)))
        ids = [token_id for token_id in marker_ids if token_id is not None]
        if len(set(ids)) < len(ids):
            got = f"{', '.join(map(str, ids[:-1]))} and {ids[-1]}"
            raise InvalidInputError(f"markers: got ids {got}, want {len(ids)} different ids")
        return marker_ids

    def _id(self, name: str, tokenizer: Tokenizer) -> Any:
        marker = getattr(self, name)
        if marker is None and name != "patch":
            return None
        token_id = tokenizer.token_to_id(marker) if isinstance(marker, str) else marker
        if token_id is None:
            raise InvalidInputError(f"markers.{name}: got {marker!r}, want a token that is one id of the tokenizer")
        return integer(f"markers.{name}", token_id, minimum=0, maximum=INT32_MAX)
