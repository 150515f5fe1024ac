"""What models take and give, as metadata and as a configuration; both say the same."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from mmpos_server.inference.tensors import DATATYPES

if TYPE_CHECKING:
    from mmpos_server.inference import open_inference_pb2 as pb
    from mmpos_server.inference.models import Model
    from mmpos_server.profiles import Profile

__all__ = ["PLATFORM", "put_config", "put_metadata"]

PLATFORM = "mmpos"
"""What runs the models."""

_TOLD = attrgetter("told")


def put_metadata(message: pb.ModelMetadataResponse, model: Model, profile: Profile) -> None:
    """Fill a message with the tensors of a version."""
    message.name, message.platform = model.name, PLATFORM
    for field, specs in ((message.inputs, model.inputs(profile)), (message.outputs, model.outputs(profile))):
        for spec in filter(_TOLD, specs):
            field.add(name=spec.name, datatype=spec.datatypes[0], shape=spec.shape)


def put_config(message: pb.ModelConfig, model: Model, profile: Profile) -> None:
    """Fill a message with the tensors of a version, and which of them may be left out."""
    message.name, message.platform, message.backend = model.name, PLATFORM, PLATFORM
    message.model_transaction_policy.decoupled = False
    for spec in model.inputs(profile):
        data_type = DATATYPES[spec.datatypes[0]].config
        message.input.add(name=spec.name, data_type=data_type, dims=spec.shape, optional=spec.optional)
    for spec in filter(_TOLD, model.outputs(profile)):
        message.output.add(name=spec.name, data_type=DATATYPES[spec.datatypes[0]].config, dims=spec.shape)
