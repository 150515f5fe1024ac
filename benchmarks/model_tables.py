"""Tables of supported and refused model types and encoders, for docs/models-reference.md and docs/models-names.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from mmpos.integrations.models import MODEL_TYPES, UNSUPPORTED_TYPES, ModelType
from mmpos.rotary import Rotary
from mmpos.rotary.hf_config import class_defaults
from mmpos.rotary.hf_models import ENCODERS, OTHER_ROTATIONS, ROTATIONS, UNSUPPORTED_ENCODERS
from mmpos.schemes import get_scheme

NAMES = Path(__file__).parents[1] / "tests/golden/model_names.json"
"""The class and an example checkpoint of each model type, read from Transformers by tests/helpers/model_names.py."""


def supported() -> str:
    """Write a table with one row per group of model types whose cells are equal, in the order of MODEL_TYPES."""
    rows = ["| model_type | scheme | rotation | notes |", "|---|---|---|---|"]
    rows += [f"| {names} | {cells} |" for cells, names in _grouped({model: _cells(model) for model in MODEL_TYPES})]
    return "\n".join(rows) + "\n"


def encoders() -> str:
    """Write a table with one row per group of vision encoders whose cells are equal."""
    rows = ["| vision encoder | patches | axes of a head | notes |", "|---|---|---|---|"]
    rows += [f"| {names} | {cells} |" for cells, names in _grouped({model: _encoder(model) for model in ENCODERS})]
    return "\n".join(rows) + "\n"


def names() -> str:
    """Write a row for each model type in Transformers, in order of class name."""
    known: dict[str, list[str]] = json.loads(NAMES.read_text(encoding="utf-8"))
    rows = []
    for model, (name, *checkpoint) in known.items():
        spelled = re.sub(r"(?<=\d)_(?=\d)", ".", name).replace("_", "-")
        scheme = _schemes(MODEL_TYPES[model]) if model in MODEL_TYPES else "refused"
        rows.append(f"| {spelled} | {''.join(checkpoint)} | `{model}` | {scheme} |")
    return (
        "\n".join(["| model | checkpoint | model_type | scheme |", "|---|---|---|---|", *sorted(rows, key=str.lower)])
        + "\n"
    )


def refused(reasons: Mapping[str, str]) -> str:
    """Write one line per reason, with all model types refused for that reason."""
    return "".join(f"- {names}: {reason}.\n" for reason, names in _grouped(reasons))


QUOTES: Mapping[str, Callable[[], str]] = {
    "supported": supported,
    "encoders": encoders,
    "refused encoders": lambda: refused(dict(sorted(UNSUPPORTED_ENCODERS.items()))),
    "names": names,
    "refused": lambda: refused(UNSUPPORTED_TYPES),
    "rotations": lambda: refused(dict(sorted(OTHER_ROTATIONS.items()))),
}
"""Page texts by name."""


def rotation(model: str) -> str:
    """Describe the axes, allocation and pairing of a model type's default language model."""
    axes = get_scheme(MODEL_TYPES[model].scheme).axes
    if axes == 1:
        return "one axis"
    row = class_defaults().get(model, {})
    row = class_defaults()[row["parts"]["thinker_config"]] if "thinker_config" in row.get("parts", {}) else row
    text = {**row.get("parts", {}), **row.get("auto_parts", {})}.get("text_config")
    if text in OTHER_ROTATIONS:  # readable only with the settings of the whole model
        return f"{axes} axes, its own, half"
    rotary = Rotary(64, axes=axes)
    if text is not None:
        section = ROTATIONS[text].section
        assert section is not None, "models with several axes have a section"
        sizes = {"head_dim": 2 * sum(section), "partial_rotary_factor": 1.0, "rope_theta": 1e4}
        rotary = Rotary.from_hf_config({"model_type": text, **sizes})
    allocation = "its own" if isinstance(rotary.allocation, tuple) else rotary.allocation
    return f"{axes} axes, {allocation}, {rotary.pairing}"


def _encoder(model: str) -> str:
    encoder, rotary = ENCODERS[model], Rotary.from_hf_config({"model_type": model})
    patches = f"{encoder.order}" + (", from 1" if encoder.first else "")
    axis = list(rotary.head_axes or rotary.pair_axis.tolist())
    names = [("frames", "rows", "columns")[a - rotary.axes] for a in dict.fromkeys(axis)]
    axes = f"{' and '.join(names)} alternating" if axis[0] != axis[1] else ", ".join(names)
    one_ladder = "" if rotary.allocation != "pixtral" else " of one ladder"
    return f"{patches} | {axes}{one_ladder}; {rotary.pairing} | {encoder.note}"


def _cells(model: str) -> str:
    model_type = MODEL_TYPES[model]
    return f"{_schemes(model_type)} | {rotation(model)} | {model_type.note}"


def _schemes(model_type: ModelType) -> str:
    """Name the scheme of a model type in Transformers and, if it differs, in serving engines."""
    return f"`{model_type.scheme}`" + (f"; serving: `{model_type.serving}`" if model_type.serving else "")


def _grouped(texts: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return each text with the names that share it."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(f"`{name}`")
    return [(text, ", ".join(group)) for text, group in names.items()]
