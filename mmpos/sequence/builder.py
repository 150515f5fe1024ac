"""From interleaved parts to a sequence: input_ids with [IMG] patches [/IMG], its segments and its positions."""

from __future__ import annotations

import os
import re
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from mmpos.errors import InvalidInputError, LimitExceededError, MmposError
from mmpos.images import ImageProcessor, ProcessedImage
from mmpos.schemes import Scheme, get_scheme
from mmpos.segments.parts import Grid
from mmpos.sequence.interleaved import Contents, InterleavedSequence
from mmpos.sequence.markers import MarkerIds, Markers
from mmpos.sequence.tokenizers import ByteTokenizer, adapt
from mmpos.sequence.video import Video, plain_parts
from mmpos.support import checks
from mmpos.support.checks import IntArray, first_bad, int_array, integer
from mmpos.support.info import cores

MAX_CUTS = 10_000
"""Most times that one text may spell markers which its tokenizer would make of it."""

_READ_BY_ANY = (bytes, bytearray, memoryview, os.PathLike, np.ndarray)
"""Images that any thread may read: files and arrays."""

__all__ = ["InterleavedSequence", "Markers", "SequenceBuilder", "Video"]


@dataclass(frozen=True)
class SequenceBuilder:
    """Builds sequences from parts: str, token ids, images of any sort that the ImageProcessor takes, and Videos.

    A list, tuple or one-dimensional integer array is token ids; an ImageSize or a Grid is an image known only by its
    size; a Video is its frames, each an image after its time in text. Text that spells a marker given by name stays
    text: where the tokenizer would make the marker of it, it is encoded in two pieces, cut inside the marker. Every
    text part is encoded by itself, so a tokenizer that puts something before each text (a space, as SentencePiece does)
    puts it before each part.

    >>> builder = SequenceBuilder()
    >>> builder.build(["a", Grid(1, 2), "b"]).input_ids.tolist()
    [97, 256, 258, 258, 257, 98]

    Args:
        tokenizer: a tokenizers or transformers object, or anything with encode and decode.
        images: how images become patches; may be left out when every image is a Grid.
        scheme: a name from mmpos.SCHEMES or a scheme object.
        markers: the special tokens of images; with Markers(row=…) every image has row separators.
        start: id of the first token.
    """

    tokenizer: Any = field(default_factory=ByteTokenizer)
    images: ImageProcessor | None = None
    scheme: str | Scheme = "rope-tie"
    markers: Markers = field(default_factory=Markers)
    start: int = 0
    marker_ids: MarkerIds = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.markers, Markers):
            raise InvalidInputError(f"markers: got {type(self.markers).__name__}, want Markers")
        if not isinstance(self.images, ImageProcessor | None):
            raise InvalidInputError(f"images: got {type(self.images).__name__}, want an ImageProcessor or None")
        object.__setattr__(self, "tokenizer", adapt(self.tokenizer))
        object.__setattr__(self, "scheme", get_scheme(self.scheme))
        object.__setattr__(self, "marker_ids", self.markers.ids(self.tokenizer))

    def build(self, parts: Sequence[Any]) -> InterleavedSequence:
        """The sequence of these parts, in order.

        Raises:
            InvalidInputError: a part is of no known kind, or an image is broken; the message names
                ``parts[i]``, of a Video ``parts[i].frames[k]``.
            UnsupportedError: the scheme has no place for row separators or frames that are there.
            LimitExceededError: an image or an id is beyond its limit.
        """
        return self._build(parts, {})

    def build_batch(
        self, documents: Sequence[Sequence[Any]], *, threads: int | None = None
    ) -> list[InterleavedSequence]:
        """The sequences of several documents, the same whatever the threads.

        Args:
            documents: the parts of each.
            threads: that decode files and arrays, at most one per image; None is one per core, 1 the caller's own,
                which encodes texts meanwhile. Pillow images, which threads must not share, are left to it, too.

        Raises:
            MmposError: as ``build``, of the first document that has a fault; the message names
                ``documents[d].parts[i]``.
        """
        if not isinstance(documents, list | tuple):
            raise InvalidInputError(f"documents: got {type(documents).__name__}, want a list of lists of parts")
        most = cores() if threads is None else integer("threads", threads, minimum=1)
        images = [
            (d, n, part)
            for d, parts in enumerate(documents)
            if isinstance(parts, list | tuple)
            for n, (_, _, part) in enumerate(plain_parts(parts))
            if isinstance(part, _READ_BY_ANY) and not _is_ids(part)
        ]
        ahead: list[dict[int, Future[ProcessedImage]]] = [{} for _ in documents]
        with ThreadPoolExecutor(most, "mmpos-images") as pool:
            # Once the main thread has ended, pools take no more.
            if self.images is not None and min(most, len(images)) > 1 and threading.main_thread().is_alive():
                for d, n, image in images:
                    ahead[d][n] = pool.submit(self.images.process, image)
            try:
                return [
                    _naming(f"documents[{d}]", partial(self._build, parts, ahead[d]), joint=".")
                    for d, parts in enumerate(documents)
                ]
            finally:
                pool.shutdown(cancel_futures=True)

    def _build(self, parts: Sequence[Any], ahead: dict[int, Future[ProcessedImage]]) -> InterleavedSequence:
        """The sequence of these parts, of whose plain parts some are decoded ahead."""
        if not isinstance(parts, list | tuple):
            raise InvalidInputError(f"parts: got {type(parts).__name__}, want a list of parts")
        found = Contents(self.marker_ids)
        for n, (given, name, part) in enumerate(plain_parts(parts)):
            if n in ahead:
                found.add_image(given, _naming(name, ahead.pop(n).result))  # popped, so that patches are held once
                continue
            content = self._read(name, part)
            if isinstance(content, np.ndarray):
                found.add_text(given, content)
            else:
                found.add_image(given, content)
        return found.sequence(self.scheme, self.start)

    def _read(self, name: str, part: Any) -> IntArray | ProcessedImage:
        """Token ids, or an image."""
        if isinstance(part, str):
            return self._encode(name, part)
        if _is_ids(part):
            ids = _token_ids(name, part)
            patch = self.marker_ids.patch
            if (ids == patch).any():
                raise InvalidInputError(f"{name}: got the patch marker's id {patch}, want images as parts")
            return ids
        if isinstance(part, Grid):
            if part.row_separator and self.markers.row is None:
                raise InvalidInputError(
                    f"{name}: got a grid with row separators, want one without, or a builder with Markers(row=…)"
                )
            return ProcessedImage(patches=None, grid=part, size=None, source_size=None, content_hash=None)
        if self.images is None:
            raise InvalidInputError(
                f"{name}: got {type(part).__name__}, want text or token ids, or a builder with images=ImageProcessor(…)"
            )
        return _naming(name, partial(self.images.process, part))

    def _encode(self, name: str, text: str) -> IntArray:
        """Ids of user text; where a marker comes out, it is cut after its first character, so it stays text."""
        ids = self._ids(name, checks.text(name, text))
        if self._marked(ids):
            ids = np.concatenate([self._ids(name, piece) for piece in self._pieces(name, text)])
            for marker in self._marked(ids):
                raise InvalidInputError(f"{name}: got text that encodes to marker id {marker}, want plain text")
        return ids

    def _ids(self, name: str, text: str) -> IntArray:
        return _token_ids(f"{name}: tokenizer.encode", self.tokenizer.encode(text) if text else [])

    def _marked(self, ids: IntArray) -> list[int]:
        markers = [marker for marker in self.marker_ids if marker is not None]
        if not ids.size or ids.max() < min(markers):  # as is usual: special tokens come last
            return []
        return [marker for marker in markers if (ids == marker).any()]

    def _pieces(self, name: str, text: str) -> Iterator[str]:
        markers = (getattr(self.markers, field.name) for field in fields(self.markers))
        names = [marker for marker in markers if isinstance(marker, str)]
        done = 0
        # Looked for at every character, since occurrences may overlap.
        found = re.finditer("(?=" + "|".join(map(re.escape, names)) + ")", text) if names else ()
        for count, match in enumerate(found):
            if count == MAX_CUTS:
                raise LimitExceededError(f"{name}: got a text that spells markers over {MAX_CUTS} times, want fewer")
            yield text[done : match.start() + 1]
            done = match.start() + 1
        if done < len(text):
            yield text[done:]


def _is_ids(part: Any) -> bool:
    """Whether a part is token ids."""
    return isinstance(part, list | tuple) or (getattr(part, "ndim", 0) == 1 and not isinstance(part, memoryview))


def _token_ids(name: str, ids: Any) -> IntArray:
    try:
        # Half the time that numpy takes to find out what is in a list; a list of bools is refused below.
        plain = type(ids) is list and ids and type(ids[0]) is int
        found: IntArray = np.frombuffer(array("q", ids), np.int64) if plain else int_array(name, ids, (None,))
    except (TypeError, OverflowError):  # floats, strings, lists: the words for them are there
        found = int_array(name, ids, (None,))
    first_bad(name, found, minimum=0)
    return found


def _naming(name: str, call: Callable[[], Any], joint: str = ": ") -> Any:
    """Call, and put the name of the part before the message of any error of ours."""
    try:
        return call()
    except MmposError as error:
        raise type(error)(f"{name}{joint}{error}") from error
