"""Checkpoints in which all tokens have the same hidden state, loaded and run as an engine would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mmpos_probe import write_checkpoint
from mmpos_probe.checkpoint import CACHES
from mmpos_probe.command import app
from typer.testing import CliRunner

from mmpos.errors import InvalidInputError, UnsupportedError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

QWEN = {"image_token_id": 555, "video_token_id": 556, "vision_start_token_id": 552, "vision_end_token_id": 553}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}}
TEXT: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 320,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 5,
    "bos_token_id": 300,
    "eos_token_id": 301,
}
HALF = {"rope_parameters": {**SECTIONS["rope_parameters"], "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}}
MODELS: Mapping[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": TEXT | SECTIONS, **QWEN},
    "qwen2_5_vl": {"text_config": TEXT | SECTIONS, **QWEN},
    "qwen3_vl": {"text_config": TEXT | SECTIONS, **QWEN},
    "qwen3_vl_moe": {"text_config": TEXT | SECTIONS, **QWEN},
    "qwen3_5": {"text_config": TEXT | HALF, **QWEN},
    "qwen3_5_moe": {"text_config": TEXT | HALF, **QWEN},
    "llama": TEXT,
    "qwen3": TEXT,
    "gemma2": TEXT,
    "phi3": {**TEXT, "pad_token_id": 302},
}
SHORT = ("qwen2_vl", "qwen3_vl", "qwen3_5", "llama")
"""The models of the fast tests."""


def config_of(model: str) -> dict[str, Any]:
    values: dict[str, Any] = transformers.CONFIG_MAPPING[model](**MODELS[model]).to_dict()
    return values


def loaded(folder: Path, model: str) -> tuple[Any, dict[str, Any]]:
    """Load a model from a checkpoint, and prepare the inputs of a prompt with an image."""
    multimodal = "text_config" in MODELS[model]
    auto = transformers.AutoModelForMultimodalLM if multimodal else transformers.AutoModelForCausalLM
    network = auto.from_pretrained(folder).eval()
    chat = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": "7"}],
        }
    ]
    if not multimodal:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return network, dict(tokenizer("Look: 7", return_tensors="pt"))
    processor = transformers.AutoProcessor.from_pretrained(folder)
    image = np.random.default_rng(1).integers(0, 256, (90, 150, 3), np.uint8)
    text = processor.apply_chat_template(chat)
    inputs = processor(images=[image], text=[text], return_tensors="pt")
    return network, {name: x.to(network.dtype) if x.is_floating_point() else x for name, x in inputs.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [m if m in SHORT else pytest.param(m, marks=pytest.mark.slow) for m in MODELS])
def test_every_token_has_one_hidden_state_in_every_layer(model: str, tmp_path: Path) -> None:
    network, inputs = loaded(write_checkpoint(config_of(model), tmp_path), model)
    decoder = network.get_decoder()
    seen: list[Any] = []
    for layer in decoder.layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
    with torch.no_grad():
        vector = network.get_input_embeddings()(torch.tensor([[7]]))
        network(**inputs)
    assert len(seen) == len(decoder.layers) >= 2
    for state in seen:
        assert torch.equal(state, vector.expand_as(state))
    assert float(vector.abs().min()) > 0


def keys_of(network: Any, input_ids: Any) -> list[Any]:
    """Return each layer's (tokens, kv_heads, head_dim) keys, as the model caches them."""
    with torch.no_grad():
        output = network(input_ids=input_ids, use_cache=True)
    cache = next(output[name] for name in CACHES if name in output)
    return [layer.keys[0].transpose(0, 1).numpy() for layer in cache.layers]


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(config_of("qwen3_vl"), tmp_path_factory.mktemp("probe"))


def test_sizes_that_affect_keys_are_kept(qwen3_vl: Path) -> None:
    text = json.loads((qwen3_vl / "config.json").read_text())["text_config"]
    assert (text["head_dim"], text["rope_parameters"]["mrope_section"], text["vocab_size"]) == (32, [4, 6, 6], 600)
    assert (text["num_hidden_layers"], text["num_attention_heads"], text["num_key_value_heads"]) == (2, 4, 2)


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
TWO = TEXT | {
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": YARN},
}


@pytest.mark.filterwarnings("ignore")
def test_layers_with_different_rotations_are_judged_by_the_references_next_to_the_config(
    tmp_path: Path,
) -> None:
    folder, dump = write_checkpoint(TWO, tmp_path / "probe"), tmp_path / "keys.npz"
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert (network.config.num_attention_heads, network.config.num_key_value_heads) == (4, 2)
    for factor in (network.model.rotary_emb.full_attention_attention_scaling, 1.0):
        network.model.rotary_emb.full_attention_attention_scaling = factor
        np.savez(dump, *keys_of(network, torch.arange(5, 45)[None]))
        result = CliRunner().invoke(app, ["run", str(dump), "--config", str(folder), "--spec", "40", "--json"])
        layers = json.loads(result.output)["layers"]
        assert {name: layer["layer_type"] for name, layer in layers.items()} == {
            "arr_0": "sliding_attention",
            "arr_1": "full_attention",
        }
        assert (result.exit_code, [layer["equal"] for layer in layers.values()]) == (
            0 if factor > 1 else 3,
            [True, factor > 1],
        )
        assert all(layer["factor_judged"] for layer in layers.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_unrotated_keys_are_written_next_to_the_config(name: str, tmp_path: Path) -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 1024, "factor": 4.0}
    rope = longrope | {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16} if name == "phi3" else dict(YARN)
    sizes = {field: value for field, value in MODELS[name].items() if field != "head_dim"}  # Phi-3 has no head_dim
    config = transformers.CONFIG_MAPPING[name](**sizes | {"rope_parameters": rope}).to_dict()
    write_checkpoint(config, tmp_path)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    layers = keys_of(network, torch.arange(5, 25)[None])
    factor = network.model.rotary_emb.attention_scaling
    assert factor > 1.05
    with np.load(tmp_path / "reference.npz") as written:
        assert written.files == ["0", "1"]
        for number, keys in enumerate(layers):  # the first token has id 0
            np.testing.assert_allclose(written[str(number)] * factor, keys[0], rtol=1e-5, atol=1e-6)


