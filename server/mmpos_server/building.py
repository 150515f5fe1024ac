"""SequenceService: documents are read, weighed, built side by side and written; each may fail by itself."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mmpos.errors import LimitExceededError, MmposError, ServiceError
from mmpos.images import ImageProcessor, ImageSize
from mmpos.images.sources import open_source
from mmpos.parts import Grid
from mmpos.rpc.v1 import sequences_pb2 as pb
from mmpos.sequence import InterleavedSequence, SequenceBuilder
from mmpos.wire.errors import put_error
from mmpos.wire.parts import get_parts
from mmpos.wire.schemes import get_scheme
from mmpos.wire.sequences import put_sequence
from mmpos_server.call import Call
from mmpos_server.config import Limits
from mmpos_server.profiles import Profiles
from mmpos_server.refusals import check

__all__ = ["Building"]


@dataclass
class _Document:
    """A document on its way: its parts, then its sequence or why there is none.

    Args:
        parts: as SequenceBuilder takes them.
        hashes: content hash of each image whose pixels are not decoded.
        decodes: whether there are pixels to decode.
        outcome: what came of it.
    """

    parts: list[Any] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)
    decodes: bool = False
    outcome: InterleavedSequence | MmposError | None = None


class Building:
    """The method of SequenceService.

    Args:
        profiles: settings of models.
        limits: most that one request may ask for.
    """

    def __init__(self, profiles: Profiles, limits: Limits) -> None:
        self._profiles, self._limits = profiles, limits

    async def build(self, message: pb.SequencesQuery, answer: pb.Sequences, call: Call) -> None:
        """Build a batch: documents with images in the threads for images, all others in one go."""
        if message.patches and _begins_with_an_image(message):
            call.join("image")
        builder = self._builder(message)
        documents = await call.run("place", self._weigh, message, builder, call)
        plain = [document for document in documents if not document.decodes]
        work = [[document] for document in documents if document.decodes]
        if plain:
            await call.run("place", self._build, builder, plain, call)
        await asyncio.gather(*(call.run("image", self._build, builder, group, call) for group in work))
        found = await call.run("place", self._write, documents, answer, call)
        call.count(documents=found[0], tokens=found[1], images=found[2])

    def _builder(self, message: pb.SequencesQuery) -> SequenceBuilder:
        profile = self._profiles.get(message.profile if message.HasField("profile") else None)
        changes: dict[str, Any] = {"start": message.start} if message.start else {}
        if message.HasField("scheme"):
            changes["scheme"] = get_scheme("query.scheme", message.scheme)
        return replace(profile.builder, **changes) if changes else profile.builder

    def _weigh(self, message: pb.SequencesQuery, builder: SequenceBuilder, call: Call) -> list[_Document]:
        """Read the documents, and refuse what is too much for one request from sizes alone."""
        with call.stage("read"):
            limits = self._limits
            check("documents", len(message.documents), limits)
            check("segments", sum(len(document.parts) for document in message.documents), limits)
            check("images", sum(_images(document) for document in message.documents), limits)
            documents = [_read(document) for document in message.documents]
            images = builder.images
            assert images is not None, "every profile has an image processor"
            weight = np.zeros(4)
            for document in documents:
                call.checkpoint()
                weight += _weight(document, images, patches=message.patches)
            for name, got in zip(("pixels", "tokens", "response_bytes", "segments"), weight, strict=True):
                check(name, got, limits)
            return documents

    def _build(self, builder: SequenceBuilder, documents: list[_Document], call: Call) -> None:
        with call.stage("build"):
            for document in documents:
                call.checkpoint()
                if document.outcome is None:
                    document.outcome = self._one(builder, document, call)

    def _one(self, builder: SequenceBuilder, document: _Document, call: Call) -> InterleavedSequence | MmposError:
        try:
            sequence = builder.build(_Watched(document.parts, call))
        except ServiceError:  # of the checkpoint
            raise
        except MmposError as error:
            return error
        if sequence.input_ids.size > self._limits.tokens:
            return LimitExceededError(f"tokens: got {sequence.input_ids.size}, want at most {self._limits.tokens}")
        hashes = tuple(document.hashes.get(i, known) for i, known in enumerate(sequence.image_hashes))
        return replace(sequence, image_hashes=hashes)

    def _write(self, documents: list[_Document], answer: pb.Sequences, call: Call) -> tuple[int, int, int]:
        with call.stage("write"):
            built = [document.outcome for document in documents if isinstance(document.outcome, InterleavedSequence)]
            tokens = sum(sequence.input_ids.size for sequence in built)
            check("tokens", tokens, self._limits)
            for document in documents:
                call.checkpoint()
                result = answer.results.add()
                if isinstance(document.outcome, MmposError):
                    put_error(result.error, document.outcome)
                elif document.outcome is not None:
                    put_sequence(result.sequence, document.outcome)
                document.outcome = None if document.decodes else document.outcome  # patches are held once
        return len(documents), tokens, sum(len(sequence.grid_thw) for sequence in built)


class _Watched(list[Any]):
    """Parts that are read only as long as somebody waits for the answer."""

    def __init__(self, parts: list[Any], call: Call) -> None:
        super().__init__(parts)
        self._call = call

    def __iter__(self) -> Iterator[Any]:
        for part in super().__iter__():
            self._call.checkpoint()
            yield part


def _begins_with_an_image(message: pb.SequencesQuery) -> bool:
    """Whether there is an image in the first few parts: what is refused in any case need not be weighed before."""
    parts = message.documents[0].parts[:16] if message.documents else []
    return any(part.WhichOneof("content") in ("image", "pixels") for part in parts)


def _images(document: pb.Document) -> int:
    return sum(part.WhichOneof("content") not in (None, "text", "token_ids") for part in document.parts)


def _read(message: pb.Document) -> _Document:
    try:
        return _Document(get_parts("", message))
    except MmposError as error:
        return _Document(outcome=error)


def _weight(document: _Document, images: ImageProcessor, *, patches: bool) -> Any:
    """(4,) source pixels, tokens, reply bytes and frames of a document, from headers.

    A character counts as a token until it is tokenised. Sizes replace images that need not be decoded. An image that is
    broken weighs nothing: building says what is wrong with it.
    """
    total = np.zeros(4)
    count = 0
    for i, part in enumerate(document.parts):
        if isinstance(part, str):
            total += _tokens(len(part))
        elif isinstance(part, Grid):
            total += _tokens(math.prod(map(float, part.extents)), part.frames)
            count += 1
        elif isinstance(part, np.ndarray) and part.ndim == 1:
            total += _tokens(part.size)
        else:
            total += _image_weight(document, i, count, images, patches=patches)
            count += 1
    return total


def _tokens(tokens: float, frames: int = 0) -> Any:
    return np.array([0, tokens, 4 * tokens, frames])


def _image_weight(document: _Document, index: int, image: int, images: ImageProcessor, *, patches: bool) -> Any:
    part = document.parts[index]
    try:
        size = images.inspect(part)
        height, width = images.fit(*size)
    except MmposError:
        return np.zeros(4)
    weight = _tokens(math.prod(images.grid(*size).extents), 1)
    if isinstance(part, ImageSize):
        return weight
    if not patches:
        document.hashes[image] = _content_hash(part)
        document.parts[index] = size
        return weight
    document.decodes = True
    weight[[0, 2]] += size.height * size.width, height * width * 3 * np.dtype(images.dtype).itemsize
    return weight


def _content_hash(image: Any) -> str:
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    with open_source(image) as source:
        return source.read("pillow")[1]
