"""SequenceBuilder: turn interleaved parts into input_ids with [IMG] patches [/IMG], segments and positions."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.images import ImageProcessor, ProcessedImage
from mmpos.positions.block_keys import block_keys
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.schemes import Scheme, get_scheme
from mmpos.segments.kinds import (
    AUDIO,
    AUDIO_TOKEN,
    CLIP,
    CLIP_MARKERS,
    PATCH,
    TEXT,
    THUMBNAIL,
    TILE,
    Audio,
    Clip,
    Grid,
    Segment,
    Text,
)
from mmpos.segments.placeholders import Placeholders
from mmpos.segments.table import SegmentTable
from mmpos.sequence.tokenizers import ByteTokenizer, Tokenizer, adapt
from mmpos.sequence.video import plain_parts, refuse_crop
from mmpos.support import checks, native
from mmpos.support.checks import INT32_MAX, Array, IntArray, counted, first_bad, int_array, integer, naming
from mmpos.support.info import cores

__all__ = [
    "Contents",
    "InterleavedSequence",
    "MarkerIds",
    "Markers",
    "PlacedDocuments",
    "SequenceBuilder",
    "is_ids",
    "join_patches",
]

MAX_CUTS = 10_000
"""Maximum number of times that a text may spell a marker that the tokenizer would recognise."""

_READ_BY_ANY = (bytes, bytearray, memoryview, os.PathLike, np.ndarray)
"""Image types that any thread may read: files and arrays."""


class MarkerIds(NamedTuple):
    """Ids of Markers; None for an absent marker."""

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
        """Number of tokens before and after the patches of an image."""
        return int(self.begin is not None), int(self.end is not None)

    @property
    def audio_margins(self) -> tuple[int, int]:
        """Number of tokens before and after a run of audio."""
        return int(self.audio_begin is not None), int(self.audio_end is not None)

    @property
    def placeholders(self) -> Placeholders:
        """Markers for patches, audio and row ends."""
        last_row = self.row if self.last_row is None else self.last_row
        rows = None if self.row is None or last_row is None else (self.row, last_row)
        return Placeholders(self.patch, self.video, self.audio, rows)

    def ids_of(self, segment: Grid | Audio | Clip) -> IntArray:
        """Return the token ids of a segment with its markers; audio tokens of a clip get the patch id at first."""
        if isinstance(segment, Audio):
            assert self.audio is not None, "checked with the part"
            return _between(self.audio_begin, self.audio, segment.length, self.audio_end)
        video = isinstance(segment, Clip) or segment.frames > 1
        patch = self.video if video and self.video is not None else self.patch
        rows = segment.frames * segment.height
        if isinstance(segment, Clip):
            assert self.audio_begin is not None, "checked with the part"
            assert self.audio_end is not None, "checked with the part"
            ids = _between(self.begin, patch, rows * segment.width + segment.audio + 2, self.end)
            ids[1], ids[-2] = self.audio_begin, self.audio_end
            return ids
        columns = segment.width + segment.row_separator
        ids = _between(self.begin, patch, rows * columns, self.end)
        if self.row is not None:
            before, after = self.margins
            inside = ids[before : ids.size - after]
            inside[segment.width :: columns] = self.row
            inside[-1] = self.row if self.last_row is None else self.last_row
        return ids


def _between(begin: int | None, token_id: int, count: int, end: int | None) -> IntArray:
    """Repeat a token ``count`` times, between the begin and end tokens that are not None."""
    ids = np.full(count + (begin is not None) + (end is not None), token_id, np.int64)
    if begin is not None:
        ids[0] = begin
    if end is not None:
        ids[-1] = end
    return ids


@dataclass(frozen=True)
class Markers:
    """Special tokens around and inside images, videos and audio, by name or by id.

    Pixtral and Mistral Small use ``Markers(None, None, "[IMG]", "[IMG_BREAK]", "[IMG_END]")``; Qwen2.5-Omni uses
    ``Markers("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", video="<|VIDEO|>", audio="<|AUDIO|>",
    audio_begin="<|audio_bos|>", audio_end="<|audio_eos|>")``.

    Args:
        begin: token before the patches of an image, or None.
        end: token after the patches of an image and after its last row marker, or None.
        patch: token for each patch in input_ids, to be replaced by its embedding.
        row: token after the patches of every row, for models that generate patch by patch or read rows of any length.
            If set, every image has row separators; None for no separators.
        last_row: token after the last row, in place of ``row``; None uses ``row``.
        video: token for each patch of a Clip and of a Grid with several frames; None uses patch.
        audio: placeholder for each audio token; None if the builder does not support audio.
        audio_begin: token before a run of audio, or None.
        audio_end: token after a run of audio, or None.
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
            InvalidInputError: a name is not a single token of the tokenizer, or two markers share an id.
        """
        if self.last_row is not None and self.row is None:
            raise InvalidInputError("markers.last_row requires markers.row")
        for name in ("audio_begin", "audio_end"):
            if getattr(self, name) is not None and self.audio is None:
                raise InvalidInputError(f"markers.{name} requires markers.audio")
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
            raise InvalidInputError(f"markers.{name}: got {marker!r}, want a token with a single id in the tokenizer")
        return integer(f"markers.{name}", token_id, minimum=0, maximum=INT32_MAX)


@dataclass(frozen=True)
class SequenceBuilder:
    """Builder of sequences from parts: str, token ids, images of any type that ImageProcessor accepts, Videos, audio.

    A list, tuple or one-dimensional integer array contains token ids. An ImageSize or a Grid stands for an image of
    which only the size is known. A Video is a series of frames, each an image preceded by its time as text. Audio and
    Clip are classes of ``mmpos.segments``: an Audio is a number of audio tokens, and a Clip is a video merged with its
    audio in the order that the scheme defines.

    Text that spells the name of a marker stays text: if the tokenizer would encode it as the marker, it is encoded in
    two pieces, split inside the name. Every text part is encoded separately, so a tokenizer that adds something before
    each text (SentencePiece adds a space) adds it before each part.

    >>> builder = SequenceBuilder()
    >>> builder.build(["a", Grid(1, 2), "b"]).input_ids.tolist()
    [97, 256, 258, 258, 257, 98]

    Args:
        tokenizer: a tokenizers or transformers object, or anything with encode and decode.
        images: processor that turns images into patches; optional if every image is a Grid.
        scheme: name from mmpos.SCHEMES, or a Scheme.
        markers: special tokens for images and audio; with Markers(row=…), every image has row separators.
        start: position id of the first token.
    """

    tokenizer: Any = field(default_factory=ByteTokenizer)
    images: ImageProcessor | None = None
    scheme: str | Scheme = "rope-tie"
    markers: Markers = field(default_factory=Markers)
    start: int = 0
    marker_ids: MarkerIds = field(init=False, repr=False)
    _all_markers: IntArray = field(init=False, repr=False, compare=False)
    _margins: tuple[tuple[int, int], tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.markers, Markers):
            raise InvalidInputError(f"markers: got {type(self.markers).__name__}, want Markers")
        if not isinstance(self.images, ImageProcessor | None):
            raise InvalidInputError(f"images: got {type(self.images).__name__}, want an ImageProcessor or None")
        vars(self).update(tokenizer=adapt(self.tokenizer), scheme=get_scheme(self.scheme))
        markers = self.markers.ids(self.tokenizer)
        ids = sorted(marker for marker in markers if marker is not None)
        margins = (markers.margins, markers.audio_margins)
        vars(self).update(marker_ids=markers, _all_markers=np.array(ids, np.int64), _margins=margins)

    def build(self, parts: Sequence[object]) -> InterleavedSequence:
        """Build the sequence of these parts, in order.

        Raises:
            InvalidInputError: a part has an unknown type, or an image is damaged; the message names ``parts[i]``, or
                ``parts[i].frames[k]`` for a Video.
            UnsupportedError: the scheme does not define row separators, frames or clips that the parts contain; the
                builder lacks an ImageProcessor or Markers for a part; or a part is a Thumbnail or a Tile, which no
                ImageProcessor produces.
            LimitExceededError: an image or an id exceeds its limit.
        """
        return self._build(parts, {})

    def build_batch(
        self, documents: Sequence[Sequence[object]], *, threads: int | None = None
    ) -> list[InterleavedSequence]:
        """Build the sequences of several documents; the number of threads does not change the result.

        Args:
            documents: parts of each document.
            threads: number of threads that decode files and arrays, at most one per image; None for one per core, 1 for
                the calling thread only. Meanwhile, the calling thread encodes texts and decodes Pillow images, which
                threads must not share.

        Raises:
            MmposError: as in ``build``, for the first document with an error; the message names
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
            if isinstance(part, _READ_BY_ANY) and not is_ids(part)
        ]
        ahead: list[dict[int, Future[ProcessedImage]]] = [{} for _ in documents]
        with ThreadPoolExecutor(most, "mmpos-images") as pool:
            # A pool accepts no work after the main thread has ended.
            if self.images is not None and min(most, len(images)) > 1 and threading.main_thread().is_alive():
                for d, n, image in images:
                    ahead[d][n] = pool.submit(self.images.process, image)
            try:
                sequences = []
                for d, parts in enumerate(documents):
                    with naming(f"documents[{d}]", joint="."):
                        sequences.append(self._build(parts, ahead[d]))
                return sequences
            finally:
                pool.shutdown(cancel_futures=True)

    def _build(self, parts: Sequence[object], ahead: dict[int, Future[ProcessedImage]]) -> InterleavedSequence:
        contents = self.contents(parts, ahead)
        tables, markers = self.placed([contents]), self.marker_ids
        types = (tables.input_ids == markers.patch).view(np.uint8)  # text contains none of these ids
        if markers.video is not None:
            types[tables.input_ids == markers.video] = PATCH
        if markers.audio is not None:
            types[tables.input_ids == markers.audio] = AUDIO_TOKEN
        return InterleavedSequence(
            input_ids=tables.input_ids,
            token_type_ids=types,
            segments=tables.segments,
            positions=tables.positions,
            patches=contents.patches,
            grid_thw=np.array(contents.grid_thw, np.int64).reshape(-1, 3),
            image_spans=np.array(contents.image_spans, np.int64).reshape(-1, 2),
            image_hashes=tuple(contents.image_hashes),
            part_offsets=np.array(contents.part_offsets, np.int64),
            image_margins=contents.image_margins,
            audio_margins=contents.audio_margins,
        )

    def contents(self, parts: Sequence[object], ahead: dict[int, Future[ProcessedImage]] | None = None) -> Contents:
        """Encode the texts of a document and decode its images, except those ``ahead``, by index; see ``build``."""
        if not isinstance(parts, list | tuple):
            raise InvalidInputError(f"parts: got {type(parts).__name__}, want a list of parts")
        images, contents = [], Contents(*self._margins, self.marker_ids.row is not None)
        for n, (index, name, part) in enumerate(plain_parts(parts)):
            if index == len(contents.part_offsets):
                contents.part_offsets.append(contents.tokens)
            if isinstance(part, str) or is_ids(part):
                ids = self._encode(name, part) if isinstance(part, str) else self._checked(name, part)
                contents.pieces.append(ids)
                contents.text += ids.size
                contents.tokens += ids.size
            else:
                self.check_components(name, part)
                image = None
                if not isinstance(part, Grid | Audio | Clip):
                    assert self.images is not None
                    with naming(name):  # pop, so that patches are not held twice
                        image = ahead.pop(n).result() if ahead and n in ahead else self.images.process(part)
                    part = image.grid
                if not isinstance(part, Audio):
                    images.append(image)
                contents.add_segment(part, None if image is None else image.content_hash)
        if contents.text:
            contents.segments.append(Text(contents.text))
        if not contents.segments:
            raise InvalidInputError("parts: got no tokens, want at least one")
        contents.part_offsets.append(contents.tokens)
        contents.patches = join_patches("parts", images) if any(images) else None
        return contents

    def placed(self, documents: Sequence[Contents]) -> PlacedDocuments:
        """Place documents together, and move their token ids into one array; see ``build`` for errors."""
        segments = SegmentTable.from_documents([contents.segments for contents in documents])
        positions, markers = place(segments, self.scheme, self.start), self.marker_ids
        # This follows the limit checks, since the arrays might not fit into memory.
        pieces = [
            piece if isinstance(piece, np.ndarray) else markers.ids_of(piece) for c in documents for piece in c.pieces
        ]
        input_ids = np.concatenate(pieces)
        for contents in documents:
            contents.pieces.clear()
        if CLIP in segments.kind:  # the scheme defines how patches and audio alternate
            assert markers.audio is not None, "checked with the clip"
            input_ids[positions.token_types(segments) == AUDIO_TOKEN] = markers.audio
        return PlacedDocuments(input_ids, segments, positions)

    def _checked(self, name: str, part: object) -> IntArray:
        """Check token ids; they may contain any marker except those for patches and audio."""
        ids = _token_ids(name, part)
        for marker in ("patch", "video", "audio"):
            token_id = getattr(self.marker_ids, marker)
            if token_id is not None and (ids == token_id).any():
                want = "Audio or a Clip as parts" if marker == "audio" else "images as parts"
                raise InvalidInputError(f"{name}: got the {marker} marker's id {token_id}, want {want}")
        return ids

    def check_components(self, name: str, part: object) -> None:
        """Raise an UnsupportedError if the builder lacks the ImageProcessor or the Markers that a part needs."""
        if isinstance(part, Audio | Clip):
            wanted = ("audio",) if isinstance(part, Audio) else ("begin", "end", "audio", "audio_begin", "audio_end")
            missing = [f"{marker}=…" for marker in wanted if getattr(self.markers, marker) is None]
            if missing:
                want = f"a builder with Markers({', '.join(missing)})"
                raise UnsupportedError(f"{name}: got {type(part).__name__}, want {want}")
        elif isinstance(part, Grid):
            if part.row_separator and self.markers.row is None:
                raise UnsupportedError(
                    f"{name}: got a grid with row separators, want one without, or a builder with Markers(row=…)"
                )
        elif not isinstance(part, str) and not is_ids(part):
            refuse_crop(name, part)
            if self.images is None:
                want = "text or token ids, or a builder with images=ImageProcessor(…)"
                raise UnsupportedError(f"{name}: got {type(part).__name__}, want {want}")

    def _encode(self, name: str, text: str) -> IntArray:
        """Encode user text, split after the first character of each spelled marker, so that the marker stays text."""
        encoder, markers = f"{name}: tokenizer.encode", self._all_markers
        text = checks.text(name, text)
        if type(self.tokenizer) is ByteTokenizer:
            ids = self.tokenizer.encode_array(text)
        else:
            ids = _token_ids(encoder, self.tokenizer.encode(text) if text else [])
        # Special tokens usually come last.
        if not ids.size or ids.max() < markers[0] or not np.isin(ids, markers).any():
            return ids
        ids = np.concatenate([_token_ids(encoder, self.tokenizer.encode(p)) for p in self._pieces(name, text)])
        marked = ids[np.isin(ids, markers)]
        if marked.size:
            raise InvalidInputError(f"{name}: got text that encodes to marker id {marked[0]}, want plain text")
        return ids

    def _pieces(self, name: str, text: str) -> Iterator[str]:
        markers = (getattr(self.markers, field.name) for field in fields(self.markers))
        names = [marker for marker in markers if isinstance(marker, str)]
        done = 0
        # Search at every character, since occurrences may overlap.
        matches = re.finditer("(?=" + "|".join(map(re.escape, names)) + ")", text) if names else ()
        for count, match in enumerate(matches):
            if count == MAX_CUTS:
                raise LimitExceededError(f"{name}: got text that spells markers more than {MAX_CUTS} times, want fewer")
            yield text[done : match.start() + 1]
            done = match.start() + 1
        if done < len(text):
            yield text[done:]