def test_an_encoder_has_both_kinds_of_layers_and_more_layers_than_its_projector_has_parts(tmp_path: Path) -> None:
    write_checkpoint(config_of("qwen2_5_vl"), tmp_path)
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    assert (vision["depth"], vision["fullatt_block_indexes"]) == (3, [2])


def test_the_only_merge_joins_bytes_that_no_prompt_contains(qwen3_vl: Path) -> None:
    model = json.loads((qwen3_vl / "tokenizer.json").read_text())["model"]
    assert (model["merges"], len(model["vocab"])) == ([["\u0100", "\u0100"]], 600)
    tokenizer = transformers.AutoTokenizer.from_pretrained(qwen3_vl)
    assert tokenizer.convert_ids_to_tokens(tokenizer("\0\0").input_ids) == ["\u0100\u0100"]


def test_special_tokens_have_the_ids_given_in_the_config(qwen3_vl: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(qwen3_vl)
    words = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    assert tokenizer.convert_tokens_to_ids(words) == [552, 553, 555, 556]
    assert tokenizer("<|image_pad|>").input_ids == [555]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (300, 301, 600)
    assert tokenizer.decode(tokenizer("A cup of café").input_ids) == "A cup of café"
    processor = json.loads((qwen3_vl / "preprocessor_config.json").read_text())
    assert (processor["patch_size"], processor["merge_size"]) == (16, 2)


def test_the_qwen2_tokenizer_adds_no_token(tmp_path: Path) -> None:
    write_checkpoint({"model_type": "qwen2", **TEXT}, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (len(tokenizer), tokenizer.eos_token_id) == (600, 301)


def test_files_next_to_the_config_are_copied(tmp_path: Path) -> None:
    released = tmp_path / "released"
    released.mkdir()
    (released / "config.json").write_text(json.dumps(config_of("qwen3_vl")))
    (released / "preprocessor_config.json").write_text('{"patch_size": 16}')
    (released / "chat_template.jinja").write_text("{{ messages }}")
    folder = write_checkpoint(released, tmp_path / "probe")
    assert (folder / "preprocessor_config.json").read_text() == '{"patch_size": 16}'
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (folder / "processor_config.json").exists()


def test_weights_are_reproducible_and_the_generator_state_is_unchanged(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    first, second = (write_checkpoint(config_of("llama"), tmp_path / name) / "model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ({}, InvalidInputError, "config requires model_type"),
        (
            {"model_type": "dragon"},
            UnsupportedError,
            "config.model_type: got 'dragon', want a model type of Transformers",
        ),
        (
            {"model_type": "gemma3"},
            UnsupportedError,
            "config.model_type: got 'gemma3', want a text model or one of qwen2_vl, qwen2_5_vl, qwen3_vl, ",
        ),
        ({"model_type": "gpt2"}, UnsupportedError, "config.model_type: got 'gpt2' without rotary embedding"),
        (
            {"model_type": "qwen3_vl", **MODELS["qwen3_vl"], "image_token_id": 600},
            InvalidInputError,
            "config.image_token_id: got 600, want < 600, the vocab_size",
        ),
    ],
)
def test_an_invalid_config_is_refused_and_nothing_is_written(
    config: Any, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        write_checkpoint(config, tmp_path / "probe")
    assert not (tmp_path / "probe").exists()


def test_a_model_whose_hidden_states_differ_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmpos_probe.checkpoint._project", lambda model: None)
    with pytest.raises(
        UnsupportedError, match=r"^config.model_type 'qwen3_vl': the hidden state of token .* differs after its emb"
    ):
        write_checkpoint(config_of("qwen3_vl"), tmp_path)


def test_a_nonempty_folder_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InvalidInputError, match="which contains files, want a new or empty folder"):
        write_checkpoint(tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.filterwarnings("ignore")
def test_the_command_writes_a_folder_that_engines_can_load(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 300, "head_dim": 16, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    output = tmp_path / "probe"
    result = CliRunner().invoke(app, ["checkpoint", "--config", str(tmp_path / "config.json"), "-o", str(output)])
    assert (result.exit_code, result.output) == (0, f"{output}\n")
    files = {"chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert files | {"reference.npz", "tokenizer_config.json"} == {path.name for path in output.iterdir()}
    assert json.loads((output / "config.json").read_text())["head_dim"] == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config: got .*config.json \\(No such file or directory\\), want a config.json"),
        ("{", "config: got .*config.json, which is not valid JSON .*"),
    ],
)
def test_a_file_that_is_not_a_config_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidInputError, match=f"^{message}$"):
        write_checkpoint(path, tmp_path / "probe")
    with pytest.raises(
        InvalidInputError, match=r"^folder: got 's3://bucket/x', want a path on this machine, not a URL$"
    ):
        write_checkpoint(path, "s3://bucket/x")
