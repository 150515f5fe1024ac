"""The config classes of the installed Transformers, their rotary modules, and a table of their defaults.

``python tests/helpers/hf_classes.py`` rewrites the table: mmpos/rotary/hf_defaults.json.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from mmpos.integrations.models import MODEL_TYPES
from mmpos.rotary.hf_models import MODELS as KNOWN

OTHER_ROTATIONS = {name: row.rotation.refused for name, row in KNOWN.items() if row.rotation.refused}
"""Model types whose rotation is not supported, with the reasons."""

TABLE = Path(__file__).parents[2] / "mmpos" / "rotary" / "hf_defaults.json"
MODELS = Path(transformers.__file__).parent / "models"

FIELDS = (
    "audio_token_id", "position_id_per_seconds", "seconds_per_chunk", "boi_token_id", "document_token_id",
    "eoi_token_id", "im_end_id", "im_start_id", "image_end_token_id", "image_start_token_id", "image_token_id",
    "patch_size", "merge_kernel_size", "merge_size", "spatial_merge_size", "temporal_merge_size",
    "temporal_patch_size", "tokens_per_second", "video_end_token_id", "video_start_token_id", "video_token_id",
    "vision_end_token_id", "vision_start_token_id",
)  # fmt: skip
"""Fields of whole models and of encoders that mmpos reads."""

ROTATION_FIELDS = (
    *("embed_dim", "head_dim", "hidden_size", "max_position_embeddings", "num_attention_heads"),
    *("original_max_position_embeddings", "qk_rope_head_dim", "rope_interleave", "rotary_dim"),
)
"""Fields of rotations that mmpos reads, in addition to the RoPE parameters."""

TAKEN = {
    "IdeficsRotaryEmbedding": ["IdeficsConfig"],
    "MimiRotaryEmbedding": ["MimiDecoderConfig", "MimiEncoderConfig"],
    "PocketTTSAudioTokenizerRotaryEmbedding": [
        "PocketTTSAudioTokenizerDecoderConfig",
        "PocketTTSAudioTokenizerEncoderConfig",
    ],
    "T5GemmaRotaryEmbedding": ["T5GemmaModuleConfig"],
}
"""Config classes that are passed to a module whose code does not name them."""

OLD_NAMES = {
    "dots3_note_vision_encoder": {"hidden_size": "embed_dim", "num_attention_heads": "num_heads"},
    "falcon": {"hidden_size": "n_embed"},
    "hunyuan_vl_text": {"head_dim": "attention_head_dim"},
    "inkling2_vision": {"patch_size": "native_patch_size", "spatial_merge_size": "adapter_merge_size"},
    "step3p5_vision": {"hidden_size": "width", "num_attention_heads": "heads"},
}
"""Old field names that classes still read."""

PLAIN = ("default", "axial")
"""Rope types without parameters."""

ROTARY = r"\w*(?:Rotary\w*|Rope)(?:Position)?Embedding"

APART = ("hunyuan_vl_text",)
"""Model types whose rotation is read only with the settings of the whole model."""

WITHOUT_MODULE = ("codegen", "gptj", "roformer")
"""Model types that rotate with functions, or with a module that holds a table of sines and cosines."""


@cache
def config_classes() -> dict[str, Any]:
    """Return all config classes by name."""
    classes = {}
    for path in sorted(MODELS.glob("*/configuration_*.py")):
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, PreTrainedConfig) and value.__module__ == module.__name__:
                classes[name] = value
    return classes


@cache
def rotations() -> dict[Any, Any]:
    """Return every config class that determines a model's rotation, with its rotary module."""
    pairs: dict[Any, Any] = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for name, config in _rotary_modules(path):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            for class_name in TAKEN.get(name, [config]):
                cls = config_classes().get(class_name)
                if cls is not None and "text_config" not in cls.sub_configs:  # its text config rotates
                    pairs.setdefault(cls, getattr(module, name))
    for model, architecture in MODEL_MAPPING_NAMES.items():  # model types that share a class with another type
        for twin, other in MODEL_MAPPING_NAMES.items():
            if other == architecture and CONFIG_MAPPING[twin] in pairs:
                pairs.setdefault(CONFIG_MAPPING[model], pairs[CONFIG_MAPPING[twin]])
    return pairs


def _rotary_modules(path: Path) -> list[tuple[str, str]]:
    """Find the rotary modules that a file's classes build from their own config, each with its config class."""
    code = path.read_text(encoding="utf-8")
    if not re.search(rf"class {ROTARY}", code):
        return []
    modules = []
    for kind in ast.parse(code).body:
        for init in kind.body if isinstance(kind, ast.ClassDef) else ():
            if isinstance(init, ast.FunctionDef) and init.name == "__init__":
                config = next(
                    (ast.unparse(a.annotation) for a in init.args.args if a.arg == "config" and a.annotation), ""
                )
                names = re.findall(rf"\b({ROTARY})\((?:config=)?(?:self\.)?config\b(?!\.)", ast.unparse(init))
                modules += [(name, config) for name in names]
    return modules


