"""Read the arguments of Rotary from a Transformers config and its class's default values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os.path import isdir, isfile
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, TypeAlias

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary.allocation import MAX_HEAD_DIM
from mmpos.rotary.hf_models import ALIASES, UNKNOWN, Encoder, ModelClass, class_of
from mmpos.rotary.scaling import NTK, DynamicNTK, Linear, Llama3, LongRoPE, PRoPE, Scaling, YaRN
from mmpos.support.checks import boolean, finite, integer, integers, numbers
from mmpos.support.files import read_json

Values: TypeAlias = Mapping[str, Any]
"""Values by field name."""

ROPE_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
        "proportional": (),
        "axial": (),
        "ntk_alpha": ("alpha",),
    }
)
"""Supported rope types and the fields that each requires; "mrope" is read as default, "su" as longrope."""

LENGTH_TYPES = ("dynamic", "yarn", "llama3", "longrope")
"""Rope types that depend on the length at which a model was trained."""

HEAD_FIELDS = ("head_dim", "hidden_size", "num_attention_heads", "qk_rope_head_dim")
"""Fields that determine the head dimension."""


def hf_arguments(
    config: object,
    *,
    layer_type: str | None = None,
    overrides: Values = MappingProxyType({}),
    by_channel: bool = False,
) -> dict[str, Any]:
    """Read the arguments of Rotary from a config and merge overrides into them.

    For a Transformers model type, the config is interpreted as its class and model code interpret it: missing fields
    take the class's default values, and fields that the code ignores have no effect. For any other model type,
    arguments that the config does not determine must be in overrides: head_dim, theta, rotary_dim (unless the config
    has a partial_rotary_factor) and pairing. A config without mrope_section does not determine axes; Rotary then uses
    its default of two interleaved axes, which rotates text exactly as the model's RoPE-1D does.

    Args:
        config: a config object, the mapping from its config.json, or the path of that file or its folder. If it has a
            text_config, that part is read; for a vision encoder, pass its vision_config.
        layer_type: the layer type whose rotation is read if the model's layers rotate differently.
        overrides: arguments of Rotary that override those from the config.
        by_channel: accept HunYuan-VL, whose two channels of a pair rotate by different axes, as if by the same axis.

    Raises:
        UnsupportedError: the rotation of this rope type or model type is not supported.
        InvalidInputError: a required config field is missing, or a field is invalid.
    """
    fields = _language_model(config, by_channel)
    rope = _rope_parameters(fields, layer_type)
    if layer_type is not None or "per_layer_config" in fields.config:
        fields = _layer(fields, layer_type)
    if not fields.kind.known:
        _check_complete(fields, rope, overrides)
    kind = _rope_type(fields, rope)
    arguments = _sizes(fields, rope, kind, overrides)
    if not overrides.keys() & {"theta", "inv_freq"}:
        arguments["theta"] = _theta(fields, rope)
    if "pairing" not in overrides:
        arguments["pairing"] = _pairing(fields)
    head_dim, rotary_dim = ({**arguments, **overrides}[name] for name in ("head_dim", "rotary_dim"))
    rotary_dim = integer("rotary_dim", head_dim if rotary_dim is None else rotary_dim)
    if kind == "axial":
        arguments |= _axial_layout(fields, head_dim, rotary_dim)
    else:
        arguments |= _text_layout(fields, rope, rotary_dim, overrides)
        if not overrides.keys() & {"scaling", "inv_freq"}:
            arguments["scaling"] = None if kind == "default" else _scaling(fields, rope, kind)
    if "allocation" in overrides:
        layout = ("allocation", "axes", "axes_dim", "mrope_section")
        arguments = {key: arguments[key] for key in arguments if key not in layout}
    return {**arguments, **overrides}


def hf_pairing(config: object) -> str | None:
    """Return how a config's model pairs channels, "half" or "adjacent"; None for an unknown model type.

    Raises:
        UnsupportedError: Rotary cannot describe how this model type rotates.
    """
    fields = _language_model(config)
    return _pairing(fields) if fields.kind.known or fields.own("rope_interleave") is not None else None


def _language_model(config: object, by_channel: bool = False) -> Fields:
    fields = config if isinstance(config, Fields) else Fields.of(config)
    for name in ("thinker_config", "text_config"):
        fields = fields.part(name) or fields
    if fields.kind.row.text_at_top:
        fields = replace(fields, kind=class_of(fields.kind.parts["text_config"]))
    model, refused = fields.kind.model_type, fields.kind.row.rotation.refused
    if refused and not by_channel:
        raise UnsupportedError(f"model_type: got {model!r}, want another: {refused}")
    for name in ("thinker_config", "text_config"):
        if name in fields.kind.parts:
            raise fields.missing_part(name, "the language model")  # a composite config without its text part
    if fields.kind.parts and not fields.kind.known:
        names = ", ".join(sorted(fields.kind.parts))
        raise InvalidInputError(f"{fields.name}: got the config of a whole {model!r}, want one of its {names}")
    return fields


def _check_complete(fields: Fields, rope: Values, overrides: Values) -> None:
    """Raise unless an unknown model type's config and the overrides determine all arguments that a class may set."""
    is_set = {
        "head_dim": fields.own("head_dim", "qk_rope_head_dim") is not None,
        "theta": "inv_freq" in overrides
        or rope.get("rope_theta") is not None
        or fields.own(*UNKNOWN.base_names) is not None,
        "rotary_dim": _factor(fields, rope) is not None or fields.own("rotary_dim") is not None,
        "pairing": fields.own("rope_interleave") is not None,
        "allocation": rope.get("rope_type") != "axial",
    }
    missing = [name for name in is_set if not is_set[name] and name not in overrides]
    if missing:
        raise InvalidInputError(
            f"model_type: got the unknown type {fields.kind.model_type!r} and a config without {', '.join(missing)}, "
            f"want them as arguments: Rotary.from_hf_config(config, {', '.join(f'{name}=…' for name in missing)})"
        )


