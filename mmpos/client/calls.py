"""The calls of both clients: each function checks the arguments, fills the request, and knows how to read the answer.

``Client`` sends a call and waits; ``AsyncClient`` sends it and awaits the answer. An item of a stream is the same call
with a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, EncodeError, Message

from mmpos.errors import InvalidInputError, LimitExceededError, MmposError, ServiceError, UnsupportedError
from mmpos.rotary.config import Rotary
from mmpos.rpc.beside import Beside
from mmpos.rpc.errors import get_error
from mmpos.rpc.positions import get_result, get_table, put_query, put_scheme
from mmpos.rpc.queries import InputIds, PositionsQuery, PositionsResult, Spans
from mmpos.rpc.rotary import put_rotary, put_rotary_positions
from mmpos.rpc.sequences import Sent, get_sequence, put_parts
from mmpos.rpc.tensors import get_torch, put_tensor
from mmpos.rpc.v1 import info_pb2, positions_pb2, rotary_pb2, sequences_pb2, tensor_pb2
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import boolean, integer, naming, one_of
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    import torch

    from mmpos.positions.table import PositionTable
    from mmpos.rotary.apply import Layout, TableLayout
    from mmpos.schemes import Scheme
    from mmpos.sequence.builder import InterleavedSequence

T = TypeVar("T")

Errors = Literal["raise", "return"]

Built = list["InterleavedSequence | MmposError"]

Read = Callable[[Any], T]
"""Function that returns the result of a parsed answer, or raises its error."""


class ServiceCall(NamedTuple, Generic[T]):
    """A call that is ready to be sent.

    Args:
        path: full name of the method.
        data: the serialized request.
        read: function that returns the result of the serialized answer, or raises its error.
    """

    path: str
    data: bytes
    read: Callable[[bytes], T]


class Rpc(NamedTuple):
    """A method of the service: its full name, and the types of its messages."""

    path: str
    request: type[Message]
    response: type[Message]


def _method(service: str, name: str, messages: Any) -> Rpc:
    path = f"/mmpos.rpc.v1.{service}Service/{name}"
    return Rpc(path, getattr(messages, f"{name}Request"), getattr(messages, f"{name}Response"))


PLACE, STREAM_PLACE = (_method("Position", name, positions_pb2) for name in ("Place", "StreamPlace"))
BUILD, STREAM_BUILD = (_method("Sequence", name, sequences_pb2) for name in ("Build", "StreamBuild"))
COS_SIN, ROTATE = (_method("Rotary", name, rotary_pb2) for name in ("CosSin", "Rotate"))
GET_INFO = _method("Info", "GetInfo", info_pb2)


def _call(method: Rpc, fill: Callable[[Any, Beside], Read[T]], item: int | None = None) -> ServiceCall[T]:
    """Return a call, or that item of a stream.

    ``fill`` fills the request and returns the function that reads the answer; large tensors are kept outside both.

    Raises:
        MmposError: an argument cannot be sent.
        LimitExceededError: the request has 2 GiB or more.
    """
    request, beside = method.request(), Beside()
    if item is not None:
        request.id = item  # type: ignore[attr-defined]
    parsed = fill(request, beside)
    try:
        data = beside.serialize(request)
    except (EncodeError, ValueError) as error:
        size = request.ByteSize() + beside.size
        raise LimitExceededError(f"request: got {size} bytes, want less than 2 GiB ({error})") from None

    def read(raw: bytes) -> T:
        try:
            answer = beside.parse(method.response, raw)
        except DecodeError:
            raise ServiceError("INTERNAL: Exception deserializing response!") from None
        if item is not None:
            _check_item(answer, item)
        return parsed(answer)

    return ServiceCall(method.path, data, read)


def _check_item(answer: Any, item: int) -> None:
    """Check that this is the answer to an item of a stream, and raise its error, if it is one."""
    if answer.id != item:
        raise ServiceError(f"answer: got id {answer.id}, want {item}")
    outcome = answer.WhichOneof("outcome")
    if outcome is None:
        raise ServiceError("answer: got neither a result nor an error")
    if outcome == "error":
        raise get_error(answer.error)


def refused(method: Rpc, item: int, error: MmposError) -> ServiceCall[Any]:
    """Return the call of an item that cannot be sent: the server answers its number alone, and ``read`` raises."""

    def read(raw: bytes) -> Any:
        raise error

    return ServiceCall(method.path, method.request(id=item).SerializeToString(), read)


def _answer(read: Callable[..., T], *arguments: object) -> T:
    """Read a part of an answer; errors become ServiceErrors, since the caller did nothing wrong."""
    try:
        return read(*arguments)
    except MmposError as error:
        raise ServiceError(f"answer: {error}") from error


# Positions


def place(profile: str | None, segments: object, *options: Any) -> ServiceCall[PositionTable]:
    """Return the call that places documents; see ``Client.place``."""
    if not isinstance(segments, SegmentTable | Spans | InputIds):
        raise InvalidInputError(f"segments: got {type(segments).__name__}, want a SegmentTable")
    query = PositionsQuery(segments, *options)

    def fill(request: Any, beside: Beside) -> Read[PositionTable]:
        put_query(request.query, query, profile, beside)
        return lambda response: _answer(get_table, "positions.table", response.positions.table)

    return _call(PLACE, fill)


def query(profile: str | None, query: PositionsQuery, item: int | None = None) -> ServiceCall[PositionsResult]:
    """Return the call that runs a query, or that item of a stream; see ``Client.query``."""
    if not isinstance(query, PositionsQuery):
        raise InvalidInputError(f"query: got {type(query).__name__}, want a PositionsQuery")

    def fill(request: Any, beside: Beside) -> Read[PositionsResult]:
        put_query(request.query, query, profile, beside)
        return lambda response: _answer(get_result, "positions", response.positions, beside)

    return _call(PLACE if item is None else STREAM_PLACE, fill, item)


# Sequences


def settings(
    profile: str | None, scheme: str | Scheme | None, start: int, patches: bool
) -> sequences_pb2.SequencesQuery:
    """Return a query without documents; see ``Client.build`` for the arguments."""
    query = sequences_pb2.SequencesQuery(profile=profile)
    if scheme is not None:
        put_scheme(query.scheme, scheme)
    query.start = integer("start", start, minimum=-(2**63), maximum=2**63 - 1)
    query.patches = boolean("patches", patches)
    return query


def build(query: sequences_pb2.SequencesQuery, parts: object) -> ServiceCall[InterleavedSequence]:
    """Return the call that builds one document; see ``Client.build``."""

    def fill(request: Any, beside: Beside) -> Read[InterleavedSequence]:
        request.query.CopyFrom(query)
        sent = put_parts(request.query.documents.add(), parts, beside)
        if sent.error is not None and not sent.names:
            raise sent.error
        return lambda response: _sequence(_results(response, 1)[0], sent, beside)

    return _call(BUILD, fill)


def build_batch(
    query: sequences_pb2.SequencesQuery, documents: Any, errors: Errors, item: int | None = None
) -> ServiceCall[Built]:
    """Return the call that builds several documents, or that item of a stream; see ``Client.build_batch``."""
    one_of("errors", errors, ("raise", "return"))
    if not isinstance(documents, list | tuple):
        raise InvalidInputError(f"documents: got {type(documents).__name__}, want a list of lists of parts")

    def fill(request: Any, beside: Beside) -> Read[Built]:
        request.query.CopyFrom(query)
        sent: list[Sent] = []
        for parts in documents:
            sent.append(put_parts(request.query.documents.add(), parts, beside))
            if sent[-1].error is not None and errors == "raise":
                break  # earlier documents may have errors on the server, and the first error is raised

        def read(response: Any) -> Built:
            results = zip(_results(response, len(sent)), sent, strict=True)
            return [_outcome(d, result, one, beside, errors) for d, (result, one) in enumerate(results)]

        return read

    return _call(BUILD if item is None else STREAM_BUILD, fill, item)


def _results(response: Any, count: int) -> Sequence[sequences_pb2.SequenceResult]:
    results = response.sequences.results
    if len(results) != count:
        raise ServiceError(f"answer: got {len(results)} results, want {count}")
    return results


def _outcome(
    document: int, result: sequences_pb2.SequenceResult, sent: Sent, beside: Beside, errors: Errors
) -> InterleavedSequence | MmposError:
    try:
        with naming(f"documents[{document}]", joint="."):
            return _sequence(result, sent, beside)
    except MmposError as error:
        if errors == "raise":
            raise
        return error


def _sequence(result: sequences_pb2.SequenceResult, sent: Sent, beside: Beside) -> InterleavedSequence:
    """Read the sequence of one document, or raise its first error; both refer to the caller's parts."""
    if result.WhichOneof("outcome") == "error":
        error = get_error(result.error)
        raise _of_part(error, sent.names) or sent.error or error
    if sent.error is not None:
        raise sent.error
    return _answer(_of_parts, result.sequence, sent, beside)