def is_ids(part: object) -> bool:
    """Return whether a part consists of token ids."""
    return isinstance(part, list | tuple) or (getattr(part, "ndim", 0) == 1 and not isinstance(part, memoryview))


def _token_ids(name: str, ids: object) -> IntArray:
    numbers = None if native.core is None else native.core.numbers(ids)
    if numbers is not None:
        return native.int64(numbers)
    checked = int_array(name, ids, (None,))
    first_bad(name, checked, minimum=0)
    return checked


@dataclass(frozen=True, eq=False)
class InterleavedSequence:
    """Text, images and audio as one sequence of tokens for a model.

    Args:
        input_ids: (tokens,) int64; patches and audio tokens have the ids of their markers.
        token_type_ids: (tokens,) uint8, 0 for text, markers and row separators, 1 for patches, 3 for audio.
        segments: segment table of the sequence, with one document.
        positions: position table of the sequence.
        patches: (patches, patch_size, patch_size, 3) pixels of all images, before merging; None if only their sizes
            are known.
        grid_thw: (images, 3) int64 frames, height, width after merging; a clip counts as an image.
        image_spans: (images, 2) int64 first patch token of each image and one past the last, including all row
            separators; for a clip, the tokens between the markers of its video.
        image_hashes: content hash of each image; None if only its size is known.
        part_offsets: (parts + 1,) int64 first token of each part, including its markers, then the number of tokens; a
            Video is one part.
        image_margins: number of markers before and after the patches of each image in image_spans.
        audio_margins: number of markers before and after the tokens of each run in audio_spans.
    """

    input_ids: IntArray
    token_type_ids: npt.NDArray[np.uint8]
    segments: SegmentTable
    positions: PositionTable
    patches: Array | None
    grid_thw: IntArray
    image_spans: IntArray
    image_hashes: tuple[str | None, ...]
    part_offsets: IntArray
    image_margins: tuple[int, int] = (1, 1)
    audio_margins: tuple[int, int] = (0, 0)

    @property
    def audio_spans(self) -> IntArray:
        """(audios, 2) int64 first token of each run of audio and one past the last, excluding the audio of clips."""
        (audio,) = (self.segments.kind == AUDIO).nonzero()
        lengths = self.segments.lengths
        stops = lengths.cumsum()
        return np.stack([stops - lengths, stops], axis=1)[audio]

    @property
    def marked_spans(self) -> IntArray:
        """(images + audios, 2) int64 first token of each image or run of audio and one past the last, with markers.

        The spans are in ascending order. A thumbnail and its tiles are one image, up to their last token.
        """
        before, after = self.image_margins
        images = self.image_spans + np.array([-before, after])
        kind = self.segments.kind
        if kind.max(initial=0) < AUDIO:  # fast path: packers call this often
            return images
        lengths = self.segments.lengths
        stops = lengths.cumsum()
        (head,) = (kind == THUMBNAIL).nonzero()
        (others,) = np.append(kind != TILE, True).nonzero()
        last = others[others.searchsorted(head, side="right")] - 1
        pictures = np.stack([(stops - lengths)[head], stops[last]], axis=1)
        whole = kind[stops.searchsorted(self.image_spans[:, 0], side="right")] < THUMBNAIL
        before, after = self.audio_margins
        spans = np.concatenate([images[whole], pictures, self.audio_spans + np.array([-before, after])])
        return spans[spans[:, 0].argsort()]

    def image_tokens(self) -> tuple[IntArray, IntArray]:
        """Return indices to scatter image features, as ``Batch`` does: ``embeddings[tokens] = features[rows]``.

        Returns:
            (patch tokens,) int64 indices into ``input_ids``, and the feature row of each.
        """
        (tokens,) = (self.token_type_ids == PATCH).nonzero()
        return tokens, np.arange(tokens.size)

    def span_name(self, span: int) -> str:
        """Name an entry of marked_spans for error messages, such as image 0 or audio 2."""
        first, stop = self.marked_spans[span].tolist()
        for name, spans in (("image", self.image_spans), ("audio", self.audio_spans)):
            (index,) = ((spans[:, 0] >= first) & (spans[:, 1] <= stop)).nonzero()
            if index.size:
                return f"{name} {index[0]}"
        raise AssertionError("every marked span belongs to an image or to audio")

    def block_keys(
        self,
        block_size: int,
        *,
        generated: npt.ArrayLike = (),
        audio_hashes: Sequence[str | bytes] = (),
        salt: str | bytes = b"",
        known: Sequence[bytes] = (),
    ) -> list[bytes]:
        """Compute a key for each full block of tokens, for sharing cached keys and values; see ``mmpos.block_keys``.

        Args:
            block_size: tokens per block.
            generated: token ids that follow the sequence.
            audio_hashes: hash of the content of each run of audio outside clips.
            salt: value that separates caches that must not share blocks, for example between models, adapters or
                tenants.
            known: keys of the first blocks, which are not computed again.

        Raises:
            InvalidInputError: an image has no content hash (a clip never has one), or the number of audio_hashes is
                wrong.
            UnsupportedError: there are generated tokens, but the scheme has no next position.
        """
        if None in self.image_hashes:
            i = self.image_hashes.index(None)
            raise InvalidInputError(
                f"image_hashes[{i}]: got None, want the hash of an image that came with its content"
            )
        kind = self.segments.kind
        sound = (kind == AUDIO)[kind != TEXT]
        if len(audio_hashes) != sound.sum():
            raise InvalidInputError(f"audio_hashes: got {len(audio_hashes)}, want {sound.sum()}, one per run of audio")
        of_audio, of_images = iter(audio_hashes), iter(self.image_hashes)
        hashes = [next(of_audio) if audio else str(next(of_images)) for audio in sound.tolist()]
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
        contents = [counted(self.input_ids.size, "token"), counted(len(self.grid_thw), "image")]
        if audios := len(self.audio_spans):
            contents.append(counted(audios, "audio run"))
        return f"InterleavedSequence({', '.join(contents)}, patches={patches})"


