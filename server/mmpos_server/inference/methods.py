"""The methods of the protocol."""

from __future__ import annotations

from typing import Any

from mmpos.errors import InvalidInputError, MmposError, UnsupportedError
from mmpos.rpc.errors import shortened
from mmpos.support.info import version
from mmpos_server.call import Call
from mmpos_server.config import Limits
from mmpos_server.failures import NotFoundError
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.metadata import put_config, put_metadata
from mmpos_server.inference.models import Model
from mmpos_server.inference.requests import get_request
from mmpos_server.inference.statistics import Statistics
from mmpos_server.methods import Method, Run, Twin
from mmpos_server.profiles import Profile, Profiles
from mmpos_server.shared_memory import Regions, SharedMemory

__all__ = ["SERVICE", "OpenInference"]

SERVICE = "inference.GRPCInferenceService"
"""Full name of the service."""


class OpenInference:
    """The protocol over some models.

    Args:
        models: what it offers; profiles are their versions.
        profiles: settings of models; the default one is the version that an empty name means.
        limits: most that one request may ask for.
        memory: what is taken of shared memory.
    """

    def __init__(self, models: list[Model], profiles: Profiles, limits: Limits, memory: SharedMemory) -> None:
        self._models = {model.name: model for model in models}
        self._profiles, self._limits, self._memory = profiles, limits, memory
        self._regions = Regions(memory)
        versions = [(model, profile) for model in models for profile in profiles]
        self._statistics = Statistics((model.name, profile.name) for model, profile in versions)
        self._tensors = {
            (model.name, profile.name): (model.inputs(profile), model.outputs(profile)) for model, profile in versions
        }

    def methods(self) -> list[Method]:
        """All methods; those that ask whether the server lives are answered however much there is to do."""
        infer = Method(
            SERVICE,
            "ModelInfer",
            pb.ModelInferRequest,
            pb.ModelInferResponse,
            self._infer,
            Twin("ModelStreamInfer", pb.ModelInferRequest, pb.ModelStreamInferResponse, self._stream_infer, _refuse),
        )
        asked = [_method(run, admitted=False) for run in (self._server_live, self._server_ready, self._model_ready)]
        told: list[Run] = [
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
        return [*asked, *(_method(run) for run in told), infer]

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
        answer.extensions.extend(("binary_tensor_data", "model_configuration", "parameters", "statistics"))
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
        """Nothing is registered, as clients that clean up want it."""

    def _find(self, name: str, version: str) -> tuple[Model, Profile]:
        """A model and its version, the default one if its name is empty.

        Raises:
            NotFoundError: there is none.
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
    """A method whose function and whose messages are named after it."""
    name = run.__name__.title().replace("_", "")
    messages: Any = pb
    return Method(
        SERVICE, name, getattr(messages, f"{name}Request"), getattr(messages, f"{name}Response"), run, admitted=admitted
    )


def _refuse(message: pb.ModelInferRequest, answer: pb.ModelStreamInferResponse, error: MmposError) -> None:
    answer.error_message = shortened(str(error))
    answer.infer_response.id = message.id
