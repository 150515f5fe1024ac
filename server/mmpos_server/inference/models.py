"""Serve the models "positions" and "sequences" over the Open Inference Protocol; their versions are the profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpos.errors import InvalidInputError, MmposError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.rpc.queries import Dense, InputIds, PositionsQuery, PositionsResult, Spans
from mmpos.schemes import Scheme, get_scheme
from mmpos.segments.placeholders import Placeholders
from mmpos.segments.table import SegmentTable
from mmpos.sequence.builder import InterleavedSequence
from mmpos.support.checks import Array
from mmpos_server.inference.messages import Outputs, Request, Spec, put_response
from mmpos_server.inference.parameters import Kind, scheme_of, views_of
from mmpos_server.limits import check, check_reply
from mmpos_server.position_service import PositionService, complete
from mmpos_server.sequence_service import PendingDocument, SequenceService

if TYPE_CHECKING:
    from mmpos.images import ImageProcessor
    from mmpos_server.call import Call
    from mmpos_server.config import Limits, Profile
    from mmpos_server.inference import open_inference_pb2 as pb

__all__ = ["Positions", "Sequences", "always", "check_outputs", "scheme_of_profile"]


def scheme_of_profile(profile: Profile) -> Scheme:
    """Return the scheme of a version."""
    scheme = profile.builder.scheme
    return get_scheme(scheme) if isinstance(scheme, str) else scheme


def _position_specs(profile: Profile) -> list[Spec]:
    """Return the specifications of the position outputs for a request that names no scheme."""
    scheme = scheme_of_profile(profile)
    return [
        Spec("position_ids", ("FP64" if scheme.fractional else "INT32",), (scheme.axes, -1)),
        Spec("next_positions", ("INT64",), (-1,), reported=scheme.resumable),
        Spec("deltas", ("INT64",), (-1,), reported=scheme.resumable),
        Spec("cu_seqlens", ("INT32",), (-1,)),
        Spec("table", ("INT64",), (5 + 4 * scheme.axes, -1)),
        Spec("table_documents", ("INT64",), (4, -1)),
    ]


def check_outputs(positions: PositionTable, request: Request, call: Call, limits: Limits) -> None:
    """Check the size of the requested outputs against the limit before they are computed."""
    if request.wants("position_ids"):
        check_reply(positions, Dense(), limits, call)
    if request.wants("table") or request.wants("table_documents"):
        check_reply(positions, None, limits, call)


def _position_outputs(positions: PositionTable) -> Outputs:
    """Return the outputs of a position table; next positions are missing if the scheme defines none."""
    result = PositionsResult.of(positions)
    arrays = {
        "next_positions": result.next_positions,
        "deltas": result.deltas,
        "cu_seqlens": result.cu_seqlens,
        "table": positions.table,
        "table_documents": positions.documents,
    }
    return {"position_ids": positions.dense} | {
        name: always(array) for name, array in arrays.items() if array is not None
    }


def always(array: Array) -> Callable[[], Array]:
    """Return a function that returns an output that already exists."""
    return lambda: array


_SPANS = ("lengths", "offsets", "grid_thw", "documents")
_IDS = ("input_ids", "image_grid_thw", "video_grid_thw", "attention_mask", "cu_seqlens")

_NUMBERS = ("image_token_id", "video_token_id", "spatial_merge_size", "row_token_id", "last_row_token_id")
"""Parameters of input_ids; all but one are fields of Placeholders."""


class Positions:
    """Model "positions", which computes positions from placeholder spans, or from input_ids and grids.

    Args:
        service: implementation of PositionService.
        limits: limits for one request.
    """

    name = "positions"
    ready = True
    parameters: Mapping[str, Kind] = {
        "scheme": "string",
        "strict": "bool",
        "views": "string",
        **dict.fromkeys(_NUMBERS, "int64"),
    }

    def __init__(self, service: PositionService, limits: Limits) -> None:
        self._service, self._limits = service, limits

    def inputs(self, profile: Profile) -> Sequence[Spec]:
        """Return spans and input_ids; all are optional because a request contains only one of the two."""
        ids = ("INT64", "INT32")
        return [
            Spec("lengths", ("INT64",), (-1,), optional=True),
            Spec("offsets", ("INT64",), (-1,), optional=True),
            Spec("grid_thw", ("INT64",), (-1, 3), optional=True),
            Spec("documents", ("INT64",), (-1,), optional=True),
            Spec("input_ids", ids, (-1,), optional=True, ndim=(2,)),
            Spec("image_grid_thw", ("INT64",), (-1, 3), optional=True),
            Spec("video_grid_thw", ("INT64",), (-1, 3), optional=True),
            Spec("attention_mask", (*ids, "UINT8"), (-1, -1), optional=True),
            Spec("cu_seqlens", ids, (-1,), optional=True),
            Spec("start", ("INT64",), (-1,), optional=True),
        ]

    def outputs(self, profile: Profile) -> Sequence[Spec]:
        """Return position_ids, next_positions, deltas, cu_seqlens and the table."""
        return _position_specs(profile)

    def infer(self, request: Request, answer: pb.ModelInferResponse, call: Call) -> None:
        """Place a batch."""

        def read() -> PositionsQuery:
            with call.stage("read"):
                return complete(self._query(request), request.profile, named=request.named)

        def write(_query: PositionsQuery, positions: PositionTable) -> None:
            check_outputs(positions, request, call, self._limits)
            put_response(answer, request, _position_outputs(positions))

        self._service.answer(read, write, call)

    def _query(self, request: Request) -> PositionsQuery:
        values = request.parameters
        start = request.array("start")
        return PositionsQuery(
            source=self._spans(request) if "lengths" in request.inputs else self._input_ids(request),
            scheme=scheme_of(values["scheme"]) if "scheme" in values else None,
            start=0 if start is None else int(start[0]) if start.size == 1 else start,
            strict=values.get("strict"),
            views=views_of(values["views"]) if "views" in values else (),
            dense=Dense() if request.wants("position_ids") else None,
        )

    def _spans(self, request: Request) -> Spans:
        _only(request, "lengths", _IDS)
        lengths, offsets, grid_thw, documents = (request.array(name) for name in _SPANS)
        assert lengths is not None
        check("documents", lengths.size, self._limits)
        check("images", 0 if offsets is None else offsets.size, self._limits)
        empty = lengths[:0]
        return Spans(
            lengths,
            empty if offsets is None else offsets,
            empty.reshape(0, 3) if grid_thw is None else grid_thw,
            documents,
        )

    def _input_ids(self, request: Request) -> InputIds:
        if "input_ids" not in request.inputs:
            raise InvalidInputError(f"inputs: got {list(request.inputs)}, want lengths or input_ids")
        _only(request, "input_ids", _SPANS)
        arrays: dict[str, Any] = {name: request.array(name) for name in _IDS}
        ids, cu_seqlens = arrays["input_ids"], arrays["cu_seqlens"]
        rows = ids.shape[0] if ids.ndim == 2 else 1 if cu_seqlens is None else cu_seqlens.size - 1
        check("documents", rows, self._limits)
        grids = (request.inputs[name].shape[0] for name in _IDS[1:3] if name in request.inputs)
        check("images", sum(grids), self._limits)
        image, video, merge, row, last_row = map(request.parameters.get, _NUMBERS)
        if last_row is not None and row is None:
            raise InvalidInputError("last_row_token_id requires row_token_id")
        rows = None if row is None else (row, row if last_row is None else last_row)
        return InputIds(**arrays, placeholders=Placeholders(image, video, rows=rows), spatial_merge_size=merge)


def _only(request: Request, kind: str, others: Sequence[str]) -> None:
    """Refuse inputs that describe the documents in a second way."""
    for name in others:
        if name in request.inputs:
            raise InvalidInputError(f"inputs: {name!r} cannot be combined with {kind!r}")


_PIXELS = {"uint8": "UINT8", "float32": "FP32"}


class Sequences:
    """Model "sequences", which converts text and image files to input_ids, positions and patches of one packed batch.

    Args:
        service: implementation of SequenceService.
        limits: limits for one request.
    """

    name = "sequences"
    ready = True
    parameters: Mapping[str, Kind] = {"scheme": "string", "start": "int64"}

    def __init__(self, service: SequenceService, limits: Limits) -> None:
        self._service, self._limits = service, limits

    def inputs(self, profile: Profile) -> Sequence[Spec]:
        """Return the parts of all documents, their kinds, and the number of parts of each document."""
        return [
            Spec("parts", ("BYTES",), (-1,)),
            Spec("kinds", ("BYTES",), (-1,), optional=True),
            Spec("parts_per_document", ("INT64",), (-1,), optional=True),
        ]

    def outputs(self, profile: Profile) -> Sequence[Spec]:
        """Return the sequences, packed one after another."""
        images = _images(profile)
        return [
            Spec("input_ids", ("INT64",), (-1,)),
            *_position_specs(profile),
            Spec("grid_thw", ("INT64",), (-1, 3)),
            Spec("image_spans", ("INT64",), (-1, 2)),
            Spec("patches", (_PIXELS[images.dtype],), (-1, images.patch_size, images.patch_size, 3)),
        ]

    def infer(self, request: Request, answer: pb.ModelInferResponse, call: Call) -> None:
        """Build a batch of sequences."""
        values = request.parameters
        scheme = scheme_of(values["scheme"]) if "scheme" in values else None
        builder = self._service.builder(request.profile.name, scheme, values.get("start", 0))

        def write(documents: list[PendingDocument]) -> None:
            sequences = [_built(f"documents[{d}]", document) for d, document in enumerate(documents)]
            check("tokens", sum(sequence.input_ids.size for sequence in sequences), self._limits)
            empty = place(SegmentTable.from_documents([]), builder.scheme)
            positions = PositionTable.concatenate([sequence.positions for sequence in sequences] or [empty])
            call.checkpoint()
            check_outputs(positions, request, call, self._limits)
            put_response(answer, request, _sequence_outputs(sequences, positions, _images(request.profile)))
            images = sum(len(sequence.grid_thw) for sequence in sequences)
            call.count(documents=len(documents), tokens=positions.num_tokens, images=images)

        self._service.answer(lambda: self._read(request), builder, write, call, patches=request.wants("patches"))

    def _read(self, request: Request) -> list[PendingDocument]:
        inputs = request.inputs
        [count] = inputs["parts"].shape
        check("segments", count, self._limits)
        if "kinds" in inputs and inputs["kinds"].shape != (count,):
            raise InvalidInputError(f"kinds: got {inputs['kinds'].shape[0]}, want {count}, one for each part")
        parts = inputs["parts"].elements()
        kinds = inputs["kinds"].elements() if "kinds" in inputs else [b"text"] * count
        counts = request.array("parts_per_document")
        counts = np.array([count]) if counts is None else counts
        check("documents", counts.size, self._limits)
        check("images", kinds.count(b"image"), self._limits)
        if counts.min(initial=0) < 0 or sum(counts.tolist()) != count:
            shown = str(counts[:10].tolist()) + ("…" if counts.size > 10 else "")
            raise InvalidInputError(f"parts_per_document: got {shown}, want a sum of {count}, the number of parts")
        ends = counts.cumsum().tolist()
        return [
            PendingDocument(
                [_part(f"documents[{d}].parts[{i - begin}]", parts[i], kinds[i]) for i in range(begin, end)]
            )
            for d, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]


def _images(profile: Profile) -> ImageProcessor:
    assert profile.builder.images is not None, "every profile has an image processor"
    return profile.builder.images


def _part(name: str, part: bytes, kind: bytes) -> str | bytes:
    if kind == b"image":
        return part
    if kind != b"text":
        raise InvalidInputError(f"{name}: got kind {kind[:100]!r}, want b'text' or b'image'")
    try:
        return part.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{name}: got bytes that are not UTF-8 ({error.reason}), want text") from None


def _built(name: str, document: PendingDocument) -> InterleavedSequence:
    """Return the sequence of a document; an error fails the whole request, since the tensors are packed."""
    outcome = document.outcome
    if isinstance(outcome, MmposError):
        raise type(outcome)(f"{name}.{outcome}") from outcome
    assert outcome is not None, "documents are built before they are written"
    return outcome


def _sequence_outputs(
    sequences: list[InterleavedSequence], positions: PositionTable, images: ImageProcessor
) -> Outputs:
    starts, size = positions.cu_seqlens[:-1].tolist(), images.patch_size
    spans = [sequence.image_spans + start for sequence, start in zip(sequences, starts, strict=True)]
    patches = [sequence.patches for sequence in sequences if sequence.patches is not None]

    def packed(arrays: list[Array], dtype: str, *shape: int) -> Callable[[], Array]:
        return lambda: np.concatenate([np.empty((0, *shape), dtype), *arrays])

    return {
        "input_ids": packed([sequence.input_ids for sequence in sequences], "int64"),
        **_position_outputs(positions),
        "grid_thw": packed([sequence.grid_thw for sequence in sequences], "int64", 3),
        "image_spans": packed(spans, "int64", 2),
        "patches": packed(patches, images.dtype, size, size, 3),
    }
