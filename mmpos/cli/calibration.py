"""Models with random weights for ``mmpos data calibrate``, whole or with few layers."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mmpos.data import Calibration, Cost, ModelStep, calibrate
from mmpos.errors import InvalidInputError
from mmpos.integrations.models import from_hf_config
from mmpos.support.extras import needed_for

_DEPTHS = ("depth", "num_hidden_layers")


def measure(folder: Path, **options: Any) -> Calibration:
    """Measure the model of a folder.

    Args:
        folder: with a config.json.
        options: device, dtype, and arguments of ``calibrate``.
    """
    return _measured(_config(folder), **options)


def measure_layers(layers: int, folder: Path, **options: Any) -> Calibration:
    """Measure the model of a folder with few layers and with twice as many, and extrapolate to all: costs are affine.

    Raises:
        InvalidInputError: layers of the model differ from one another, so that some cannot stand for all.
    """
    parts = _parts(_config(folder))
    whole = [depth for *_, depth in parts]
    few, more = (_measured(_shortened(folder, number), **options) for number in (layers, 2 * layers))
    scales = [depth / layers - 1 for depth in whole]
    scale_of = {"language": scales[0], "vision": scales[-1]}
    found = {}
    for each in fields(Cost):
        first, second = getattr(few.cost, each.name), getattr(more.cost, each.name)
        found[each.name] = max(first + (second - first) * scale_of[each.name.partition("_")[0]], 0.0)
    return replace(more, cost=Cost(**found), residual=max(few.residual, more.residual))


def _config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise InvalidInputError(f"FOLDER: got {str(folder)!r}, want a folder with a config.json")
    with needed_for("mmpos data calibrate", extra="hf"):
        from transformers import AutoConfig
    return AutoConfig.from_pretrained(folder)


def _parts(config: Any) -> list[tuple[Any, str, int]]:
    """Return the configs that have layers, the language model first, with the name and number of these."""
    configs = [config.get_text_config(), *filter(None, [getattr(config, "vision_config", None)])]
    named = [(part, next(name for name in _DEPTHS if hasattr(part, name))) for part in configs]
    return [(part, name, getattr(part, name)) for part, name in named]


def _shortened(folder: Path, layers: int) -> Any:
    config = _config(folder)
    for part, name, depth in _parts(config):
        for indexed in ("fullatt_block_indexes", "deepstack_visual_indexes", "layer_types", "mlp_only_layers"):
            listed = getattr(part, indexed, None)
            if listed and not (len(listed) == depth and len(set(listed)) == 1):
                raise InvalidInputError(f"--layers: got a config with {indexed}, want none: its layers differ")
            if listed:
                setattr(part, indexed, listed[:1] * layers)
        setattr(part, name, layers)
    return config


def _measured(config: Any, *, device: str, dtype: str, **options: Any) -> Calibration:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise InvalidInputError(f"--dtype: got {dtype!r}, want float32, bfloat16 or float16")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInputError(f"--device: got {device!r} without a GPU that torch sees, want cpu")
    settings = from_hf_config(config)
    auto: Any = AutoModelForImageTextToText if getattr(config, "vision_config", None) else AutoModelForCausalLM
    if settings.vision_scheme is None:
        options["patches"] = ()
    model = auto.from_config(config, dtype=kind).to(device)
    return calibrate(
        ModelStep(model, settings), patches_per_token=getattr(settings, "spatial_merge_size", 1) ** 2, **options
    )
