"""Transformers' Trainer and accelerate with packed batches: training, resuming a run, and batches that stay whole."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import trainer_packs
import transformers
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from trainer_packs import losses, make_config, make_loader, make_model, state_file, train
from training_models import examples_of, tiny_config

from mmpos import SequenceBuilder
from mmpos.data import PackedCollator, RankLoader
from mmpos.errors import UnsupportedError

accelerate = pytest.importorskip("accelerate")
EXAMPLE = Path(trainer_packs.__file__)


def as_lists(batches: Any) -> list[Any]:
    """Return the tokens, the labels and the pixel sum of each batch."""
    return [
        (batch["input_ids"].tolist(), batch["labels"].tolist(), float(batch["pixel_values"].sum())) for batch in batches
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl"])
def test_a_resumed_run_of_the_example_equals_an_uninterrupted_run(tmp_path: Path, model_type: str) -> None:
    """Trainer alone would resume the two older types from random weights."""
    config = make_config() if model_type == "qwen3_vl" else tiny_config(model_type)
    config.vision_config.patch_size, config.vision_config.window_size = 14, 112
    uninterrupted = train(tmp_path / "uninterrupted", 12, save_steps=6, config=config)
    first, *_, last = losses(uninterrupted)
    assert last < first
    history = uninterrupted.state.log_history
    before, after = (entry["eval_loss"] for entry in history if "eval_loss" in entry)
    assert after < before
    checkpoint = tmp_path / "uninterrupted/checkpoint-6"
    resumed = train(tmp_path / "resumed", 12, checkpoint=checkpoint, save_steps=6, config=config)
    assert resumed.state.global_step == 12
    weights, expected = (
        dict(trainer.model.named_parameters()) for trainer in (resumed, uninterrupted) if trainer.model
    )
    assert weights.keys() == expected.keys()
    for name, parameter in expected.items():
        value = parameter.detach()
        bound = torch.finfo(value.dtype).eps ** 0.5
        torch.testing.assert_close(weights[name].detach(), value, rtol=0, atol=bound * float(value.abs().max()))
    loader = make_loader(config)
    loader.load_state_dict(json.loads(state_file(checkpoint, 0).read_text()))
    loader.set_epoch(0)
    batches = as_lists(islice(make_loader(config), 20))
    assert as_lists(islice(loader, 14)) == batches[6:]
    assert batches[8:16] != batches[:8], "the next epoch is in another order"


def test_the_example_refuses_a_checkpoint_that_lacks_a_weight(tmp_path: Path) -> None:
    config = tiny_config("qwen2_5_vl")
    make_model(config, None).save_pretrained(tmp_path)
    make_model(config, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"got weights with {'missing_keys': \['model.language_model.norm.weight'\]}"):
        make_model(config, tmp_path)


@pytest.mark.slow
def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    options = ["--folder", str(tmp_path), "--steps", "10"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("loss ")]
    first, last = (float(word) for word in line.split()[1:])
    assert last < first
    states = [json.loads(state_file(tmp_path / "checkpoint-10", rank).read_text()) for rank in (0, 1)]
    assert [state["loader"]["of"]["consumer"] for state in states] == ["0 of 2 by auto", "1 of 2 by auto"]


def test_accelerate_leaves_a_rank_loader_as_it_is_and_batches_refuse_to_be_split() -> None:
    loader = make_loader(make_config(), copies=2)
    plain = loader.loader
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.prepare(loader) is loader
    batch = next(iter(loader))
    dispatcher = accelerator.prepare(plain)
    assert type(dispatcher).__name__ == "DataLoaderDispatcher"
    with pytest.raises(UnsupportedError, match=r"^batch: .* want the whole batch; load through mmpos.data.RankLoader"):
        next(iter(dispatcher))
    with pytest.raises(TypeError, match="Can only find the batch size of tensors"):
        accelerate.utils.find_batch_size(dict(batch))


def test_errors_that_trainer_and_accelerate_raise_for_a_batch_name_the_remedy(tmp_path: Path) -> None:
    examples: Any = examples_of(SequenceBuilder(scheme="flatten"), ["one"], ["the second"])
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, remove_unused_columns=False, use_cpu=True, disable_tqdm=True, report_to=[]
    )
    model, collate = torch.nn.Linear(1, 1), cast(Any, PackedCollator())
    trainer = transformers.Trainer(model, arguments, collate, examples)
    with pytest.raises(UnsupportedError, match=r"^batch: got a Batch .* want ModelCollator\(settings\) as data_c"):
        trainer.train()
    loader = DataLoader(examples, batch_size=2, collate_fn=collate)
    options: dict[str, Any] = {"device": torch.device("cpu"), "put_on_device": True, "dispatch_batches": True}
    dispatcher = accelerate.data_loader.prepare_data_loader(loader, **options)
    with pytest.raises(TypeError, match=r"^Can only .*Batch'>, which stays whole: load it through mmpos.data.RankLoad"):
        next(iter(dispatcher))


def test_skipping_batches_outside_the_loader_is_refused() -> None:
    loader: RankLoader[Any] = make_loader(make_config(), copies=2)
    with pytest.raises(UnsupportedError, match=r"^drop_last: .*ignore_data_skip=True"):
        accelerate.skip_first_batches(loader, 1)
