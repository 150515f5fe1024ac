"""The calls of both clients as data, each defined once: arguments, and how to fill the request and read the response.

``Client`` sends a call and waits; ``AsyncClient`` sends it and awaits the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, NoReturn, ParamSpec, TypeVar

import numpy as np
from google.protobuf.message import EncodeError, Message

from mmpos.client.info import ServerInfo, get_info
from mmpos.errors import InvalidInputError, LimitExceededError, MmposError, ServiceError, UnsupportedError
from mmpos.rotary.config import Rotary
from mmpos.rpc.beside import Beside
from mmpos.rpc.errors import get_error
from mmpos.rpc.positions import get_result, put_query, put_scheme
from mmpos.rpc.queries import InputIds, PositionsQuery, PositionsResult, Spans, View
from mmpos.rpc.rotary import put_rotary, put_rotary_positions
from mmpos.rpc.sequences import Sent, get_sequence, put_parts
from mmpos.rpc.tensors import get_torch, put_tensor
from mmpos.rpc.v1 import info_pb2, positions_pb2, rotary_pb2, sequences_pb2, tensor_pb2
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import boolean, integer, naming, one_of
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from mmpos.positions.table import PositionTable
    from mmpos.rotary.apply import Layout, TableLayout
    from mmpos.schemes import Scheme
    from mmpos.sequence.builder import InterleavedSequence

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R_co = TypeVar("R_co", bound=Message, covariant=True)

Errors = Literal["raise", "return"]

Built = list["InterleavedSequence | MmposError"]

Read = Callable[[Any], T]
"""Function that returns the result of a response, or raises its error."""


@dataclass(frozen=True)
class Rpc(Generic[R_co]):
    """A method of the service.

    Args:
        path: full name of the method.
        request: function that creates an empty request.
        response: type of the responses.
    """

    path: str
    request: Callable[..., Message]
    response: type[R_co]


PLACE = Rpc("/mmpos.rpc.v1.PositionService/Place", positions_pb2.PlaceRequest, positions_pb2.PlaceResponse)
STREAM_PLACE = Rpc(
    "/mmpos.rpc.v1.PositionService/StreamPlace",
    positions_pb2.StreamPlaceRequest,
    positions_pb2.StreamPlaceResponse,
)
BUILD = Rpc("/mmpos.rpc.v1.SequenceService/Build", sequences_pb2.BuildRequest, sequences_pb2.BuildResponse)
STREAM_BUILD = Rpc(
    "/mmpos.rpc.v1.SequenceService/StreamBuild",
    sequences_pb2.StreamBuildRequest,
    sequences_pb2.StreamBuildResponse,
)
COS_SIN = Rpc("/mmpos.rpc.v1.RotaryService/CosSin", rotary_pb2.CosSinRequest, rotary_pb2.CosSinResponse)
ROTATE = Rpc("/mmpos.rpc.v1.RotaryService/Rotate", rotary_pb2.RotateRequest, rotary_pb2.RotateResponse)
GET_INFO = Rpc("/mmpos.rpc.v1.InfoService/GetInfo", info_pb2.GetInfoRequest, info_pb2.GetInfoResponse)


def _raise(error: MmposError) -> NoReturn:
    raise error


@dataclass(frozen=True)
class Prepared(Generic[T_co]):
    """A request that is ready to be sent.

    Args:
        data: the serialized request.
        parse: function that parses the response.
        read: function that reads the parsed response.
    """

    data: bytes
    parse: Callable[[bytes], Message]
    read: Read[T_co]


@dataclass(frozen=True)
class ServiceCall(Generic[T_co]):
    """A call that fills a new request for each attempt.

    Args:
        method: method to call; its streaming variant accepts the same call as an item.
        put: function that fills a request and returns the function that reads the response; large tensors are kept
            outside the message.
        refused: function that turns an error of the whole call into a result.
        waits: whether the call waits for a server that has disappeared.
    """

    method: Rpc[Message]
    put: Callable[[Any, Beside], Read[T_co]]
    refused: Callable[[MmposError], T_co] = _raise
    waits: bool = True

    def request(self, message: Message | None = None) -> Prepared[T_co]:
        """Create the request.

        Args:
            message: stream request to fill; None creates a new request of the method.

        Raises:
            MmposError: an argument cannot be sent.
            LimitExceededError: the request has 2 GiB or more.
        """
        message = self.method.request() if message is None else message
        beside = Beside()
        read = self.put(message, beside)
        try:
            return Prepared(beside.serialize(message), partial(beside.parse, self.method.response), read)
        except (EncodeError, ValueError) as error:
            size = message.ByteSize() + beside.size
            raise LimitExceededError(f"request: got {size} bytes, want less than 2 GiB ({error})") from None


Maker = Callable[Concatenate[str | None, P], ServiceCall[T]]
"""Function that maps a client's profile and the arguments of its method to the call."""


