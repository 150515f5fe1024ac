"""A sequence of interleaved text and images, and how its arrays come of what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.images import ProcessedImage
from mmpos.positions.block_keys import block_keys
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.schemes import Scheme
from mmpos.segments.parts import Grid, Text
from mmpos.segments.separators import separator_tokens
from mmpos.segments.table import SegmentTable
from mmpos.sequence.markers import MarkerIds
from mmpos.sequence.video import given_offsets
from mmpos.support.checks import IntArray, counted, int_array

__all__ = ["Contents", "InterleavedSequence"]


@dataclass(frozen=True, eq=False)
class InterleavedSequence:
    """Text and images as a model reads them.

    Args:
        input_ids: (tokens,) int64; patches are the patch marker's id.
        token_type_ids: (tokens,) uint8, 0 for text, markers and row separators, 1 for patches.
        segments: the shape of the sequence, one document.
        positions: its position table.
        patches: (patches, patch_size, patch_size, 3) pixels of all images, before merging; None when
            the images are known only by size.
        grid_thw: (images, 3) int64 frames, height, width after merging.
        image_spans: (images, 2) int64 first token of each image's patches and one past the last, row separators
            included, the one after the last row too.
        image_hashes: content hash of each image; None where only the size is known.
        part_offsets: (parts + 1,) int64 first token of each part, an image's markers included, then the total; a
            Video is one part.
        image_margins: tokens before and after those of every image in image_spans: its markers.
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
    image_margins: tuple[int, int] = (1, 1)

    @property
    def marked_spans(self) -> IntArray:
        """(images, 2) int64 first token of each image and one past the last, its markers included."""
        before, after = self.image_margins
        return self.image_spans + np.array([-before, after])

    def block_keys(
        self,
        block_size: int,
        *,
        generated: npt.ArrayLike = (),
        salt: str | bytes = b"",
        known: Sequence[bytes] = (),
    ) -> list[bytes]:
        """One key for each full block of tokens, to share keys and values by; see ``mmpos.block_keys``.

        Args:
            block_size: tokens of a block.
            generated: token ids after those of the sequence.
            salt: tells caches apart that must not share blocks: of models, adapters or tenants.
            known: keys of the first blocks, which are not computed again.

        Raises:
            InvalidInputError: an image is known only by its size.
            UnsupportedError: tokens were generated, and the scheme has no next position.
        """
        hashes = [found for found in self.image_hashes if found is not None]
        if len(hashes) < len(self.image_hashes):
            i = self.image_hashes.index(None)
            raise InvalidInputError(
                f"image_hashes[{i}]: got None, want the hash of an image that came with its content"
            )
        more = int_array("generated", generated, (None,))
        positions = self.positions
        if more.size:
            positions = positions.window([0], [0], [self.input_ids.size + more.size])
        (keys,) = block_keys(
            self.segments,
            positions,
            block_size,
            input_ids=np.concatenate([self.input_ids, more]),
            image_hashes=hashes,
            salt=salt,
            known=[known],
        )
        return keys

    def __repr__(self) -> str:
        patches = None if self.patches is None else f"{self.patches.dtype} {self.patches.shape}"
        tokens, images = counted(self.input_ids.size, "token"), counted(len(self.grid_thw), "image")
        return f"InterleavedSequence({tokens}, {images}, patches={patches})"


@dataclass
class Contents:
    """A sequence on its way.

    Args:
        marker_ids: of the tokens around and inside images.
        texts: first token and ids of every part that is text.
        document: its text, with markers, and its grids.
        images: in order.
        spans: first token of each image's patches and one past the last.
        offsets: first token of each plain part, then of what comes next.
        given: the part given that each plain part is of.
        text: tokens since the last grid.
    """

    marker_ids: MarkerIds
    texts: list[tuple[int, IntArray]] = field(default_factory=list)
    document: list[Text | Grid] = field(default_factory=list)
    images: list[ProcessedImage] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])
    given: list[int] = field(default_factory=list)
    text: int = 0

    def add_text(self, given: int, ids: IntArray) -> None:
        """One more part of text."""
        self.given.append(given)
        self.texts.append((self.offsets[-1], ids))
        self.offsets.append(self.offsets[-1] + ids.size)
        self.text += ids.size

    def add_image(self, given: int, image: ProcessedImage) -> None:
        """One more image, with its markers."""
        self.given.append(given)
        grid = replace(image.grid, row_separator=True) if self.marker_ids.row is not None else image.grid
        before, after = self.marker_ids.margins
        first = self.offsets[-1] + before
        stop = first + grid.frames * grid.height * (grid.width + grid.row_separator)
        self.document += [Text(self.text + before), grid] if self.text + before else [grid]
        self.images.append(image)
        self.spans.append((first, stop))
        self.offsets.append(stop + after)
        self.text = after

    def sequence(self, scheme: str | Scheme, start: int) -> InterleavedSequence:
        """What has come of it."""
        document = [*self.document, Text(self.text)] if self.text else self.document
        if not document:
            raise InvalidInputError("parts: got no tokens, want at least one")
        segments = SegmentTable.from_documents([document])
        patches = self._patches()
        positions = place(segments, scheme, start)
        spans = np.array(self.spans, np.int64).reshape(-1, 2)
        markers = self.marker_ids
        input_ids = np.full(self.offsets[-1], markers.patch, np.int64)
        for first, ids in self.texts:
            input_ids[first : first + ids.size] = ids
        markers.write(input_ids, spans, separator_tokens(segments))
        return InterleavedSequence(
            input_ids=input_ids,
            token_type_ids=(input_ids == markers.patch).view(np.uint8),  # no other token has this id
            segments=segments,
            positions=positions,
            patches=patches,
            grid_thw=np.array([image.grid.extents for image in self.images], np.int64).reshape(-1, 3),
            image_spans=spans,
            image_hashes=tuple(image.content_hash for image in self.images),
            part_offsets=given_offsets(self.offsets, self.given),
            image_margins=markers.margins,
        )

    def _patches(self) -> npt.NDArray[Any] | None:
        pixels = [image.patches for image in self.images if image.patches is not None]
        if pixels and len(pixels) < len(self.images):
            raise InvalidInputError("parts: got images with and without pixels, want all of one sort")
        if len(pixels) == 1:
            return pixels[0]
        return np.concatenate(pixels) if pixels else None
