"""Calls of the service as data: the method, its request, and how its answer is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

from google.protobuf.message import EncodeError

from mmpos.client.info import ServerInfo, get_info
from mmpos.client.options import Options
from mmpos.errors import InvalidInputError, LimitExceededError, MmposError, ServiceError, UnsupportedError
from mmpos.rpc.errors import get_error
from mmpos.rpc.positions import get_result, put_query, put_scheme
from mmpos.rpc.queries import InputIds, PositionsQuery, PositionsResult, Spans, View
from mmpos.rpc.sequences import Sent, get_sequence, put_parts
from mmpos.rpc.v1 import info_pb2, positions_pb2, sequences_pb2
from mmpos.rpc.v1 import rotary_pb2 as pb
from mmpos.segments.table import SegmentTable
from mmpos.sequence.video import part_offsets
from mmpos.support.checks import boolean, integer, naming, one_of
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from mmpos.client.shared_memory import Lease
    from mmpos.positions.table import PositionTable
    from mmpos.rotary import Rotary
    from mmpos.rotary.apply import Layout, TableLayout
    from mmpos.rpc.tensors import Memory
    from mmpos.schemes import Scheme
    from mmpos.sequence.builder import InterleavedSequence


T = TypeVar("T")

Errors = Literal["raise", "return"]

Ask = Callable[[Any], Callable[[Any], T]]
"""Fills the query of a request, and gives what reads the answer."""


def _raise(error: MmposError) -> NoReturn:
    raise error


@dataclass(frozen=True)
class Call(Generic[T]):
    """A unary call.

    Args:
        path: of the method.
        request: the message, serialised.
        response: the type of the answer.
        decode: makes the result of the answer, or raises what the server says of it.
        refused: makes a result of the error of the whole call.
        waits: whether it waits for a server that is gone.
    """

    path: str
    request: bytes
    response: Any
    decode: Callable[[Any], T]
    refused: Callable[[MmposError], T] = _raise
    waits: bool = True


@dataclass(frozen=True)
class Method:
    """A method with a stream twin.

    Args:
        path: of the unary method.
        request: its request, with a field ``query``.
        response: its response.
        stream_path: of the stream.
        stream_request: its request, with fields ``id`` and ``query``.
        stream_response: its response, with fields ``id``, ``error`` and that of the answer.
        answer: the field of both responses that holds the answer.
    """

    path: str
    request: Any
    response: Any
    stream_path: str
    stream_request: Any
    stream_response: Any
    answer: str

    def call(self, ask: Ask[T]) -> Call[T]:
        """The unary call that asks this."""
        request = self.request()
        request.query.SetInParent()
        decode = ask(request.query)
        return Call(self.path, serialised(request), self.response, lambda got: decode(getattr(got, self.answer)))


PLACE = Method(
    "/mmpos.rpc.v1.PositionService/Place",
    positions_pb2.PlaceRequest,
    positions_pb2.PlaceResponse,
    "/mmpos.rpc.v1.PositionService/StreamPlace",
    positions_pb2.StreamPlaceRequest,
    positions_pb2.StreamPlaceResponse,
    "positions",
)


def place(
    options: Options,
    segments: SegmentTable | Spans | InputIds,
    scheme: str | Scheme | None = None,
    start: npt.ArrayLike = 0,
    strict: bool | None = None,
    *,
    views: Sequence[View] = (),
) -> Call[PositionTable]:
    """The positions of documents, as ``mmpos.place`` gives them.

    Args:
        segments: the documents, as a SegmentTable, Spans or InputIds.
        scheme: a name from mmpos.SCHEMES or a scheme object; None: that of the profile.
        start: id of each document's first token, one for all or (documents,).
        strict: whether two grids without text between are an error; None: the scheme decides.
        views: what to make of the placed table, in this order: Take, Window, Decode, Shard, Pad.

    Returns:
        A new PositionTable.

    Raises:
        MmposError: what ``mmpos.place`` and the views raise; LimitExceededError also for a limit of the server.
        ServiceError: no answer.
    """
    if not isinstance(segments, SegmentTable | Spans | InputIds):
        raise InvalidInputError(f"segments: got {type(segments).__name__}, want a SegmentTable")
    found = query(options, PositionsQuery(segments, scheme, start, strict, views))

    def decode(answer: Any) -> PositionTable:
        table = found.decode(answer).table
        if table is None:
            raise ServiceError("answer: got ids, want a table")
        return table

    return Call(found.path, found.request, found.response, decode)


def query(options: Options, query: PositionsQuery) -> Call[PositionsResult]:
    """The answer to a query, as its ``run`` gives it, but for what it leaves to the profile.

    Args:
        query: which documents, which scheme, which views, table or ids.

    Raises:
        MmposError: what ``query.run`` raises; LimitExceededError also for a limit of the server.
        ServiceError: no answer.
    """
    return PLACE.call(ask_positions(options, query))


def info(options: Options) -> Call[ServerInfo]:
    """Version, schemes, limits and profiles of the server."""
    request = serialised(info_pb2.GetInfoRequest())
    return Call("/mmpos.rpc.v1.InfoService/GetInfo", request, info_pb2.GetInfoResponse, get_info)


def healthy(options: Options, service: str = "") -> Call[bool]:
    """Whether the server says that it serves; False also where none answers.

    Args:
        service: full name of a service, such as "mmpos.rpc.v1.PositionService"; empty: the whole server.
    """
    from grpc_health.v1 import health_pb2 as health

    def refused(error: MmposError) -> bool:
        if isinstance(error, ServiceError):
            return False
        raise error

    if not isinstance(service, str):
        raise InvalidInputError(f"service: got {service!r}, want a name")
    request = serialised(health.HealthCheckRequest(service=service))
    serving = health.HealthCheckResponse.SERVING
    response = health.HealthCheckResponse
    return Call(
        "/grpc.health.v1.Health/Check", request, response, lambda got: got.status == serving, refused, waits=False
    )


def ask_positions(options: Options, query: PositionsQuery) -> Ask[PositionsResult]:
    """What asks for positions."""
    if not isinstance(query, PositionsQuery):
        raise InvalidInputError(f"query: got {type(query).__name__}, want a PositionsQuery")

    memory = options.memory

    def ask(message: Any) -> Callable[[Any], PositionsResult]:
        put_query(message, query, options.profile, memory)
        if memory is not None and query.dense is not None:
            memory.answer(message)
        return lambda answer: _read_positions(answer, memory)

    return ask


@contextmanager
def trusting() -> Iterator[None]:
    """Where an answer is read: what is wrong with it is no fault of the caller."""
    try:
        yield
    except MmposError as error:
        raise ServiceError(f"answer: {error}") from error


def serialised(message: Any) -> bytes:
    """The bytes of a message.

    Raises:
        LimitExceededError: 2 GiB or more, which no message may have.
    """
    try:
        data: bytes = message.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise LimitExceededError(f"request: got {message.ByteSize()} bytes, want less than 2 GiB ({error})") from None
    return data


def _read_positions(answer: Any, memory: Memory | None) -> PositionsResult:
    with trusting():
        return get_result("positions", answer, memory)


Built = list["InterleavedSequence | MmposError"]

BUILD = Method(
    "/mmpos.rpc.v1.SequenceService/Build",
    sequences_pb2.BuildRequest,
    sequences_pb2.BuildResponse,
    "/mmpos.rpc.v1.SequenceService/StreamBuild",
    sequences_pb2.StreamBuildRequest,
    sequences_pb2.StreamBuildResponse,
    "sequences",
)


def build(
    options: Options,
    parts: Sequence[Any],
    *,
    scheme: str | Scheme | None = None,
    start: int = 0,
    patches: bool = True,
) -> Call[InterleavedSequence]:
    """The sequence of these parts, as ``SequenceBuilder.build`` gives it with the settings of the profile.

    Args:
        parts: text, token ids, Grid, ImageSize, Video, and images as SequenceBuilder takes them. A path travels as the
            bytes of its file; a Pillow image, an array or a tensor as its upright pixels, without loss.
        scheme: a name from mmpos.SCHEMES or a scheme object; None: that of the profile.
        start: id of the first token.
        patches: whether pixels are wanted; without them nothing is decoded.

    Returns:
        A new InterleavedSequence, its image hashes those of the call in process.

    Raises:
        MmposError: what ``SequenceBuilder.build`` raises; LimitExceededError also for a limit of the server.
        ServiceError: no answer.
    """
    settings = BuildSettings.checked(options, "raise", scheme, start, patches)
    return BUILD.call(settings.ask_one(parts))


def build_batch(
    options: Options,
    documents: Sequence[Sequence[Any]],
    errors: Errors = "raise",
    *,
    scheme: str | Scheme | None = None,
    start: int = 0,
    patches: bool = True,
) -> Call[Built]:
    """The sequences of several documents in one call.

    Args:
        documents: the parts of each, as for ``build``.
        errors: "raise" raises the first error, which names ``documents[d].parts[i]``; "return" puts each error where
            its sequence would be.
        scheme: as for ``build``.
        start: id of the first token of every document.
        patches: as for ``build``.

    Returns:
        One entry per document.

    Raises:
        MmposError: as for ``build``; with errors="return" only what is wrong with the whole call.
        ServiceError: no answer.
    """
    return BUILD.call(BuildSettings.checked(options, errors, scheme, start, patches).ask(documents))


@dataclass(frozen=True)
class BuildSettings:
    """How documents are built; makes what asks for them."""

    profile: str | None
    errors: Errors
    scheme: str | Scheme | None
    start: int
    patches: bool
    memory: Lease | None = None

    @classmethod
    def checked(
        cls, options: Options, errors: Errors, scheme: str | Scheme | None, start: int, patches: bool
    ) -> BuildSettings:
        """The settings, or what is wrong with them."""
        one_of("errors", errors, ("raise", "return"))
        start = integer("start", start, minimum=-(2**63), maximum=2**63 - 1)
        return cls(options.profile, errors, scheme, start, boolean("patches", patches), options.memory)

    def ask_one(self, parts: Sequence[Any]) -> Ask[InterleavedSequence]:
        """What asks for one document."""

        def ask(message: Any) -> Callable[[Any], InterleavedSequence]:
            self._put(message)
            sent = put_parts(message.documents.add(), parts, self.memory)
            if sent.error is not None and not sent.names:
                raise sent.error
            self._share(message)

            def decode(answer: Any) -> InterleavedSequence:
                (found,) = _results(answer, 1)
                return _one(found, sent, self.memory)

            return decode

        return ask

    def ask(self, documents: Sequence[Sequence[Any]]) -> Ask[Built]:
        """What asks for several documents."""
        if not isinstance(documents, list | tuple):
            raise InvalidInputError(f"documents: got {type(documents).__name__}, want a list of lists of parts")

        def ask(message: Any) -> Callable[[Any], Built]:
            self._put(message)
            put: list[Sent] = []
            for parts in documents:
                put.append(put_parts(message.documents.add(), parts, self.memory))
                if put[-1].error is not None and self.errors == "raise":
                    break  # those before it may have errors of their own, and the first is raised
            self._share(message)

            def decode(answer: Any) -> Built:
                found = zip(_results(answer, len(put)), put, strict=True)
                return [self._outcome(f"documents[{d}]", *pair) for d, pair in enumerate(found)]

            return decode

        return ask

    def _put(self, message: Any) -> None:
        if self.profile is not None:
            message.profile = self.profile
        if self.scheme is not None:
            put_scheme(message.scheme, self.scheme)
        message.start, message.patches = self.start, self.patches

    def _share(self, message: Any) -> None:
        """Have the answer put into what shared memory the documents have left."""
        if self.memory is not None and self.patches:
            self.memory.answer(message)

    def _outcome(self, name: str, found: Any, sent: Sent) -> InterleavedSequence | MmposError:
        try:
            with naming(name, joint="."):
                return _one(found, sent, self.memory)
        except MmposError as error:
            if self.errors == "raise":
                raise
            return error


def _results(answer: Any, count: int) -> Any:
    if len(answer.results) != count:
        raise ServiceError(f"answer: got {len(answer.results)} results, want {count}")
    return answer.results


def _one(found: Any, sent: Sent, memory: Lease | None) -> InterleavedSequence:
    """The sequence of one document, or its first error raised, both in terms of the parts given."""
    if found.WhichOneof("outcome") == "error":
        error = get_error(found.error)
        of_part = _of_given(error, sent.names)
        raise of_part or sent.error or error
    if sent.error is not None:
        raise sent.error
    with trusting():
        sequence = get_sequence("sequence", found.sequence, sent.hashes, memory)
        offsets, want = sequence.part_offsets, len(sent.given) + 1
        if offsets.size != want:
            raise InvalidInputError(f"sequence.part_offsets: got {offsets.size}, want {want}")
        return replace(sequence, part_offsets=part_offsets(offsets, sent.given))


def _of_given(error: MmposError, names: list[str]) -> MmposError | None:
    """The error of a part sent, if it is one, with the name of what was given: a server sees parts of a Video."""
    part = re.match(r"parts\[(\d+)\]", str(error))
    if part is None or int(part[1]) >= len(names):
        return None
    return type(error)(names[int(part[1])] + str(error)[part.end() :])


_TABLES = {
    "pairs": pb.COS_SIN_LAYOUT_PAIRS,
    "transformers": pb.COS_SIN_LAYOUT_TRANSFORMERS,
    "torchtitan": pb.COS_SIN_LAYOUT_TORCHTITAN,
}
_LAYOUTS = {
    None: pb.ROTATE_LAYOUT_UNSPECIFIED,
    "thd": pb.ROTATE_LAYOUT_THD,
    "bshd": pb.ROTATE_LAYOUT_BSHD,
    "bhsd": pb.ROTATE_LAYOUT_BHSD,
}
_COS_SIN = "/mmpos.rpc.v1.RotaryService/CosSin"


def cos_sin(
    options: Options, rotary: Rotary | None, positions: PositionTable | torch.Tensor, layout: TableLayout = "pairs"
) -> Call[tuple[torch.Tensor, torch.Tensor] | torch.Tensor]:
    """cos and sin of all tokens, as ``mmpos.rotary.cos_sin`` gives them.

    Args:
        rotary: the rotation; None: that of the profile.
        positions: a PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).
        layout: "pairs", "transformers" or "torchtitan", as for ``mmpos.rotary.cos_sin``.

    Returns:
        New tensors, float32 or complex64, where the positions are.

    Raises:
        MmposError: what ``mmpos.rotary.cos_sin`` raises; LimitExceededError also for a limit of the server.
        ServiceError: no answer.
    """
    one_of("layout", layout, tuple(_TABLES))
    request = pb.CosSinRequest(layout=_TABLES[layout])
    _fill(request, options, rotary, positions)

    def decode(answer: pb.CosSinResponse) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        if layout == "torchtitan":
            return _tensor("cache", answer.cache, positions)
        return _tensor("cos", answer.cos, positions), _tensor("sin", answer.sin, positions)

    return Call(_COS_SIN, serialised(request), pb.CosSinResponse, decode)


def angles(options: Options, rotary: Rotary | None, positions: PositionTable | torch.Tensor) -> Call[torch.Tensor]:
    """Exact angles wrapped to [−π, π], as ``mmpos.rotary.angles`` gives them.

    Args:
        rotary: the rotation; None: that of the profile.
        positions: a PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).

    Returns:
        A new float32 tensor where the positions are.

    Raises:
        MmposError: what ``mmpos.rotary.angles`` raises; LimitExceededError also for a limit of the server.
        ServiceError: no answer.
    """
    request = pb.CosSinRequest(layout=pb.COS_SIN_LAYOUT_ANGLES)
    _fill(request, options, rotary, positions)
    response = pb.CosSinResponse
    return Call(_COS_SIN, serialised(request), response, lambda answer: _tensor("cache", answer.cache, positions))


def apply_rotary(
    options: Options,
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: PositionTable | torch.Tensor,
    rotary: Rotary | None,
    *,
    layout: Layout | None = None,
    conjugate: bool = False,
) -> Call[tuple[torch.Tensor, torch.Tensor | None]]:
    """q and k rotated, as ``mmpos.rotary.apply_rotary`` does; both travel, there and back.

    Args:
        q: queries, as for ``apply_rotary``; without gradients.
        k: keys, or None.
        positions: a PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).
        rotary: the rotation; None: that of the profile.
        layout: "thd", "bshd" or "bhsd"; None is thd for three dimensions and bshd for four.
        conjugate: rotate by the negative angles.

    Returns:
        New tensors on the device of q.

    Raises:
        MmposError: what ``apply_rotary`` raises; LimitExceededError also for a limit of the server.
        UnsupportedError: q or k requires gradients.
        ServiceError: no answer.
    """
    from mmpos.rpc.tensors import aligned, put_tensor

    if layout is not None:
        one_of("layout", layout, ("thd", "bshd", "bhsd"))
    _check_tensors(q, k)
    request = pb.RotateRequest(layout=_LAYOUTS[layout], conjugate=boolean("conjugate", conjugate))
    _fill(request, options, rotary, positions)
    memory = options.memory
    put_tensor(request.q, q, memory)
    if k is not None:
        put_tensor(request.k, k, memory)
    if memory is not None:
        memory.answer(request, sum(aligned(x.nbytes) for x in (q, k) if x is not None))

    def decode(answer: pb.RotateResponse) -> tuple[torch.Tensor, torch.Tensor | None]:
        turned = _tensor("q", answer.q, q, memory)
        return turned, _tensor("k", answer.k, q, memory) if answer.HasField("k") else None

    return Call("/mmpos.rpc.v1.RotaryService/Rotate", serialised(request), pb.RotateResponse, decode)


def _fill(request: Any, options: Options, rotary: Any, positions: Any) -> None:
    from mmpos.rotary import Rotary
    from mmpos.rpc.rotary import put_rotary, put_rotary_positions

    if not isinstance(rotary, Rotary | None):
        raise InvalidInputError(f"rotary: got {type(rotary).__name__}, want a Rotary or None")
    if rotary is not None:
        put_rotary(request.rotary.rotary, rotary)
    elif options.profile is not None:
        request.rotary.profile = options.profile
    put_rotary_positions(request.positions, positions)


def _check_tensors(q: Any, k: Any) -> None:
    """What a server cannot see."""
    with needed_for("rotations", extra="all"):
        import torch

    from mmpos.rotary.reference import FLOATS

    for name, x in (("q", q), ("k", k)):
        if x is None and name == "k":
            continue
        if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise InvalidInputError(f"{name}: got {got}, want a tensor of float32, bfloat16 or float16")
        if torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedError(f"{name}: got a tensor that requires gradients, want it detached: none come back")
    if k is not None and k.device != q.device:
        raise InvalidInputError(f"k: got a tensor on {k.device}, want {q.device} as q")


def _tensor(name: str, message: Any, like: Any, memory: Memory | None = None) -> torch.Tensor:
    """The tensor of an answer, where the caller's are."""
    import torch

    from mmpos.rpc.tensors import get_torch

    with trusting():
        found = get_torch(name, message, memory)
    return found.to(like.device) if isinstance(like, torch.Tensor) else found