def documented(method: F, maker: Maker[P, T]) -> F:
    """Give a client method the name, docstring and signature of the function that creates its call."""
    original = signature(maker)
    _, *parameters = original.parameters.values()
    result = original.return_annotation.removeprefix("ServiceCall[").removesuffix("]")
    described: Any = method
    described.__name__, described.__doc__ = maker.__name__, maker.__doc__
    described.__signature__ = original.replace(
        parameters=[Parameter("self", Parameter.POSITIONAL_ONLY), *parameters], return_annotation=result
    )
    return method


def _answer(read: Callable[..., T], *arguments: object) -> T:
    """Read a part of an answer; errors become ServiceErrors, since the caller did nothing wrong."""
    try:
        return read(*arguments)
    except MmposError as error:
        raise ServiceError(f"answer: {error}") from error


# Positions

PlaceRequest = positions_pb2.PlaceRequest | positions_pb2.StreamPlaceRequest
PlaceResponse = positions_pb2.PlaceResponse | positions_pb2.StreamPlaceResponse


def place(
    profile: str | None,
    segments: SegmentTable | Spans | InputIds,
    scheme: str | Scheme | None = None,
    start: npt.ArrayLike = 0,
    strict: bool | None = None,
    *,
    views: Sequence[View] = (),
) -> ServiceCall[PositionTable]:
    """Place documents like ``mmpos.place``.

    Args:
        segments: documents, as a SegmentTable, Spans or InputIds.
        scheme: name from mmpos.SCHEMES or a scheme object; None selects the profile's scheme.
        start: id of each document's first token: one number for all, or (documents,).
        strict: whether two grids without text between them cause an error; None lets the scheme decide.
        views: methods to apply to the placed table in this order: Take, Window, Decode, Shard, Pad.

    Returns:
        A new PositionTable.

    Raises:
        MmposError: see ``mmpos.place`` and the views; also LimitExceededError if a server limit is exceeded.
        ServiceError: the server did not answer.
    """
    if not isinstance(segments, SegmentTable | Spans | InputIds):
        raise InvalidInputError(f"segments: got {type(segments).__name__}, want a SegmentTable")
    return _positions(profile, PositionsQuery(segments, scheme, start, strict, views), _table)


def query(profile: str | None, query: PositionsQuery) -> ServiceCall[PositionsResult]:
    """Run a query on the server, like ``query.run``; the profile fills its unset fields.

    Args:
        query: documents, scheme, views, and whether to return the table or ids.

    Raises:
        MmposError: see ``query.run``; also LimitExceededError if a server limit is exceeded.
        ServiceError: the server did not answer.
    """
    if not isinstance(query, PositionsQuery):
        raise InvalidInputError(f"query: got {type(query).__name__}, want a PositionsQuery")
    return _positions(profile, query, lambda result: result)


def _positions(profile: str | None, query: PositionsQuery, of: Callable[[PositionsResult], T]) -> ServiceCall[T]:
    def put(request: PlaceRequest, beside: Beside) -> Read[T]:
        request.query.SetInParent()
        put_query(request.query, query, profile, beside)

        def read(response: PlaceResponse) -> T:
            return of(_answer(get_result, "positions", response.positions, beside))

        return read

    return ServiceCall(PLACE, put)


def _table(result: PositionsResult) -> PositionTable:
    if result.table is None:
        raise ServiceError("answer: got ids, want a table")
    return result.table


# Sequences

BuildRequest = sequences_pb2.BuildRequest | sequences_pb2.StreamBuildRequest
BuildResponse = sequences_pb2.BuildResponse | sequences_pb2.StreamBuildResponse


@dataclass(frozen=True)
class BuildSettings:
    """The settings for building documents; see ``build`` for the arguments."""

    profile: str | None
    scheme: str | Scheme | None
    start: int
    patches: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", integer("start", self.start, minimum=-(2**63), maximum=2**63 - 1))
        object.__setattr__(self, "patches", boolean("patches", self.patches))

    def put(self, request: BuildRequest) -> None:
        """Fill the fields of a request that apply to all its documents."""
        request.query.SetInParent()
        if self.profile is not None:
            request.query.profile = self.profile
        if self.scheme is not None:
            put_scheme(request.query.scheme, self.scheme)
        request.query.start, request.query.patches = self.start, self.patches


