"""Collect all methods of the server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmpos.rpc.positions import parameters, put_placeholders
from mmpos.rpc.v1 import info_pb2, positions_pb2, rotary_pb2, scheme_pb2, sequences_pb2
from mmpos.schemes import Scheme
from mmpos.support.info import version
from mmpos_server.config import Limits, Profile, Profiles
from mmpos_server.limits import MAX_VIEWS
from mmpos_server.methods import Method, Run, queried
from mmpos_server.plain import PlainQueries
from mmpos_server.position_service import PositionService
from mmpos_server.rotary_service import RotaryService, device, unserved
from mmpos_server.sequence_service import SequenceService

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos_server.call import Call

__all__ = ["methods", "place_method"]

PACKAGE = "mmpos.rpc.v1"


def methods(profiles: Profiles, limits: Limits, *, rotations: bool = False) -> list[Method]:
    """Return all methods of a server with these profiles and limits; ``rotations`` imports torch."""
    positions, sequences = PositionService(profiles, limits), SequenceService(profiles, limits)
    rotary = RotaryService(profiles, limits)
    on = device() if rotations else ""

    async def get_info(message: info_pb2.GetInfoRequest, answer: info_pb2.GetInfoResponse, call: Call) -> None:
        answer.version, answer.device = version(), on
        for scheme in profiles.schemes.values():
            _put_scheme(answer.schemes.add(), scheme)
        for name, value in vars(limits).items():
            setattr(answer.limits, name, value)
        answer.limits.views = MAX_VIEWS
        for profile in profiles:
            _put_profile(answer.profiles.add(), profile)

    return [
        place_method(positions.place, PlainQueries(profiles, limits)),
        _method("Sequence", "Build", sequences_pb2, queried(sequences.build, "sequences"), stream=True),
        _method("Rotary", "CosSin", rotary_pb2, rotary.cos_sin if rotations else unserved),
        _method("Rotary", "Rotate", rotary_pb2, rotary.rotate if rotations else unserved),
        _method("Info", "GetInfo", info_pb2, get_info),
    ]


def place_method(run: Run, plain: PlainQueries | None = None) -> Method:
    """Return Place, from a function that answers queries and an optional fast path."""
    method = _method("Position", "Place", positions_pb2, queried(run, "positions"), stream=True)
    return replace(method, plain=None if plain is None else plain.answer)


def _method(service: str, name: str, messages: Any, run: Run, *, stream: bool = False) -> Method:
    """Return an mmpos method; its messages are named after it."""

    def pair(prefix: str) -> tuple[type[Message], type[Message]]:
        return getattr(messages, f"{prefix}{name}Request"), getattr(messages, f"{prefix}{name}Response")

    # Items of Place do not run in parallel: placing one takes no longer than handing it to a thread.
    build, item = name == "Build", pair("Stream") if stream else None
    full = f"{PACKAGE}.{service}Service"
    return Method(full, name, *pair(""), run, item, build, bulky=build, large=name in ("Build", "Rotate"))


def _put_scheme(message: info_pb2.SchemeInfo, scheme: type[Scheme]) -> None:
    default = scheme()
    message.name, message.axes, message.fractional = default.name, default.axes, default.fractional
    message.resumable = default.resumable
    fields = scheme_pb2.Scheme.DESCRIPTOR.fields_by_name  # a scheme of the user's own may have other parameters
    message.parameters.extend(name for name in parameters(scheme) if name in fields)


def _put_profile(message: info_pb2.ProfileInfo, profile: Profile) -> None:
    builder = profile.builder
    message.name = profile.name
    message.scheme = builder.scheme if isinstance(builder.scheme, str) else builder.scheme.name
    markers = builder.marker_ids
    message.begin_token_id = -1 if markers.begin is None else markers.begin
    message.end_token_id = -1 if markers.end is None else markers.end
    put_placeholders(message.placeholders, markers.placeholders)
    if builder.images is not None:
        message.patch_size = builder.images.patch_size
        message.spatial_merge_size = builder.images.spatial_merge_size
    message.rotary = profile.rotary is not None
