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


def measure(folder: Path, layers: int | None = None, **options: Any) -> Calibration:
    """Measure the model of a folder.

    Args:
        folder: with a config.json.
        layers: None measures the whole model; otherwise it is measured with this many layers and with twice as many,
            and extrapolated to all.
        options: device, dtype, and arguments of ``calibrate``.

    Raises:
        InvalidInputError: layers of the model differ from one another, so that some cannot stand for all.
    """
    config = _config(folder)
    if layers is None:
        return _measured(config, **options)
    depths = [depth for *_, depth in _parts(config)]
    few, more = (_measured(_shortened(folder, number), **options) for number in (layers, 2 * layers))
    return extrapolate(few, more, *(depth / layers - 1 for depth in (depths[0], depths[-1])))


def extrapolate(few: Calibration, more: Calibration, language: float, vision: float) -> Calibration:
    """Extrapolate from few layers and twice as many to all: costs are affine in the number of layers.

    The overhead, which no part has to itself, grows as that of the language model does.

    Args:
        few: with some layers.
        more: with twice as many; its times stay in the result.
        language: how many times the difference of the two separates few from all layers of the language model.
        vision: the same of the vision tower.
    """
    found = {}
    for each in fields(Cost):
        scale = vision if each.name.startswith("vision") else language
        found[each.name] = _line(getattr(few.cost, each.name), getattr(more.cost, each.name), scale)
    overhead, residual = _line(few.overhead, more.overhead, language), max(few.residual, more.residual)
    return replace(more, cost=Cost(**found), overhead=overhead, residual=residual)


def _line(first: float, second: float, scale: float) -> float:
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
    with needed_for("mmpos data calibrate", extra="all"):
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
