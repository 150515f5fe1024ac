"""Ids of vLLM's requests, its slicing of them restated, and the plugin, with a stand-in where vLLM is not installed."""

from __future__ import annotations

import importlib
import random
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm_stand_in

import mmpos
import mmpos.vllm
from mmpos import Grid, InvalidInputError, LimitExceededError, SegmentTable, Text, UnsupportedError, place
from mmpos.consuming import ids_consumed
from mmpos.rotary import Rotary
from mmpos.vllm import Sections, ServedModel, check_apart, mrope_input_positions, request_segments, window_positions
from mmpos.vllm.settings import IDS_PER_TOKEN

TWO = Sections(Rotary(16), max_position=4096, permuted=True)
THREE = Sections(Rotary(32, allocation="sections", mrope_section=[4, 6, 6]), max_position=4096)
CONFIG: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [0, 4, 4]},
    "vision_config": {"spatial_merge_size": 2},
    "mmpos": {"scheme": "rope-tie"},
}


def feature(modality: str, offset: int, length: int, mask: list[int] | None = None, **data: Any) -> Any:
    """The fields of vLLM's MultiModalFeatureSpec that are read."""
    is_embed = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    return SimpleNamespace(
        modality=modality,
        data={key: SimpleNamespace(data=torch.tensor(value)) for key, value in data.items()},
        mm_position=SimpleNamespace(offset=offset, length=length, is_embed=is_embed),
    )


def image(offset: int, height: int, width: int) -> Any:
    """An image of so many tokens a side, which were twice as many patches."""
    return feature("image", offset, height * width, image_grid_thw=[1, 2 * height, 2 * width])


def ids(tokens: int, features: list[Any], scheme: Any = "rope-tie", **more: Any) -> tuple[list[list[int]], int]:
    sections = THREE if mmpos.schemes.get_scheme(scheme).axes == 3 else TWO
    found, delta = mrope_input_positions(
        [0] * tokens, features, scheme=scheme, sections=sections, spatial_merge_size=2, **more
    )
    assert found.dtype == torch.int64
    return found.tolist(), delta


def test_an_image_is_placed_by_its_span_and_grid() -> None:
    rows = [0, 1, 2, 6, 6, 6, 10, 10, 10, 14, 15]
    assert ids(11, [image(3, 2, 3)]) == ([rows, rows, [0, 1, 2, 5, 8, 11, 5, 8, 11, 14, 15]], 5)


def test_text_alone_and_embeddings_of_prompts_have_the_ids_of_text() -> None:
    assert ids(4, []) == ([[0, 1, 2, 3]] * 3, 0)
    assert ids(4, [feature("prompt_embeds", 1, 2)]) == ([[0, 1, 2, 3]] * 3, 0)


def drawn(draw: random.Random) -> tuple[list[Text | Grid], list[Any]]:
    """A document, and the features of the same request in any order."""
    document: list[Text | Grid] = [Text(draw.randint(1, 5))]
    features, tokens = [], document[0].length  # type: ignore[union-attr]
    for _ in range(draw.randint(0, 4)):
        grid, text = Grid(draw.randint(1, 5), draw.randint(1, 5)), Text(draw.randint(1, 4))
        features.append(image(tokens, grid.height, grid.width))
        document += [grid, text]
        tokens += grid.height * grid.width + text.length
    draw.shuffle(features)
    return document, features


def test_requests_have_the_ids_of_their_documents_whatever_the_order_of_features() -> None:
    draw = random.Random(2)
    for _ in range(100):
        document, features = drawn(draw)
        want = place(SegmentTable.from_documents([document]), "rope-tie")
        got = ids(want.num_tokens, features)
        assert got == (want.dense(axes=(0, 0, 1)).tolist(), int(want.deltas[0]))