def _rope_parameters(fields: Fields, layer_type: str | None) -> dict[str, Any]:
    """Read the rope parameters, for one layer type if they differ by type, from any field that may contain them."""
    scaling, parameters = (fields.own(name) for name in ("rope_scaling", "rope_parameters"))
    for value in (scaling, parameters):
        if value is not None and not isinstance(value, Mapping):
            raise InvalidInputError(f"rope_parameters: got {value!r}, want a mapping")
    if scaling and fields.kind.model_type == "cohere2_moe":
        raise InvalidInputError("rope_scaling: got a value for 'cohere2_moe', whose code ignores it, want none")
    by_layer = [any(isinstance(value, Mapping) for value in (rope or {}).values()) for rope in (scaling, parameters)]
    if fields.kind.by_layer or by_layer[0 if scaling else 1]:
        if by_layer[0]:  # in a config object, both fields are the same mapping
            scaling, parameters = None, scaling
        return _layer_parameters(fields, layer_type, scaling, parameters or {})
    if layer_type is not None or "layer_types" in fields.config:
        types = _layer_types(fields)
        if layer_type is not None and layer_type not in types:
            want = f"one of {_listed(sorted({*types}))}" if types else "None: all layers rotate alike"
            raise InvalidInputError(f"layer_type: got {layer_type!r}, want {want}")
    default = fields.kind.defaults.get("rope_parameters", {})
    return {} if fields.kind.rotation.unscaled else dict(scaling or parameters or default)


