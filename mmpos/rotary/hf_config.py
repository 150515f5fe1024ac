"""What a Transformers config says about its rotation, as the arguments of Rotary."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from mmpos.checks import boolean, integer
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary.hf_models import ADJACENT_MODELS, AXIAL_MODELS, INTERLEAVED_MODELS, OTHER_ROTATIONS, SECTIONS
from mmpos.rotary.scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, PRoPE, Scaling, YaRN
from mmpos.rotary.values import MAX_HEAD_DIM, finite, integers

__all__ = ["ROPE_TYPES", "check_config", "hf_arguments", "read_field"]

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "axial", "ntk_alpha")
"""The rope types that are understood, after "mrope" is taken as default and "su" as longrope."""


def hf_arguments(
    config: Any, *, layer_type: str | None = None, overrides: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The arguments of Rotary for a config, with overrides in their place.

    Read are rope_parameters or rope_theta and rope_scaling, here or in text_config; head_dim, or what it
    follows from; partial_rotary_factor or rotary_dim; mrope_section. Without mrope_section a config does not
    speak of axes: they are Rotary's own default, two interleaved, which on text is the RoPE-1D of the model.
    No config speaks of pairing: it is "adjacent" for ADJACENT_MODELS, or as rope_interleave says, and
    "half" for every other model type, unknown ones too; pass it where that is wrong. A config object is surer
    than a config.json, which may leave out what its class sets by default.

    Args:
        config: a config object or the mapping of its config.json; of a vision encoder pass its vision_config.
        layer_type: which one, where rope_parameters holds one entry per layer type.
        overrides: arguments of Rotary that replace what the config says.

    Raises:
        UnsupportedError: a rope type or a model type whose rotation is not known.
        InvalidInputError: the config does not say what is needed.
    """
    check_config(config)
    config = _language_model(config)
    model = _model(config)
    if model in OTHER_ROTATIONS:
        raise UnsupportedError(f"model_type: got {model!r}, want another: {OTHER_ROTATIONS[model]}")
    rope = _rope_parameters(config, layer_type)
    kind = _rope_type(config, rope)
    head_dim = _head_dim(config)
    found: dict[str, Any] = {"head_dim": head_dim, "theta": _theta(config, rope)}
    found["rotary_dim"] = _rotary_dim(config, rope, kind, head_dim)
    if kind == "axial":
        found.update(_vision_layout(model, overrides))
    else:
        adjacent = _get(config, "rope_interleave", default=model in ADJACENT_MODELS)
        found["pairing"] = "adjacent" if boolean("rope_interleave", adjacent) else "half"
        found.update(_text_layout(model, rope))
        if not overrides.keys() & {"scaling", "inv_freq"}:
            found["scaling"] = _scaling(config, rope, kind)
    if "inv_freq" in overrides:
        del found["theta"]
    if "allocation" in overrides:
        found = {key: value for key, value in found.items() if key not in ("allocation", "axes", "mrope_section")}
    return {**found, **overrides}


def check_config(config: Any) -> None:
    """Refuse the name of a file or of a checkpoint, which has no fields: nothing is read or fetched here."""
    if config is None or isinstance(config, str | bytes | PurePath):
        raise InvalidInputError(
            f"config: got {type(config).__name__}, want a config object, or the mapping of a config.json, "
            "json.loads(Path(...).read_text())"
        )