def _of_parts(message: sequences_pb2.Sequence, sent: Sent, beside: Beside) -> InterleavedSequence:
    """Read a sequence with the offsets of the caller's parts, since a Video was sent as several parts."""
    sequence = get_sequence("sequence", message, sent.hashes, beside)
    offsets, want = sequence.part_offsets, len(sent.origins) + 1
    if offsets.size != want:
        raise InvalidInputError(f"sequence.part_offsets: got {offsets.size}, want {want}")
    # Keep the first offset of each part, and the total.
    edges = np.diff(sent.origins, prepend=-1, append=-1).nonzero()[0]
    return replace(sequence, part_offsets=offsets[edges])


def _of_part(error: MmposError, names: list[str]) -> MmposError | None:
    """Name the caller's part in the error of a sent part; return None if the error belongs to no part.

    A Video is one part for the caller, but is sent as several parts.
    """
    part = re.match(r"parts\[(\d+)\]", str(error))
    if part is None or int(part[1]) >= len(names):
        return None
    return type(error)(names[int(part[1])] + str(error)[part.end() :])


# Rotations


def cos_sin(profile: str | None, rotary: object, positions: object, layout: TableLayout) -> ServiceCall[Any]:
    """Return the call that computes cos and sin; see ``Client.cos_sin``."""
    one_of("layout", layout, ("pairs", "transformers", "torchtitan"))
    names = ("cache",) if layout == "torchtitan" else ("cos", "sin")
    return _tables(profile, rotary, positions, layout, *names)


