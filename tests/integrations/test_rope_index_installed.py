"""The plugin that installs rope_index in the models of Transformers' own tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from mmpos.integrations.hf.get_rope_index import OmniRopeIndex, RopeIndex

FILE = """
import torch
from transformers import Qwen2_5OmniTalkerConfig, Qwen2_5OmniTalkerForConditionalGeneration, Qwen2VLConfig, Qwen2VLModel

IDS = torch.tensor([[5, 9, 9, 6]])
GRID = torch.tensor([[1, 2, 4]])

def model():
    with torch.device("meta"):
        return Qwen2VLModel(Qwen2VLConfig(text_config={"num_hidden_layers": 1}, vision_config={"depth": 1}))

def test_called():
    ids, deltas = model().get_rope_index(IDS, (IDS == 9).int(), GRID)
    assert ids[2, 0].tolist() == [0, 1, 2, 3] and deltas.tolist() == [[0]]

def test_made():
    assert "get_rope_index" in vars(model())

def test_refused():
    talker = Qwen2_5OmniTalkerForConditionalGeneration.__new__(Qwen2_5OmniTalkerForConditionalGeneration)
    torch.nn.Module.__init__(talker)
    talker.config = Qwen2_5OmniTalkerConfig()
    talker.post_init()
    assert "get_rope_index" not in vars(talker)
"""


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(folder: Path, names: str) -> int:
    """Run tests of the file with the plugin, as another pytest with its own configuration."""
    path = folder / "test_of_transformers.py"
    path.write_text(FILE)
    options = ["-p", "rope_index_installed", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    return int(pytest.main([str(path), "-q", "--import-mode=importlib", "-k", names, *options]))


def test_models_are_given_functions_whose_calls_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    untouched = [PreTrainedModel.post_init, RopeIndex.__call__, OmniRopeIndex.__call__]
    assert run(tmp_path, "called or made or refused") == pytest.ExitCode.OK
    said = capfd.readouterr().out
    assert "rope_index was called 1 time: {'RopeIndex': 1}\n" in said
    assert "1 model without it: config.model_type: got 'qwen2_5_omni_talker', want one of cohere_compass, " in said
    assert [PreTrainedModel.post_init, RopeIndex.__call__, OmniRopeIndex.__call__] == untouched


def test_a_run_without_a_call_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "made") == pytest.ExitCode.TESTS_FAILED
    said = capfd.readouterr().out
    assert "rope_index was called 0 times: {}\n" in said
    assert "1 passed" in said
