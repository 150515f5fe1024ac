"""Implement SequenceService: check, build and write documents; a document that fails does not affect the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpos.errors import MmposError, ServiceError
from mmpos.images import ImageSize
from mmpos.images.decode import open_source
from mmpos.positions.plan import plan_of
from mmpos.rpc.errors import put_error
from mmpos.rpc.positions import get_scheme
from mmpos.rpc.sequences import get_parts, put_sequences
from mmpos.rpc.v1 import sequences_pb2 as pb
from mmpos.schemes import get_scheme as named_scheme
from mmpos.segments.kinds import Audio, Clip, Grid
from mmpos.sequence.builder import Contents, PlacedDocuments, SequenceBuilder, is_ids
from mmpos_server.config import Limits, Profiles
from mmpos_server.limits import check, check_answer
from mmpos_server.plain import SMALL_ANSWER, SMALL_BYTES

if TYPE_CHECKING:
    from mmpos_server.call import Call

__all__ = ["SequenceService"]

_Together = tuple[list[Contents], PlacedDocuments]
"""Documents that were placed together."""


@dataclass(slots=True)
class _Document:
    """A document in a request: its parts, and later its contents or its error.

    Args:
        parts: parts for SequenceBuilder.
        images: number of images among them.
        hashes: content hashes of the images that are not decoded.
        decoded: whether an image is decoded.
        contents: the encoded parts.
        error: the error; None as long as there is none.
    """

    parts: list[Any] = field(default_factory=list)
    images: int = 0
    hashes: dict[int, str] = field(default_factory=dict)
    decoded: bool = False
    contents: Contents | None = None
    error: MmposError | None = None


class SequenceService:
    """Implementation of SequenceService.

    Args:
        profiles: settings for the models.
        limits: limits for one request.
    """

    def __init__(self, profiles: Profiles, limits: Limits) -> None:
        self._profiles, self._limits = profiles, limits

    async def build(self, message: pb.SequencesQuery, answer: pb.Sequences, call: Call) -> None:
        """Answer Build with the sequences of a batch of documents; threads decode images and do long work."""
        builder = self._builder(message)

        def finish() -> None:
            began = perf_counter()
            self._encode(builder, documents, call)
            placed = self._place(builder, documents)
            call.staged("build", began)
            began = perf_counter()
            self._write(placed, documents, answer, call)
            call.staged("write", began)

        if call.request_bytes <= SMALL_BYTES:
            documents = self._read(message, builder, call)
        else:
            documents = await call.run("work", self._read, message, builder, call)
        decoded = [document for document in documents if document.decoded]
        if decoded:
            await call.map("image", self._build, [(builder, [document], call) for document in decoded])
        if call.request_bytes <= SMALL_BYTES and (decoded or call.answer_bytes <= SMALL_ANSWER):
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
        began = perf_counter()
        check("documents", len(message.documents), self._limits)
        documents = [_read(document, call) for document in message.documents]
        check("segments", sum(len(document.parts) for document in documents), self._limits)
        check("images", sum(document.images for document in documents), self._limits)
        size = _Size()
        for document in documents:
            call.checkpoint()
            size.add(document, builder, call, patches=message.patches)
        check("pixels", size.pixels, self._limits)
        check("tokens", size.tokens, self._limits)
        check_answer(4 * size.tokens + size.patch_bytes, self._limits, call)
        check("segments", size.frames, self._limits)
        call.staged("read", began)
        return documents

    def _build(self, builder: SequenceBuilder, documents: list[_Document], call: Call) -> None:
        began = perf_counter()
        self._encode(builder, documents, call)
        call.staged("build", began)

    def _encode(self, builder: SequenceBuilder, documents: list[_Document], call: Call) -> None:
        """Encode the texts and decode the images of the documents for which this is still to do."""
        for document in documents:
            call.checkpoint()
            if document.contents is not None or document.error is not None:
                continue
            try:
                parts = _CheckedParts(document.parts, call) if document.decoded else document.parts
                contents = builder.contents(parts)
                check("tokens", contents.tokens, self._limits)
            except ServiceError:  # raised by the checkpoint
                raise
            except MmposError as error:
                document.error = error
            else:
                for image, content_hash in document.hashes.items():
                    contents.image_hashes[image] = content_hash
                document.contents = contents

    def _place(self, builder: SequenceBuilder, documents: list[_Document]) -> list[_Together]:
        """Place all documents together, or one by one if one of them fails or the scheme may look across documents."""
        built = [(document, document.contents) for document in documents if document.contents is not None]
        check("tokens", sum(contents.tokens for _, contents in built), self._limits)
        if len(built) > 1 and plan_of(named_scheme(builder.scheme)) is not None:
            with suppress(MmposError):
                every = [contents for _, contents in built]
                return [(every, builder.placed(every))]
        placed: list[_Together] = []
        for document, contents in built:
            try:
                placed.append(([contents], builder.placed([contents])))
            except MmposError as error:
                document.error = error
        return placed

    def _write(self, placed: list[_Together], documents: list[_Document], answer: pb.Sequences, call: Call) -> None:
        messages = []
        for document in documents:
            result = answer.results.add()
            if document.error is None:
                messages.append(result.sequence)
            else:
                put_error(result.error, document.error)
        empty = iter(messages)
        for together, tables in placed:
            call.checkpoint()
            put_sequences(list(islice(empty, len(together))), together, tables, call.beside)
        call.counts = {
            "documents": len(documents),
            "tokens": sum(tables.input_ids.size for _, tables in placed),
            "images": sum(len(contents.grid_thw) for together, _ in placed for contents in together),
        }


class _CheckedParts(list[Any]):
    """List of parts that raises an error during iteration if the client is no longer waiting for the answer."""

    def __init__(self, parts: list[Any], call: Call) -> None:
        super().__init__(parts)
        self._call = call

    def __iter__(self) -> Iterator[Any]:
        for part in super().__iter__():
            self._call.checkpoint()
            yield part


def _read(message: pb.Document, call: Call) -> _Document:
    try:
        parts = get_parts("", message, call.beside)
    except MmposError as error:
        return _Document(error=error)
    return _Document(parts, sum(not (isinstance(part, str | Audio) or is_ids(part)) for part in parts))


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
        document.decoded = True
        self.pixels += size.height * size.width
        self.patch_bytes += height * width * 3 * np.dtype(images.dtype).itemsize


def _content_hash(image: object) -> str:
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    with open_source(image) as source:
        return source.read("pillow")[1]
