"""Probe Transformers models while they run: correct models raise no alarm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from probe_configs import GEMMA3, GLM, QWEN

import mmpos
from mmpos.analysis.probe import check, identify, read, write_checkpoint
from mmpos.analysis.probe import transformers as keys_of
from mmpos.analysis.probe.checkpoint import FAMILIES
from mmpos.integrations.hf import patch
from mmpos.integrations.models import ModelSettings
from mmpos.positions.table import PositionTable
from mmpos.rotary import Rotary
from mmpos.segments import SegmentTable

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from cache_name import CACHE  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

TEXT: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 1280,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "bos_token_id": 300,
    "eos_token_id": None,
}


def sections(*sizes: int, theta: float = 1e6, **rest: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": list(sizes), **rest}
    return {"text_config": {**TEXT, "rope_parameters": rope}}


CONFIGS: Mapping[str, dict[str, Any]] = {
    "qwen2_vl": {**sections(16, 24, 24), **QWEN},
    "qwen2_5_vl": {**sections(16, 24, 24), **QWEN},
    "qwen3_vl": {**sections(24, 20, 20, theta=5e6), **QWEN},
    "qwen3_5": {**sections(11, 11, 10, theta=1e7, partial_rotary_factor=0.5), **QWEN},
    "glm4v": {**sections(8, 12, 12, partial_rotary_factor=0.5), **GLM},
    "glm_ocr": {**sections(16, 24, 24), **GLM},
    "ernie4_5_vl_moe": {**sections(22, 22, 20, theta=5e5), **GLM},
    "paddleocr_vl": {**sections(16, 24, 24, theta=5e5), **QWEN},
    "gemma3": {"text_config": {**TEXT, "layer_types": ["sliding_attention", "full_attention"] * 2}, **GEMMA3},
    "mistral3": {"text_config": {"model_type": "mistral", **TEXT}, "image_token_index": 500},
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
        "image_token_index": 500,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {"model_type": "internvl_vision", "image_size": [112, 112], "patch_size": [14, 14]},
        "image_token_id": 555,
        "image_seq_length": 16,
    },
    "phi3": {**TEXT, "pad_token_id": 302},
}
VIDEOS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm_ocr")
QUICK = ("qwen3_vl", "gemma3")
"""The models of the fast tests."""


PATCHED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paddleocr_vl", "gemma3", "mistral3", "llava", "internvl", "phi3")
"""The models whose language model ``patch`` supports."""
WAYS = [
    pytest.param(name, way, marks=() if name in QUICK and way in ("sdpa", "patched") else pytest.mark.slow)
    for name in CONFIGS
    for way in ("eager", "sdpa", "static", *(["patched"] if name in PATCHED else []))
]
CASTS = ("float32", "bfloat16", "float8_e4m3fn")


class Model(NamedTuple):
    network: Any
    processor: Any
    config: dict[str, Any]


@cache
def model_of(name: str, dtype: str = "float32") -> Model:
    """Build a model with random weights, and its processor."""
    with TemporaryDirectory() as folder:
        write_checkpoint(transformers.CONFIG_MAPPING[name](**CONFIGS[name]).to_dict(), folder)
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = transformers.AutoProcessor if "text_config" in CONFIGS[name] else transformers.AutoTokenizer
        processor = kind.from_pretrained(folder)
    torch.manual_seed(1)
    auto = (
        transformers.AutoModelForMultimodalLM if "text_config" in CONFIGS[name] else transformers.AutoModelForCausalLM
    )
    network = auto.from_config(config, dtype=getattr(torch, dtype)).eval()
    return Model(network, processor, config.to_dict())


def prompt(name: str, *texts: str) -> dict[str, Any]:
    """Return the inputs of a batch, with random pixels for every {image} and {video}."""
    model = model_of(name)
    family = next(family for family in FAMILIES if re.match(family.types, name))
    rng = np.random.default_rng(0)
    count = {kind: sum(text.count(f"{{{kind}}}") for text in texts) for kind in ("image", "video")}
    filled = [text.format(image=family.image, video=family.video) for text in texts]
    if not hasattr(model.processor, "image_processor"):
        return dict(model.processor(filled, return_tensors="pt", padding=True, padding_side="left"))
    sizes = [(120, 200, 3), (90, 150, 3), (200, 120, 3)]
    media: dict[str, Any] = {}
    if count["image"]:
        images = [rng.integers(0, 256, sizes[i % 3], np.uint8) for i in range(count["image"])]
        media["images"] = [[images.pop() for _ in range(text.count("{image}"))] for text in texts]
    if count["video"]:
        media["videos"] = [rng.integers(0, 256, (8, 96, 128, 3), np.uint8) for i in range(count["video"])]
        media["do_sample_frames"] = False
    return dict(model.processor(text=filled, return_tensors="pt", padding=True, padding_side="left", **media))


class Meant(NamedTuple):
    """The settings of a config, the segments of inputs, and the (batch, seq) mask of tokens that are not padding."""

    settings: ModelSettings
    segments: SegmentTable
    real: npt.NDArray[np.bool_]

    @property
    def table(self) -> PositionTable:
        return self.settings.place(self.segments)


def meant(name: str, inputs: Mapping[str, Any], more: int = 0) -> Meant:
    """Return the positions that the config intends, with ``more`` text tokens at the end."""
    settings = mmpos.from_hf_config(model_of(name).config, layer_type="full_attention" if name == "gemma3" else None)
    tail = ((0, 0), (0, more))
    ids = np.pad(inputs["input_ids"].numpy(), tail, constant_values=5)
    real = np.pad(inputs["attention_mask"].numpy(), tail, constant_values=1) == 1
    grids = [inputs[kind].numpy() if kind in inputs else None for kind in ("image_grid_thw", "video_grid_thw")]
    seconds = inputs.get("second_per_grid_ts")
    times: dict[str, Any] = {} if seconds is None else {"seconds_per_frame": [float(value) for value in seconds]}
    offsets = np.append(0, real.sum(axis=1).cumsum())
    return Meant(settings, settings.segments(ids[real], *grids, cu_seqlens=offsets, **times), real)


def rotary_of(name: str, layer: int) -> Rotary:
    kind = model_of(name).config["text_config"]["layer_types"][layer] if name == "gemma3" else None
    return mmpos.from_hf_config(model_of(name).config, layer_type=kind).rotary


def assert_calm(name: str, layers: Any, want: Meant, casts: tuple[str, ...] = ("float32",)) -> None:
    """Check that every layer has the intended positions, and that no note blames its rotation."""
    for layer in layers:
        rotary = rotary_of(name, layer.layer)
        for cast in casts:
            keys = torch.tensor(layer.keys[want.real]).to(getattr(torch, cast))
            for reference in (None,) if layer.reference is None else (None, layer.reference):
                reading = read(keys, rotary, reference=reference)
                diagnosis = check(reading, want.segments, want.settings.scheme, want.settings.start)
                assert diagnosis.equal, (layer.layer, cast, str(diagnosis))
                assert cast != "float32" or reading.known.all(), (layer.layer, reading.notes)
                assert not [note for note in reading.notes if re.search(ALARM, note)], reading.notes
                identification = identify(keys, rotary, want.table, reference=reference)
                assert identification.as_meant, (layer.layer, cast, str(identification))
            assert identify(keys, rotary).as_meant


ALARM = "another rotary|are rotated|times as long|of other lengths|abandoned"
"""Words in the notes about wrong rotations."""


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_correct_model_raises_no_alarm(name: str, way: str) -> None:
    network = model_of(name).network
    text = "A {image} and{image}. 7" if "text_config" in CONFIGS[name] else "A and b"
    inputs = prompt(name, text)
    width = inputs["input_ids"].shape[1]
    want, later = meant(name, inputs, 4), [{"input_ids": torch.full((1, more), 5)} for more in (2, 1, 1)]
    if way == "patched":
        network, table = deepcopy(network).get_decoder(), want.table
        patch(network, patched_by(name), implementation="reference")
        stops = np.cumsum([width, 2, 1, 1])
        calls = [{"input_ids": inputs["input_ids"]}, *later]
        for call, start, stop in zip(calls, [0, *stops], stops, strict=False):
            call["mm_position_ids"] = table.slice(start, stop)
        assert_calm(name, keys_of(network, *calls), want, CASTS)
        return
    network.set_attn_implementation("eager" if way == "eager" else "sdpa")
    if way == "static":
        own = transformers.StaticCache(config=network.config.get_text_config(), max_cache_len=width + 8)
        assert_calm(name, keys_of(network, {**inputs, CACHE: own}, *later), want, CASTS)
        return
    if way == "eager":  # only the attention function differs, so one prompt is enough
        assert_calm(name, keys_of(network, inputs, *later), want)
        return
    assert_calm(name, keys_of(network, inputs, *later), want, CASTS)
    if name in VIDEOS:
        inputs = prompt(name, "See {video} now")
        assert_calm(name, keys_of(network, inputs, generate=3), meant(name, inputs, 2))
    padded = prompt(name, text, f"Longer, and {text}")
    assert_calm(name, keys_of(network, padded, generate=3), meant(name, padded, 2))
    packed, want = packed_row(name, padded)
    assert_calm(name, keys_of(network, packed), want)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_a_bfloat16_model_raises_no_alarm(name: str) -> None:
    inputs = prompt(name, "A {image} and{image}. 7" if "text_config" in CONFIGS[name] else "A and b")
    narrow = {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}
    layers = keys_of(model_of(name, "bfloat16").network, narrow, generate=4)
    for layer in layers:
        rotary, want = rotary_of(name, layer.layer), meant(name, inputs, 3)
        reading = read(layer.keys[0], rotary)
        assert check(reading, want.segments, want.settings.scheme).equal
        assert not [note for note in reading.notes if re.search(ALARM, note)], reading.notes
        assert identify(layer.keys[0], rotary, want.table).as_meant


def patched_by(name: str) -> Any:
    """Return the rotary for ``patch``, or one rotary for each type of layer."""
    if name != "gemma3":
        return rotary_of(name, 0)
    types = model_of(name).config["text_config"]["layer_types"]
    return {kind: rotary_of(name, layer) for layer, kind in enumerate(types)}


def packed_row(name: str, padded: Mapping[str, Any]) -> tuple[dict[str, Any], Meant]:
    """Pack the rows of a padded batch into one, with their position_ids."""
    want = meant(name, padded)
    real, ids = torch.tensor(want.real), torch.tensor(want.table.dense().astype(np.int64))
    row = {key: value[real][None] if value.shape[:2] == real.shape else value for key, value in padded.items()}
    del row["attention_mask"]
    row["position_ids"] = ids if len(ids) == 1 else ids[:, None]
    return row, want._replace(real=np.ones((1, ids.shape[1]), np.bool_))
