"""mmpos probe checkpoint: the files it writes, and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mmpos.__main__ import main

pytest.importorskip("transformers")

LLAMA = {"model_type": "llama", "vocab_size": 300, "head_dim": 16, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.filterwarnings("ignore")
def test_checkpoint_writes_a_folder_that_engines_can_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    output = tmp_path / "probe"
    assert main(["probe", "checkpoint", "--config", str(tmp_path / "config.json"), "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    files = {"chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert files | {"reference.npz", "tokenizer_config.json"} == {path.name for path in output.iterdir()}
    assert json.loads((output / "config.json").read_text())["head_dim"] == 16


@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_cannot_be_created_causes_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    output = tmp_path / "config.json" / "probe"
    assert main(["probe", "checkpoint", "--config", str(tmp_path / "config.json"), "-o", str(output)]) == 1
    assert capsys.readouterr().err == f"mmpos: error: {output}: Not a directory\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config: got .*config.json \\(No such file or directory\\), want a config.json"),
        ("{", "config: got .*config.json, which is not valid JSON .*"),
        ('{"model_type": "gpt2"}', "config.model_type: got 'gpt2' without rotary embeddings, want one with them"),
    ],
)
def test_an_invalid_config_causes_a_one_line_error(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert main(["probe", "checkpoint", "--config", str(path), "-o", str(tmp_path / "probe")]) != 0
    assert re.fullmatch(f"mmpos: error: {message}\n", capsys.readouterr().err)