def _get(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that is set."""
    for name in names:
        value = read_field(config, name)
        if value is not None:
            return value
    return default


def read_field(config: Any, name: str) -> Any:
    """A field of an object or a mapping; None where it is not there."""
    try:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    except Exception as error:
        got = f"{type(error).__name__} ({error})"
        raise InvalidInputError(f"{name}: got {got} from the config, want a field that can be read") from error


def _language_model(config: Any) -> Any:
    for name in ("thinker_config", "text_config"):
        config = _get(config, name, default=config)
    return config


def _model(config: Any) -> str:
    model = str(_get(config, "model_type", default=""))
    for suffix in ("_text", "_vision", "_vision_encoder", "_vision_model"):
        model = model.removesuffix(suffix)
    return model


def _rope_parameters(config: Any, layer_type: str | None) -> Mapping[str, Any]:
    rope = _get(config, "rope_parameters", "rope_scaling", default={})
    if not isinstance(rope, Mapping):
        raise InvalidInputError(f"rope_parameters: got {rope!r}, want a mapping")
    kinds = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if not kinds and _get(config, "rope_local_base_freq", "local_rope_theta") is not None:
        raise UnsupportedError(
            "rope_parameters: got a second base beside it, want one entry per layer type (Transformers 5)"
        )
    if not kinds:
        return dict(rope)
    if layer_type not in kinds:
        raise InvalidInputError(f"layer_type: got {layer_type!r}, want one of {', '.join(map(repr, kinds))}")
    return dict(rope[layer_type])


def _rope_type(config: Any, rope: Mapping[str, Any]) -> str:
    kind = str(_get(rope, "rope_type", "type", default="default"))
    kind = {"mrope": "default", "su": "longrope"}.get(kind, kind)
    if kind == "default" and _get(config, "patch_size") and _get(config, "num_channels", "in_channels", "in_chans"):
        return "axial"
    return "ntk_alpha" if kind == "dynamic" and rope.get("alpha") else kind


def _head_dim(config: Any) -> int:
    # The rotated part of a latent-attention head is a tensor of its own, whatever head_dim says.
    told = _get(config, "qk_rope_head_dim", "head_dim")
    if told is not None:
        return integer("head_dim", told, minimum=2, maximum=MAX_HEAD_DIM)
    width = _get(config, *(("embed_dim",) if _get(config, "patch_size") else ()), "hidden_size", "n_embd", "d_model")
    heads = _get(config, "num_attention_heads", "n_head", "num_heads")
    if width is None or heads is None:
        raise InvalidInputError("head_dim: got none in the config, want it, or hidden_size and num_attention_heads")
    found = integer("hidden_size", width, minimum=1) // integer("num_attention_heads", heads, minimum=1)
    return integer("head_dim", found, minimum=2, maximum=MAX_HEAD_DIM)


def _theta(config: Any, rope: Mapping[str, Any]) -> float:
    default = _get(config, "default_theta")
    default = default if isinstance(default, Real) else 10000.0
    theta: float = _get(rope, "rope_theta", default=_get(config, "rope_theta", "rotary_emb_base", default=default))
    return theta


def _rotary_dim(config: Any, rope: Mapping[str, Any], kind: str, head_dim: int) -> int:
    if kind in ("proportional", "axial") or _get(config, "qk_rope_head_dim") is not None:
        return head_dim
    factor = _get(rope, "partial_rotary_factor", default=_get(config, "partial_rotary_factor", "rotary_pct"))
    if factor is None:
        return integer("rotary_dim", _get(config, "rotary_dim", default=head_dim))
    return int(head_dim * finite("partial_rotary_factor", factor, minimum=0))


def _vision_layout(model: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    if model in AXIAL_MODELS:
        return {"allocation": "axial", "pairing": "half"}
    if model == "pixtral":
        return {"allocation": "pixtral", "pairing": "half"}
    if {"allocation", "pairing"} <= overrides.keys():
        return {}
    raise UnsupportedError(f"model_type: got {model!r} with axial rotation, want allocation and pairing told for it")


def _text_layout(model: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    told = _get(rope, "mrope_section", default=SECTIONS.get(model))
    if told is None:
        return {}
    section = integers("mrope_section", told, maximum=MAX_HEAD_DIM)
    if model == "ernie4_5_vl_moe":  # (rows, columns, frames): rows and columns alternate, then frames
        if len(section) != 3 or section[0] != section[1]:
            raise InvalidInputError(f"mrope_section: got {list(section)}, want as many rows as columns, then frames")
        return {"axes": 3, "allocation": [1, 2] * section[0] + [0] * section[2]}
    interleaved = model in INTERLEAVED_MODELS or rope.get("mrope_interleaved") or rope.get("interleaved")
    return {
        "axes": len(section),
        "allocation": "mrope-interleaved" if interleaved else "sections",
        "mrope_section": list(section),
    }


def _scaling(config: Any, rope: Mapping[str, Any], kind: str) -> Scaling | None:
    longest = _number(config, "max_position_embeddings")
    original = _number(config, "original_max_position_embeddings")
    original = _number(rope, "original_max_position_embeddings", longest) if original is None else original
    factor: Any = rope.get("factor")
    if factor is None and kind in ("yarn", "longrope") and longest and original:
        factor = longest / original
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(factor)
    if kind == "dynamic":
        return DynamicNTK(factor, longest)
    if kind == "ntk_alpha":
        return NTK(rope["alpha"])
    if kind == "llama3":
        return Llama3(factor, rope.get("low_freq_factor"), rope.get("high_freq_factor"), original)  # type: ignore[arg-type]
    if kind == "proportional":
        return PRoPE(_get(rope, "partial_rotary_factor", default=1.0), _get(rope, "factor", default=1.0))
    if kind == "longrope":
        short, long = rope.get("short_factor"), rope.get("long_factor")
        return LongRoPE(short, long, original, factor, rope.get("attention_factor"))  # type: ignore[arg-type]
    if kind == "yarn":
        return _yarn(rope, factor, original)
    raise UnsupportedError(f"rope_type: got {kind!r}, want one of {', '.join(map(repr, ROPE_TYPES))}")


def _number(config: Any, name: str, default: Any = None) -> Any:
    """A number as the config has it."""
    value = _get(config, name)
    if value is None:
        return default
    finite(name, value)
    return value


def _yarn(rope: Mapping[str, Any], factor: Any, original: Any) -> YaRN:
    same = {key: rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
    fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
    return YaRN(factor, original, fast, slow, truncate=_get(rope, "truncate", default=True), **same)
