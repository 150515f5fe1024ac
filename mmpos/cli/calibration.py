"""Calibration of models with random weights for ``mmpos data calibrate``, with all layers or a few."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mmpos.data import Calibration, Cost, ModelStep, calibrate
from mmpos.errors import InvalidInputError
from mmpos.integrations.models import from_hf_config
from mmpos.support.extras import needed_for

_DEPTHS = ("depth", "num_hidden_layers")


def measure(folder: Path, layers: int | None = None, **options: Any) -> Calibration:
    """Measure the costs of a model.

    Args:
        folder: folder with a config.json.
        layers: number of layers to measure. Costs are measured with this number and with twice this number of layers,
            and extrapolated to all layers. None measures the complete model.
        options: device, dtype, and arguments of ``calibrate``.

    Raises:
        InvalidInputError: the layers of the model differ, so that costs cannot be extrapolated.
    """
    config = _config(folder)
    if layers is None:
        return _measured(config, **options)
    depths = [depth for *_, depth in _parts(config)]
    few, twice = (_measured(_shortened(folder, number), **options) for number in (layers, 2 * layers))
    return extrapolate(few, twice, *(depth / layers - 1 for depth in (depths[0], depths[-1])))


def extrapolate(few: Calibration, twice: Calibration, language: float, vision: float) -> Calibration:
    """Extrapolate costs, which are affine in the number of layers, to all layers.

    The overhead, which the parts of the model share, is extrapolated with the scale for the language model.

    Args:
        few: calibration with a few layers.
        twice: calibration with twice this number of layers; the result keeps its times.
        language: scale for the language model: (all layers − few layers) / few layers.
        vision: the same scale for the vision tower.
    """
    costs = {}
    for field in fields(Cost):
        scale = vision if field.name.startswith("vision") else language
        costs[field.name] = _extrapolated(getattr(few.cost, field.name), getattr(twice.cost, field.name), scale)
    overhead, residual = _extrapolated(few.overhead, twice.overhead, language), max(few.residual, twice.residual)
    return replace(twice, cost=Cost(**costs), overhead=overhead, residual=residual)


def _extrapolated(first: float, second: float, scale: float) -> float:
    return max(first + (second - first) * scale, 0.0)


def _config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise InvalidInputError(f"FOLDER: got {str(folder)!r}, want a folder with a config.json")
    with needed_for("mmpos data calibrate", extra="hf"):
        from transformers import AutoConfig
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        got = " ".join(str(error).split())[:200]
        raise InvalidInputError(f"{folder / 'config.json'}: got {got}, want the config of a model") from error


def _parts(config: Any) -> list[tuple[Any, str, int]]:
    """Return the configs of the language model and of the vision tower, with the depth field and depth of each."""
    configs = [config.get_text_config(), *filter(None, [getattr(config, "vision_config", None)])]
    depth_fields = [(part, next(name for name in _DEPTHS if hasattr(part, name))) for part in configs]
    return [(part, name, getattr(part, name)) for part, name in depth_fields]


def _shortened(folder: Path, layers: int) -> Any:
    config = _config(folder)
    for part, name, depth in _parts(config):
        for indexed in ("fullatt_block_indexes", "deepstack_visual_indexes", "layer_types", "mlp_only_layers"):
            listed = getattr(part, indexed, None)
            if listed and not (len(listed) == depth and len(set(listed)) == 1):
                raise InvalidInputError(f"--layers requires equal layers, got a config with {indexed}")
            if listed:
                setattr(part, indexed, listed[:1] * layers)
        setattr(part, name, layers)
    return config


def _measured(config: Any, *, device: str, dtype: str, **options: Any) -> Calibration:
    with needed_for("mmpos data calibrate", extra="all"):
        import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise InvalidInputError(f"--dtype: got {dtype!r}, want float32, bfloat16 or float16")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInputError(f"--device: got {device!r}, but torch finds no GPU; pass cpu")
    settings = from_hf_config(config)
    auto: Any = AutoModelForImageTextToText if getattr(config, "vision_config", None) else AutoModelForCausalLM
    if settings.vision_scheme is None:
        options["patches"] = ()
    model = auto.from_config(config, dtype=kind).to(device)
    return calibrate(
        ModelStep(model, settings), patches_per_token=getattr(settings, "spatial_merge_size", 1) ** 2, **options
    )
