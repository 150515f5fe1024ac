"""Requests to the service, with answers that are checked against in-process results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import grpc
from google.protobuf.message import Message

from mmpos.client import Dense, PositionsQuery
from mmpos.rpc.positions import get_result, put_query
from mmpos.rpc.sequences import get_sequence, put_parts
from mmpos.rpc.v1 import positions_pb2, sequences_pb2
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted
from mmpos_bench.proofs import equal
from mmpos_bench.serving import PHOTOGRAPHS, ask
from mmpos_bench.workloads import workload
from mmpos_server.config import Profiles, load

_POSITIONS, _SEQUENCES = "/mmpos.rpc.v1.PositionService/", "/mmpos.rpc.v1.SequenceService/"


@dataclass(frozen=True)
class Question:
    """Request to the service, its answer, and the amount of work in one call."""

    name: str
    path: str  # path of the method
    request: bytes
    answer: bytes
    documents: int  # number of documents in the request
    tokens: int  # number of tokens in these documents
    proof: Callable[[], None]  # raises NotEqualError if the answer differs from the in-process result

    @property
    def stream(self) -> bool:
        """Whether the request is an item of a stream."""
        return "/Stream" in self.path

    @property
    def work(self) -> dict[str, int]:
        """Amount of work in one call."""
        moved = len(self.request) + len(self.answer)
        return {"calls": 1, "documents": self.documents, "tokens": self.tokens, "bytes": moved}


class Asking:
    """Builds questions by asking a server.

    Args:
        channel: channel to the server.
        tokens: tokens per document in questions about positions and about text.
        images: images per document in questions about positions.
        side: side length of these images in tokens.
    """

    def __init__(self, channel: grpc.Channel, tokens: int, images: int, side: int) -> None:
        self._channel, self._sizes = channel, (tokens, images, side)
        self._builder = Profiles.from_config(load()).default.builder

    def place(self, documents: int, *, dense: bool = False, stream: bool = False) -> Question:
        """Ask for the positions of the given number of documents."""
        call = "StreamPlace, items of" if stream else "Place,"
        name = f"{call} {counted(documents, 'document')}{', dense ids' if dense else ''}"
        segments = SegmentTable.from_documents(workload(documents, *self._sizes))
        query = PositionsQuery(segments, dense=Dense() if dense else None)
        request: positions_pb2.StreamPlaceRequest | positions_pb2.PlaceRequest
        request = positions_pb2.StreamPlaceRequest() if stream else positions_pb2.PlaceRequest()
        put_query(request.query, query)
        kind = positions_pb2.StreamPlaceResponse if stream else positions_pb2.PlaceResponse

        def prove(raw: bytes) -> None:
            equal(get_result("positions", kind.FromString(raw).positions), query.run())

        path = _POSITIONS + ("StreamPlace" if stream else "Place")
        return self._question(name, path, request, documents, segments.num_tokens, prove)

    def text(self, documents: int) -> Question:
        """Ask for sequences from the given number of text documents, with one token per letter."""
        return self._build("of text", [["a bird " * max(1, self._sizes[0] // 7)]] * documents)

    def photographs(self, documents: int) -> Question:
        """Ask for sequences, with patches, from the given number of documents containing two photographs each."""
        cat, cup = PHOTOGRAPHS
        return self._build("with 2 photographs", [["A cat: ", cat, " and a cup: ", cup]] * documents, patches=True)

    def _build(self, content: str, documents: list[list[str | bytes]], *, patches: bool = False) -> Question:
        request = sequences_pb2.BuildRequest()
        request.query.patches = patches
        for document in documents:
            put_parts(request.query.documents.add(), document)
        want = tuple(map(self._builder.build, documents))

        def prove(raw: bytes) -> None:
            results = sequences_pb2.BuildResponse.FromString(raw).sequences.results
            equal([get_sequence("sequence", result.sequence) for result in results], want)

        name, tokens = f"Build, {counted(len(documents), 'document')} {content}", sum(s.input_ids.size for s in want)
        return self._question(name, f"{_SEQUENCES}Build", request, len(documents), tokens, prove)

    def _question(
        self, name: str, path: str, request: Message, documents: int, tokens: int, prove: Callable[[bytes], None]
    ) -> Question:
        sent = request.SerializeToString()
        raw = ask(self._channel, path, sent)
        return Question(name, path, sent, raw, documents, tokens, partial(prove, raw))
