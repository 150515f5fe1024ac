"""Implement the methods of the Open Inference Protocol, including the metadata and statistics of its models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import time
from typing import TYPE_CHECKING, Any

from mmpos.errors import InvalidInputError, MmposError, UnsupportedError
from mmpos.rpc.errors import shortened
from mmpos.support.info import version
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.messages import DATATYPES, get_request
from mmpos_server.methods import Method, NotFoundError, Run, Twin
from mmpos_server.shared_memory import Regions, SharedMemory

if TYPE_CHECKING:
    from mmpos_server.call import Call
    from mmpos_server.config import Limits, Profile, Profiles
    from mmpos_server.inference.models import Positions, Sequences
    from mmpos_server.inference.rotate import Rotate

    Model = Positions | Sequences | Rotate

__all__ = ["SERVICE", "OpenInference"]

SERVICE = "inference.GRPCInferenceService"
"""Full name of the service."""

_PLATFORM = "mmpos"
"""Platform and backend in the metadata of all models."""


class OpenInference:
    """Implementation of GRPCInferenceService.

    Args:
        models: the service's models; profiles are their versions.
        profiles: settings for the models; the default profile is the version with an empty name.
        limits: limits for one request.
        memory: access to the clients' shared memory.
    """

    def __init__(self, models: Sequence[Model], profiles: Profiles, limits: Limits, memory: SharedMemory) -> None:
        self._models = {model.name: model for model in models}
        self._profiles, self._limits, self._memory = profiles, limits, memory
        self._regions = Regions(memory)
        versions = [(model, profile) for model in models for profile in profiles]
        self._statistics = _Statistics((model.name, profile.name) for model, profile in versions)
        self._tensors = {
            (model.name, profile.name): (model.inputs(profile), model.outputs(profile)) for model, profile in versions
        }

    def methods(self) -> list[Method]:
        """Return all methods; the server answers those for liveness and readiness under any load."""
        probes: dict[str, Run] = {
            "ServerLive": _server_live,
            "ServerReady": _server_ready,
            "ModelReady": self._model_ready,
        }
        others: dict[str, Run] = {
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "SystemSharedMemoryStatus": self._memory_status,
            "SystemSharedMemoryRegister": self._register_memory,
            "SystemSharedMemoryUnregister": self._unregister_memory,
            "CudaSharedMemoryStatus": _cuda_memory_status,
            "CudaSharedMemoryRegister": _register_cuda_memory,
            "CudaSharedMemoryUnregister": _unregister_cuda_memory,
        }
        infer, item = pb.ModelInferRequest, pb.ModelStreamInferResponse
        stream = Twin("ModelStreamInfer", infer, item, self._stream_infer, _refuse, side_by_side=True)
        return [
            *(_method(name, run, admitted=False) for name, run in probes.items()),
            *(_method(name, run) for name, run in others.items()),
            Method(SERVICE, "ModelInfer", infer, pb.ModelInferResponse, self._infer, stream),
        ]

    def _model_ready(self, message: pb.ModelReadyRequest, answer: pb.ModelReadyResponse, call: Call) -> None:
        try:
            model, _ = self._find(message.name, message.version)
        except NotFoundError:
            return
        answer.ready = model.ready and not call.stopping

    def _server_metadata(
        self, message: pb.ServerMetadataRequest, answer: pb.ServerMetadataResponse, call: Call
    ) -> None:
        answer.name, answer.version = "mmpos", version()
        answer.extensions.extend(("model_configuration", "parameters", "statistics"))
        if self._memory.prefix is not None:
            answer.extensions.append("system_shared_memory")

    def _model_metadata(self, message: pb.ModelMetadataRequest, answer: pb.ModelMetadataResponse, call: Call) -> None:
        model, profile = self._find(message.name, message.version)
        answer.name, answer.platform = model.name, _PLATFORM
        answer.versions.extend(known.name for known in self._profiles)
        for tensors, specs in zip(
            (answer.inputs, answer.outputs), self._tensors[model.name, profile.name], strict=True
        ):
            for spec in specs:
                if spec.reported:
                    tensors.add(name=spec.name, datatype=spec.datatypes[0], shape=spec.shape)

    def _model_config(self, message: pb.ModelConfigRequest, answer: pb.ModelConfigResponse, call: Call) -> None:
        model, profile = self._find(message.name, message.version)
        config = answer.config
        config.name, config.platform, config.backend = model.name, _PLATFORM, _PLATFORM
        config.model_transaction_policy.decoupled = False
        inputs, outputs = self._tensors[model.name, profile.name]
        for spec in inputs:
            data_type = DATATYPES[spec.datatypes[0]].config
            config.input.add(name=spec.name, data_type=data_type, dims=spec.shape, optional=spec.optional)
        for spec in outputs:
            if spec.reported:
                data_type = DATATYPES[spec.datatypes[0]].config
                config.output.add(name=spec.name, data_type=data_type, dims=spec.shape)

    def _model_statistics(
        self, message: pb.ModelStatisticsRequest, answer: pb.ModelStatisticsResponse, call: Call
    ) -> None:
        if message.name or message.version:
            self._find(message.name or next(iter(self._models)), message.version)
        self._statistics.put(answer, message.name, message.version)

    def _infer(self, message: pb.ModelInferRequest, answer: pb.ModelInferResponse, call: Call) -> None:
        model, profile = self._find(message.model_name, message.model_version)
        answer.model_name, answer.model_version, answer.id = model.name, profile.name, message.id
        answered = False
        try:
            inputs, outputs = self._tensors[model.name, profile.name]
            with call.stage("read"):
                request = get_request(message, profile, inputs, outputs, model.parameters, self._regions, self._limits)
            call.hold(request.shared_bytes)
            model.infer(request, answer, call)
            answered = True
        finally:
            self._statistics.count(model.name, profile.name, call, answered=answered)

    def _stream_infer(self, message: pb.ModelInferRequest, answer: pb.ModelStreamInferResponse, call: Call) -> None:
        self._infer(message, answer.infer_response, call)
        answer.infer_response.parameters["triton_final_response"].bool_param = True

    def _memory_status(
        self, message: pb.SystemSharedMemoryStatusRequest, answer: pb.SystemSharedMemoryStatusResponse, call: Call
    ) -> None:
        regions = {message.name: self._regions.get("name", message.name)} if message.name else dict(self._regions)
        for name, region in regions.items():
            status = answer.regions[name]
            status.name, status.key = name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size

    def _register_memory(self, message: pb.SystemSharedMemoryRegisterRequest, answer: object, call: Call) -> None:
        self._regions.register(message.name, message.key, message.offset, message.byte_size)

    def _unregister_memory(self, message: pb.SystemSharedMemoryUnregisterRequest, answer: object, call: Call) -> None:
        self._regions.unregister(message.name)

    def _find(self, name: str, version: str) -> tuple[Model, Profile]:
        """Return a model and its version; an empty version means the default.

        Raises:
            NotFoundError: the model or the version does not exist.
        """
        if name not in self._models:
            raise NotFoundError(f"model: got {name[:300]!r}, want one of {', '.join(map(repr, self._models))}")
        if not version:
            return self._models[name], self._profiles.default
        for profile in self._profiles:
            if profile.name == version:
                return self._models[name], profile
        known = ", ".join(repr(profile.name) for profile in self._profiles)
        raise NotFoundError(f"version of {name!r}: got {version[:300]!r}, want one of {known}")


def _method(name: str, run: Run, *, admitted: bool = True) -> Method:
    messages: Any = pb
    request, response = getattr(messages, f"{name}Request"), getattr(messages, f"{name}Response")
    return Method(SERVICE, name, request, response, run, admitted=admitted)


def _refuse(message: pb.ModelInferRequest, answer: pb.ModelStreamInferResponse, error: MmposError) -> None:
    answer.error_message = shortened(str(error))
    answer.infer_response.id = message.id


def _server_live(message: object, answer: pb.ServerLiveResponse, call: Call) -> None:
    answer.live = True


def _server_ready(message: object, answer: pb.ServerReadyResponse, call: Call) -> None:
    answer.ready = not call.stopping


def _cuda_memory_status(message: pb.CudaSharedMemoryStatusRequest, answer: object, call: Call) -> None:
    if message.name:
        raise InvalidInputError(f"name: got region {message.name[:300]!r}, want a registered region")


def _register_cuda_memory(message: object, answer: object, call: Call) -> None:
    raise UnsupportedError("region: GPU memory is not supported, want system shared memory")


def _unregister_cuda_memory(message: object, answer: object, call: Call) -> None:
    """Do nothing, so that clients can clean up: GPU regions are never registered."""


# Stages of a call by their names in the protocol. Encoding, which follows ``infer``, has no name there.
_DURATIONS = {
    "queue": "queue",
    "decode": "compute_input",
    "read": "compute_input",
    "place": "compute_infer",
    "build": "compute_infer",
    "rotate": "compute_infer",
    "write": "compute_output",
}


@dataclass
class _Times:
    """Counts and seconds of the requests to one version of one model."""

    succeeded: int = 0
    failed: int = 0
    documents: int = 0
    last: float = 0.0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("success", "fail", *_DURATIONS.values()), 0.0)
    )

    def put(self, message: pb.ModelStatistics) -> None:
        """Write the statistics of a model's version to a message."""
        message.last_inference = int(1000 * self.last)
        message.inference_count, message.execution_count = self.documents, self.succeeded
        for name, seconds in self.seconds.items():
            duration = getattr(message.inference_stats, name)
            duration.count = self.failed if name == "fail" else self.succeeded
            duration.ns = round(1e9 * seconds)


class _Statistics:
    """Statistics for all models since the server started.

    Args:
        versions: name and version of each model.
    """

    def __init__(self, versions: Iterable[tuple[str, str]]) -> None:
        self._times = {version: _Times() for version in versions}
        self._lock = Lock()

    def count(self, model: str, version: str, call: Call, *, answered: bool) -> None:
        """Count a request that was answered, failed, or was cancelled."""
        times = self._times[model, version]
        with self._lock:
            times.last = time()
            times.seconds["success" if answered else "fail"] += call.seconds
            if not answered:
                times.failed += 1
                return
            times.succeeded += 1
            times.documents += call.counts.get("documents", 1)
            for stage, seconds in call.stages:
                times.seconds[_DURATIONS[stage]] += seconds

    def put(self, message: pb.ModelStatisticsResponse, model: str, version: str) -> None:
        """Write statistics to a message; an empty model or version selects all."""
        with self._lock:
            for (name, profile), times in self._times.items():
                if model in ("", name) and version in ("", profile):
                    times.put(message.model_stats.add(name=name, version=profile))
