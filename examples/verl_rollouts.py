"""Carry fingerprints in verl's DataProto, reorder, split and pad them along with the rollouts, then compare them.

This requires verl and tensordict in a separate environment (tested with 0.9.1 and 0.10; verl requires an older
Transformers than constraints.txt does), and takes seconds on one core. Positions have the layout of verl's agent loop
for Qwen-VL: (batch, 4, length), with prompts padded on the left, responses padded on the right, and the token count in
the first row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import mmpos
from mmpos import Grid, SegmentTable, Text

try:
    from verl import DataProto
    from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto
except ModuleNotFoundError as error:
    command = "pip install verl tensordict, in a separate environment"
    raise SystemExit(f"verl_rollouts: {error.name} is not installed; install it with: {command}") from None


def roll_out(prompts: list[list[Any]], lengths: list[int]) -> DataProto:
    """Create rollouts of these lengths, with fingerprints of an engine's positions."""
    positions = mmpos.place(SegmentTable.from_documents(prompts), "mrope-transformers")
    answers = positions.decode(lengths)
    left, left_mask = positions.padded(side="left")
    right, right_mask = answers.padded()
    mask = np.concatenate([left_mask, right_mask], axis=1)
    text_row = np.where(mask, mask.cumsum(axis=1) - 1, 1)
    ids = np.concatenate([text_row[None], np.concatenate([left, right], axis=2)])
    rollouts = positions.window(range(len(prompts)), [0] * len(prompts), positions.lengths + lengths)
    return DataProto.from_dict(
        tensors={"attention_mask": torch.tensor(mask), "position_ids": torch.tensor(ids).transpose(0, 1).contiguous()},
        non_tensors={"fingerprint": np.array(mmpos.fingerprint(rollouts), object)},
    )


def check(data: DataProto) -> None:
    """Compare positions with those of the rollouts before a loss is computed."""
    ids = data.batch["position_ids"][:, 1:].transpose(0, 1)  # the first row is not an axis
    fingerprints = mmpos.fingerprint(ids, attention_mask=data.batch["attention_mask"])
    wrong = [row for row, want in enumerate(data.non_tensor_batch["fingerprint"]) if fingerprints[row] != want]
    if wrong:
        raise ValueError(f"rows {wrong} have positions that differ from their rollouts'")


def main() -> None:
    """Apply the operations that verl performs on rollouts before the loss; then make a mistake."""
    prompts: list[list[Any]] = [
        [Text(3), Grid(2, 3), Text(2)],
        [Text(5)],
        [Grid(4, 4), Text(6)],
        [Text(1), Grid(3, 2), Text(1)],
    ]
    data = roll_out(prompts, [4, 7, 2, 5])
    data.reorder(torch.tensor([2, 0, 3, 1]))
    parts = data.repeat(2, interleave=True).chunk(4)
    padded, padding = pad_dataproto_to_divisor(DataProto.concat(parts[:3]), 4)
    for rollouts in (data, *parts, padded, unpad_dataproto(padded, padding)):
        check(rollouts)
    print("reordered, repeated, cut and padded: the positions are those of the rollouts")
    data.batch["position_ids"][:, 1:] = data.batch["position_ids"][:, :1]
    try:
        check(data)
    except ValueError as error:
        print("with 1-D ids:", error)


if __name__ == "__main__":
    main()
