"""Model "sequences": text and image files, to what a model reads, packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpos.errors import InvalidInputError, MmposError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.segments.table import SegmentTable
from mmpos.sequence.builder import InterleavedSequence
from mmpos_server.building import Building, Document
from mmpos_server.inference.models import position_outputs
from mmpos_server.inference.parameters import Kind, scheme_of
from mmpos_server.inference.positions import check_outputs, outputs_of
from mmpos_server.inference.requests import Request
from mmpos_server.inference.responses import Output, put_response
from mmpos_server.inference.tensors import Spec
from mmpos_server.refusals import check

if TYPE_CHECKING:
    from mmpos.images import ImageProcessor
    from mmpos.sequence.builder import SequenceBuilder
    from mmpos_server.call import Call
    from mmpos_server.config import Limits
    from mmpos_server.inference import open_inference_pb2 as pb
    from mmpos_server.profiles import Profile

__all__ = ["Sequences"]

_PIXELS = {"uint8": "UINT8", "float32": "FP32"}


class Sequences:
    """Parts of documents to input_ids, positions and patches of one packed batch.

    Args:
        building: what builds.
        limits: most that one request may ask for.
    """

    name = "sequences"
    ready = True
    parameters: Mapping[str, Kind] = {"scheme": "string", "start": "int64"}

    def __init__(self, building: Building, limits: Limits) -> None:
        self._building, self._limits = building, limits

    def inputs(self, profile: Profile) -> Sequence[Spec]:
        """The parts of all documents, what each is, and how many each document has."""
        return [
            Spec("parts", ("BYTES",), (-1,)),
            Spec("kinds", ("BYTES",), (-1,), optional=True),
            Spec("parts_per_document", ("INT64",), (-1,), optional=True),
        ]

    def outputs(self, profile: Profile) -> Sequence[Spec]:
        """Sequences, one after the other."""
        images = _images(profile)
        return [
            Spec("input_ids", ("INT64",), (-1,)),
            *position_outputs(profile),
            Spec("grid_thw", ("INT64",), (-1, 3)),
            Spec("image_spans", ("INT64",), (-1, 2)),
            Spec("patches", (_PIXELS[images.dtype],), (-1, images.patch_size, images.patch_size, 3)),
        ]

    async def infer(self, request: Request, answer: pb.ModelInferResponse, call: Call) -> None:
        """Build a batch."""
        values = request.parameters
        scheme = scheme_of(values["scheme"]) if "scheme" in values else None
        builder = self._building.builder(request.profile.name, scheme, values.get("start", 0))
        documents = await self._building.solve(
            lambda: self._read(request), builder, call, patches=request.wants("patches")
        )
        found = await call.run("place", self._write, documents, builder, request, answer, call)
        call.count(documents=len(documents), tokens=found[0], images=found[1])

    def _read(self, request: Request) -> list[Document]:
        [count] = request.inputs["parts"].shape
        check("segments", count, self._limits)
        if "kinds" in request.inputs and request.inputs["kinds"].shape != (count,):
            raise InvalidInputError(f"kinds: got {request.inputs['kinds'].shape[0]}, want {count} like parts")
        parts, kinds, counts = request.elements("parts"), request.elements("kinds"), request.array("parts_per_document")
        assert parts is not None
        if kinds is None:
            kinds = [b"text"] * len(parts)
        counts = np.array([len(parts)]) if counts is None else counts
        check("documents", counts.size, self._limits)
        check("images", kinds.count(b"image"), self._limits)
        if counts.min(initial=0) < 0 or sum(counts.tolist()) != len(parts):
            raise InvalidInputError(f"parts_per_document: got {_some(counts)}, want a sum of {len(parts)} like parts")
        ends = counts.cumsum().tolist()
        return [
            Document([_part(f"documents[{d}].parts[{i - begin}]", parts[i], kinds[i]) for i in range(begin, end)])
            for d, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]

    def _write(
        self,
        documents: list[Document],
        builder: SequenceBuilder,
        request: Request,
        answer: pb.ModelInferResponse,
        call: Call,
    ) -> tuple[int, int]:
        with call.stage("write"):
            sequences = [_built(f"documents[{d}]", document) for d, document in enumerate(documents)]
            check("tokens", sum(sequence.input_ids.size for sequence in sequences), self._limits)
            nothing = place(SegmentTable.from_documents([]), builder.scheme)
            positions = PositionTable.concatenate([sequence.positions for sequence in sequences] or [nothing])
            call.checkpoint()
            check_outputs(positions, request, call, self._limits)
            put_response(answer, request, _outputs(sequences, positions, _images(request.profile)))
        return positions.num_tokens, sum(len(sequence.grid_thw) for sequence in sequences)


def _images(profile: Profile) -> ImageProcessor:
    assert profile.builder.images is not None, "every profile has an image processor"
    return profile.builder.images


def _some(counts: Any) -> str:
    return str(counts[:10].tolist()) + ("…" if counts.size > 10 else "")


def _part(name: str, part: bytes, kind: bytes) -> str | bytes:
    if kind == b"image":
        return part
    if kind != b"text":
        raise InvalidInputError(f"{name}: got kind {kind[:100]!r}, want b'text' or b'image'")
    try:
        return part.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{name}: got bytes that are not UTF-8 ({error.reason}), want text") from None


def _built(name: str, document: Document) -> InterleavedSequence:
    """The sequence of a document; an error of one document is that of the request, whose tensors have room for all."""
    outcome = document.outcome
    if isinstance(outcome, MmposError):
        raise type(outcome)(f"{name}.{outcome}") from outcome
    assert outcome is not None, "documents are built before they are written"
    return outcome


def _outputs(
    sequences: list[InterleavedSequence], positions: PositionTable, images: ImageProcessor
) -> dict[str, Output]:
    starts = positions.cu_seqlens[:-1].tolist()

    def ids() -> tuple[str, Any]:
        return "INT64", np.concatenate([_none(0), *(sequence.input_ids for sequence in sequences)])

    def grids() -> tuple[str, Any]:
        return "INT64", np.concatenate([_none(0, 3), *(sequence.grid_thw for sequence in sequences)])

    def spans() -> tuple[str, Any]:
        moved = (sequence.image_spans + start for sequence, start in zip(sequences, starts, strict=True))
        return "INT64", np.concatenate([_none(0, 2), *moved])

    def patches() -> tuple[str, Any]:
        size, found = images.patch_size, (sequence.patches for sequence in sequences)
        none = np.empty((0, size, size, 3), images.dtype)
        return _PIXELS[images.dtype], np.concatenate([none, *(one for one in found if one is not None)])

    return {"input_ids": ids, **outputs_of(positions), "grid_thw": grids, "image_spans": spans, "patches": patches}


def _none(*shape: int) -> Any:
    return np.empty(shape, np.int64)
