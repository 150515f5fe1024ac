"""The pytest plugin that installs rope_index in the models of Transformers' tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from mmpos.integrations.hf.get_rope_index import RopeIndex

FILE = """
import torch
from transformers import Qwen2_5OmniTalkerConfig, Qwen2_5OmniTalkerForConditionalGeneration, Qwen2VLConfig, Qwen2VLModel

def test_called():
    with torch.device("meta"):
        model = Qwen2VLModel(Qwen2VLConfig(text_config={"num_hidden_layers": 1}, vision_config={"depth": 1}))
    ids = torch.tensor([[5, 9, 9, 6]])
    assert model.get_rope_index(ids, (ids == 9).int(), torch.tensor([[1, 2, 4]]))[0][2, 0].tolist() == [0, 1, 2, 3]

def test_refused():
    talker = Qwen2_5OmniTalkerForConditionalGeneration.__new__(Qwen2_5OmniTalkerForConditionalGeneration)
    torch.nn.Module.__init__(talker)
    talker.config = Qwen2_5OmniTalkerConfig()
    talker.post_init()
    assert "get_rope_index" not in vars(talker)
"""


def test_the_plugin_counts_calls_and_a_run_without_calls_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    untouched = [PreTrainedModel.post_init, RopeIndex.__call__]
    path = tmp_path / "test_of_transformers.py"
    path.write_text(FILE)
    options = ["-p", "rope_index_installed", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    for names, status, message in (
        ("called or refused", pytest.ExitCode.OK, "rope_index was called 1 time: {'RopeIndex': 1}\n"),
        ("refused", pytest.ExitCode.TESTS_FAILED, "rope_index was called 0 times: {}\n"),
    ):
        assert pytest.main([str(path), "-q", "--import-mode=importlib", "-k", names, *options]) == status
        out = capfd.readouterr().out
        assert message in out
        assert "1 model without it: config.model_type: got 'qwen2_5_omni_talker', want one of cohere_compass, " in out
        assert [PreTrainedModel.post_init, RopeIndex.__call__] == untouched
