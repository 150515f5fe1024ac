"""Shared parts of the Open Inference Protocol tests: settings, and requests through tritonclient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from mmpos_server.config import ServerConfig
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.methods import SERVICE

TritonClient: TypeAlias = triton.InferenceServerClient
Infer: TypeAlias = "grpc.UnaryUnaryMultiCallable[pb.ModelInferRequest, pb.ModelInferResponse]"


def config(**tables: Any) -> ServerConfig:
    """Return settings with a profile for each kind of scheme."""
    images = {"backend": "pillow", "patch_size": 14, "spatial_merge_size": 2}
    return ServerConfig.model_validate(
        {
            "profiles": {
                "default": {"images": images, "rotary": {"head_dim": 16}},
                "halves": {"scheme": {"name": "rope-tie-fractional", "axes": 3}, "images": images},
                "flat": {"scheme": "grid-2d", "images": {**images, "dtype": "float32"}},
            },
            **tables,
        }
    )


def input_tensor(name: str, values: object, datatype: str | None = None) -> Any:
    """Build an input tensor from numbers or a list of bytes."""
    array = np.array(values, object) if _is_bytes(values) else np.asarray(values)
    tensor = triton.InferInput(name, array.shape, datatype or np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def requested_outputs(names: Iterable[str] | None) -> list[Any] | None:
    """Build requested outputs with these names."""
    return None if names is None else [triton.InferRequestedOutput(name) for name in names]


def ask(
    client: TritonClient, model: str, inputs: Mapping[str, object], outputs: Sequence[str] | None = None, **options: Any
) -> Any:
    """Send a request and return the output arrays by name."""
    tensors = [input_tensor(name, values) for name, values in inputs.items()]
    result = client.infer(model, tensors, outputs=requested_outputs(outputs), **options)
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def stub(channel: grpc.Channel) -> Infer:
    """Return ModelInfer as a callable, for messages that no client would write."""
    kinds = pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
    return channel.unary_unary(f"/{SERVICE}/ModelInfer", *kinds)


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    """Return the status and message of a failing call."""
    with pytest.raises((triton.InferenceServerException, grpc.RpcError)) as raised:
        call()
    error = raised.value
    if isinstance(error, grpc.RpcError):
        return error.code().name, error.details() or ""
    return error.status().removeprefix("StatusCode."), error.message()


def _is_bytes(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, bytes) for value in values)
