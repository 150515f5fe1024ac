"""Methods of the Open Inference Protocol, with the metadata and statistics of its models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from time import time
from typing import Any

from mmpos.errors import InvalidInputError, MmposError, UnsupportedError
from mmpos.rpc.errors import shortened
from mmpos.support.info import version
from mmpos_server.admission import Call
from mmpos_server.config import Limits, Profile, Profiles
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.messages import DATATYPES, get_request
from mmpos_server.inference.models import InferenceModel
from mmpos_server.methods import Method, NotFoundError, Run, Twin
from mmpos_server.shared_memory import Regions, SharedMemory

__all__ = ["PLATFORM", "SERVICE", "OpenInference", "Statistics", "put_config", "put_metadata"]


SERVICE = "inference.GRPCInferenceService"
"""Full name of the service."""


class OpenInference:
    """Implementation of GRPCInferenceService.

    Args:
        models: models of the service; profiles are their versions.
        profiles: settings of models; the default profile is the version with an empty name.
        limits: limits of one request.
        memory: access to shared memory of clients.
    """

    def __init__(self, models: list[InferenceModel], profiles: Profiles, limits: Limits, memory: SharedMemory) -> None:
        self._models = {model.name: model for model in models}
        self._profiles, self._limits, self._memory = profiles, limits, memory
        self._regions = Regions(memory)
        versions = [(model, profile) for model in models for profile in profiles]
        self._statistics = Statistics((model.name, profile.name) for model, profile in versions)
        self._tensors = {
            (model.name, profile.name): (model.inputs(profile), model.outputs(profile)) for model, profile in versions
        }

    def methods(self) -> list[Method]:
        """Return all methods; liveness and readiness are answered under any load."""
        infer = Method(
            SERVICE,
            "ModelInfer",
            pb.ModelInferRequest,
            pb.ModelInferResponse,
            self._infer,
            Twin("ModelStreamInfer", pb.ModelInferRequest, pb.ModelStreamInferResponse, self._stream_infer, _refuse),
        )
        probes = [_method(run, admitted=False) for run in (self._server_live, self._server_ready, self._model_ready)]
        admitted: list[Run] = [
            self._server_metadata,
            self._model_metadata,
            self._model_config,
            self._model_statistics,
            self._system_shared_memory_status,
            self._system_shared_memory_register,
            self._system_shared_memory_unregister,
            self._cuda_shared_memory_status,
            self._cuda_shared_memory_register,
            self._cuda_shared_memory_unregister,
        ]
        return [*probes, *(_method(run) for run in admitted), infer]

    async def _server_live(self, message: pb.ServerLiveRequest, answer: pb.ServerLiveResponse, call: Call) -> None:
        answer.live = True

    async def _server_ready(self, message: pb.ServerReadyRequest, answer: pb.ServerReadyResponse, call: Call) -> None:
        answer.ready = not call.stopping

    async def _model_ready(self, message: pb.ModelReadyRequest, answer: pb.ModelReadyResponse, call: Call) -> None:
        try:
            model, _ = self._find(message.name, message.version)
        except NotFoundError:
            return
        answer.ready = model.ready and not call.stopping

    async def _server_metadata(
        self, message: pb.ServerMetadataRequest, answer: pb.ServerMetadataResponse, call: Call
    ) -> None:
        answer.name, answer.version = "mmpos", version()
        answer.extensions.extend(("model_configuration", "parameters", "statistics"))
        if self._memory.prefix is not None:
            answer.extensions.append("system_shared_memory")

    async def _model_metadata(
        self, message: pb.ModelMetadataRequest, answer: pb.ModelMetadataResponse, call: Call
    ) -> None:
        put_metadata(answer, *self._find(message.name, message.version))
        answer.versions.extend(profile.name for profile in self._profiles)

    async def _model_config(self, message: pb.ModelConfigRequest, answer: pb.ModelConfigResponse, call: Call) -> None:
        put_config(answer.config, *self._find(message.name, message.version))

    async def _model_statistics(
        self, message: pb.ModelStatisticsRequest, answer: pb.ModelStatisticsResponse, call: Call
    ) -> None:
        if message.name or message.version:
            self._find(message.name or next(iter(self._models)), message.version)
        self._statistics.put(answer, message.name, message.version)

    async def _infer(self, message: pb.ModelInferRequest, answer: pb.ModelInferResponse, call: Call) -> None:
        model, profile = self._find(message.model_name, message.model_version)
        answer.model_name, answer.model_version, answer.id = model.name, profile.name, message.id
        answered = False
        try:
            inputs, outputs = self._tensors[model.name, profile.name]
            with call.stage("read"):
                request = get_request(message, profile, inputs, outputs, model.parameters, self._regions, self._limits)
            await call.weigh(request.shared_bytes)
            await model.infer(request, answer, call)
            answered = True
        finally:
            count = self._statistics.succeeded if answered else self._statistics.failed
            count(model.name, profile.name, call)

    async def _stream_infer(
        self, message: pb.ModelInferRequest, answer: pb.ModelStreamInferResponse, call: Call
    ) -> None:
        await self._infer(message, answer.infer_response, call)
        answer.infer_response.parameters["triton_final_response"].bool_param = True

    async def _system_shared_memory_status(
        self, message: pb.SystemSharedMemoryStatusRequest, answer: pb.SystemSharedMemoryStatusResponse, call: Call
    ) -> None:
        regions = dict(self._regions)
        if message.name:
            regions = {message.name: self._regions.get("name", message.name)}
        for name, region in regions.items():
            status = answer.regions[name]
            status.name, status.key = name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size

    async def _system_shared_memory_register(
        self, message: pb.SystemSharedMemoryRegisterRequest, answer: pb.SystemSharedMemoryRegisterResponse, call: Call
    ) -> None:
        self._regions.register(message.name, message.key, message.offset, message.byte_size)

    async def _system_shared_memory_unregister(
        self,
        message: pb.SystemSharedMemoryUnregisterRequest,
        answer: pb.SystemSharedMemoryUnregisterResponse,
        call: Call,
    ) -> None:
        self._regions.unregister(message.name)

    async def _cuda_shared_memory_status(
        self, message: pb.CudaSharedMemoryStatusRequest, answer: pb.CudaSharedMemoryStatusResponse, call: Call
    ) -> None:
        if message.name:
            raise InvalidInputError(f"name: got region {message.name[:300]!r}, want one that is registered")

    async def _cuda_shared_memory_register(
        self, message: pb.CudaSharedMemoryRegisterRequest, answer: pb.CudaSharedMemoryRegisterResponse, call: Call
    ) -> None:
        raise UnsupportedError("region: got memory of a GPU, want system shared memory")

    async def _cuda_shared_memory_unregister(
        self, message: pb.CudaSharedMemoryUnregisterRequest, answer: pb.CudaSharedMemoryUnregisterResponse, call: Call
    ) -> None:
        """Do nothing, so that clients may clean up: no region of a GPU is ever registered."""

    def _find(self, name: str, version: str) -> tuple[InferenceModel, Profile]:
        """Return a model and its version; an empty version is the default one.

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