def test_vllms_steps_of_a_request_are_windows_of_its_table() -> None:
    """Inside the prompt vLLM slices, after it adds delta to the index of the token, be it generated or a draft."""
    draw = random.Random(4)
    for _ in range(100):
        document, features = drawn(draw)
        table = place(SegmentTable.from_documents([document]), "rope-tie")
        tokens = table.num_tokens
        prompt, delta = mrope_input_positions(
            [0] * tokens, features, scheme="rope-tie", sections=TWO, spatial_merge_size=2
        )
        computed, scheduled = draw.randint(0, tokens + 5), draw.randint(1, tokens + 5)
        after = torch.arange(max(computed, tokens), max(computed + scheduled, tokens)) + delta
        step = torch.cat([prompt[:, computed : computed + scheduled], after.expand(3, -1)], dim=1)
        assert step.tolist() == window_positions(table, TWO, [0], [computed], [scheduled]).tolist()


def test_frames_among_timestamps_are_grids_of_their_own() -> None:
    frame = [0, 0, 1, 1, 0]  # timestamp, marker, two patches, marker
    video = feature("video", 2, 10, frame * 2, video_grid_thw=[2, 2, 4])
    table = request_segments(13, [video], spatial_merge_size=2)
    document: list[Text | Grid] = [Text(4), Grid(1, 2), Text(3), Grid(1, 2), Text(2)]
    assert table.extents.tolist() == SegmentTable.from_documents([document]).extents.tolist()


def test_seconds_per_grid_place_the_frames_of_a_whole_video() -> None:
    video = feature("video", 1, 3, video_grid_thw=[3, 2, 2], second_per_grid_ts=1.5)
    frames = ids(5, [video], mmpos.schemes.MRopeQwen25(2))[0][0]
    assert frames == [0, 1, 4, 7, 8]


def test_rows_that_end_in_a_token_of_their_own_have_separators() -> None:
    row = [1, 1, 1, 0]
    separated = feature("image", 2, 8, row * 2, image_grid_thw=[1, 4, 6])
    table = request_segments(12, [separated], spatial_merge_size=2)
    want = SegmentTable.from_documents([[Text(2), Grid(2, 3, row_separator=True), Text(2)]])
    assert table.extents.tolist() == want.extents.tolist()
    assert table.row_separator is not None
    assert table.row_separator.tolist() == [False, True, False]
    with pytest.raises(
        UnsupportedError, match=r"mm_features\[1\]: got no row separators, want them as in mm_features\[0\]"
    ):
        request_segments(16, [separated, image(11, 1, 2)], spatial_merge_size=2)


def test_a_mask_of_one_run_is_the_whole_grid() -> None:
    marked = feature("image", 2, 8, [0, 1, 1, 1, 1, 1, 1, 0], image_grid_thw=[1, 4, 6])
    want = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]])
    assert request_segments(11, [marked], spatial_merge_size=2).extents.tolist() == want.extents.tolist()


NO_GRID = SimpleNamespace(modality="image", data=None, mm_position=image(0, 1, 1).mm_position)
REFUSED = [
    ([image(0, 1, 2), feature("image", 4, 5, image_grid_thw=[1, 4, 6])],
     r"mm_features\[1\].mm_position.length: got 5, want 6 for 1x2x3 after merging"),
    ([feature("image", 0, 6, image_grid_thw=[1, 4, 5])],
     r"mm_features\[0\].data: got grid_thw \[1, 4, 5\], want .* multiples of spatial_merge_size 2"),
    ([feature("image", 0, 0, image_grid_thw=[1, 0, 4])], r"mm_features\[0\].data: got grid_thw \[1, 0, 4\], want"),
    ([feature("video", 0, 9, [1, 1, 0, 1, 0, 1, 1, 0, 0], video_grid_thw=[2, 2, 4])],
     r"is_embed: got runs of \[2, 1, 2\] patches, want one of 4 for 2x1x2 after merging, one per frame"),
    ([feature("image", 0, 6, [1, 1, 0, 0, 1, 1], image_grid_thw=[1, 4, 4])], r"is_embed: got runs of \[2, 2\] patches"),
    ([image(2, 2, 2), image(4, 1, 1)], r"offsets\[1\]: got 4 in document 0, want >= 6"),
    ([image(18, 2, 2)], r"offsets\[0\]: the span of 4 tokens ends at 22, want <= 20"),
    ([NO_GRID], r"mm_features\[0\].data: got None .*, want an item with image_grid_thw"),
    ([feature("image", 0, 1, video_grid_thw=[1, 2, 2])], r"got \['video_grid_thw'\], want an item with image_grid_thw"),
    ([feature("image", 0, 1, image_grid_thw=[[1, 2, 2]])], r"grid_thw of mm_features: got shape \(1, 1, 3\)"),
    ([3], r"mm_features\[0\]: got int, want the fields of a MultiModalFeatureSpec"),
]  # fmt: skip


