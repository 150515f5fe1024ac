"""The names by which people know a model type: the Transformers class without "Config", and an example checkpoint.

``python tests/helpers/model_names.py`` writes tests/golden/model_names.json, which docs/models-names.md shows.

Transformers copies documentation from one model to the next, along with the name of the checkpoint. Among the types
that mention a checkpoint, this program assigns it to the type with the most similar name.
"""

from __future__ import annotations

import json
import re
from difflib import SequenceMatcher
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import (  # type: ignore[attr-defined]
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)

from mmpos.integrations.models import MODEL_TYPES, UNSUPPORTED_TYPES

GOLDEN = Path(__file__).parents[1] / "golden" / "model_names.json"
MODELS = Path(transformers.__file__).parent / "models"


def names() -> dict[str, list[str]]:
    """Return the class and, if one is known, the checkpoint of each supported or refused model type."""
    documented, mentioned = {}, {}
    for model, config in CONFIG_MAPPING_NAMES.items():
        files = sorted((MODELS / model_type_to_module_name(model)).glob("*.py"))
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        documented[model] = set(re.findall(rf'checkpoint="([^"]+)"\)\s(?:@\w+\s)*class {config}\b', text))
        mentioned[model] = documented[model] | set(re.findall(r'from_pretrained\(\s*"([\w.-]+/[\w.-]+)"', text))

    def owner(checkpoint: str) -> str:
        return max((m for m in mentioned if checkpoint in mentioned[m]), key=lambda m: _similarity(m, checkpoint))

    organisations = {checkpoint.partition("/")[0] for checkpoint in set().union(*documented.values())}
    known = {}
    for model in (*MODEL_TYPES, *UNSUPPORTED_TYPES):
        if model not in CONFIG_MAPPING_NAMES:
            continue
        own = [checkpoint for checkpoint in mentioned[model] if owner(checkpoint) == model]
        own = [checkpoint for checkpoint in own if checkpoint in documented[model]] or [
            checkpoint
            for checkpoint in own
            if checkpoint.partition("/")[0] in organisations and _similarity(model, checkpoint)[0] == 1
        ]
        known[model] = [CONFIG_MAPPING_NAMES[model].removesuffix("Config").rstrip("_")]
        known[model] += [max(own, key=lambda c: (_similarity(model, c), c)).partition("/")[2]] if own else []
    return known


def _similarity(model: str, checkpoint: str) -> tuple[float, int]:
    """Return the share of a type's name that the checkpoint repeats in order, and minus the difference in length."""
    model, name = (re.sub(r"[\W_]", "", text.lower()) for text in (model, checkpoint.partition("/")[2]))
    blocks = SequenceMatcher(None, model, name, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(model), -abs(len(name) - len(model))


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(names(), indent=0) + "\n", encoding="utf-8")
