"""From interleaved parts to a sequence: input_ids with [IMG] patches [/IMG], its segments and its positions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos import checks
from mmpos.checks import INT32_MAX, IntArray, first_bad, int_array, integer
from mmpos.errors import InvalidInputError, LimitExceededError, MmposError, UnsupportedError
from mmpos.images import ImageProcessor, ProcessedImage
from mmpos.parts import GRID, Grid, Text
from mmpos.placing import place
from mmpos.positions import PositionTable
from mmpos.schemes import Scheme, get_scheme
from mmpos.segments import SegmentTable
from mmpos.tokenizers import ByteTokenizer, Tokenizer, adapt

MAX_CUTS = 10_000
"""Most times that one text may spell markers which its tokenizer would make of it."""

__all__ = ["InterleavedSequence", "Markers", "SequenceBuilder"]


@dataclass(frozen=True)
class Markers:
    """The special tokens around and inside an image, by name or by id.

    Args:
        begin: stands before the patches of an image.
        end: stands after them.
        patch: stands for every patch in input_ids, where its embedding will go.
    """

    begin: str | int = "[IMG]"
    end: str | int = "[/IMG]"
    patch: str | int = "[PATCH]"

    def ids(self, tokenizer: Tokenizer) -> tuple[int, int, int]:
        """Ids of begin, end and patch.

        Raises:
            InvalidInputError: a name is not one token of the tokenizer, or two markers share an id.
        """
        found = []
        for name in ("begin", "end", "patch"):
            marker = getattr(self, name)
            token_id = tokenizer.token_to_id(marker) if isinstance(marker, str) else marker
            if token_id is None:
                raise InvalidInputError(f"markers.{name}: got {marker!r}, want a token that is one id of the tokenizer")
            found.append(integer(f"markers.{name}", token_id, minimum=0, maximum=INT32_MAX))
        begin, end, patch = found
        if len({begin, end, patch}) < 3:
            raise InvalidInputError(f"markers: got ids {begin}, {end} and {patch}, want three different ids")
        return begin, end, patch


@dataclass(frozen=True, eq=False)
class InterleavedSequence:
    """Text and images as a model reads them.

    Args:
        input_ids: (tokens,) int64; patches are the patch marker's id.
        token_type_ids: (tokens,) uint8, 0 for text and markers, 1 for patches.
        segments: the shape of the sequence, one document.
        positions: its position table.
        patches: (patches, patch_size, patch_size, 3) pixels of all images, before merging; None when
            the images are known only by size.
        grid_thw: (images, 3) int64 frames, height, width after merging.
        image_spans: (images, 2) int64 first token of each image's patches and one past the last.
        image_hashes: content hash of each image; None where only the size is known.
        part_offsets: (parts + 1,) int64 first token of each part, an image's markers included, then the total.
    """

    input_ids: IntArray
    token_type_ids: npt.NDArray[np.uint8]
    segments: SegmentTable
    positions: PositionTable
    patches: npt.NDArray[Any] | None
    grid_thw: IntArray
    image_spans: IntArray
    image_hashes: tuple[str | None, ...]
    part_offsets: IntArray

    def __repr__(self) -> str:
        patches = None if self.patches is None else f"{self.patches.dtype} {self.patches.shape}"
        return f"InterleavedSequence({self.input_ids.size} tokens, {len(self.grid_thw)} images, patches={patches})"


@dataclass(frozen=True)
class SequenceBuilder:
    """Builds sequences from parts: str, token ids, and images of any sort that the ImageProcessor takes.

    A list, tuple or one-dimensional integer array is token ids; an ImageSize or a Grid is an image known
    only by its size. Text that spells a marker given by name stays text: where the tokenizer would make the marker
    of it, it is encoded in two pieces, cut inside the marker. Every text part is encoded by itself, so a tokenizer
    that puts something before each text (a space, as SentencePiece does) puts it before each part.

    >>> builder = SequenceBuilder()
    >>> builder.build(["a", Grid(1, 2), "b"]).input_ids.tolist()
    [97, 256, 258, 258, 257, 98]

    Args:
        tokenizer: a tokenizers or transformers object, or anything with encode and decode.
        images: how images become patches; may be left out when every image is a Grid.
        scheme: a name from mmpos.SCHEMES or a scheme object.
        markers: the special tokens of images.
        start: id of the first token.
    """

    tokenizer: Any = field(default_factory=ByteTokenizer)
    images: ImageProcessor | None = None
    scheme: str | Scheme = "rope-tie"
    markers: Markers = field(default_factory=Markers)
    start: int = 0
    marker_ids: tuple[int, int, int] = field(init=False, repr=False)

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
                ``parts[i]``.
            LimitExceededError: an image or an id is beyond its limit.
        """
        if not isinstance(parts, list | tuple):
            raise InvalidInputError(f"parts: got {type(parts).__name__}, want a list of parts")
        begin, end, patch = self.marker_ids
        chunks: list[IntArray] = []
        document: list[Text | Grid] = []
        images: list[ProcessedImage] = []
        sizes: list[int] = []
        text = 0  # tokens since the last grid
        for i, part in enumerate(parts):
            found = self._read(f"parts[{i}]", part)
            if isinstance(found, np.ndarray):
                chunks.append(found)
                sizes.append(found.size)
                text += found.size
                continue
            tokens = np.full(math.prod(found.grid.extents) + 2, patch)
            tokens[[0, -1]] = begin, end
            chunks.append(tokens)
            sizes.append(tokens.size)
            document += [Text(text + 1), found.grid]
            images.append(found)
            text = 1
        if text:
            document.append(Text(text))
        if not document:
            raise InvalidInputError("parts: got no tokens, want at least one")
        return self._assemble(np.concatenate(chunks), document, images, sizes)

    def build_batch(self, documents: Sequence[Sequence[Any]]) -> list[InterleavedSequence]:
        """The sequences of several documents; errors name ``documents[d].parts[i]``."""
        if not isinstance(documents, list | tuple):
            raise InvalidInputError(f"documents: got {type(documents).__name__}, want a list of lists of parts")
        return [_naming(f"documents[{d}]", self.build, parts, joint=".") for d, parts in enumerate(documents)]

    def _assemble(
        self, input_ids: IntArray, document: list[Text | Grid], images: list[ProcessedImage], sizes: list[int]
    ) -> InterleavedSequence:
        segments = SegmentTable.from_documents([document])
        ends = np.cumsum(segments.lengths)
        spans = np.stack([ends - segments.lengths, ends], axis=1)[segments.kind == GRID]
        pixels = [image.patches for image in images if image.patches is not None]
        if pixels and len(pixels) < len(images):
            raise InvalidInputError("parts: got images with and without pixels, want all of one sort")
        return InterleavedSequence(
            input_ids=input_ids,
            token_type_ids=np.repeat(segments.kind, segments.lengths),
            segments=segments,
            positions=place(segments, self.scheme, self.start),
            patches=np.concatenate(pixels) if pixels else None,
            grid_thw=segments.extents[:, segments.kind == GRID].T.copy(),
            image_spans=spans,
            image_hashes=tuple(image.content_hash for image in images),
            part_offsets=np.cumsum([0, *sizes]),
        )

    def _read(self, name: str, part: Any) -> IntArray | ProcessedImage:
        """Token ids, or an image."""
        if isinstance(part, str):
            return self._encode(name, part)
        if isinstance(part, list | tuple) or (getattr(part, "ndim", 0) == 1 and not isinstance(part, memoryview)):
            ids = _token_ids(name, part)
            if (ids == self.marker_ids[2]).any():
                raise InvalidInputError(f"{name}: got the patch marker's id {self.marker_ids[2]}, want images as parts")
            return ids
        if isinstance(part, Grid):
            if part.row_separator:
                raise UnsupportedError(f"{name}: got a grid with row separators, want one without")
            return ProcessedImage(patches=None, grid=part, size=None, source_size=None, content_hash=None)
        if self.images is None:
            raise InvalidInputError(
                f"{name}: got {type(part).__name__}, want text or token ids, or a builder with images=ImageProcessor(…)"
            )
        return _naming(name, self.images.process, part)

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
        return [marker for marker in self.marker_ids if (ids == marker).any()]

    def _pieces(self, name: str, text: str) -> Iterator[str]:
        names = [m for m in (self.markers.begin, self.markers.end, self.markers.patch) if isinstance(m, str)]
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


def _token_ids(name: str, ids: Any) -> IntArray:
    array = int_array(name, ids, (None,))
    first_bad(name, array, minimum=0)
    return array


def _naming(name: str, call: Any, argument: Any, joint: str = ": ") -> Any:
    """Call, and put the name of the part before the message of any error of ours."""
    try:
        return call(argument)
    except MmposError as error:
        raise type(error)(f"{name}{joint}{error}") from error