class PlacedDocuments(NamedTuple):
    """Documents that were placed together: their (tokens,) token ids, segments and positions."""

    input_ids: IntArray
    segments: SegmentTable
    positions: PositionTable


@dataclass(slots=True)
class Contents:
    """Contents of a document that is not placed yet, as its sequence will have them: margins, offsets, grids, spans."""

    image_margins: tuple[int, int]
    audio_margins: tuple[int, int]
    row_separator: bool
    pieces: list[IntArray | Grid | Audio | Clip] = field(default_factory=list)  # plain parts: token ids and segments
    segments: list[Segment] = field(default_factory=list)  # text including markers, grids, audio and clips
    part_offsets: list[int] = field(default_factory=list)
    grid_thw: list[tuple[int, int, int]] = field(default_factory=list)
    image_spans: list[tuple[int, int]] = field(default_factory=list)
    image_hashes: list[str | None] = field(default_factory=list)
    patches: Array | None = None
    text: int = 0  # number of text tokens since the last segment
    tokens: int = 0

    def add_segment(self, segment: Grid | Audio | Clip, content_hash: str | None = None) -> None:
        """Add a segment with its markers; the segment of a clip already includes its own."""
        frames, height, width = segment.extents
        size, outside, inside = frames * height * width + segment.extra_tokens, (0, 0), (0, 0)
        if isinstance(segment, Audio):
            outside = self.audio_margins
        elif isinstance(segment, Clip):
            inside = (CLIP_MARKERS // 2, CLIP_MARKERS // 2)
            size += 2 * CLIP_MARKERS
        else:
            outside = inside = self.image_margins
            if self.row_separator:
                segment, size = replace(segment, row_separator=True), size + frames * height
        self.pieces.append(segment)
        before = self.text + outside[0]
        self.segments += [Text(before), segment] if before else [segment]
        begin, self.text, self.tokens = self.tokens, outside[1], self.tokens + size + sum(outside)
        if not isinstance(segment, Audio):
            self.grid_thw.append((frames, height, width))
            self.image_spans.append((begin + inside[0], self.tokens - inside[1]))
            self.image_hashes.append(content_hash)


def join_patches(name: str, images: Sequence[ProcessedImage | None]) -> Array | None:
    """Concatenate the patches of images, without copying a single image; return None if only sizes are known.

    Args:
        name: name of the images for error messages.
        images: images, all with pixels or all without; None is an image without pixels.
    """
    pixels = [image.patches for image in images if image is not None and image.patches is not None]
    if pixels and len(pixels) < len(images):
        raise InvalidInputError(f"{name}: got images with and without pixels, want all with pixels or all without")
    if len(pixels) == 1:
        return pixels[0]
    return np.concatenate(pixels) if pixels else None
