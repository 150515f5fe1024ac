"""Version, schemes, limits and profiles of a server, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

from google.protobuf.message import Message

from mmpos.rpc.positions import get_placeholders
from mmpos.rpc.v1 import info_pb2 as pb
from mmpos.segments.placeholders import Placeholders

T = TypeVar("T")


@dataclass(frozen=True)
class SchemeInfo:
    """A scheme that the server knows.

    Args:
        name: its name.
        axes: numbers in a position, with default parameters.
        fractional: whether ids may be fractions, with default parameters.
        resumable: whether next positions and decoding exist.
        parameters: names of its parameters.
    """

    name: str
    axes: int
    fractional: bool
    resumable: bool
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class LimitsInfo:
    """Limits of one request.

    Args:
        request_bytes: bytes of a request.
        response_bytes: bytes of tensors in a reply.
        documents: documents.
        segments: segments of the documents, and of the tables that views make.
        tokens: tokens, padding included.
        images: images and videos.
        pixels: pixels of all images before resizing.
        views: views of a query.
        shared_bytes: bytes of tensors in shared memory, there and back.
    """

    request_bytes: int
    response_bytes: int
    documents: int
    segments: int
    tokens: int
    images: int
    pixels: int
    views: int
    shared_bytes: int


@dataclass(frozen=True)
class ProfileInfo:
    """Settings of a model on the server.

    Args:
        name: its name.
        scheme: the scheme's name.
        begin_token_id: the id before an image's patches; None where nothing stands there.
        end_token_id: the id after them; likewise.
        placeholders: the ids of patches, audio and ends of rows.
        patch_size: side of a patch in pixels.
        spatial_merge_size: patches merged along each side.
        rotary: whether it has a rotation.
    """

    name: str
    scheme: str
    begin_token_id: int | None
    end_token_id: int | None
    placeholders: Placeholders
    patch_size: int
    spatial_merge_size: int
    rotary: bool


@dataclass(frozen=True)
class ServerInfo:
    """Version, schemes, limits and profiles of a server.

    Args:
        version: of mmpos there.
        schemes: all schemes.
        limits: per request.
        profiles: all profiles; the first is the default.
        device: where it rotates: "cuda", "cpu", or empty if it does not.
        shared_memory_prefix: how names of shared memory objects must begin; empty if it takes none.
        shared_memory_processes: the link /proc/self/ns/pid of the server; likewise.
    """

    version: str
    schemes: tuple[SchemeInfo, ...]
    limits: LimitsInfo
    profiles: tuple[ProfileInfo, ...]
    device: str
    shared_memory_prefix: str
    shared_memory_processes: str


def get_info(message: pb.GetInfoResponse) -> ServerInfo:
    """Read the info of a message."""
    return ServerInfo(
        version=message.version,
        schemes=tuple(_same(SchemeInfo, scheme, parameters=tuple(scheme.parameters)) for scheme in message.schemes),
        limits=_same(LimitsInfo, message.limits),
        profiles=tuple(map(_profile, message.profiles)),
        device=message.device,
        shared_memory_prefix=message.shared_memory_prefix,
        shared_memory_processes=message.shared_memory_processes,
    )


def _profile(message: pb.ProfileInfo) -> ProfileInfo:
    markers = {name: getattr(message, name) for name in ("begin_token_id", "end_token_id")}
    around = {name: None if token_id < 0 else token_id for name, token_id in markers.items()}
    return _same(ProfileInfo, message, placeholders=get_placeholders(message.placeholders), **around)


def _same(kind: type[T], message: Message, **others: object) -> T:
    """Make the data from the fields of a message that have the same names."""
    names = [f.name for f in fields(kind) if f.name not in others]  # type: ignore[arg-type]
    return kind(**{name: getattr(message, name) for name in names}, **others)