def _method(run: Run, *, admitted: bool = True) -> Method:
    """Return the method whose name and messages follow from the name of its function."""
    name = run.__name__.title().replace("_", "")
    messages: Any = pb
    return Method(
        SERVICE, name, getattr(messages, f"{name}Request"), getattr(messages, f"{name}Response"), run, admitted=admitted
    )


def _refuse(message: pb.ModelInferRequest, answer: pb.ModelStreamInferResponse, error: MmposError) -> None:
    answer.error_message = shortened(str(error))
    answer.infer_response.id = message.id


PLATFORM = "mmpos"
"""Platform and backend of all models, in their metadata."""

_REPORTED = attrgetter("reported")


def put_metadata(message: pb.ModelMetadataResponse, model: InferenceModel, profile: Profile) -> None:
    """Fill the metadata of a version of a model."""
    message.name, message.platform = model.name, PLATFORM
    for tensors, specs in ((message.inputs, model.inputs(profile)), (message.outputs, model.outputs(profile))):
        for spec in filter(_REPORTED, specs):
            tensors.add(name=spec.name, datatype=spec.datatypes[0], shape=spec.shape)


def put_config(message: pb.ModelConfig, model: InferenceModel, profile: Profile) -> None:
    """Fill the configuration of a version of a model, with its optional inputs."""
    message.name, message.platform, message.backend = model.name, PLATFORM, PLATFORM
    message.model_transaction_policy.decoupled = False
    for spec in model.inputs(profile):
        data_type = DATATYPES[spec.datatypes[0]].config
        message.input.add(name=spec.name, data_type=data_type, dims=spec.shape, optional=spec.optional)
    for spec in filter(_REPORTED, model.outputs(profile)):
        message.output.add(name=spec.name, data_type=DATATYPES[spec.datatypes[0]].config, dims=spec.shape)


# Stages of a call by their names in the protocol. Encoding comes after ``infer``, and has no name there.
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
    """Counts and seconds of the requests of one version of one model."""

    succeeded: int = 0
    failed: int = 0
    documents: int = 0
    last: float = 0.0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("success", "fail", *_DURATIONS.values()), 0.0)
    )


class Statistics:
    """Statistics of all models since the server started; used from the event loop only.

    Args:
        versions: name and version of each model.
    """

    def __init__(self, versions: Iterable[tuple[str, str]]) -> None:
        self._times = {version: _Times() for version in versions}

    def succeeded(self, model: str, version: str, call: Call) -> None:
        """Count a request that was answered."""
        times = self._begin(model, version, call, "success")
        times.succeeded += 1
        times.documents += call.counts.get("documents", 1)
        for stage, seconds in call.stages:
            times.seconds[_DURATIONS[stage]] += seconds

    def failed(self, model: str, version: str, call: Call) -> None:
        """Count a request that failed or was cancelled."""
        self._begin(model, version, call, "fail").failed += 1

    def put(self, message: pb.ModelStatisticsResponse, model: str, version: str) -> None:
        """Fill a message with statistics; an empty model or version stands for all."""
        for (name, of), times in self._times.items():
            if model in ("", name) and version in ("", of):
                _put(message.model_stats.add(name=name, version=of), times)

    def _begin(self, model: str, version: str, call: Call, outcome: str) -> _Times:
        times = self._times[model, version]
        times.last = time()
        times.seconds[outcome] += call.seconds
        return times


def _put(message: pb.ModelStatistics, times: _Times) -> None:
    message.last_inference = int(1000 * times.last)
    message.inference_count, message.execution_count = times.documents, times.succeeded
    for name, seconds in times.seconds.items():
        duration = getattr(message.inference_stats, name)
        duration.count = times.failed if name == "fail" else times.succeeded
        duration.ns = round(1e9 * seconds)
