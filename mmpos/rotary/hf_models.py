"""The table of model types in Transformers 5.24: what their configs leave open, and the defaults of their classes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from mmpos.schemes import get_scheme

TRANSFORMERS = "5.24"
"""The version of Transformers whose model types are known."""

T = TypeVar("T")


@dataclass(frozen=True)
class Encoder:
    """Rotation and patch positions of a vision encoder.

    Args:
        turns: the axes by which the channels of a head are rotated. "rows": a block by rows, then one by columns;
            "columns": columns first; "in turn": alternately by columns and rows; "frames": blocks by frames, rows and
            columns, with the remaining channels unrotated; "halves": each half acts as a head, the first rotated by
            columns and the second by rows; "ladder": as in Pixtral.
        order: patch order: "raster", or "merged" in blocks of spatial_merge_size; "" if no scheme produces the
            encoder's positions.
        first: id of the first row and column; if it is 1, a class token may have id 0.
        kv_heads: for "halves", number of kv heads if the config omits it.
        note: peculiarities, for readers.
    """

    turns: Literal["rows", "columns", "in turn", "frames", "halves", "ladder"] = "rows"
    order: Literal["raster", "merged", ""] = "merged"
    first: int = 0
    kv_heads: int | None = None
    note: str = ""


@dataclass(frozen=True)
class RotationType:
    """Rotation of one model type.

    Args:
        adjacent: whether channels (2j, 2j + 1) instead of two halves are paired if the config has no rope_interleave.
        section: default of mrope_section.
        interleaved: whether M-RoPE is interleaved regardless of the config.
        partial: default of partial_rotary_factor; None means that rope_type "default" ignores the field and rotates all
            channels. All other rope types use the field.
        reads_rotary_dim: whether rotary_dim is read if there is no partial_rotary_factor.
        unscaled: whether rope_parameters is ignored.
        theta: the base if no config can change it.
        base_names: fields outside of rope_parameters with the base.
        factor_names: fields outside of rope_parameters with the partial_rotary_factor.
        alpha: whether rope_type "dynamic" with an alpha is NTK scaling by alpha.
        head_dim_unread: whether head_dim is ignored, and a head has hidden_size / num_attention_heads channels.
        width: a field and a multiplier, whose product divided by num_attention_heads is the default of head_dim.
        full_head_dim: default of global_head_dim, the head_dim of full-attention layers.
        layer_theta: fields with the base of each layer type in configs without rope_parameters per layer type.
        scaled_layers: layer types to which rope_scaling of such configs applies.
        layer_bases: whether layer_rope_theta contains the base of each layer; a base of 0 means that the layer is not
            rotated.
        encoder: rotation of a vision encoder by rows and columns.
        refused: why Rotary cannot describe the rotation.
        unplaced: for a vision encoder, why no scheme produces its positions.
    """

    adjacent: bool = False
    section: tuple[int, int, int] | None = None
    interleaved: bool = False
    partial: float | None = None
    reads_rotary_dim: bool = False
    unscaled: bool = False
    theta: float | None = None
    base_names: tuple[str, ...] = ("rope_theta",)
    factor_names: tuple[str, ...] = ("partial_rotary_factor",)
    alpha: bool = False
    head_dim_unread: bool = False
    width: tuple[str, int] = ("hidden_size", 1)
    full_head_dim: int | None = None
    layer_theta: Mapping[str, str] = field(default_factory=dict, hash=False)
    scaled_layers: tuple[str, ...] = ("full_attention",)
    layer_bases: bool = False
    encoder: Encoder | None = None
    refused: str = ""
    unplaced: str = ""


@dataclass(frozen=True)
class ModelType:
    """Positions and rotation of a model type, and the arguments of its models.

    Args:
        scheme: name of the scheme in Transformers, or in the model's own code; "" if from_hf_config does not read it.
        note: peculiarities of the model type, as text.
        serving: name of the scheme in the serving engines; "" if it is the same as ``scheme``.
        text: permitted types of the language model. If empty, the type that the model's class defines is permitted, or
            any of TEXT_TYPES if the class defines none.
        markers: config fields with the token ids before and after an image.
        video_markers: config fields with the token ids around a video, if videos use the same placeholders as images.
        timed: whether frames are placed by time in seconds, at vision_config.tokens_per_second.
        frames_apart: whether every frame of a video is a separate grid.
        merges_frames: whether vision_config.temporal_merge_size frames of a video become one.
        row_markers: names of the token after each row except the last and of the token after the last row, if the
            encoder is Pixtral's; such images have no markers around them.
        opening: config field with the id of the token before an image, if an extra placeholder follows this token and
            each row ends with a separate token.
        row_separator: whether each row of an image or frame ends with an extra placeholder.
        generates: whether the model generates images; the grids of generated images follow the grids in the prompt.
        start: id of the first token in a document.
        crop_markers: config fields with the ids of CropMarkers, if each image is split into a thumbnail and tiles; the
            patches are then merged 4×4, or 2×2 if downsample_mode is "4x".
        text_at_top: whether the earliest configs have the fields of text_config at the top level, next to
            vision_config.
        rotation: the rotation of its q and k, if the type is a language model or an encoder.
        inputs: flags of `mmpos.data.ModelInputs` if its models separate the documents of a pack, or the reason for
            refusing packs; None if that is not known.
        refused: why from_hf_config refuses it.
    """

    scheme: str = ""
    note: str = ""
    serving: str = ""
    text: frozenset[str] = field(default=frozenset(), repr=False)
    markers: tuple[str, str] | None = None
    video_markers: tuple[str, str] | None = None
    timed: bool = False
    frames_apart: bool = False
    merges_frames: bool = False
    row_markers: tuple[str, str] | None = None
    opening: str | None = None
    row_separator: bool = False
    generates: bool = False
    start: int = 0
    crop_markers: tuple[str, ...] = ()
    text_at_top: bool = False
    rotation: RotationType = RotationType()
    inputs: tuple[str, ...] | str | None = None
    refused: str = ""

    @property
    def has_rope_index(self) -> bool:
        """Whether the class in Transformers has ``get_rope_index``, as it does if the model has more than two axes."""
        return get_scheme(self.scheme).axes > 2


UNLISTED = ModelType()
"""Row of all other model types of Transformers: their code pairs the halves of whole heads."""

UNKNOWN = RotationType(
    alpha=True,
    reads_rotary_dim=True,
    base_names=("rope_theta", "rotary_emb_base"),
    factor_names=("partial_rotary_factor", "rotary_pct"),
)
"""Rotation of a model type that Transformers does not have: any field that a class may read is read."""


def _record(kind: type[T], values: Mapping[str, Any]) -> T:
    """Create a record, with tuples instead of lists."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _rows() -> Iterator[tuple[str, ModelType]]:
    for values in tomllib.loads(files(__package__).joinpath("hf_models.toml").read_text(encoding="utf-8"))["rows"]:
        names, text, rotation = (
            values.pop(name, none) for name, none in (("types", ""), ("text", ()), ("rotation", {}))
        )
        if "encoder" in rotation:
            rotation["encoder"] = _record(Encoder, rotation["encoder"])
        values |= {"text": frozenset(text), "rotation": _record(RotationType, rotation)}
        for name in names.split():
            yield name, _record(ModelType, values)