def build(
    profile: str | None,
    parts: Sequence[object],
    *,
    scheme: str | Scheme | None = None,
    start: int = 0,
    patches: bool = True,
) -> ServiceCall[InterleavedSequence]:
    """Build a sequence from parts, like ``SequenceBuilder.build`` with the settings of the profile.

    Args:
        parts: text, token ids, Grid, ImageSize, Video and images, as in SequenceBuilder. A path is sent as the bytes
            of its file; a Pillow image, an array or a tensor as its upright pixels, without loss.
        scheme: name from mmpos.SCHEMES or a scheme object; None selects the profile's scheme.
        start: id of the first token.
        patches: whether to return patches; if not, no image is decoded.

    Returns:
        A new InterleavedSequence, with the same image hashes as a call in process.

    Raises:
        MmposError: see ``SequenceBuilder.build``; also LimitExceededError if a server limit is exceeded.
        ServiceError: the server did not answer.
    """
    settings = BuildSettings(profile, scheme, start, patches)

    def put(request: BuildRequest, beside: Beside) -> Read[InterleavedSequence]:
        settings.put(request)
        sent = put_parts(request.query.documents.add(), parts, beside)
        if sent.error is not None and not sent.names:
            raise sent.error
        return lambda response: _sequence(_results(response, 1)[0], sent, beside)

    return ServiceCall(BUILD, put)


def build_batch(
    profile: str | None,
    documents: Sequence[Sequence[object]],
    errors: Errors = "raise",
    *,
    scheme: str | Scheme | None = None,
    start: int = 0,
    patches: bool = True,
) -> ServiceCall[Built]:
    """Build the sequences of several documents in one call.

    Args:
        documents: parts of each document; see ``build``.
        errors: "raise" raises the first error, which names ``documents[d].parts[i]``; "return" returns each error
            instead of the sequence.
        scheme: see ``build``.
        start: id of the first token of every document.
        patches: see ``build``.

    Returns:
        One sequence or error per document.

    Raises:
        MmposError: see ``build``; with errors="return", only errors of the whole call.
        ServiceError: the server did not answer.
    """
    return batch_call(BuildSettings(profile, scheme, start, patches), documents, errors)


def batch_call(settings: BuildSettings, documents: Sequence[Sequence[object]], errors: Errors) -> ServiceCall[Built]:
    """Return the call that builds several documents with these settings."""
    one_of("errors", errors, ("raise", "return"))
    if not isinstance(documents, list | tuple):
        raise InvalidInputError(f"documents: got {type(documents).__name__}, want a list of lists of parts")

    def put(request: BuildRequest, beside: Beside) -> Read[Built]:
        settings.put(request)
        sent: list[Sent] = []
        for parts in documents:
            sent.append(put_parts(request.query.documents.add(), parts, beside))
            if sent[-1].error is not None and errors == "raise":
                break  # earlier documents may have errors on the server, and the first error is raised

        def read(response: BuildResponse) -> Built:
            results = _results(response, len(sent))
            return [_outcome(d, results[d], sent[d], beside, errors) for d in range(len(sent))]

        return read

    return ServiceCall(BUILD, put)


def _results(response: BuildResponse, count: int) -> Sequence[sequences_pb2.SequenceResult]:
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

_TABLES = {
    "pairs": rotary_pb2.COS_SIN_LAYOUT_PAIRS,
    "transformers": rotary_pb2.COS_SIN_LAYOUT_TRANSFORMERS,
    "torchtitan": rotary_pb2.COS_SIN_LAYOUT_TORCHTITAN,
}
_LAYOUTS = {
    None: rotary_pb2.ROTATE_LAYOUT_UNSPECIFIED,
    "thd": rotary_pb2.ROTATE_LAYOUT_THD,
    "bshd": rotary_pb2.ROTATE_LAYOUT_BSHD,
    "bhsd": rotary_pb2.ROTATE_LAYOUT_BHSD,
}


def cos_sin(
    profile: str | None, rotary: Rotary | None, positions: PositionTable | torch.Tensor, layout: TableLayout = "pairs"
) -> ServiceCall[tuple[torch.Tensor, torch.Tensor] | torch.Tensor]:
    """Compute cos and sin of all tokens like ``mmpos.rotary.cos_sin``.

    Args:
        rotary: rotation; None selects the profile's rotation.
        positions: PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).
        layout: "pairs", "transformers" or "torchtitan", as for ``mmpos.rotary.cos_sin``.

    Returns:
        New tensors, float32 or complex64, on the device of the positions.

    Raises:
        MmposError: see ``mmpos.rotary.cos_sin``; also LimitExceededError if a server limit is exceeded.
        ServiceError: the server did not answer.
    """
    one_of("layout", layout, tuple(_TABLES))

    def put(
        request: rotary_pb2.CosSinRequest, beside: Beside
    ) -> Read[tuple[torch.Tensor, torch.Tensor] | torch.Tensor]:
        request.layout = _TABLES[layout]
        _put_rotation(request, profile, rotary, positions)
        if layout == "torchtitan":
            return lambda response: _tensor("cache", response.cache, positions, beside)
        return lambda response: (
            _tensor("cos", response.cos, positions, beside),
            _tensor("sin", response.sin, positions, beside),
        )

    return ServiceCall(COS_SIN, put)


