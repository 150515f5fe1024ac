"""Train an unpatched, tiny random Qwen3-VL on packs with Transformers' Trainer, and resume exactly.

This takes about a minute on two cores. To use two ranks, run `torchrun --nproc-per-node 2 examples/trainer_packs.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForImageTextToText,
    Qwen3VLConfig,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import mmpos
from mmpos.data import BatchDataset, HFImages, ModelCollator, Packer, Preprocess, RankLoader, dataset_shards

PHOTOS = Path(mmpos.__file__).parent / "photos"
CAPTIONS = {"chelsea": "A cat looks at you.", "coffee": "A cup of coffee, from above."}
TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def make_config() -> Any:
    """Create the config of a Qwen3-VL with two layers and bytes as tokens."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 2, "head_dim": 32}
    patches = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 64}
    encoder = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    named: dict[str, Any] = dict(zip(TOKENS, range(256, 260), strict=True))
    text = {"vocab_size": 260, "pad_token_id": None, "rope_parameters": rope, **sizes, **heads}
    return Qwen3VLConfig(
        text_config=text, vision_config={**patches, **encoder, "deepstack_visual_indexes": [0]}, **named
    )


def make_model(config: Any, checkpoint: Path | None) -> Any:
    """Create a random model, or load the weights of a checkpoint and refuse it if a weight is missing or left over.

    Trainer ignores such weights, and it does not know the names under which Qwen2-VL and Qwen2.5-VL are saved.
    """
    kind: Any = AutoModelForImageTextToText
    if checkpoint is None:
        return kind.from_config(config)
    model, info = kind.from_pretrained(checkpoint, output_loading_info=True)
    wrong = {fault: sorted(map(str, names)) for fault, names in info.items() if names}
    if wrong:
        raise ValueError(f"{checkpoint}: got weights with {wrong}, want exactly those of the model")
    return model


def make_loader(config: Any, copies: int = 8, endless: bool = True) -> RankLoader[dict[str, Any]]:
    """Create a loader whose batches are packs of photos and captions, in the form of model arguments."""
    settings = mmpos.from_hf_config(config)
    # For a real model, from_hf_config(folder) reads these arguments from the checkpoint's files.
    images = settings.image_processor(mean=[0.5] * 3, std=[0.5] * 3, min_pixels=3136, max_pixels=10_000)
    builder = mmpos.SequenceBuilder(images=images, scheme=settings.scheme, markers=settings.markers)
    photos = [{"bytes": (PHOTOS / f"{name}.jpg").read_bytes(), "path": None} for name in CAPTIONS]
    records = Dataset.from_dict({"image": photos * copies, "text": list(CAPTIONS.values()) * copies})
    dataset = BatchDataset(
        dataset_shards(records),
        Preprocess(HFImages(), builder),
        Packer(max_tokens=128, buffer=4),
        ModelCollator(settings, images),
        shuffle=4,
    )
    return RankLoader(DataLoader(dataset, batch_size=None), even="repeat", endless=endless)


class PackTrainer(Trainer):
    """Trainer that takes its batches from RankLoaders, which accelerate leaves unchanged."""

    loader: RankLoader[dict[str, Any]]

    def get_train_dataloader(self) -> Any:
        """Return the loader for training."""
        return self.loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader that was passed as ``eval_dataset``, without which Trainer refuses to evaluate."""
        return self.eval_dataset


class KeepLoader(TrainerCallback):
    """Callback that saves the state of each rank's loader with the checkpoint."""

    def __init__(self, loader: RankLoader[dict[str, Any]]) -> None:
        self.loader = loader

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save the loader state when the checkpoint is saved."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        folder.mkdir(exist_ok=True, parents=True)
        state_file(folder, args.process_index).write_text(json.dumps(self.loader.state_dict()))


def state_file(checkpoint: Path, rank: int) -> Path:
    """Return the path of the file that contains a rank's loader state."""
    return checkpoint / f"loader-{rank}.json"


def train(
    folder: Path, steps: int, *, checkpoint: Path | None = None, save_steps: int = 10, config: Any = None
) -> PackTrainer:
    """Train from the beginning, or resume from a checkpoint.

    Args:
        folder: folder in which checkpoints are saved.
        steps: number of optimizer steps, including those before the checkpoint.
        checkpoint: folder of the checkpoint to resume from.
        save_steps: number of steps between checkpoints; the model is evaluated before each of them.
        config: config of the model; None uses ``make_config``.
    """
    torch.manual_seed(0)
    config = make_config() if config is None else config
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        save_steps=save_steps,
        eval_strategy="steps",
        eval_steps=save_steps,
        prediction_loss_only=True,  # the logits of packs do not fit together
        learning_rate=3e-3,
        logging_steps=5,
        remove_unused_columns=False,  # the collator returns the model's arguments
        ignore_data_skip=True,  # the loader resumes from its own state
        ddp_find_unused_parameters=True,  # a pack may contain only text
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    loader = make_loader(config)  # after TrainingArguments, which connects the ranks
    if checkpoint is not None:
        loader.load_state_dict(json.loads(state_file(checkpoint, arguments.process_index).read_text()))
    examples: Any = make_loader(config, copies=1, endless=False)  # evaluation must end
    model = make_model(config, checkpoint)
    trainer = PackTrainer(model, arguments, eval_dataset=examples, callbacks=[KeepLoader(loader)])
    trainer.loader = loader
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer


def losses(trainer: Trainer) -> list[float]:
    """Return the logged losses."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """Train the model and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint", type=Path, default=None, help="checkpoint to resume from")
    options = parser.parse_args()
    trainer = train(options.folder, options.steps, checkpoint=options.checkpoint)
    if trainer.is_world_process_zero():  # lines from several ranks would be interleaved
        print("loss", " ".join(f"{loss:.2f}" for loss in losses(trainer)))
    if torch.distributed.is_initialized():  # a process that ends while a thread of gloo runs aborts
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
