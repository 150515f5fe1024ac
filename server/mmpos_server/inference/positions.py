"""Model "positions": documents known by their shape, placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable
from mmpos.rpc.queries import Dense, InputIds, PositionsQuery, PositionsResult, Spans
from mmpos.support.checks import IntArray
from mmpos_server.inference.models import position_outputs
from mmpos_server.inference.parameters import Kind, scheme_of, views_of
from mmpos_server.inference.requests import Request
from mmpos_server.inference.responses import Output, put_response
from mmpos_server.inference.tensors import Spec
from mmpos_server.placing import INLINE_BYTES, INLINE_SEGMENTS, Placing, complete, segments_at_work
from mmpos_server.refusals import check, check_reply

if TYPE_CHECKING:
    from mmpos_server.call import Call
    from mmpos_server.config import Limits
    from mmpos_server.inference import open_inference_pb2 as pb
    from mmpos_server.profiles import Profile

__all__ = ["Positions", "check_outputs", "outputs_of"]

INLINE_IDS, INLINE_TEXT = 32_768, 2048
"""Up to so many ids are written, and characters of views read, between two other requests: a thread would cost more
than they do."""

_SPANS = ("lengths", "offsets", "grid_thw", "documents")
_IDS = ("input_ids", "image_grid_thw", "video_grid_thw", "attention_mask", "cu_seqlens")

_NUMBERS = ("image_token_id", "video_token_id", "spatial_merge_size", "row_token_id", "last_row_token_id")


class Positions:
    """Placeholder spans, or input_ids and grids, to positions.

    Args:
        placing: what places.
        limits: most that one request may ask for.
    """

    name = "positions"
    ready = True
    parameters: Mapping[str, Kind] = {
        "scheme": "string",
        "strict": "bool",
        "views": "string",
        **dict.fromkeys(_NUMBERS, "int64"),
    }

    def __init__(self, placing: Placing, limits: Limits) -> None:
        self._placing, self._limits = placing, limits

    def inputs(self, profile: Profile) -> Sequence[Spec]:
        """Spans, or input_ids: all are optional, since a request has one kind or the other."""
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
        """Ids, the table, and what follows from it."""
        return position_outputs(profile)

    async def infer(self, request: Request, answer: pb.ModelInferResponse, call: Call) -> None:
        """Place a batch."""
        text = len(request.parameters.get("views", ""))
        if call.request_bytes + call.weighed <= INLINE_BYTES and text <= INLINE_TEXT:
            query = self._read(request, call)
            if segments_at_work(query) <= INLINE_SEGMENTS:
                positions, images = self._placing.solve(query, call)
            else:
                positions, images = await call.run("place", self._placing.solve, query, call)
        else:
            positions, images = await call.run("place", self._solve, request, call)
        if positions.axes * positions.num_tokens <= INLINE_IDS:
            self._write(positions, request, answer, call)
        else:
            await call.run("place", self._write, positions, request, answer, call)
        call.count(documents=positions.num_documents, tokens=positions.num_tokens, images=images)

    def _read(self, request: Request, call: Call) -> PositionsQuery:
        with call.stage("read"):
            return complete(self._query(request), request.profile, named=request.named)

    def _solve(self, request: Request, call: Call) -> tuple[PositionTable, int]:
        return self._placing.solve(self._read(request, call), call)

    def _write(self, positions: PositionTable, request: Request, answer: pb.ModelInferResponse, call: Call) -> None:
        with call.stage("write"):
            check_outputs(positions, request, call, self._limits)
            put_response(answer, request, outputs_of(positions))

    def _query(self, request: Request) -> PositionsQuery:
        values = request.parameters
        start = request.array("start")
        return PositionsQuery(
            source=self._spans(request) if "lengths" in request.inputs else self._input_ids(request),
            scheme=scheme_of(values["scheme"]) if "scheme" in values else None,
            start=0 if start is None else int(start[0]) if start.size == 1 else start,
            strict=values.get("strict"),
            views=views_of(values["views"], self._limits) if "views" in values else (),
        )

    def _spans(self, request: Request) -> Spans:
        _only(request, "lengths", _IDS)
        lengths, offsets, grid_thw, documents = (request.array(name) for name in _SPANS)
        assert lengths is not None
        check("documents", lengths.size, self._limits)
        check("images", 0 if offsets is None else offsets.size, self._limits)
        none = lengths[:0]
        return Spans(
            lengths,
            none if offsets is None else offsets,
            none.reshape(0, 3) if grid_thw is None else grid_thw,
            documents,
        )

    def _input_ids(self, request: Request) -> InputIds:
        if "input_ids" not in request.inputs:
            raise InvalidInputError(f"inputs: got {list(request.inputs)}, want lengths or input_ids among them")
        _only(request, "input_ids", _SPANS)
        arrays: dict[str, Any] = {name: request.array(name) for name in _IDS}
        ids, cu_seqlens = arrays["input_ids"], arrays["cu_seqlens"]
        rows = ids.shape[0] if ids.ndim == 2 else 1 if cu_seqlens is None else cu_seqlens.size - 1
        check("documents", rows, self._limits)
        grids = (request.inputs[name].shape[0] for name in _IDS[1:3] if name in request.inputs)
        check("images", sum(grids), self._limits)
        arrays |= {name: request.parameters.get(name) for name in _NUMBERS}
        return InputIds(**arrays)


def _only(request: Request, kind: str, others: Sequence[str]) -> None:
    """Refuse inputs of the other kind of documents."""
    for name in others:
        if name in request.inputs:
            raise InvalidInputError(f"inputs: got {name!r} beside {kind!r}, want one or the other")


def check_outputs(positions: PositionTable, request: Request, call: Call, limits: Limits) -> None:
    """Compare the bytes of the wanted outputs with the limit, before they are made."""
    if request.wants("position_ids"):
        check_reply(positions, Dense(), limits, call)
    if request.wants("table") or request.wants("table_documents"):
        check_reply(positions, None, limits, call)


def outputs_of(positions: PositionTable) -> dict[str, Output]:
    """The outputs that tell these positions; without the next ones where the scheme has none."""
    result = PositionsResult.of(positions)
    integers: dict[str, IntArray | None] = {"next_positions": result.next_positions, "deltas": result.deltas}
    found: dict[str, Output] = {
        "position_ids": lambda: ("FP64" if positions.fractional else "INT32", positions.dense()),
        **{name: _given("INT64", values) for name, values in integers.items() if values is not None},
        "cu_seqlens": _given("INT32", result.cu_seqlens),
        "table": _given("INT64", positions.table),
        "table_documents": _given("INT64", positions.documents),
    }
    return found


def _given(datatype: str, array: Any) -> Output:
    return lambda: (datatype, array)