MODELS: Mapping[str, ModelType] = MappingProxyType(dict(_rows()))
"""All model types of which more is known than the defaults of their classes: the rows of hf_models.toml."""

MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType({name: row for name, row in MODELS.items() if row.scheme})
"""All model types that from_hf_config supports."""

UNSUPPORTED_TYPES: Mapping[str, str] = MappingProxyType({x: row.refused for x, row in MODELS.items() if row.refused})
"""Model types that from_hf_config refuses, with the reason."""

TEXT_TYPES = frozenset({"gemma3_text", "lfm3", *(name for name, row in MODELS.items() if row.note == "text only")})
"""Language models with one id per token, from zero, used on their own or as parts of other models."""

ENCODERS: Mapping[str, Encoder] = MappingProxyType(
    {name: encoder for name in sorted(MODELS) if (encoder := MODELS[name].rotation.encoder) and encoder.order}
)
"""Vision encoders whose positions are known."""

ALIASES: Mapping[str, str] = MappingProxyType({"exaone4_5_text": "exaone4", "kimi_k2": "deepseek_v3"})
"""Model types of nested configs in the earliest releases, mapped to the types that Transformers uses for them."""


@cache
def class_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Load the relevant defaults of the config classes in Transformers 5.24, by model type.

    ``names`` contains alternative field names, ``parts`` the model types of nested configs, ``auto_parts`` the model
    types of nested configs that do not state their model type, ``part_defaults`` the default field values of nested
    configs, ``absent_parts`` the field values of nested configs that are absent, and ``optional_parts`` the nested
    configs that are absent by default. Model types with a rotation have ``rope_theta``, which is null if their class
    has no default. tests/helpers/hf_classes.py writes the file.
    """
    table = json.loads(files(__package__).joinpath("hf_defaults.json").read_text(encoding="utf-8"))
    return MappingProxyType(table)


@dataclass(frozen=True)
class ModelClass:
    """What the table and the config class of a model type say.

    Args:
        model_type: the model type; "" if unknown.
        row: its row in the table.
        defaults: defaults of its config class; empty for an unknown model type.
        known: whether it is known how this model type rotates.
        rotation: the part of its rotation that its config does not specify.
        by_layer: whether the class has rope parameters per layer type by default.
        parts: names of nested configs and the default model type of each.
        spellings: all names of each field that has several.
    """

    model_type: str
    row: ModelType
    defaults: Mapping[str, Any]
    known: bool
    rotation: RotationType
    by_layer: bool
    parts: Mapping[str, str]
    spellings: Mapping[str, tuple[str, ...]]


@cache
def class_of(model_type: str) -> ModelClass:
    """Return what is known of a model type."""
    row, defaults = MODELS.get(model_type, UNLISTED), class_defaults().get(model_type, {})
    known = "rope_theta" in defaults
    spellings: dict[str, tuple[str, ...]] = {}
    for pair in defaults.get("names", {}).items():
        for name, other in (pair, pair[::-1]):
            spellings[name] = (*spellings.get(name, (name,)), other)
    return ModelClass(
        model_type,
        row,
        defaults,
        known,
        row.rotation if known else UNKNOWN,
        any(isinstance(value, Mapping) for value in defaults.get("rope_parameters", {}).values()),
        {**defaults.get("auto_parts", {}), **defaults.get("parts", {})},
        spellings,
    )
