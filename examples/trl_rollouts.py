"""Train an unpatched Qwen3-VL on rollouts with TRL's SFTTrainer, and check packs against the rollouts' positions.

This requires `pip install trl` (tested with 1.16 and constraints.txt) and takes a minute on one core. In each round, a
tiny random model samples captions of photos with Transformers' positions, and trains on the half with the most
lower-case letters. The dataset contains a fingerprint of each rollout's positions. The trainer compares these
fingerprints with those of its packs before computing the loss. `--mistake` trains on 1-D ids and fails on the first
batch.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tiny_qwen3_vl import END, IGNORED, IMAGE, PAD, VIDEO, VISION_END, VISION_START, make_batch, make_model
from tiny_vlm_task import load_photos
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

import mmpos
from mmpos.data import Location, ModelCollator, ProcessedInputs

Record = dict[str, Any]


def roll_out(model: Any, photos: list[Any], copies: int) -> list[Record]:
    """Sample several captions for every photo, and record the fingerprints of their positions."""
    used: list[Tensor] = []
    rotary = model.model.language_model.rotary_emb
    hook = rotary.register_forward_pre_hook(lambda _, arguments: used.append(arguments[1]))
    batch = make_batch(photos * copies)
    suppressed = [PAD, VISION_START, VISION_END, IMAGE, VIDEO]
    with torch.no_grad():
        tokens = model.eval().generate(**batch, max_new_tokens=24, do_sample=True, suppress_tokens=suppressed)
    hook.remove()
    answers = tokens[:, batch["input_ids"].shape[1] :]
    inputs = tokens[:, :-1]  # the last token was never an input
    mask = torch.cat([batch["attention_mask"], answers[:, :-1].ne(PAD).long()], dim=1)
    fingerprints = mmpos.fingerprint(torch.cat(used, dim=2), attention_mask=mask)
    patches = batch["image_grid_thw"].prod(dim=1).tolist()
    rows = zip(inputs, mask.bool(), answers, batch["image_grid_thw"], batch["pixel_values"].split(patches), strict=True)
    prompt = batch["input_ids"].shape[1]
    return [
        {
            "input_ids": ids[real].tolist(),
            "labels": [IGNORED] * int(real[:prompt].sum()) + ids[prompt:][real[prompt:]].tolist(),
            "image_grid_thw": grid[None].tolist(),
            "pixel_values": pixels.tolist(),
            "fingerprint": fingerprint,
            "reward": sum(ord("a") <= byte <= ord("z") for byte in answer.tolist()) / int((answer != PAD).sum()),
        }
        for (ids, real, answer, grid, pixels), fingerprint in zip(rows, fingerprints, strict=True)
    ]


class Packs:
    """TRL data_collator that combines the records of a batch into one pack, with their fingerprints."""

    def __init__(self, config: Any) -> None:
        settings = mmpos.from_hf_config(config)
        self.example, self.collate = ProcessedInputs(settings), ModelCollator(settings)

    def __call__(self, records: list[Record]) -> dict[str, Any]:
        """Return the model's arguments and the fingerprints."""
        examples = [self.example(record, Location("rollouts", i)) for i, record in enumerate(records)]
        return {**self.collate(examples), "fingerprints": [record["fingerprint"] for record in records]}


class CheckedTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer that, before computing the loss, checks that its positions are those of the rollouts."""

    mistake = False

    def compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        """Compare fingerprints, then compute TRL's loss."""
        want = inputs.pop("fingerprints")
        if self.mistake:
            inputs["position_ids"] = inputs["position_ids"][:1].repeat(4, 1, 1)
        ids = inputs["position_ids"][1:]  # the first row is the text row
        if mmpos.fingerprint(ids, cu_seqlens=inputs["cu_seq_lens_q"]) != want:
            raise ValueError("the trainer's positions differ from the rollout's")
        return super().compute_loss(model, inputs, *arguments, **named)


def make_tokenizer() -> Any:
    """Create the tokenizer that TRL requires; it encodes no text."""
    words = Tokenizer(WordLevel({"<pad>": PAD, "<end>": END}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def train(model: Any, records: list[Record], folder: str, *, mistake: bool = False) -> None:
    """Train on rollouts, four in a pack."""
    options = SFTConfig(
        folder,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        num_train_epochs=1,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        activation_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = CheckedTrainer(
        model,
        options,
        data_collator=Packs(model.config),
        train_dataset=Dataset.from_list(records),
        processing_class=make_tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.mistake = mistake
    trainer.train()


def main() -> None:
    """Roll out and train in rounds, and print the rewards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--mistake", action="store_true")
    options = parser.parse_args()
    photos, model = load_photos(), make_model()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            records = sorted(roll_out(model, photos, copies=8), key=lambda record: -float(record["reward"]))
            print(f"round {number}: reward {sum(record['reward'] for record in records) / len(records):.2f}")
            train(model, records[: len(records) // 2], folder, mistake=options.mistake)


if __name__ == "__main__":
    main()