def angles(
    profile: str | None, rotary: Rotary | None, positions: PositionTable | torch.Tensor
) -> ServiceCall[torch.Tensor]:
    """Compute exact angles, wrapped to [−π, π], like ``mmpos.rotary.angles``.

    Args:
        rotary: rotation; None selects the profile's rotation.
        positions: PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).

    Returns:
        A new float32 tensor on the device of the positions.

    Raises:
        MmposError: see ``mmpos.rotary.angles``; also LimitExceededError if a server limit is exceeded.
        ServiceError: the server did not answer.
    """

    def put(request: rotary_pb2.CosSinRequest, beside: Beside) -> Read[torch.Tensor]:
        request.layout = rotary_pb2.COS_SIN_LAYOUT_ANGLES
        _put_rotation(request, profile, rotary, positions)
        return lambda response: _tensor("cache", response.cache, positions, beside)

    return ServiceCall(COS_SIN, put)


def apply_rotary(
    profile: str | None,
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: PositionTable | torch.Tensor,
    rotary: Rotary | None,
    *,
    layout: Layout | None = None,
    conjugate: bool = False,
) -> ServiceCall[tuple[torch.Tensor, torch.Tensor | None]]:
    """Rotate q and k on the server like ``mmpos.rotary.apply_rotary``; both are sent to the server and back.

    Args:
        q: queries; see ``apply_rotary``. They must not require gradients.
        k: keys, or None.
        positions: PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).
        rotary: rotation; None selects the profile's rotation.
        layout: "thd", "bshd" or "bhsd"; None means thd for three dimensions and bshd for four.
        conjugate: whether to rotate by the negated angles.

    Returns:
        New tensors on the device of q.

    Raises:
        MmposError: see ``apply_rotary``; also LimitExceededError if a server limit is exceeded.
        UnsupportedError: q or k requires gradients.
        ServiceError: the server did not answer.
    """
    if layout is not None:
        one_of("layout", layout, ("thd", "bshd", "bhsd"))
    _check_tensors(q, k)
    conjugate = boolean("conjugate", conjugate)

    def put(request: rotary_pb2.RotateRequest, beside: Beside) -> Read[tuple[torch.Tensor, torch.Tensor | None]]:
        request.layout, request.conjugate = _LAYOUTS[layout], conjugate
        _put_rotation(request, profile, rotary, positions)
        put_tensor(request.q, q, beside)
        if k is not None:
            put_tensor(request.k, k, beside)

        def read(response: rotary_pb2.RotateResponse) -> tuple[torch.Tensor, torch.Tensor | None]:
            rotated = _tensor("q", response.q, q, beside)
            return rotated, _tensor("k", response.k, q, beside) if response.HasField("k") else None

        return read

    return ServiceCall(ROTATE, put)


def _put_rotation(
    request: rotary_pb2.CosSinRequest | rotary_pb2.RotateRequest,
    profile: str | None,
    rotary: Rotary | None,
    positions: PositionTable | torch.Tensor,
) -> None:
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

    from mmpos.rotary.reference import FLOATS

    for name, x in (("q", q), ("k", k)):
        if x is None and name == "k":
            continue
        if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise InvalidInputError(f"{name}: got {got}, want a tensor of float32, bfloat16 or float16")
        if torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedError(
                f"{name}: got a tensor that requires gradients, want a detached one; a service returns no gradients"
            )
    if k is not None and k.device != q.device:
        raise InvalidInputError(f"k must be on the device of q, {q.device}, got {k.device}")


def _tensor(name: str, message: tensor_pb2.Tensor, like: object, beside: Beside) -> torch.Tensor:
    """Read a tensor from an answer, and move it to the device of ``like`` if that is a tensor."""
    import torch

    tensor = _answer(get_torch, name, message, beside)
    return tensor.to(like.device) if isinstance(like, torch.Tensor) else tensor


# The server


def info(profile: str | None) -> ServiceCall[ServerInfo]:
    """Get the version, schemes, limits and profiles of the server."""
    return ServiceCall(GET_INFO, lambda request, beside: get_info)


def healthy(profile: str | None) -> ServiceCall[bool]:
    """Return whether the server reports that it is serving; False if no server answers."""
    from grpc_health.v1 import health_pb2 as health

    def put(request: health.HealthCheckRequest, beside: Beside) -> Read[bool]:
        serving = health.HealthCheckResponse.SERVING
        return lambda response: bool(response.status == serving)

    def refused(error: MmposError) -> bool:
        if isinstance(error, ServiceError):
            return False
        raise error

    check = Rpc("/grpc.health.v1.Health/Check", health.HealthCheckRequest, health.HealthCheckResponse)
    return ServiceCall(check, put, refused=refused, waits=False)
