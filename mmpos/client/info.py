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
    """A scheme known to the server.

    Args:
        name: name of the scheme.
        axes: number of ids per token, with default parameters.
        fractional: whether ids may be fractions, with default parameters.
        resumable: whether next positions are defined and decoding is supported.
        parameters: names of the scheme's parameters.
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
        request_bytes: size of a request in bytes.
        response_bytes: size of the tensors in a reply, in bytes.
        documents: number of documents.
        segments: number of segments in the documents, and in the tables after each view.
        tokens: number of tokens, including padding.
        images: number of images and videos.
        pixels: number of pixels in all images before resizing.
        views: number of views in a query.
        message_bytes: size of a request, except those of ``build``, without its tensors of 64 KiB or more, in bytes.
    """

    request_bytes: int
    response_bytes: int
    documents: int
    segments: int
    tokens: int
    images: int
    pixels: int
    views: int
    message_bytes: int


@dataclass(frozen=True)
class ProfileInfo:
    """Settings of a model on the server.

    Args:
        name: name of the profile.
        scheme: name of the scheme.
        begin_token_id: token id before the patches of an image, or None.
        end_token_id: token id after the patches of an image, or None.
        placeholders: token ids for patches, audio and row ends.
        patch_size: side of a patch in pixels.
        spatial_merge_size: patches merged along each side.
        rotary: whether the profile has a rotation.
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
        version: version of mmpos on the server.
        schemes: all schemes.
        limits: limits of one request.
        profiles: all profiles; the first is the default.
        device: device of rotations, "cuda" or "cpu"; empty if the server cannot rotate.
    """

    version: str
    schemes: tuple[SchemeInfo, ...]
    limits: LimitsInfo
    profiles: tuple[ProfileInfo, ...]
    device: str


def get_info(message: pb.GetInfoResponse) -> ServerInfo:
    """Read the server's info from a message."""
    return ServerInfo(
        version=message.version,
        schemes=tuple(_same(SchemeInfo, scheme, parameters=tuple(scheme.parameters)) for scheme in message.schemes),
        limits=_same(LimitsInfo, message.limits),
        profiles=tuple(map(_profile, message.profiles)),
        device=message.device,
    )


def _profile(message: pb.ProfileInfo) -> ProfileInfo:
    markers = {name: getattr(message, name) for name in ("begin_token_id", "end_token_id")}
    token_ids = {name: None if token_id < 0 else token_id for name, token_id in markers.items()}
    return _same(ProfileInfo, message, placeholders=get_placeholders(message.placeholders), **token_ids)


def _same(kind: type[T], message: Message, **others: object) -> T:
    """Create a dataclass from the fields of a message that have the same names."""
    names = [f.name for f in fields(kind) if f.name not in others]  # type: ignore[arg-type]
    return kind(**{name: getattr(message, name) for name in names}, **others)
