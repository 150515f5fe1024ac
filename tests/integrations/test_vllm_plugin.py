"""The vLLM plugin, tested with a stand-in for vLLM: configs, registration, weights and refusals."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm_stand_in
from refusals import assert_refused
from test_vllm import CONFIG, ids, image, span
from tolerance import EXACT, assert_within

import mmpos
import mmpos.integrations.vllm
from mmpos import MmposError, UnsupportedError
from mmpos.integrations.sections import Sections
from mmpos.integrations.vllm import ServedModel
from mmpos.rotary import Rotary

SPLIT = {**CONFIG, "mmpos": {"scheme": "rope-tie", "allocation": "split"}}
PERMUTED = {**CONFIG, "mmpos": {"scheme": "rope-tie", "permuted": True}}


def test_a_served_model_is_read_from_a_config() -> None:
    served = ServedModel.from_config(CONFIG, max_model_len=100)
    assert served == ServedModel(mmpos.schemes.RopeTie(), Sections(Rotary(16), 300, permuted=True), 2, permute=True)
    other = {**CONFIG, "mmpos": {"scheme": "naive-2d", "allocation": "split", "precision": "hf"}}
    rotary = Rotary(16, allocation="split", precision="hf")
    assert ServedModel.from_config(other, 7) == ServedModel(mmpos.schemes.Naive2D(), Sections(rotary, 21), 2)
    text = {key: CONFIG[key] for key in ("hidden_size", "num_attention_heads", "rope_theta", "rope_scaling")}
    nested = {key: value for key, value in CONFIG.items() if key not in text}
    qwen3 = {**nested, "model_type": "qwen3_vl", "text_config": {**text, "head_dim": 16}}  # the default is 128
    assert ServedModel.from_config(qwen3, 100) == served
    ready = ServedModel.from_config(PERMUTED, 7)
    assert ready == ServedModel(mmpos.schemes.RopeTie(), Sections(Rotary(16), 21, permuted=True), 2, permute=False)


def test_a_served_model_checks_its_arguments() -> None:
    tie, permuted = mmpos.schemes.RopeTie(), Sections(Rotary(16), 300, permuted=True)
    assert ServedModel("rope-tie", permuted, 2) == ServedModel(tie, permuted, 2)  # type: ignore[arg-type]
    split = Sections(Rotary(16, allocation="split"), 300)
    for arguments, message in (
        ((tie, None, 2), "sections: got NoneType, want a Sections"),
        ((tie, permuted, 0), "spatial_merge_size: got 0, want >= 1"),
        ((tie, permuted, 2, 1), "permute: got 1, want True or False"),
        ((tie, split, 2, True), "permute: got True, want False for sections that are not permuted"),
    ):
        assert_refused(message, partial(ServedModel, *arguments))


def rope(**values: object) -> dict[str, Any]:
    return {"rope_scaling": {"type": "mrope", **values}}


SECTION = "rope_parameters.mrope_section: got"
OF_MMPOS: dict[str, dict[str, Any] | None] = {
    "config.mmpos: got None, want a mapping with scheme": None,
    "config.mmpos: got {}, want a mapping with scheme": {},
    "config.mmpos: got 'axes', want one of": {"scheme": "rope-tie", "axes": 2},
    "scheme: got 'rope-ti', want": {"scheme": "rope-ti"},
    "config.mmpos.allocation: got 'axial', want": {"scheme": "rope-tie", "allocation": "axial"},
    "precision: got 'fp16', want": {"scheme": "rope-tie", "precision": "fp16"},
    "config.mmpos.permuted: got 1, want True or False": {"scheme": "rope-tie", "permuted": 1},
    "config.mmpos.permuted: got True for allocation 'split'": {**SPLIT["mmpos"], "permuted": True},
    "scheme: got 'mrope' with 3 axes, want two axes": {"scheme": "mrope"},
    "positions: got scheme 'rope-tie-v2', whose ids may be fractions": {"scheme": "rope-tie-v2"},
    "next_positions: got document 0 of rows": {"scheme": "rows"},
    "documents[0][0]: got text, want": {"scheme": "grid-2d"},
}
CHANGES: dict[str, dict[str, Any]] = {
    **{message: {"mmpos": options} for message, options in OF_MMPOS.items()},
    f"{SECTION} [2, 3, 3], want [0, 4, 4]": rope(mrope_section=[2, 3, 3]),
    f"{SECTION} None, want [0, 4, 4]": rope(),
    "rope_parameters.mrope_interleaved: got True": rope(mrope_section=[0, 4, 4], mrope_interleaved=True),
    "config.vision_config.spatial_merge_size: got None": {"vision_config": {}},
    "config.vision_config.spatial_merge_size: got None, want": {"vision_config": None},
}


@pytest.mark.parametrize("message", CHANGES)
def test_the_error_for_an_unservable_config_names_the_field(message: str) -> None:
    changed = {**CONFIG, **CHANGES[message]}
    assert_refused(message, lambda: ServedModel.from_config(changed, max_model_len=100), MmposError)


def test_importing_the_package_and_its_plugin_does_not_import_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith("mmpos.integrations.vllm") or name.split(".")[0] == "vllm"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)  # makes every import of vllm fail
    assert importlib.import_module("mmpos.integrations.vllm.plugin").ARCHITECTURES
    with pytest.raises(ImportError, match="vllm"):
        importlib.import_module("mmpos.integrations.vllm.models")


def test_vllm_finds_the_entry_point_and_can_call_it_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = vllm_stand_in.install(monkeypatch)
    (entry,) = entry_points(group="vllm.general_plugins", name="mmpos")
    register = entry.load()
    register()
    once = dict(registry.models)
    register()
    assert registry.models == once
    assert len(once) == 3
    for architecture, path in once.items():
        module, name = path.split(":")
        assert architecture.startswith("MMPos")
        assert isinstance(getattr(importlib.import_module(module), name), type)


def vllm_config(**more: Any) -> Any:
    multimodal = SimpleNamespace(
        is_multimodal_pruning_enabled=lambda: more.get("pruning", False), enable_mm_embeds=more.get("embeds", False)
    )
    model = SimpleNamespace(hf_config=more.get("config", CONFIG), max_model_len=100, multimodal_config=multimodal)
    fields = dict.fromkeys(("speculative_config", "lora_config", "quant_config"))
    return SimpleNamespace(model_config=model, **{key: more.get(key, value) for key, value in fields.items()})


@pytest.fixture(params=["PlacedQwen2VL", "PlacedQwen25VL", "PlacedQwen3VL"])
def model_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    vllm_stand_in.install(monkeypatch)
    return getattr(importlib.import_module("mmpos.integrations.vllm.models"), request.param)


def test_a_served_model_returns_the_ids_of_its_scheme(model_class: Any) -> None:
    model = model_class(vllm_config=vllm_config(), prefix="p")
    assert model.prefix == "p"
    rows, delta = model.get_mrope_input_positions([0] * 11, [image(3, 2, 3)])
    assert (rows.tolist(), delta) == ids(11, [image(3, 2, 3)])
    adjacent = [image(1, 1, 2), image(3, 1, 2)]
    assert model.get_mrope_input_positions([0] * 9, adjacent)[1] == ids(9, adjacent, strict=False)[1]


def test_a_served_model_loads_weights_in_the_order_of_its_sections(model_class: Any) -> None:
    def weights() -> Any:
        for part in "qkv":
            yield f"model.layers.0.self_attn.{part}_proj.weight", torch.arange(16)[:, None].float()
        yield "model.visual.blocks.0.attn.q_proj.weight", torch.arange(16)[:, None].float()

    plain = [float(i) for i in range(16)]
    permuted = [float(i) for i in (0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)]
    loaded = model_class(vllm_config=vllm_config()).load_weights(weights())
    assert [rows.flatten().tolist() for rows in loaded.values()] == [permuted, permuted, plain, plain]
    for config in (SPLIT, PERMUTED):
        loaded = model_class(vllm_config=vllm_config(config=config)).load_weights(weights())
        assert [rows.flatten().tolist() for rows in loaded.values()] == [plain] * 4


def test_a_served_model_has_its_own_cache_in_the_order_of_its_sections(model_class: Any) -> None:
    model = model_class(vllm_config=vllm_config())
    first, second = (layer.rotary_emb for layer in model.language_model)
    assert first is second
    assert first is not vllm_stand_in.Model.shared
    assert not vllm_stand_in.Model.shared.cos_sin_cache.any()
    assert first.cos_sin_cache.shape == (300, 16)
    frequencies = np.array([10000.0 ** (-j / 8) for j in (0, 2, 4, 6, 1, 3, 5, 7)])
    angles = np.arange(300)[:, None] * frequencies
    want = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    assert_within(first.cos_sin_cache, want, EXACT)


def test_the_cache_of_a_bfloat16_model_is_rounded_once(model_class: Any) -> None:
    exact = model_class(vllm_config=vllm_config()).language_model[0].rotary_emb.cos_sin_cache
    torch.set_default_dtype(torch.bfloat16)  # vLLM does this while it constructs a model
    try:
        cache = model_class(vllm_config=vllm_config()).language_model[0].rotary_emb.cos_sin_cache
    finally:
        torch.set_default_dtype(torch.float32)
    assert cache.dtype == torch.bfloat16
    assert torch.equal(cache, exact.to(torch.bfloat16))


@pytest.mark.parametrize(("field", "value"), [("head_size", 32), ("rotary_dim", 8), ("is_neox_style", False)])
def test_a_different_rotation_is_refused(
    model_class: Any, field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_stand_in.Model.shared, field, value)
    message = f"MRotaryEmbedding.{field}: got {value}, want an MRotaryEmbedding with"
    assert_refused(message, lambda: model_class(vllm_config=vllm_config()), UnsupportedError)
    other = SimpleNamespace(head_size=16, rotary_dim=16, is_neox_style=True)
    monkeypatch.setattr(vllm_stand_in.Model, "shared", other)
    message = "SimpleNamespace.head_size: got 16, want an MRotaryEmbedding with 16"
    assert_refused(message, lambda: model_class(vllm_config=vllm_config()), UnsupportedError)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("speculative_config.method: got 'mtp', want ngram", {"speculative_config": SimpleNamespace(method="mtp")}),
        ("enable_mm_embeds: got True, want False", {"embeds": True}),
        ("multimodal pruning: got enabled", {"pruning": True}),
        ("lora_config: got one, want none, or a permuted", {"lora_config": SimpleNamespace()}),
        ("quant_config: got SimpleNamespace, want none", {"quant_config": SimpleNamespace()}),
    ],
)  # fmt: skip
def test_unservable_engine_configs_are_refused(model_class: Any, change: Any, message: str) -> None:
    assert_refused(message, lambda: model_class(vllm_config=vllm_config(**change)), UnsupportedError)


def test_harmless_engine_configs_are_accepted(model_class: Any) -> None:
    model_class(vllm_config=vllm_config(speculative_config=SimpleNamespace(method="ngram")))
    for config in (SPLIT, PERMUTED):
        model_class(vllm_config=vllm_config(config=config, lora_config=object(), quant_config=object()))


def test_videos_and_adjacent_images_are_refused_when_a_request_arrives(model_class: Any) -> None:
    processor, info, _ = model_class.factories
    known = info(SimpleNamespace(mmpos={"scheme": "rope-tie"}))
    plain = processor(info(SimpleNamespace()))
    assert_refused("config.mmpos: got None, want a mapping with scheme", lambda: plain.apply({}, "timing"))
    assert known.get_supported_mm_limits() == {"image": None, "video": 0}
    apart = {"image": [span(1, 4), span(6, 1)]}
    assert processor(known).apply(apart, "timing") == {"mm_placeholders": apart, "timing": "timing"}
    adjacent = {"image": [span(1, 4), span(5, 1)]}
    assert_refused("mm_placeholders: got an image at", lambda: processor(known).apply(adjacent, "timing"))
