"""Transformers' vision encoders: their positions, and how small encoders rotate q and k."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from typing import Any, NoReturn

import pytest
import torch
from fill_tables import UNSUPPORTED_ENCODERS
from hf_classes import rotations
from model_configs import encoder_settings
from tolerance import assert_within, cos_sin
from tolerance import rotations as rotation_bound
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from mmpos import Grid, SegmentTable, Text, place
from mmpos.integrations.models.from_config import vision_scheme
from mmpos.rotary import Rotary, apply_rotary
from mmpos.rotary.hf_config import Fields
from mmpos.rotary.hf_models import ENCODERS
from mmpos.schemes import Grid2D

SMALL: dict[str, Any] = {
    **dict.fromkeys(("depth", "num_hidden_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads", "num_local_experts"), 2),
    **dict.fromkeys(("hidden_size", "embed_dim", "adapter_in_dim"), 128),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "projection_intermediate_size"), 32),
    **dict.fromkeys(("adapter_out_dim", "out_hidden_size", "projection_hidden_dim", "text_hidden_size"), 32),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), 32),
    **dict.fromkeys(("pos_emb_height", "pos_emb_width", "posemb_grid_size"), 8),
    "deepstack_visual_indexes": [],
    "image_size": 32,
    "layer_types": ["full_attention"],
    "mlp_layer_types": ["dense"],
    "num_position_embeddings": 64,
    "patch_size": 4,
    "temporal_patch_size": 2,
}
"""Config fields for encoders with one layer, two heads of 64 channels and patches of 4×4 pixels."""

FUNCTIONS = (
    "apply_multidimensional_rope",
    "vision_apply_rotary_emb",
    "apply_rotary_pos_emb_vision",
    "apply_rotary_pos_emb",
)
"""Names of functions that rotate q and k, the most specific first."""

IMAGES = {
    "gemma4_vision": [(3, 6), (6, 3)],
    "llama4_vision_model": [(8, 8), (8, 8)],
    "pixtral": [(3, 5), (4, 2)],
    "step3p5_vision": [(3, 5), (3, 5)],
}
"""Rows and columns of patches for encoders that take complete images."""
FRAMES_APART = ("glm4v_moe_vision", "glm4v_vision")
"""Encoders that take each frame of a video as a separate grid."""


def small(encoder: str) -> tuple[Any, Any]:
    """Return a small config of the encoder, and the module with its code."""
    kind: Any = CONFIG_MAPPING[encoder]
    config = kind(**{name: value for name, value in SMALL.items() if name in kind.__dataclass_fields__})
    return config, importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))


def grids_of(encoder: str) -> list[tuple[int, int, int]]:
    """Return the (frames, rows, columns) of each grid before merging."""
    if encoder in IMAGES:
        return [(1, *sides) for sides in IMAGES[encoder]]
    return [(1, 4, 6), (1 if encoder in FRAMES_APART else 2, 2, 8)]


def run(encoder: str, model: Any) -> None:
    """Run the model on patches of ``grids_of(encoder)``, or on images."""
    grid = torch.tensor(grids_of(encoder))
    patches = int(grid.prod(dim=1).sum())
    channels = 3 * 4 * 4 * getattr(model.config, "temporal_patch_size", getattr(model.config, "patch_temporal", 1))
    if encoder == "pixtral":
        model(torch.randn(2, 3, 32, 32), image_sizes=4 * grid[:, 1:])
    elif encoder == "gemma4_vision":  # its inputs are patches with their columns and rows
        places = [[[x, y] for y in range(height) for x in range(width)] for _, height, width in grid.tolist()]
        model(torch.randn(2, patches // 2, 48), torch.tensor(places))
    elif encoder in IMAGES:
        model(torch.randn(2, 3, *(4 * grid[0, 1:]).tolist()))
    elif encoder == "inkling2_vision":  # its inputs are blocks of 2×2 patches
        model(torch.randn(patches // 4, 8, 8, 3), grid // torch.tensor([1, 2, 2]))
    elif encoder == "kimi_k25_vision":
        model(torch.randn(patches, 3, 4, 4), grid)
    elif encoder == "paddleocr_vl_vision":
        model(torch.randn(1, patches, 3, 4, 4), grid)
    else:
        model(torch.randn(patches, channels), grid)


def models_of(kind: Any, code: Any) -> list[Any]:
    """Return the models of a module that have this config class."""
    kinds = [value for value in vars(code).values() if inspect.isclass(value) and issubclass(value, PreTrainedModel)]
    return [value for value in kinds if value.config_class is kind and value.__module__ == code.__name__]


class RotatedError(Exception):
    """Stop an encoder at its rotation; the arguments are q, k, rotated q and rotated k."""


def by_token(values: Tensor) -> Tensor:
    """Reshape q or k of any encoder to (tokens, heads, channels)."""
    if values.ndim == 4 and values.shape[1] == 2:  # two heads come before the tokens
        values = values.transpose(1, 2)
    return values.reshape(-1, *values.shape[-2:])


def documents_of(encoder: str) -> list[list[Text | Grid]]:
    """Return one document per grid, with a class token where the encoder inserts one."""
    grids = [Grid.from_thw(grid) for grid in grids_of(encoder)]
    if encoder == "inkling2_vision":
        return [[Text(1), grid] for grid in grids]
    return [[grid, Text(1)] if encoder == "llama4_vision_model" else [grid] for grid in grids]


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ENCODERS)
def test_positions_and_rotation_equal_those_of_the_encoder(encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, code = small(encoder)
    name = next(name for name in FUNCTIONS if hasattr(code, name))
    function = getattr(code, name)

    def rotate(q: Tensor, k: Tensor, *tables: Tensor, **options: Any) -> NoReturn:
        if encoder == "gemma4_vision":  # k holds cos, and each half of a head is rotated like a whole head
            q, theirs = (values.reshape(-1, 4, 32) for values in (q, function(q, k, *tables)))
            raise RotatedError(q, q, theirs, theirs)
        raise RotatedError(*(by_token(values) for values in (q, k, *function(q, k, *tables, **options))))

    monkeypatch.setattr(code, name, rotate)
    torch.manual_seed(0)
    with torch.no_grad(), pytest.raises(RotatedError) as caught:
        run(encoder, models_of(type(config), code)[-1](config).eval())
    q, k, *theirs = caught.value.args
    scheme = vision_scheme(Fields.of(config))
    positions = place(SegmentTable.from_documents(documents_of(encoder)), scheme)
    ours = apply_rotary(q, k, positions, Rotary.from_hf_config(config, precision="hf"), layout="thd")
    for got, want in zip(ours, theirs, strict=True):
        assert_within(got, want, rotation_bound(want, cos_sin()))  # both use the same float32 angles


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_mapping_gives_the_positions_and_rotation_of_its_config_object(encoder: str) -> None:
    config = CONFIG_MAPPING[encoder]()
    for mapping in (json.loads(config.to_json_string(use_diff=False)), {"model_type": encoder}):
        assert encoder_settings(encoder, mapping) == encoder_settings(encoder, config)


@pytest.mark.parametrize(
    ("config", "scheme", "head_dim"),
    [
        ({"model_type": "step3p5_vision", "width": 1024, "heads": 8}, Grid2D(), 128),
        ({"model_type": "inkling2_vision", "adapter_merge_size": 4}, Grid2D("merged", 4, first=1), 64),
        ({"model_type": "dots3_note_vision_encoder", "embed_dim": 768}, Grid2D("merged", 2), 32),
        ({"model_type": "llama4_vision_model", "rope_parameters": {"rope_type": "linear"}}, Grid2D(first=1), 48),
    ],
)
def test_old_field_names_are_read_and_fields_that_the_model_ignores_are_not(
    config: dict[str, Any], scheme: Grid2D, head_dim: int
) -> None:
    assert vision_scheme(Fields.of(config)) == scheme
    rotary = Rotary.from_hf_config(config)
    assert (rotary.head_dim, rotary.theta, rotary.scaling) == (head_dim, 10000.0, None)


@pytest.mark.slow
@pytest.mark.xdist_group("hf_classes")  # imports every Transformers model
def test_every_vision_encoder_that_rotates_is_supported_or_refused_by_name() -> None:
    parts = {
        spec.model_type
        for config in CONFIG_MAPPING.values()
        for name, spec in config.sub_configs_defaults.items()
        if name in ("vision_config", "video_config", "backbone_config")
    }
    inside = {
        spec.model_type
        for model in parts & set(CONFIG_MAPPING)
        for spec in CONFIG_MAPPING[model].sub_configs_defaults.values()
    }
    rotating = {
        kind.model_type
        for kind, module in rotations().items()
        if hasattr(module, "compute_axial_rope_parameters")
        or kind.model_type in parts | inside
        or any(
            model.main_input_name.startswith("pixel_values")
            for model in models_of(kind, sys.modules[module.__module__])
        )
    }
    assert {*ENCODERS, *UNSUPPORTED_ENCODERS} - {"vjepa2"} == rotating  # it rotates in a function, without a module