@pytest.mark.parametrize(("features", "message"), REFUSED)
def test_features_that_do_not_fit_are_named(features: list[Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ids(20, features)


def test_what_has_no_place_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"mm_features\[0\].modality: got 'audio', want one of 'image', 'video'"):
        ids(9, [feature("audio", 0, 2)])
    with pytest.raises(UnsupportedError, match=r"rope-tie-fractional.* may be fractions"):
        ids(11, [image(3, 2, 3)], "rope-tie-fractional")
    with pytest.raises(InvalidInputError, match="a grid right after a grid"):
        ids(9, [image(1, 1, 2), image(3, 1, 2)])
    assert ids(9, [image(1, 1, 2), image(3, 1, 2)], strict=False)[1] == 6


def test_a_request_that_could_outrun_the_cache_is_refused_before_it_is_served() -> None:
    sections = Sections(Rotary(16), max_position=20, permuted=True)
    given: dict[str, Any] = {"scheme": "rope-tie", "sections": sections, "spatial_merge_size": 2}
    _, delta = mrope_input_positions([0] * 11, [image(3, 2, 3)], **given, max_new_tokens=4)
    assert delta == 5
    with pytest.raises(LimitExceededError, match=r"documents\[0\]: got cursor 16 and max_new_tokens 5, want .* 20"):
        mrope_input_positions([0] * 11, [image(3, 2, 3)], **given, max_new_tokens=5)


def span(offset: int, length: int) -> Any:
    return SimpleNamespace(offset=offset, length=length)


def test_touching_images_are_refused_by_their_placeholders_alone() -> None:
    apart = {"image": [span(8, 2), span(1, 4)], "video": [span(6, 1)]}
    check_apart(apart, "rope-tie")
    touching = {"image": [span(8, 2), span(1, 4)], "video": [span(5, 1)]}
    with pytest.raises(
        InvalidInputError, match="an image at token 5 right after an image, want text between them in rope-tie"
    ):
        check_apart(touching, "rope-tie")
    check_apart(touching, "naive-2d")


@pytest.mark.parametrize("scheme", ["naive-2d", "rope-tie", "rope-tie-lcm"])
def test_no_image_consumes_more_than_three_ids_per_token(scheme: str) -> None:
    sizes = [(h, w) for h in range(1, 41) for w in range(1, 41)] + [(1, 4096), (4096, 1), (2, 999)]
    consumed = ids_consumed(scheme, [Grid(h, w) for h, w in sizes])
    assert (consumed <= [IDS_PER_TOKEN * h * w for h, w in sizes]).all()
    most = {"naive-2d": 1, "rope-tie": 3, "rope-tie-lcm": 1}[scheme]
    assert consumed[0] == most


def test_the_worst_prompt_of_a_served_model_has_rows_for_all_its_ids() -> None:
    served = ServedModel.from_config(CONFIG, max_model_len=50)
    worst = [image(i, 1, 1) for i in range(50)]
    found, delta = mrope_input_positions(
        [0] * 50, worst, scheme=served.scheme, sections=served.sections, spatial_merge_size=2, strict=False
    )
    assert (int(found.max()), delta) == (148, 100)


def test_a_config_says_how_its_model_is_served() -> None:
    served = ServedModel.from_config(CONFIG, max_model_len=100)
    assert served == ServedModel(mmpos.schemes.RopeTie(), Sections(Rotary(16), 300, permuted=True), 2)
    told = {**CONFIG, "mmpos": {"scheme": "naive-2d", "allocation": "split", "precision": "hf"}}
    rotary = Rotary(16, allocation="split", precision="hf")
    assert ServedModel.from_config(told, 7) == ServedModel(mmpos.schemes.Naive2D(), Sections(rotary, 21), 2)


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": "mrope", **values}}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mmpos": None}, InvalidInputError, "config.mmpos: got None, want a mapping with scheme"),
        ({"mmpos": {}}, InvalidInputError, "config.mmpos: got {}, want a mapping with scheme"),
        ({"mmpos": {"scheme": "rope-tie", "axes": 2}}, InvalidInputError, "config.mmpos: got 'axes', want one of"),
        ({"mmpos": {"scheme": "rope-ti"}}, InvalidInputError, "scheme: got 'rope-ti', want"),
        ({"mmpos": {"scheme": "rope-tie", "allocation": "axial"}}, InvalidInputError, "allocation: got 'axial', want"),
        ({"mmpos": {"scheme": "rope-tie", "precision": "fp16"}}, InvalidInputError, "precision: got 'fp16', want"),
        ({"mmpos": {"scheme": "mrope"}}, UnsupportedError, "scheme: got 'mrope' of 3 axes, want one of two"),
        ({"mmpos": {"scheme": "rope-tie-v2"}}, UnsupportedError, "may be fractions"),
        ({"mmpos": {"scheme": "rows"}}, UnsupportedError, "rows"),
        ({"mmpos": {"scheme": "grid-2d"}}, UnsupportedError, "grid-2d"),
        (rope(mrope_section=[2, 3, 3]), InvalidInputError, r"mrope_section: got \[2, 3, 3\], want \[0, 4, 4\]"),
        (rope(), InvalidInputError, r"mrope_section: got None, want \[0, 4, 4\]"),
        (rope(mrope_section=[0, 4, 4], mrope_interleaved=True), InvalidInputError, "mrope_interleaved: got True"),
        ({"vision_config": {}}, InvalidInputError, "config.vision_config.spatial_merge_size: got None"),
        ({"vision_config": None}, InvalidInputError, "config.vision_config.spatial_merge_size: got None"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_served_are_refused_with_the_field(change: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ServedModel.from_config({**CONFIG, **change}, max_model_len=100)


def test_importing_the_room_and_its_plugin_imports_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("mmpos.vllm") or name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it is an error
    assert importlib.import_module("mmpos.vllm.plugin").ARCHITECTURES
    with pytest.raises(ImportError, match="vllm"):
        importlib.import_module("mmpos.vllm.models")


def test_vllm_finds_the_plugin_and_may_register_it_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = vllm_stand_in.install(monkeypatch)
    (found,) = entry_points(group="vllm.general_plugins", name="mmpos")
    register = found.load()
    register()
    once = dict(registry.models)
    register()
    assert registry.models == once
    assert len(once) == 3
    for architecture, where in once.items():
        module, name = where.split(":")
        assert architecture.startswith("MMPos")
        assert isinstance(getattr(importlib.import_module(module), name), type)


def vllm_config(**more: Any) -> Any:
    pruning = SimpleNamespace(is_multimodal_pruning_enabled=lambda: more.get("pruning", False))
    model = SimpleNamespace(hf_config=more.get("config", CONFIG), max_model_len=100, multimodal_config=pruning)
    fields = dict.fromkeys(("speculative_config", "lora_config", "quant_config"))
    return SimpleNamespace(model_config=model, **{key: more.get(key, value) for key, value in fields.items()})


SPLIT = {**CONFIG, "mmpos": {"scheme": "rope-tie", "allocation": "split"}}


@pytest.fixture(params=["PlacedQwen2VL", "PlacedQwen25VL", "PlacedQwen3VL"])
def model_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    vllm_stand_in.install(monkeypatch)
    return getattr(importlib.import_module("mmpos.vllm.models"), request.param)


def test_a_served_model_has_our_ids(model_class: Any) -> None:
    model = model_class(vllm_config=vllm_config(), prefix="p")
    assert model.prefix == "p"
    found, delta = model.get_mrope_input_positions([0] * 11, [image(3, 2, 3)])
    assert (found.tolist(), delta) == ids(11, [image(3, 2, 3)])
    touching = [image(1, 1, 2), image(3, 1, 2)]
    assert model.get_mrope_input_positions([0] * 9, touching)[1] == ids(9, touching, strict=False)[1]


def test_a_served_model_loads_weights_in_the_order_of_its_sections(model_class: Any) -> None:
    def weights() -> Any:
        for part in "qkv":
            yield f"model.layers.0.self_attn.{part}_proj.weight", torch.arange(16)[:, None].float()
        yield "model.visual.blocks.0.attn.q_proj.weight", torch.arange(16)[:, None].float()

    plain = [float(i) for i in range(16)]
    permuted = [float(i) for i in (0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)]
    loaded = model_class(vllm_config=vllm_config()).load_weights(weights())
    assert [rows.flatten().tolist() for rows in loaded.values()] == [permuted, permuted, plain, plain]
    loaded = model_class(vllm_config=vllm_config(config=SPLIT)).load_weights(weights())
    assert [rows.flatten().tolist() for rows in loaded.values()] == [plain] * 4


def test_a_served_model_has_a_cache_of_its_own_in_the_same_order(model_class: Any) -> None:
    model = model_class(vllm_config=vllm_config())
    first, second = (layer.rotary_emb for layer in model.language_model)
    assert first is second
    assert first is not vllm_stand_in.Model.shared
    assert not vllm_stand_in.Model.shared.cos_sin_cache.any()
    assert first.cos_sin_cache.shape == (300, 16)
    frequencies = np.array([10000.0 ** (-j / 8) for j in (0, 2, 4, 6, 1, 3, 5, 7)])
    angles = np.arange(300)[:, None] * frequencies
    want = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    torch.testing.assert_close(first.cos_sin_cache.double(), torch.from_numpy(want), rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "method: got 'eagle3', want ngram"),
        ({"pruning": True}, "multimodal pruning: got it enabled"),
        ({"lora_config": SimpleNamespace()}, "lora_config: got one, want none"),
        ({"quant_config": SimpleNamespace()}, "quant_config: got SimpleNamespace, want none"),
    ],
)  # fmt: skip
def test_what_would_be_served_wrongly_is_refused_at_the_start(model_class: Any, change: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        model_class(vllm_config=vllm_config(**change))


def test_what_does_no_harm_is_served(model_class: Any) -> None:
    model_class(vllm_config=vllm_config(speculative_config=SimpleNamespace(method="ngram")))
    model_class(vllm_config=vllm_config(config=SPLIT, lora_config=object(), quant_config=object()))


def test_videos_and_touching_images_are_refused_where_requests_come_in(model_class: Any) -> None:
    processor, info, _ = model_class.factories
    known = info(SimpleNamespace(mmpos={"scheme": "rope-tie"}))
    assert known.get_supported_mm_limits() == {"image": None}
    apart = {"image": [span(1, 4), span(6, 1)]}
    assert processor(known).apply(apart, "timing") == {"mm_placeholders": apart, "timing": "timing"}
    with pytest.raises(InvalidInputError, match="right after an image"):
        processor(known).apply({"image": [span(1, 4), span(5, 1)]}, "timing")