def table() -> dict[str, dict[str, Any]]:
    """Collect the defaults that mmpos reads from the classes, by model type."""
    rotating = {config.model_type: config for config in rotations() if config.model_type}
    rotating |= {model: CONFIG_MAPPING[model] for model in WITHOUT_MODULE}
    rows = {
        model: _rotation(config) for model, config in rotating.items() if model not in OTHER_ROTATIONS or model in APART
    }
    wholes = [config for config in CONFIG_MAPPING.values() if config.sub_configs_defaults]
    known = {*rows, *OTHER_ROTATIONS}
    for config in wholes * 3:  # nested configs may contain further nested configs
        if (
            any(spec.model_type in known for spec in config.sub_configs_defaults.values())
            or config.model_type in MODEL_TYPES
        ):
            known.add(config.model_type)
    for config in wholes:
        if config.model_type in known:
            row = rows.setdefault(config.model_type, {})
            row |= _fields(config, FIELDS)
            for name, spec in config.sub_configs_defaults.items():
                if spec.model_type in known or name == "vision_config":
                    fixed = issubclass(spec.config_class, PreTrainedConfig) or _corrected(config, name, spec)
                    row.setdefault("parts" if fixed else "auto_parts", {})[name] = spec.model_type
                    if defaults := _part_defaults(spec.init_kwargs):
                        kind = "part_defaults" if _merges(config, name, spec, defaults) else "absent_parts"
                        row.setdefault(kind, {})[name] = defaults
                    if spec.model_type not in rows:
                        rows[spec.model_type] = _fields(CONFIG_MAPPING[spec.model_type], FIELDS)
            if config.model_type in MODEL_TYPES and (optional := _optional(config, row)):
                row["optional_parts"] = optional
    return dict(sorted(rows.items()))


def _corrected(config: Any, name: str, spec: Any) -> bool:
    """Return whether a class sets a nested config's model type even if the config names the whole model's type."""
    try:
        inside = getattr(config(**{name: {"model_type": config.model_type}}), name)
    except (AttributeError, KeyError, StrictDataclassError, TypeError, ValueError):
        return False
    return bool(inside.model_type == spec.model_type)


def _fields(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the defaults of these fields, under the names that the class uses."""
    others = {name: config.attribute_map[name] for name in names if name in config.attribute_map}
    others |= OLD_NAMES.get(config.model_type, {})
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    row = {}
    for name in names:
        own = config.attribute_map.get(name, name)
        own = own if own in defaults else name
        if own in defaults:
            row[own] = defaults[own]
    assert dataclasses.MISSING not in row.values()
    return {**row, **({"names": others} if others else {})}


def _optional(config: Any, row: dict[str, Any]) -> list[str]:
    """List the parts whose default is None."""
    default = config()
    return sorted(
        name for kind in ("parts", "auto_parts") for name in row.get(kind, ()) if getattr(default, name) is None
    )


def _part_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Select the fields that mmpos reads from among the values that a class sets in a nested config."""
    names = (*FIELDS, *ROTATION_FIELDS, "rope_parameters", "rope_theta")
    inside = {name: _part_defaults(value) for name, value in values.items() if name.endswith("_config")}
    kept = {name: value for name, value in values.items() if name in names}
    return kept | {name: value for name, value in inside.items() if value}


def _merges(config: Any, name: str, spec: Any, defaults: dict[str, Any]) -> bool:
    """Return whether a class also fills its defaults into a nested config that is given without these fields."""
    if config.model_type == "fun_asr_nano":  # its class refuses a part that does not fit the others
        return False
    inside = getattr(config(**{name: {"model_type": spec.model_type}}), name)
    return all(getattr(inside, name, None) == value for name, value in defaults.items() if name != "rope_theta")


def _rotation(config: Any) -> dict[str, Any]:
    row = _fields(config, ROTATION_FIELDS + FIELDS)
    if not hasattr(config(), "rope_parameters"):
        return row | {"rope_theta": getattr(config, "rope_theta", None)}
    default = config().rope_parameters
    if any(isinstance(value, dict) for value in default.values()):
        return row | {"rope_theta": None, "rope_parameters": default}
    try:
        parameters = config(rope_parameters={"rope_type": "default"}).rope_parameters
    except KeyError:  # the class requires more parameters
        parameters = default
    row["rope_theta"] = parameters.get("rope_theta", default.get("rope_theta"))
    if parameters.get("partial_rotary_factor") is not None:
        row["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    plain = default.get("rope_type") in PLAIN and parameters is not default
    if not plain or {**default, "rope_type": "default"} != {**parameters, "rope_type": "default"}:
        row["rope_parameters"] = dict(default)
        if config(rope_theta=2.0).rope_parameters.get("rope_theta") == 2.0:  # rope_theta is a separate field
            row["rope_theta"] = row["rope_parameters"].pop("rope_theta")
    if types := getattr(config(), "layer_types", None):
        row["layer_types"] = sorted(set(types))
    return row


def to_json(rows: dict[str, dict[str, Any]]) -> str:
    """Format the table as in the file, with one line for each model type."""
    lines = [f"{json.dumps(model)}: {json.dumps(row, sort_keys=True)}" for model, row in rows.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    TABLE.write_text(to_json(table()), encoding="utf-8")
