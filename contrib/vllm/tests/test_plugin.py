"""The vLLM plugin without vLLM: configs, registration and refusals."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from mmpos_vllm import Sections, ServedModel
from mmpos_vllm.plugin import ARCHITECTURES, register
from mmpos_vllm.served_model import IDS_PER_TOKEN, check_engine

import mmpos
from mmpos import Grid, MmposError, SegmentTable, UnsupportedError
from mmpos.rotary import Rotary
from mmpos.schemes import Naive2D, RopeTie

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [0, 4, 4]},
    "vision_config": {"spatial_merge_size": 2},
    "mmpos": {"scheme": "rope-tie"},
}


def test_a_served_model_is_read_from_a_config() -> None:
    served = ServedModel.from_config(CONFIG, max_model_len=100)
    assert served == ServedModel(RopeTie(), Sections(Rotary(16), 300, permuted=True), 2, permute=True)
    other = {**CONFIG, "mmpos": {"scheme": "naive-2d", "allocation": "split", "precision": "hf"}}
    rotary = Rotary(16, allocation="split", precision="hf")
    assert ServedModel.from_config(other, 7) == ServedModel(Naive2D(), Sections(rotary, 21), 2)
    text = {key: CONFIG[key] for key in ("hidden_size", "num_attention_heads", "rope_theta", "rope_scaling")}
    nested = {key: value for key, value in CONFIG.items() if key not in text}
    qwen3 = {**nested, "model_type": "qwen3_vl", "text_config": {**text, "head_dim": 16}}  # the default is 128
    assert ServedModel.from_config(qwen3, 100) == served
    ready = ServedModel.from_config({**CONFIG, "mmpos": {"scheme": "rope-tie", "permuted": True}}, 7)
    assert ready == ServedModel(RopeTie(), Sections(Rotary(16), 21, permuted=True), 2, permute=False)


SECTION = "rope_parameters.mrope_section: got"
OF_MMPOS: dict[str, dict[str, Any] | None] = {
    "config.mmpos: got None, want a mapping with scheme": None,
    "config.mmpos: got {}, want a mapping with scheme": {},
    "config.mmpos: got 'axes', want one of": {"scheme": "rope-tie", "axes": 2},
    "scheme: got 'rope-ti' (did you mean 'rope-tie'?), want": {"scheme": "rope-ti"},
    "config.mmpos.allocation: got 'axial', want": {"scheme": "rope-tie", "allocation": "axial"},
    "precision: got 'fp16', want": {"scheme": "rope-tie", "precision": "fp16"},
    "config.mmpos.permuted: got 1, want True or False": {"scheme": "rope-tie", "permuted": 1},
    "config.mmpos.permuted: got True for allo": {"scheme": "rope-tie", "allocation": "split", "permuted": True},
    "scheme: got 'mrope' with 3 axes, want two axes": {"scheme": "mrope"},
    "positions: got scheme 'rope-tie-v2', whose ids may be fractions": {"scheme": "rope-tie-v2"},
    "next_positions: got document 0 of rows": {"scheme": "rows"},
    "documents[0][0]: got text, want": {"scheme": "grid-2d"},
}
CHANGES: dict[str, dict[str, Any]] = {
    **{message: {"mmpos": options} for message, options in OF_MMPOS.items()},
    f"{SECTION} [2, 3, 3], want [0, 4, 4]": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    f"{SECTION} None, want [0, 4, 4]": {"rope_scaling": {"type": "mrope"}},
    "rope_parameters.mrope_interleaved: got True": {
        "rope_scaling": {"type": "mrope", "mrope_section": [0, 4, 4], "mrope_interleaved": True}
    },
    "config.vision_config.spatial_merge_size: got None": {"vision_config": {}},
    "config.vision_config.spatial_merge_size: got None, want": {"vision_config": None},
}


@pytest.mark.parametrize("message", CHANGES)
def test_the_error_for_an_unservable_config_names_the_field(message: str) -> None:
    changed = {**CONFIG, **CHANGES[message]}
    with pytest.raises(MmposError, match=f"^{re.escape(message)}"):
        ServedModel.from_config(changed, max_model_len=100)


def test_an_image_consumes_at_most_three_ids_per_token() -> None:
    sizes = [(h, w) for h in range(1, 41) for w in range(1, 41)] + [(1, 4096), (4096, 1), (2, 999)]
    documents = SegmentTable.from_documents([[Grid(h, w)] for h, w in sizes])
    for scheme, most in (("naive-2d", 1), ("rope-tie", 3), ("rope-tie-lcm", 1)):
        consumed = mmpos.place(documents, scheme).next_positions
        assert (consumed <= [IDS_PER_TOKEN * h * w for h, w in sizes]).all()
        assert consumed[0] == most


def test_importing_the_plugin_does_not_import_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("mmpos_vllm", "vllm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)  # makes every import of vllm fail
    assert importlib.import_module("mmpos_vllm.plugin").ARCHITECTURES
    with pytest.raises(ImportError, match="vllm"):
        importlib.import_module("mmpos_vllm.models")


def test_vllm_finds_the_entry_point_and_can_call_it_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    models: dict[str, str] = {}
    registry = SimpleNamespace(register_model=models.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    (entry,) = entry_points(group="vllm.general_plugins", name="mmpos")
    assert entry.load() is register
    register()
    register()
    assert models == ARCHITECTURES
    assert all(name.startswith("MMPos") and find_spec(path.split(":")[0]) for name, path in models.items())


def vllm_config(pruning: bool = False, embeds: bool = False, **more: object) -> Any:
    """Return the fields of a vLLM config that are checked."""
    multimodal = SimpleNamespace(is_multimodal_pruning_enabled=lambda: pruning, enable_mm_embeds=embeds)
    fields = {"speculative_config": None, "lora_config": None, "quant_config": None, **more}
    return SimpleNamespace(model_config=SimpleNamespace(multimodal_config=multimodal), **fields)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("speculative_config.method: got 'mtp', want ngram", {"speculative_config": SimpleNamespace(method="mtp")}),
        ("enable_mm_embeds: got True, want False", {"embeds": True}),
        ("multimodal pruning: got enabled", {"pruning": True}),
        ("lora_config: got one, want none, or a permuted", {"lora_config": SimpleNamespace()}),
        ("quant_config: got SimpleNamespace, want none", {"quant_config": SimpleNamespace()}),
    ],
)
def test_unservable_engine_configs_are_refused(change: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}"):
        check_engine(vllm_config(**change), permute=True)


def test_harmless_engine_configs_are_accepted() -> None:
    check_engine(vllm_config(speculative_config=SimpleNamespace(method="ngram")), permute=True)
    check_engine(vllm_config(lora_config=object(), quant_config=object()), permute=False)