def _layer_parameters(
    fields: Fields, layer_type: str | None, scaling: Values | None, parameters: Values
) -> dict[str, Any]:
    """Return the rope parameters of a layer type, even from configs that predate per-layer-type entries."""
    rotation, defaults = fields.kind.rotation, fields.kind.defaults.get("rope_parameters", {})
    older = bool(rotation.layer_theta)
    entries = {**defaults, **parameters} if older else parameters or defaults
    types = [name for name, entry in entries.items() if isinstance(entry, Mapping)]
    if layer_type is None or layer_type not in types:
        raise InvalidInputError(f"layer_type: got {layer_type!r}, want one of {_listed(types)}")
    entry = dict(entries[layer_type])
    for_all = {} if older and rotation.scaled_layers else {"rope_scaling": scaling}
    if not older and not parameters:
        for_all |= {name: fields.own(name) for name in ("rope_theta", "partial_rotary_factors")}
    if rotation.partial is not None and "partial_rotary_factor" not in entry:
        for_all["partial_rotary_factor"] = fields.own("partial_rotary_factor")
    for name, value in for_all.items():
        if value:
            want = f"rope_parameters with an entry for each of {_listed(types)}"
            raise InvalidInputError(f"{name}: got {value!r} for all layers of {fields.kind.model_type!r}, want {want}")
    if older:
        default, base = defaults[layer_type], fields.own(rotation.layer_theta.get(layer_type, ""))
        entry = {name: default[name] for name in ("rope_theta", "partial_rotary_factor") if name in default}
        entry |= ({} if base is None else {"rope_theta": base}) | (parameters.get(layer_type) or {})
        if scaling and layer_type in rotation.scaled_layers:
            if "rope_type" not in scaling:  # here, Transformers ignores the field "type" and keeps "default"
                got = f"none for {fields.kind.model_type!r}, want a rope type; 'type' is ignored"
                raise InvalidInputError(f"rope_scaling.rope_type: got {got}")
            entry |= scaling
    if entry.get("truncate") is False:
        raise InvalidInputError("truncate: got False for a layer type, where Transformers ignores it, want none")
    return entry


def _layer_types(fields: Fields) -> list[str]:
    """Return the type of each layer from the config, or else the types in the defaults of its class, if any."""
    types = fields.get("layer_types")
    if not isinstance(types, list | tuple | None) or not all(isinstance(kind, str) for kind in types or ()):
        raise InvalidInputError(f"layer_types: got {types!r}, want a list of names")
    return list(types or ())


def _layer(fields: Fields, layer_type: str | None) -> Fields:
    """Return the fields of the layers of one type if the config has fields per layer."""
    by_index, head_dim = fields.own("per_layer_config"), fields.kind.rotation.full_head_dim
    if not by_index:
        if layer_type != "full_attention" or head_dim is None or "per_layer_config" in fields.config:
            return fields
        own = fields.own("global_head_dim")
        return replace(fields, config={**fields.config, "head_dim": head_dim if own is None else own})
    if layer_type is not None and fields.own("layer_types") is None:
        raise fields.missing("layer_types", "the type of each layer, since the config has a per_layer_config")
    if not isinstance(by_index, Mapping) or not all(
        str(index).isdecimal() and isinstance(values, Mapping) for index, values in by_index.items()
    ):
        raise InvalidInputError(f"per_layer_config: got {by_index!r}, want a mapping from layer index to fields")
    changes = {int(index): values for index, values in by_index.items()}
    # The layer after the last index stands for all later layers.
    layers = [{**fields.config, **changes.get(index, {})} for index in range(max(changes) + 2)]
    if layer_type is not None:
        types = _layer_types(fields)
        layers += layers[-1:] * (len(types) - len(layers))
        layers = [layer for layer, kind in zip(layers, types, strict=False) if kind == layer_type]
    for name in HEAD_FIELDS:
        values: list[Any] = []
        for layer in layers:
            if (value := layer.get(name)) not in values:
                values.append(value)
        if len(values) > 1:
            got = ", ".join(map(str, values))
            raise InvalidInputError(f"{name}: got {got} in per_layer_config, want one value, or pass layer_type")
    return replace(fields, config=layers[0]) if layers else fields


def _rope_type(fields: Fields, rope: Values) -> str:
    model = fields.kind.model_type
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    kind = {"mrope": "default", "su": "longrope"}.get(kind, kind)
    if kind == "xdrope" and model == "hunyuan_vl_text":
        kind = "dynamic"
    if kind == "yarn" and model in ("phi3", "phi4_multimodal"):
        kind = "longrope"
    if (kind == "default" and fields.kind.rotation.encoder is not None) or model == "llama4_vision_model":
        kind = "axial"  # the vision encoder of Llama 4 is axial regardless of its config
    return "ntk_alpha" if kind == "dynamic" and rope.get("alpha") and fields.kind.rotation.alpha else kind


