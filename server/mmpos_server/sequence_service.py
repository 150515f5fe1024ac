"""Implement SequenceService: check, build and write documents; a document that fails does not affect the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mmpos.errors import LimitExceededError, MmposError, ServiceError
from mmpos.images import ImageSize
from mmpos.images.decode import open_source
from mmpos.rpc.errors import put_error
from mmpos.rpc.positions import get_scheme
from mmpos.rpc.sequences import get_parts, put_sequence
from mmpos.rpc.v1 import sequences_pb2 as pb
from mmpos.segments.kinds import Audio, Clip, Grid
from mmpos.sequence.builder import InterleavedSequence, SequenceBuilder
from mmpos_server.config import Limits, Profiles
from mmpos_server.limits import check, check_answer
from mmpos_server.plain import SMALL_ANSWER
from mmpos_server.position_service import is_small

if TYPE_CHECKING:
    from mmpos_server.call import Call, PoolName

__all__ = ["SequenceService"]

_HEAVY_PIXELS = 16_000_000
"""Number of pixels above which an image counts as heavy; to bound memory, only a few threads decode heavy images.
"""


@dataclass
class _Document:
    """A document in a request: its parts, and later its sequence or its error.

    Args:
        parts: parts for SequenceBuilder.
        hashes: content hashes of the images that are not decoded.
        pool: pool that decodes the images: "heavy" if an image has more than 16 megapixels, "" if there are no images.
        outcome: the sequence, or the error; None before the document is built.
    """

    parts: list[Any] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)
    pool: Literal["", "image", "heavy"] = ""
    outcome: InterleavedSequence | MmposError | None = None


class SequenceService:
    """Implementation of SequenceService.

    Args:
        profiles: settings for the models.
        limits: limits for one request.
    """

    def __init__(self, profiles: Profiles, limits: Limits) -> None:
        self._profiles, self._limits = profiles, limits

    async def build(self, message: pb.SequencesQuery, answer: pb.Sequences, call: Call) -> None:
        """Answer Build with the sequences of a batch of documents; threads decode images in parallel and do long work."""
        builder = self._builder(message)

        def finish() -> None:
            self._build(builder, documents, call)
            with call.stage("write"):
                self._write(documents, answer, call)

        if is_small(call):
            documents = self._read(message, builder, call)
        else:
            documents = await call.run("work", self._read, message, builder, call)
        decoded: dict[PoolName, list[_Document]] = {"image": [], "heavy": []}
        for document in documents:
            if document.pool:
                decoded[document.pool].append(document)
        pools = [pool for pool, pending in decoded.items() if pending]
        for pool in pools:
            await call.map(pool, self._build, [(builder, [document], call) for document in decoded[pool]])
        if is_small(call) and (pools or call.answer_bytes <= SMALL_ANSWER):
            finish()
        else:
            await call.run("work", finish)

    def _builder(self, message: pb.SequencesQuery) -> SequenceBuilder:
        """Return the builder of the query's profile, with the query's scheme and start if it has them."""
        builder = self._profiles.get(message.profile if message.HasField("profile") else None).builder
        changes: dict[str, Any] = {"start": message.start} if message.start else {}
        if message.HasField("scheme"):
            changes["scheme"] = get_scheme("query.scheme", message.scheme, self._profiles.schemes)
        return replace(builder, **changes) if changes else builder

    def _read(self, message: pb.SequencesQuery, builder: SequenceBuilder, call: Call) -> list[_Document]:
        """Read the documents and check their sizes against the limits before any is built."""
        with call.stage("read"):
            check("documents", len(message.documents), self._limits)
            check("segments", sum(len(document.parts) for document in message.documents), self._limits)
            check("images", sum(_images(document) for document in message.documents), self._limits)
            documents = [_read(document, call) for document in message.documents]
            size = _Size()
            for document in documents:
                call.checkpoint()
                size.add(document, builder, call, patches=message.patches)
            check("pixels", size.pixels, self._limits)
            check("tokens", size.tokens, self._limits)
            check_answer(4 * size.tokens + size.patch_bytes, self._limits, call)
            check("segments", size.frames, self._limits)
            return documents

    def _build(self, builder: SequenceBuilder, documents: list[_Document], call: Call) -> None:
        with call.stage("build"):
            for document in documents:
                call.checkpoint()
                if document.outcome is None:
                    document.outcome = self._build_one(builder, document, call)

    def _build_one(self, builder: SequenceBuilder, document: _Document, call: Call) -> InterleavedSequence | MmposError:
        try:
            sequence = builder.build(_CheckedParts(document.parts, call))
        except ServiceError:  # raised by the checkpoint
            raise
        except MmposError as error:
            return error
        if sequence.input_ids.size > self._limits.tokens:
            return LimitExceededError(f"tokens: got {sequence.input_ids.size}, want at most {self._limits.tokens}")
        if not document.hashes:
            return sequence
        hashes = tuple(document.hashes.get(i, known) for i, known in enumerate(sequence.image_hashes))
        return replace(sequence, image_hashes=hashes)

    def _write(self, documents: list[_Document], answer: pb.Sequences, call: Call) -> None:
        built = [document.outcome for document in documents if isinstance(document.outcome, InterleavedSequence)]
        tokens = sum(sequence.input_ids.size for sequence in built)
        check("tokens", tokens, self._limits)
        call.count(documents=len(documents), tokens=tokens, images=sum(len(sequence.grid_thw) for sequence in built))
        del built  # so that the patches are in memory only once
        for document in documents:
            call.checkpoint()
            result = answer.results.add()
            if isinstance(document.outcome, MmposError):
                put_error(result.error, document.outcome)
            elif document.outcome is not None:
                put_sequence(result.sequence, document.outcome, call.beside)
            document.outcome = None


class _CheckedParts(list[Any]):
    """List of parts that raises an error during iteration if the client is no longer waiting for the answer."""

    def __init__(self, parts: list[Any], call: Call) -> None:
        super().__init__(parts)
        self._call = call

    def __iter__(self) -> Iterator[Any]:
        for part in super().__iter__():
            self._call.checkpoint()
            yield part


def _images(document: pb.Document) -> int:
    return sum(part.WhichOneof("content") not in (None, "text", "token_ids", "audio") for part in document.parts)


def _read(message: pb.Document, call: Call) -> _Document:
    try:
        return _Document(get_parts("", message, call.beside))
    except MmposError as error:
        return _Document(outcome=error)


@dataclass
class _Size:
    """Size of a request as estimated from image headers: source pixels, tokens, bytes of patches, and frames."""

    pixels: int = 0
    tokens: int = 0
    patch_bytes: int = 0
    frames: int = 0

    def add(self, document: _Document, builder: SequenceBuilder, call: Call, *, patches: bool) -> None:
        """Add a document.

        Each character counts as a token until it is tokenised. Images that need not be decoded are replaced by their
        sizes. A broken image adds nothing because building the document raises the error.
        """
        images = 0
        for i, part in enumerate(document.parts):
            if isinstance(part, str):
                self.tokens += len(part)
            elif isinstance(part, Audio):
                self.tokens += part.length
            elif isinstance(part, np.ndarray) and part.ndim == 1:
                self.tokens += part.size
            else:
                if isinstance(part, Grid):
                    self._add_grid(part, builder)
                elif isinstance(part, Clip):
                    # A scheme may split a clip before and after every audio token.
                    self.tokens += part.frames * part.height * part.width + part.audio
                    self.frames += part.frames + 2 * part.audio
                else:
                    call.checkpoint()
                    self._add_image(document, i, images, builder, patches=patches)
                images += 1

    def _add_grid(self, grid: Grid, builder: SequenceBuilder) -> None:
        self.tokens += grid.frames * grid.height * (grid.width + (builder.markers.row is not None))
        self.frames += grid.frames

    def _add_image(
        self, document: _Document, index: int, image: int, builder: SequenceBuilder, *, patches: bool
    ) -> None:
        part, images = document.parts[index], builder.images
        assert images is not None, "every profile has an image processor"
        try:
            size = images.inspect(part)
            height, width = images.fit(*size)
        except MmposError:
            return
        self._add_grid(images.grid(*size), builder)
        if isinstance(part, ImageSize):
            return
        if not patches:
            document.hashes[image] = _content_hash(part)
            document.parts[index] = size
            return
        heavy = document.pool == "heavy" or size.height * size.width > _HEAVY_PIXELS
        document.pool = "heavy" if heavy else "image"
        self.pixels += size.height * size.width
        self.patch_bytes += height * width * 3 * np.dtype(images.dtype).itemsize


def _content_hash(image: object) -> str:
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    with open_source(image) as source:
        return source.read("pillow")[1]