def angles(profile: str | None, rotary: object, positions: object) -> ServiceCall[Any]:
    """Return the call that computes angles; see ``Client.angles``."""
    return _tables(profile, rotary, positions, "angles", "cache")


def _tables(profile: str | None, rotary: object, positions: object, layout: str, *names: str) -> ServiceCall[Any]:
    def fill(request: Any, beside: Beside) -> Read[Any]:
        request.layout = f"COS_SIN_LAYOUT_{layout.upper()}"
        _put_rotation(request, profile, rotary, positions)

        def read(response: Any) -> Any:
            one, *more = (_tensor(name, getattr(response, name), positions, beside) for name in names)
            return (one, *more) if more else one

        return read

    return _call(COS_SIN, fill)


def apply_rotary(
    profile: str | None,
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: object,
    rotary: object,
    layout: Layout | None,
    conjugate: bool,
) -> ServiceCall[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the call that rotates q and k; see ``Client.apply_rotary``."""
    if layout is not None:
        one_of("layout", layout, ("thd", "bshd", "bhsd"))
    _check_tensors(q, k)

    def fill(request: Any, beside: Beside) -> Read[tuple[torch.Tensor, torch.Tensor | None]]:
        request.layout = f"ROTATE_LAYOUT_{(layout or 'unspecified').upper()}"
        request.conjugate = boolean("conjugate", conjugate)
        _put_rotation(request, profile, rotary, positions)
        put_tensor(request.q, q, beside)
        if k is not None:
            put_tensor(request.k, k, beside)
        return lambda response: (
            _tensor("q", response.q, q, beside),
            _tensor("k", response.k, q, beside) if response.HasField("k") else None,
        )

    return _call(ROTATE, fill)


def _put_rotation(request: Any, profile: str | None, rotary: object, positions: Any) -> None:
    if not isinstance(rotary, Rotary | None):
        raise InvalidInputError(f"rotary: got {type(rotary).__name__}, want a Rotary or None")
    if rotary is not None:
        put_rotary(request.rotary.rotary, rotary)
    elif profile is not None:
        request.rotary.profile = profile
    put_rotary_positions(request.positions, positions)


def _check_tensors(q: torch.Tensor, k: torch.Tensor | None) -> None:
    """Check the tensor properties that a server cannot see."""
    with needed_for("rotations", extra="all"):
        import torch

    from mmpos.rotary.memory import FLOATS

    for name, x in [("q", q)] if k is None else [("q", q), ("k", k)]:
        if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise InvalidInputError(f"{name}: got {got}, want a tensor of float32, bfloat16 or float16")
        if torch.is_grad_enabled() and x.requires_grad:
            want = "want a detached one; a service returns no gradients"
            raise UnsupportedError(f"{name}: got a tensor that requires gradients, {want}")
    if k is not None and k.device != q.device:
        raise InvalidInputError(f"k must be on the device of q, {q.device}, got {k.device}")


def _tensor(name: str, message: tensor_pb2.Tensor, like: object, beside: Beside) -> torch.Tensor:
    """Read a tensor from an answer, and move it to the device of ``like`` if that is a tensor."""
    import torch

    tensor = _answer(get_torch, name, message, beside)
    return tensor.to(like.device) if isinstance(like, torch.Tensor) else tensor


# The server


def info() -> ServiceCall[info_pb2.GetInfoResponse]:
    """Return the call that describes the server; see ``Client.info``."""
    return _call(GET_INFO, lambda request, beside: lambda answer: answer)


def healthy() -> ServiceCall[bool]:
    """Return the call that checks the health of the server; see ``Client.healthy``."""
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

    check = Rpc("/grpc.health.v1.Health/Check", HealthCheckRequest, HealthCheckResponse)
    return _call(check, lambda request, beside: lambda answer: bool(answer.status == HealthCheckResponse.SERVING))
