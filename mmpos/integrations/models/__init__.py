"""Settings of deployed models, read from their configs: scheme, token ids and rotations."""

from mmpos.integrations.models.from_config import from_hf_config
from mmpos.integrations.models.settings import ModelSettings
from mmpos.rotary.hf_models import MODEL_TYPES, TEXT_TYPES, UNSUPPORTED_TYPES, ModelType

__all__ = ["MODEL_TYPES", "TEXT_TYPES", "UNSUPPORTED_TYPES", "ModelSettings", "ModelType", "from_hf_config"]
