"""Transformers as an engine: probe checkpoints that it runs correctly raise no alarm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from mmpos_probe import check, identify, read, write_checkpoint
from mmpos_probe.checkpoint import CACHES

import mmpos
from mmpos import ModelSettings, PositionTable, SegmentTable
from mmpos.rotary import Rotary

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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
    "dtype": "float32",
}


def sections(*sizes: int, theta: float = 1e6, **rest: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": list(sizes), **rest}
    tokens = {"image_token_id": 555, "video_token_id": 556, "vision_start_token_id": 552, "vision_end_token_id": 553}
    return {"text_config": {**TEXT, "rope_parameters": rope}, "dtype": "float32", **tokens}


CONFIGS: Mapping[str, dict[str, Any]] = {
    "qwen2_vl": sections(16, 24, 24),
    "qwen2_5_vl": sections(16, 24, 24),
    "qwen3_vl": sections(24, 20, 20, theta=5e6),
    "qwen3_5": sections(11, 11, 10, theta=1e7, partial_rotary_factor=0.5),
    "gemma3_text": {**TEXT, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "phi3": {**TEXT, "pad_token_id": 302},
}
QUICK = ("qwen3_vl", "gemma3_text")
"""The models of the fast tests."""

IMAGE, VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
CASTS = ("float32", "bfloat16", "float8_e4m3fn")


class Model(NamedTuple):
    network: Any
    processor: Any
    config: dict[str, Any]
    references: Mapping[str, npt.NDArray[np.float32]]


@cache
def model_of(name: str) -> Model:
    """Load a checkpoint, with its processor and its unrotated keys."""
    with TemporaryDirectory() as folder:
        write_checkpoint(transformers.CONFIG_MAPPING[name](**CONFIGS[name]).to_dict(), folder)
        multimodal = "text_config" in CONFIGS[name]
        auto = transformers.AutoModelForMultimodalLM if multimodal else transformers.AutoModelForCausalLM
        network = auto.from_pretrained(folder).eval()
        processor = (transformers.AutoProcessor if multimodal else transformers.AutoTokenizer).from_pretrained(folder)
        with np.load(f"{folder}/reference.npz") as archive:
            return Model(network, processor, network.config.to_dict(), dict(archive))


def prompt(name: str, *texts: str) -> dict[str, Any]:
    """Return the inputs of a batch, with random pixels for every image and video."""
    processor, rng, media = model_of(name).processor, np.random.default_rng(0), dict[str, Any]()
    if not hasattr(processor, "image_processor"):
        return dict(processor(list(texts), return_tensors="pt", padding=True, padding_side="left"))
    if count := sum(text.count(IMAGE) for text in texts):
        media["images"] = [rng.integers(0, 256, (120 + 30 * i, 200, 3), np.uint8) for i in range(count)]
    if count := sum(text.count(VIDEO) for text in texts):
        media["videos"] = [rng.integers(0, 256, (8, 96, 128, 3), np.uint8) for _ in range(count)]
        media["do_sample_frames"] = False
    return dict(processor(text=list(texts), return_tensors="pt", padding=True, padding_side="left", **media))


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
    kind = "full_attention" if name == "gemma3_text" else None
    settings = mmpos.from_hf_config(model_of(name).config, layer_type=kind)
    tail = ((0, 0), (0, more))
    ids = np.pad(inputs["input_ids"].numpy(), tail, constant_values=5)
    real = np.pad(inputs["attention_mask"].numpy(), tail, constant_values=1) == 1
    grids = [inputs[kind].numpy() if kind in inputs else None for kind in ("image_grid_thw", "video_grid_thw")]
    seconds = inputs.get("second_per_grid_ts")
    times: dict[str, Any] = {} if seconds is None else {"seconds_per_frame": [float(value) for value in seconds]}
    offsets = np.append(0, real.sum(axis=1).cumsum())
    return Meant(settings, settings.segments(ids[real], *grids, cu_seqlens=offsets, **times), real)


def rotary_of(name: str, layer: int) -> Rotary:
    kind = model_of(name).config["layer_types"][layer] if name == "gemma3_text" else None
    return mmpos.from_hf_config(model_of(name).config, layer_type=kind).rotary


ALARM = "another rotary|are rotated|times as long|of other lengths|abandoned"
"""Words in the notes about wrong rotations."""


def cache_of(output: Any) -> dict[str, Any]:
    """Return the cache in an output, by its name."""
    return next({name: output[name]} for name in CACHES if name in output)


def assert_calm(name: str, output: Any, want: Meant, casts: tuple[str, ...] = ("float32",)) -> None:
    """Check that every cached layer has the intended positions, and that no note blames its rotation."""
    (cached,) = cache_of(output).values()
    layers = {
        number: layer.keys for number, layer in enumerate(cached.layers) if getattr(layer, "keys", None) is not None
    }
    assert layers
    assert set(map(str, layers)) == set(model_of(name).references)
    for number, cached_keys in layers.items():
        rotary = rotary_of(name, number)
        for cast in casts:
            keys = cached_keys.transpose(1, 2)[torch.tensor(want.real)].to(getattr(torch, cast))
            for reference in (None, model_of(name).references[str(number)]):
                reading = read(keys, rotary, reference=reference)
                diagnosis = check(reading, want.segments, want.settings.scheme, want.settings.start)
                assert diagnosis.equal, (number, cast, str(diagnosis))
                assert cast != "float32" or reading.known.all(), (number, reading.notes)
                assert not [note for note in reading.notes if re.search(ALARM, note)], reading.notes
                identification = identify(keys, rotary, want.table, reference=reference)
                assert identification.as_meant, (number, cast, str(identification))


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_a_correct_model_raises_no_alarm(name: str) -> None:
    network = model_of(name).network
    text = f"A {IMAGE} and{IMAGE}. 7" if "text_config" in CONFIGS[name] else "A and b"
    inputs = prompt(name, text)
    with torch.no_grad():
        output = network(**inputs, use_cache=True)
        for more in (2, 1, 1):
            output = network(input_ids=torch.full((1, more), 5), **cache_of(output))
    assert_calm(name, output, meant(name, inputs, 4), CASTS)
    padded = prompt(name, text, f"Longer, and {text}")
    assert_calm(name, generated(name, padded), meant(name, padded, 2))
    if "text_config" in CONFIGS[name]:
        inputs = prompt(name, f"See {VIDEO} now")
        assert_calm(name, generated(name, inputs), meant(name, inputs, 2))


def generated(name: str, inputs: Mapping[str, Any]) -> Any:
    """Generate three tokens, and return the output; the last token never passes through forward."""
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    return model_of(name).network.generate(**inputs, **options)