def _sizes(fields: Fields, rope: Values, kind: str, overrides: Values) -> dict[str, Any]:
    """Return head_dim and, unless it is overridden, rotary_dim."""
    rotation, head_dim = fields.kind.rotation, overrides.get("head_dim")
    if "head_dim" not in overrides:
        # Latent attention rotates a separate tensor with qk_rope_head_dim channels, regardless of head_dim.
        if "qk_rope_head_dim" in fields.kind.defaults or not fields.kind.known:
            head_dim = fields.get("qk_rope_head_dim", null=False)
        if head_dim is None and not rotation.head_dim_unread:
            head_dim = fields.get("head_dim", null=False)
        if head_dim is None:
            name, times = rotation.width
            width, heads = fields.get(name), fields.get("num_attention_heads")
            if width is None or heads is None:
                want = f"head_dim, or {name} and num_attention_heads"
                raise InvalidInputError(f"head_dim: got none in the config, want {want}")
            head_dim = times * integer(name, width, minimum=1) // integer("num_attention_heads", heads, minimum=1)
            if head_dim % 2:
                got = f"none, and {head_dim} derived from {name} {width} and num_attention_heads {heads}"
                raise InvalidInputError(f"{fields.name}.head_dim: got {got}, want an even number")
        head_dim = integer("head_dim", head_dim, minimum=2, maximum=MAX_HEAD_DIM)
    if "rotary_dim" in overrides:
        return {"head_dim": head_dim}
    head_dim = rotary_dim = integer("head_dim", head_dim)
    if kind == "axial" and rotation.encoder is not None and rotation.encoder.turns == "frames":
        rotary_dim = head_dim // 6 * 6
    has_factor = kind != "default" or rotation.partial is not None or rotation.reads_rotary_dim
    # mistral4's factor refers to a head of a different size.
    if has_factor and kind not in ("proportional", "axial") and fields.kind.model_type != "mistral4":
        factor = _factor(fields, rope)
        own = fields.get("rotary_dim") if factor is None and rotation.reads_rotary_dim else None
        if own is not None:
            return {"head_dim": head_dim, "rotary_dim": integer("rotary_dim", own)}
        if factor is None:
            factor = 1.0 if kind != "default" or rotation.partial is None else rotation.partial
        rotary_dim = int(head_dim * finite("partial_rotary_factor", factor, minimum=0))
        if rotary_dim % 2:
            unset = " (the config has none)" if fields.own("head_dim", "qk_rope_head_dim") is None else ""
            got = f"{factor}, which rotates {rotary_dim} channels of head_dim {head_dim}{unset}"
            raise InvalidInputError(f"{fields.name}.partial_rotary_factor: got {got}, want an even number of channels")
    return {"head_dim": head_dim, "rotary_dim": rotary_dim}


def _theta(fields: Fields, rope: Values) -> float:
    base = rope.get("rope_theta") if fields.kind.rotation.theta is None else fields.kind.rotation.theta
    base = fields.own(*fields.kind.rotation.base_names) if base is None else base
    base = fields.kind.defaults.get("rope_theta") if base is None else base
    if base is None:
        raise InvalidInputError("rope_theta: got none in the config, want rope_theta, or the argument theta")
    theta = finite("rope_theta", base, minimum=1)
    if fields.kind.rotation.layer_bases:
        bases = numbers("layer_rope_theta", fields.own("layer_rope_theta") or (), 0)
        others = {base for base in bases if base} - {theta}
        if others:
            got = ", ".join(map(str, sorted(others)))
            raise InvalidInputError(
                f"layer_rope_theta must equal rope_theta {theta} in rotated layers unless theta is passed, got {got}"
            )
    return theta


