"""Model folders: config.json and the image processor's file next to it."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from model_configs import LAYER_TYPES, config_of
from refusals import assert_refused
from tolerance import assert_within, normalised

import mmpos
from mmpos.integrations.models import from_hf_config
from mmpos.rotary import Rotary

QWEN3_VL: dict[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "temporal_patch_size": 2,
}
"""preprocessor_config.json as released."""
ARGUMENTS: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "min_pixels": 65536, "max_pixels": 16777216}


def folder_of(tmp_path: Path, model: str, **files: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(config_of(model).to_json_string(use_diff=False))
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    return tmp_path


def test_the_image_processor_of_a_folder_has_the_values_in_its_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen3_vl", preprocessor_config=QWEN3_VL)
    want = mmpos.ImageProcessor(patch_size=16, spatial_merge_size=2, order="merged", **ARGUMENTS)
    for path in (folder, str(folder), folder / "config.json", str(folder / "config.json")):
        assert from_hf_config(path).image_processor() == want
        assert Rotary.from_hf_config(path) == from_hf_config(path).rotary
    assert from_hf_config(folder).image_processor(max_pixels=70000).max_pixels == 70000


QWEN, GLM, GLM46 = "Qwen2VLImageProcessor", "Glm4vImageProcessor", "Glm46VImageProcessor"
CLASSES: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3_vl", QWEN, QWEN3_VL),
    ("qwen3_vl", QWEN, QWEN3_VL | {"min_pixels": 4096, "max_pixels": 10**6}),
    ("qwen3_vl", QWEN, {name: QWEN3_VL[name] for name in ("image_std", "merge_size", "patch_size")}),
    ("qwen2_vl", QWEN, {}),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeImageProcessor", {}),
    ("cohere_compass", "CohereCompassImageProcessor", {"patch_size": 16}),
    ("minimax_m3_vl", "MiniMaxM3VLImageProcessor", {}),
    ("minimax_m3_vl", "MiniMaxM3VLImageProcessor", {"size": [672, 672]}),
    ("paddleocr_vl", "PaddleOCRVLImageProcessor", {}),
    *((model, GLM, {}) for model in ("glm4v", "glm4v_moe")),
    *((model, GLM46, {}) for model in ("glm46v", "glm_ocr")),
]
SIZES = [(3, 500), (27, 28), (1, 1), (200, 9), (5, 17), (700, 13), (28, 28), (20, 11), (4001, 1000)]
SIZES += np.random.default_rng(0).integers(1, 900, (100, 2)).tolist()


@pytest.mark.parametrize(("model", "name", "values"), CLASSES)
def test_values_grids_and_pixels_equal_those_of_the_class(
    tmp_path: Path, model: str, name: str, values: dict[str, Any]
) -> None:
    folder = folder_of(tmp_path, model, preprocessor_config=values | {"image_processor_type": name})
    settings = from_hf_config(folder, layer_type=LAYER_TYPES.get(model))
    ours, theirs = settings.image_processor(), getattr(transformers, name).from_pretrained(folder)
    counted = 2 if name.startswith("Glm") else 1  # the class counts the pixels of all frames in a patch
    assert (ours.mean, ours.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
    assert (ours.patch_size, ours.spatial_merge_size) == (theirs.patch_size, theirs.merge_size)
    limits = [theirs.size[edge] // counted for edge in ("shortest_edge", "longest_edge")]
    assert [ours.min_pixels, ours.max_pixels] == limits
    for height, width in SIZES:
        try:
            want = theirs.get_number_of_image_patches(height, width, {})
        except ValueError:  # one side is over 200 times as long as the other
            with pytest.raises(mmpos.InvalidInputError, match="want a long side <= 200 short sides"):
                ours.grid(height, width)
            continue
        grid = ours.grid(height, width)
        assert grid.height * grid.width * ours.spatial_merge_size**2 == want, (height, width)
    assert settings.image_file is not None
    small: dict[str, Any] = {"size": {"shortest_edge": 2 * 28**2, "longest_edge": 40 * 28**2}}
    less = settings.image_processor(min_pixels=2 * 28**2 // counted, max_pixels=40 * 28**2 // counted)
    for size, (images, options) in itertools.product([(333, 400), (11, 40), (300, 20)], [(ours, {}), (less, small)]):
        photo = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
        got = images.process(photo, temporal_patch_size=settings.image_file.temporal_patch_size or 1)
        pixels = theirs(photo, return_tensors="np", **options)
        merge = images.spatial_merge_size
        assert [[1, merge * got.grid.height, merge * got.grid.width]] == pixels["image_grid_thw"].tolist()
        assert got.patches is not None
        assert_within(got.patches.reshape(-1), pixels["pixel_values"].reshape(-1), normalised(images.mean, images.std))


def test_processor_config_json_takes_precedence_over_preprocessor_config_json(tmp_path: Path) -> None:
    inside = {"image_processor": QWEN3_VL, "processor_class": "Qwen3VLProcessor"}
    other = QWEN3_VL | {"min_pixels": 4096}
    folder = folder_of(tmp_path, "qwen3_vl", processor_config=inside, preprocessor_config=other)
    assert from_hf_config(folder).image_processor().min_pixels == 65536
    folder_of(tmp_path, "qwen3_vl", processor_config={"processor_class": "Qwen3VLProcessor"})
    assert from_hf_config(folder).image_processor().min_pixels == 4096


def test_a_folder_without_image_processor_files_has_the_settings_of_its_config(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen3_vl")
    assert from_hf_config(folder) == from_hf_config(config_of("qwen3_vl"))
    assert Rotary.from_hf_config(folder) == Rotary.from_hf_config(config_of("qwen3_vl"))
    message = (
        "image_processor: got no mean, std, min_pixels, max_pixels, which config.json does not contain, want a folder "
        "with preprocessor_config.json as the config, or these arguments"
    )
    for config in (config_of("qwen3_vl"), folder):
        assert_refused(message, from_hf_config(config).image_processor)
        assert from_hf_config(config).image_processor(**ARGUMENTS).min_pixels == 65536


GLMGA = "image_processor_type: got 'GlmgaImageProcessor', which multiplies the side of a token by patch_expand_factor"
SIGLIP = "image_processor_type: got 'SiglipImageProcessorFast', which is not known to resize as ImageProcessor does"
ODD = {"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 4097, "longest_edge": 10**6}}
REFUSED: dict[str, dict[str, Any]] = {
    GLMGA: {"image_processor_type": "GlmgaImageProcessor"},
    "min_pixels: got 4097, want a multiple of temporal_patch_size=2": ODD,
    SIGLIP: {"image_processor_type": "SiglipImageProcessorFast"},
    "image_processor_type: got none, which is not known": {"image_processor_type": None},
    "do_normalize: got False, want True": {"do_normalize": False},
    "resample: got 2, want 3": {"resample": 2},
    "rescale_factor: got 1.0, want 1 / 255": {"rescale_factor": 1},
    "patch_size: got 14, want 16 as in config.json": {"patch_size": 14},
    "merge_size: got 4, want 2 as in config.json": {"merge_size": 4},
    "temporal_patch_size: got 1, want 2 as in config.json": {"temporal_patch_size": 1},
    "size: got {'shortest_edge': 4096}, want longest_edge, or the field max_pixels": {"size": {"shortest_edge": 4096}},
    "min_pixels: got 1.5, want an integer": {"size": {"shortest_edge": 1.5, "longest_edge": 9}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_unsupported_image_processor_is_refused(tmp_path: Path, message: str) -> None:
    settings = from_hf_config(folder_of(tmp_path, "qwen3_vl", preprocessor_config=QWEN3_VL | REFUSED[message]))
    assert settings.place(settings.segments([1, 2])).next_positions.tolist() == [2]
    assert_refused(f"{tmp_path / 'preprocessor_config.json'}: {message}", settings.image_processor, mmpos.MmposError)
    assert settings.image_processor(**ARGUMENTS).min_pixels == 65536


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{\n"a":1,\nb}', ":3: got no valid JSON (Expecting property name enclosed in double quotes, column 1), want"),
        (b"[]", ": got list, want a JSON object"),
        (b"\xff", ": got no valid JSON ('utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, ": got no valid JSON ("),
    ],
    ids=["syntax", "list", "bytes", "depth"],
)
@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "processor_config.json"])
def test_invalid_json_is_reported_with_its_file_and_line(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    path = folder_of(tmp_path, "qwen3_vl") / name
    path.write_bytes(text)
    for config in (tmp_path, tmp_path / "config.json"):
        assert_refused(f"{path}{message}", partial(from_hf_config, config))


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    for read in (from_hf_config, Rotary.from_hf_config):
        message = f"{tmp_path}: got a folder without config.json, want the folder of a model"
        assert_refused(message, partial(read, tmp_path))
        assert_refused("config: got str, want a config object, the path of a config.json", partial(read, ""))
