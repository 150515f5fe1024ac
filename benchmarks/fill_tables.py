"""Write the tables of recorded figures and of models between the marks on pages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mmpos.integrations.models import MODEL_TYPES, UNSUPPORTED_TYPES
from mmpos.rotary import Rotary
from mmpos.rotary.hf_models import ENCODERS, MODELS, class_defaults
from mmpos.schemes import get_scheme
from mmpos.support.checks import counted
from mmpos.support.files import write_text
from mmpos_bench.measured import code_of
from mmpos_bench.results import from_json, to_markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
NAMES = ROOT / "tests/golden/model_names.json"
"""The class and, if one is known, an example checkpoint of each model type, as in Transformers' code."""

OTHER_ROTATIONS = {name: row.rotation.refused for name, row in MODELS.items() if row.rotation.refused}
UNSUPPORTED_ENCODERS = {name: row.rotation.unplaced for name, row in MODELS.items() if row.rotation.unplaced}
"""The reasons for which a rotation is not supported, or no scheme produces an encoder's positions."""

PAGES = (ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md")))


def figures(name: str) -> str:
    """Write the table of the figures called "suite; group", and a line that says when and where they were recorded."""
    suite, _, group = name.partition("; ")
    path = RESULTS / f"{suite}.json"
    report = from_json(path.read_text(encoding="utf-8")) if path.exists() else None
    if report is None or report.quick or not report.group(group):
        raise SystemExit(f"{name}: found no such figures in {RESULTS}")
    machine, age = report.machine, "" if report.code == code_of(suite) else ", **before later changes**"
    at = f"{report.date}, {machine.commit}, {machine.cpu}, {counted(machine.cores, 'core')}, load {machine.load}"
    return f"{to_markdown(report.group(group), parts=False)}\n{at}{age}.\n"


def rotation(model: str) -> str:
    """Describe the axes, allocation and pairing of a model type's default language model."""
    axes, defaults = get_scheme(MODEL_TYPES[model].scheme).axes, class_defaults()
    if axes == 1:
        return "one axis"
    row = defaults.get(model, {})
    row = defaults[row["parts"]["thinker_config"]] if "thinker_config" in row.get("parts", {}) else row
    text = {**row.get("parts", {}), **row.get("auto_parts", {})}.get("text_config")
    if text in OTHER_ROTATIONS:  # readable only with the settings of the whole model
        return f"{axes} axes, its own, half"
    rotary = Rotary(64, axes=axes)
    if text is not None:
        sizes = {"partial_rotary_factor": 1.0, "rope_theta": 1e4}
        head_dim = 2 * sum(MODELS[text].rotation.section or ())
        rotary = Rotary.from_hf_config({"model_type": text, "head_dim": head_dim, **sizes})
    allocation = "its own" if isinstance(rotary.allocation, tuple) else rotary.allocation
    return f"{axes} axes, {allocation}, {rotary.pairing}"


def model_type(model: str) -> str:
    """Write the cells of a model type."""
    return f"{schemes(model)} | {rotation(model)} | {MODEL_TYPES[model].note}"


def schemes(model: str) -> str:
    """Name the scheme of a model type in Transformers and, if it differs, in serving engines."""
    known = MODEL_TYPES[model]
    return f"`{known.scheme}`" + (f"; serving: `{known.serving}`" if known.serving else "")


def encoder(model: str) -> str:
    """Write the cells of a vision encoder."""
    known, rotary = ENCODERS[model], Rotary.from_hf_config({"model_type": model})
    axis = rotary.head_axes or rotary.pair_axis.tolist()
    names = [("frames", "rows", "columns")[a - rotary.axes] for a in dict.fromkeys(axis)]
    axes = f"{' and '.join(names)} alternating" if axis[0] != axis[1] else ", ".join(names)
    axes += " of one ladder" * (rotary.allocation == "pixtral")
    return f"{known.order}{', from 1' if known.first else ''} | {axes}; {rotary.pairing} | {known.note}"


def table(head: str, rows: list[str]) -> str:
    """Write a table with left-aligned columns."""
    return "\n".join([f"| {head} |", f"|{'---|' * len(head.split(' | '))}", *rows]) + "\n"


def names() -> str:
    """Write the model types of each scheme, each with a checkpoint, or with its class if no checkpoint is known."""
    types: dict[str, list[str]] = {}
    known = json.loads(NAMES.read_text(encoding="utf-8"))
    for model, (name, *checkpoint) in sorted((model, known[model]) for model in known if model in MODEL_TYPES):
        types.setdefault(schemes(model), []).append(f"`{model}` ({''.join(checkpoint) or name.replace('_', '-')})")
    return "".join(f"- **{scheme}**: {', '.join(types[scheme])}.\n" for scheme in sorted(types))


GROUPED: Mapping[str, tuple[str, Iterable[str], Callable[[str], str]]] = {
    "supported": ("model_type | scheme | rotation | notes", MODEL_TYPES, model_type),
    "encoders": ("vision encoder | patches | axes of a head | notes", ENCODERS, encoder),
    "refused": ("", UNSUPPORTED_TYPES, UNSUPPORTED_TYPES.__getitem__),
    "refused encoders": ("", sorted(UNSUPPORTED_ENCODERS), UNSUPPORTED_ENCODERS.__getitem__),
}
"""The head of each table, or nothing for a list; its names; and the text of a name, shared by several names."""


def models(name: str) -> str:
    """Write the table or the list with this name."""
    if name == "names":
        return names()
    head, known, text_of = GROUPED[name]
    groups: dict[str, list[str]] = {}
    for model in known:
        groups.setdefault(text_of(model), []).append(f"`{model}`")
    lines = [(", ".join(group), text) for text, group in groups.items()]
    return table(head, [f"| {x} | {y} |" for x, y in lines]) if head else "".join(f"- {x}: {y}.\n" for x, y in lines)


def filled_in(page: str) -> str:
    """Return a page with the text between ``<!-- mark: name -->`` and ``<!-- /mark -->`` written again."""
    marks = re.compile(r"(<!-- (bench|models): ([^>]+?) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
    return marks.sub(lambda match: match[1] + (figures if match[2] == "bench" else models)(match[3]) + match[4], page)


if __name__ == "__main__":
    for page in PAGES:
        write_text(page, filled_in(page.read_text(encoding="utf-8")))