def _factor(fields: Fields, rope: Values) -> Any:
    """Return the partial_rotary_factor of the config or of its class."""
    factor = rope.get("partial_rotary_factor")
    if factor is None and not fields.kind.by_layer:
        factor = fields.own(*fields.kind.rotation.factor_names)
    return fields.kind.defaults.get("partial_rotary_factor") if factor is None else factor


def _pairing(fields: Fields) -> str:
    adjacent = fields.kind.rotation.adjacent
    if "rope_interleave" in fields.kind.defaults or not fields.kind.known:
        adjacent = boolean("rope_interleave", fields.get("rope_interleave"))
    return "adjacent" if adjacent else "half"


def _axial_layout(fields: Fields, head_dim: int, rotary_dim: int) -> dict[str, Any]:
    """Return the layout arguments of a vision encoder, whose axes are rows and columns, or frames, rows and columns."""
    encoder = fields.kind.rotation.encoder or Encoder()
    turns = encoder.turns
    if turns == "halves":
        # Each half of a head acts as a head: the first half is rotated by columns, the second by rows.
        heads = integer("num_attention_heads", fields.get("num_attention_heads"), minimum=1)
        if (kv_heads := fields.own("num_key_value_heads") or encoder.kv_heads) != heads:
            raise UnsupportedError(f"num_key_value_heads: got {kv_heads}, want {heads} as for num_attention_heads")
        halves = {"head_dim": head_dim // 2, "rotary_dim": rotary_dim // 2}
        return {**halves, "axes": 2, "allocation": "heads", "head_axes": [1, 0] * heads}
    if turns == "frames":
        return {"axes": 3, "allocation": "axial"}
    if turns in ("rows", "ladder"):
        return {"allocation": "pixtral" if turns == "ladder" else "axial"}
    pairs = rotary_dim // 4
    allocation = [1, 0] * pairs if turns == "in turn" else [1] * pairs + [0] * pairs
    return {"axes": 2, "allocation": allocation, "axes_dim": [2 * pairs] * 2}


def _text_layout(fields: Fields, rope: Values, rotary_dim: int, overrides: Values) -> dict[str, Any]:
    model, rotation = fields.kind.model_type, fields.kind.rotation
    pairs, older = rope.get("mrope_section"), rope.get("xdrope_section") if model == "hunyuan_vl_text" else None
    if pairs is not None and older is not None and list(pairs) != list(older):
        raise InvalidInputError(f"mrope_section must equal xdrope_section, got {pairs} and {older}")
    pairs = older if pairs is None else pairs
    from_class = pairs is None
    pairs = rotation.section if pairs is None else pairs
    if pairs is None:
        return {}
    section = integers("mrope_section", pairs, maximum=MAX_HEAD_DIM)
    if model == "ernie4_5_vl_moe_text":  # (rows, columns, frames): rows and columns alternate, then frames
        if len(section) != 3 or section[0] != section[1]:
            raise InvalidInputError(
                f"mrope_section: got {list(section)}, want pairs of rows, the same number for columns, then frames"
            )
        return {"axes": 3, "allocation": [1, 2] * section[0] + [0] * section[2]}
    interleaved = rotation.interleaved or rope.get("mrope_interleaved") or rope.get("interleaved")
    left = rotary_dim // 2 - sum(section[1:])
    if rotation.interleaved and len(section) == 3 and left >= 0:  # the model code gives all remaining pairs to frames
        section = (left, *section[1:])
    if from_class and sum(section) != rotary_dim // 2 and not overrides.keys() & {"allocation", "mrope_section"}:
        read = ("head_dim",) if rotation.partial is None else ("head_dim", "partial_rotary_factor")
        unset = [name for name in read if fields.own(name) is None and rope.get(name) is None]
        raise InvalidInputError(
            f"{fields.name}: got no {', '.join([*unset, 'mrope_section'])}, want the values of a checkpoint: the "
            f"default mrope_section {list(section)} does not sum to the {rotary_dim // 2} rotated pairs"
        )
    return {
        "axes": len(section),
        "allocation": "mrope-interleaved" if interleaved else "sections",
        "mrope_section": list(section),
    }


def _scaling(fields: Fields, rope: Values, kind: str) -> Scaling:
    if kind not in ROPE_TYPES:
        raise UnsupportedError(f"rope_type: got {kind!r}, want one of {_listed(ROPE_TYPES)}")
    for name in ROPE_TYPES[kind]:
        if name not in rope:
            raise InvalidInputError(f"rope_parameters.{name}: got none, want a value for rope_type {kind!r}")
    longest, name = fields.get("max_position_embeddings"), "original_max_position_embeddings"
    original = fields.get(name, null=False)
    original = rope.get(name) if original is None else original
    for length, value in (("max_position_embeddings", longest), (name, original)):
        if value is not None:
            finite(length, value, above=0)
    original = longest if original is None else original
    if original is None and kind in LENGTH_TYPES:
        raise InvalidInputError(
            f"max_position_embeddings: got none in the config, want a number for rope_type {kind!r}"
        )
    factor: Any = rope.get("factor")
    if factor is None and kind in ("yarn", "longrope") and longest is not None:
        factor = longest / original
    if fields.kind.model_type == "molmo2_text":
        _check_all_scaled(fields)
    if fields.kind.model_type == "phimoe":
        return _phimoe(rope, kind, original)
    match kind:
        case "linear":
            return Linear(factor)
        case "dynamic":
            return DynamicNTK(factor, longest)
        case "ntk_alpha":
            return NTK(rope["alpha"])
        case "llama3":
            return Llama3(factor, rope["low_freq_factor"], rope["high_freq_factor"], original)
        case "proportional":
            part = _factor(fields, rope)
            return PRoPE(1.0 if part is None else part, 1.0 if factor is None else factor)
        case "longrope":
            return LongRoPE(rope["short_factor"], rope["long_factor"], original, factor, rope.get("attention_factor"))
    optional = {name: rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
    fast, slow, truncate = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1, rope.get("truncate")
    return YaRN(factor, original, fast, slow, truncate=True if truncate is None else truncate, **optional)


def _check_all_scaled(fields: Fields) -> None:
    layers, count = fields.own("rope_scaling_layers"), fields.own("num_hidden_layers")
    if layers is None:
        return
    if {*integers("rope_scaling_layers", layers)} != {*range(integer("num_hidden_layers", count))}:
        raise InvalidInputError(
            f"rope_scaling_layers: got {layers}, want all {count} layers, or pass scaling for these or the other layers"
        )


def _phimoe(rope: Values, kind: str, original: Any) -> LongRoPE:
    """Return LongRoPE with the attention factor short_mscale.

    Transformers 5.24 uses the short factors at every length, unlike the code released with the checkpoints.
    """
    short, long = (rope.get(name) for name in ("short_mscale", "long_mscale"))
    if kind != "longrope" or short is None or short != long:
        got = f"{kind!r} with short_mscale {short} and long_mscale {long}"
        raise UnsupportedError(f"rope_parameters: got {got} for 'phimoe', want 'longrope' with equal values")
    return LongRoPE(rope["short_factor"], rope["long_factor"], original, None, short)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _mapping(config: object) -> Values:
    """Return the fields of a config: a mapping itself, the result of to_dict, or the attributes of any other object."""
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, type) and callable(to_dict := getattr(config, "to_dict", None)):
        return dict(to_dict())
    fields = {}
    for name in (name for name in dir(config) if not name.startswith("_")):
        try:
            fields[name] = getattr(config, name, None)
        except Exception as error:
            got = f"{type(error).__name__} ({error})"
            raise InvalidInputError(f"{name}: got {got} from the config, want a readable field") from error
    return fields


@dataclass(frozen=True)
class Fields:
    """A config or nested config, with the defaults of its class for missing fields.

    Args:
        name: name of the config in error messages.
        config: its own fields.
        kind: what is known of its model type.
    """

    name: str
    config: Values
    kind: ModelClass

    @classmethod
    def of(cls, config: object) -> Fields:
        """Create the fields of a whole config, of a config.json file, or of the config.json in a folder.

        Raises:
            InvalidInputError: the folder has no readable config.json, or the string names neither a file nor a folder,
                for example because it is a checkpoint's name (nothing is downloaded).
        """
        got = type(config).__name__
        if isinstance(config, str | PurePath) and str(config):
            path = Path(config, "config.json") if isdir(config) else Path(config)
            if isfile(path):
                config = read_json(path)
            elif isdir(config):
                raise InvalidInputError(f"{config}: got a folder without config.json, want the folder of a model")
            else:
                got = f"{str(config)!r}, where there is neither a file nor a folder"
        if not isinstance(config, Mapping | type) and (
            isinstance(config, PurePath) or type(config).__module__ == "builtins"
        ):
            raise InvalidInputError(
                f"config: got {got}, want a config object, the path of a config.json or of its folder, or "
                "the file's contents as a mapping. Nothing is downloaded: for a model on the Hub, download its "
                "config.json, or look its model_type up in docs/models-names.md"
            )
        fields = _mapping(config)
        model = fields.get("model_type")
        return cls("config", fields, class_of(model if isinstance(model, str) else ""))

    def own(self, *names: str) -> Any:
        """Return the first of these fields that the config itself sets, or None."""
        for name in names:
            spelt = {each: self.config.get(each) for each in self.kind.spellings.get(name, (name,))}
            spelt = {each: value for each, value in spelt.items() if value is not None}
            if spelt:
                value, *others = spelt.values()
                if any(other != value for other in others):
                    got = " and ".join(f"{each} {other!r}" for each, other in spelt.items())
                    raise InvalidInputError(f"{self.name}.{name}: got {got}, two names of one field, want equal values")
                return value
        return None

    def get(self, *names: str, null: bool = True) -> Any:
        """Return the first of these fields that the config sets, else the default of its class.

        Null stays null, or is refused unless ``null``, if the default of the class is a number: it would be ambiguous.
        """
        value = self.own(*names)
        if value is not None:
            return value
        spellings = [each for name in names for each in self.kind.spellings.get(name, (name,))]
        default = next((self.kind.defaults[each] for each in spellings if each in self.kind.defaults), None)
        if not any(each in self.config for each in spellings):
            return default
        if default is not None and not null:
            raise InvalidInputError(f"{self.name}.{names[0]}: got null, want a number; the default is {default}")
        return None

    def part(self, name: str) -> Fields | None:
        """Return a nested config, or None if it is missing; a bare config has the nested configs of its class."""
        kind, config = self.kind, self.own(name)
        is_bare = self.config.keys() <= {"model_type"}
        if config is None and is_bare and name in kind.parts and name not in kind.defaults.get("optional_parts", ()):
            config = kind.defaults.get("absent_parts", {}).get(name, {})
        if config is None:
            return None
        config = {**kind.defaults.get("part_defaults", {}).get(name, {}), **_mapping(config)}
        model = None if name in kind.defaults.get("parts", {}) else config.get("model_type")
        model = ALIASES.get(model, model) if isinstance(model, str) and model else kind.parts.get(name, "")
        return Fields(f"{self.name}.{name}", config, class_of(model))

    def integer(self, *names: str, needed: bool = False, minimum: int = 0) -> Any:
        """Return the first of these fields that is set, as an integer, or None; equal values in a list are one."""
        value = self.get(*names)
        if isinstance(value, list | tuple) and value and all(each == value[0] for each in value):
            value = value[0]
        if value is None and needed:
            raise self.missing(names[0], "an integer")
        return None if value is None else integer(f"{self.name}.{names[0]}", value, minimum=minimum)

    def missing(self, name: str, want: str) -> InvalidInputError:
        """Return the error for a missing field."""
        return InvalidInputError(f"{self.name}.{name}: got none, want {want}")

    def missing_part(self, name: str, whose: str) -> InvalidInputError:
        """Return the error for a missing nested config."""
        return self.missing(name, f"the config of {whose}, or {{}} for the defaults of its class")
