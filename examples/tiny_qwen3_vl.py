"""Train a tiny Qwen3-VL from Transformers on photos with ``rope_index`` instead of its own ``get_rope_index``.

The model learns captions of eight photos in ten seconds on one core, then generates them with a cache. The captions
equal those generated with the model's own ``get_rope_index``. Only one call concerns positions: ``install(model)``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tiny_vlm_task import Photo, load_photos
from torch import Tensor
from transformers import Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from mmpos.integrations.hf import install, uninstall

PAD, END, VISION_START, VISION_END, IMAGE, VIDEO = range(256, 262)
"""Special tokens after the 256 bytes."""
IGNORED = -100
"""Label of tokens that are not trained on."""


def make_model() -> Any:
    """Create a Qwen3-VL with random weights, two layers, and an encoder with one layer."""
    torch.manual_seed(0)
    text: dict[str, Any] = {
        "vocab_size": 262,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]},
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": END,
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    kind: Any = Qwen3VLConfig
    config = kind(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return Qwen3VLForConditionalGeneration(config)


def make_batch(photos: Sequence[Photo], *, answered: bool = False) -> dict[str, Tensor]:
    """Build a left-padded row for every photo: about 16 image tokens, followed by the caption if ``answered``."""
    kind: Any = Qwen2VLImageProcessor
    images = kind(patch_size=16, size={"shortest_edge": 96 * 96, "longest_edge": 128 * 128})
    processed = images([photo.pixels for photo in photos], return_tensors="pt")
    patches = (processed["image_grid_thw"].prod(dim=1) // 4).tolist()
    prompts = [[VISION_START, *[IMAGE] * count, VISION_END] for count in patches]
    answers = [[*photo.caption.encode(), END] if answered else [] for photo in photos]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    pads = [width - len(prompt) - len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    rows = list(zip(pads, prompts, answers, strict=True))
    input_ids = torch.tensor([[PAD] * pad + prompt + answer for pad, prompt, answer in rows])
    labels = torch.tensor([[IGNORED] * (pad + len(prompt)) + answer for pad, prompt, answer in rows])
    batch = {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "mm_token_type_ids": (input_ids == IMAGE).long(),
        "pixel_values": processed["pixel_values"],
        "image_grid_thw": processed["image_grid_thw"],
    }
    return {**batch, "labels": labels} if answered else batch


def train(model: Any, photos: Sequence[Photo], steps: int) -> float:
    """Train on crops of the captioned photos; return the mean loss of the last ten steps, in nats per byte."""
    random = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    losses = []
    for _ in range(steps):
        loss = model.train()(**make_batch([photo.crop(random) for photo in photos], answered=True)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return float(np.mean(losses[-10:]))


@torch.no_grad()
def captions(model: Any, photos: Sequence[Photo]) -> list[str]:
    """Generate the caption of every photo."""
    batch = make_batch(photos)
    answers = model.eval().generate(**batch, max_new_tokens=60, do_sample=False)[:, batch["input_ids"].shape[1] :]
    return [bytes(token for token in row if token < PAD).decode(errors="replace") for row in answers.tolist()]


def main() -> None:
    """Train the model and print its captions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    photos, model, begin = load_photos(), install(make_model()), time.perf_counter()
    loss = train(model, photos, steps)
    print(f"{steps} steps in {time.perf_counter() - begin:.0f} s, {loss:.2f} nats a byte")
    answers = captions(model, photos)
    for photo, text in zip(photos, answers, strict=True):
        print("right:" if text == photo.caption else f"wrong, want {photo.caption!r}:", repr(text))
    print("same with the model's own method:", captions(uninstall(model), photos) == answers)


if __name__ == "__main__":
    main()
