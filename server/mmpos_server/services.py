"""All methods of the server: those of mmpos, GetInfo, and the Open Inference Protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmpos.rpc.positions import parameters, put_placeholders
from mmpos.rpc.v1 import info_pb2, positions_pb2, rotary_pb2, sequences_pb2
from mmpos.schemes import SCHEMES, Scheme
from mmpos.support.info import version
from mmpos_server.config import Limits, Profile, Profiles
from mmpos_server.inference.methods import OpenInference
from mmpos_server.inference.models import InferenceModel, Positions, Rotate, Sequences
from mmpos_server.limits import MAX_VIEWS
from mmpos_server.methods import Method, Run, queried, streamed
from mmpos_server.position_service import PositionService
from mmpos_server.rotary_service import RotaryService, device
from mmpos_server.sequence_service import SequenceService
from mmpos_server.shared_memory import SharedMemory

if TYPE_CHECKING:
    from mmpos_server.call import Call

__all__ = ["methods", "place_method"]

PACKAGE = "mmpos.rpc.v1"


def methods(profiles: Profiles, limits: Limits, memory: SharedMemory) -> list[Method]:
    """Return all methods of a server with these profiles, limits and shared memory."""
    positions, sequences = PositionService(profiles, limits), SequenceService(profiles, limits)
    rotary = RotaryService(profiles, limits)
    build = queried(sequences.build, "sequences")
    models: list[InferenceModel] = [Sequences(sequences, limits), Positions(positions, limits), Rotate(rotary, limits)]
    service = f"{PACKAGE}.RotaryService"
    return [
        place_method(positions.place),
        Method(
            f"{PACKAGE}.SequenceService",
            "Build",
            sequences_pb2.BuildRequest,
            sequences_pb2.BuildResponse,
            build,
            streamed(
                "StreamBuild",
                sequences_pb2.StreamBuildRequest,
                sequences_pb2.StreamBuildResponse,
                build,
                side_by_side=True,
            ),
        ),
        Method(service, "CosSin", rotary_pb2.CosSinRequest, rotary_pb2.CosSinResponse, rotary.cos_sin),
        Method(service, "Rotate", rotary_pb2.RotateRequest, rotary_pb2.RotateResponse, rotary.rotate),
        Method(
            f"{PACKAGE}.InfoService",
            "GetInfo",
            info_pb2.GetInfoRequest,
            info_pb2.GetInfoResponse,
            _Info(profiles, limits, memory).get_info,
        ),
        *OpenInference(models, profiles, limits, memory).methods(),
    ]


def place_method(run: Run) -> Method:
    """Return method Place, with its stream form, of a function from a query to positions."""
    place = queried(run, "positions")
    return Method(
        f"{PACKAGE}.PositionService",
        "Place",
        positions_pb2.PlaceRequest,
        positions_pb2.PlaceResponse,
        place,
        streamed("StreamPlace", positions_pb2.StreamPlaceRequest, positions_pb2.StreamPlaceResponse, place),
    )


@dataclass(frozen=True)
class _Info:
    profiles: Profiles
    limits: Limits
    memory: SharedMemory

    def get_info(self, message: info_pb2.GetInfoRequest, answer: info_pb2.GetInfoResponse, call: Call) -> None:
        """Answer GetInfo: version, schemes, limits, profiles, device and shared memory."""
        answer.version = version()
        for scheme in SCHEMES.values():
            _put_scheme(answer.schemes.add(), scheme)
        for name, value in self.limits.model_dump().items():
            setattr(answer.limits, name, value)
        answer.limits.views = MAX_VIEWS
        for profile in self.profiles:
            _put_profile(answer.profiles.add(), profile)
        answer.device = device()
        answer.shared_memory_prefix = self.memory.prefix or ""


def _put_scheme(message: info_pb2.SchemeInfo, scheme: type[Scheme]) -> None:
    default = scheme()
    message.name, message.axes, message.fractional = default.name, default.axes, default.fractional
    message.resumable = default.resumable
    message.parameters.extend(parameters(scheme))


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
