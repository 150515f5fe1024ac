"""Files of published kinds train a tiny Qwen2.5-VL with the losses of a plain loop around Transformers' processor."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from qwen_processors import config_of, processor_of
from tiny_models import AUTOS, quiet

import mmpos
from mmpos.data import Chat, FineVision, Images, ModelCollator, Preprocess, TarDocuments, shards
from mmpos.data.readers import Reader


def photo(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))


A, B, C = photo(56, 84), photo(84, 56), photo(56, 112)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def files(folder: Path) -> list[Reader]:
    """Write a file of LLaMA-Factory and ms-swift, one of FineVision, and a tar file of interleaved documents."""
    import datasets

    A.save(folder / "a.png")
    talk = [("user", "<image>What is this?"), ("assistant", "A cat."), ("user", "Sure?"), ("assistant", "It is.")]
    record = {"messages": [{"role": role, "content": text} for role, text in talk], "images": ["a.png"]}
    (folder / "chat.jsonl").write_text(json.dumps(record))
    row = {"images": [B, C], "texts": [{"user": "A cup?", "assistant": "A cup of coffee."}], "source": "tqa"}
    features = {"images": datasets.List(datasets.Image()), "texts": datasets.List({"user": datasets.Value("string"), "assistant": datasets.Value("string")}), "source": datasets.Value("string")}
    datasets.Dataset.from_list([row], features=datasets.Features(features)).to_parquet(folder / "finevision.parquet")
    document = {"texts": ["A cat:", None, "looks at you", None], "images": [None, "x1.png", None, "x2.png"]}
    with tarfile.open(folder / "pages.tar", "w") as tar:
        for name, data in (("x1.png", png(C)), ("json", json.dumps(document).encode()), ("x2.png", png(A))):
            member = tarfile.TarInfo(f"000017.{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return shards([str(folder / name) for name in ("chat.jsonl", "finevision.parquet", "pages.tar")])


def turn(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": c} if isinstance(c, str) else {"type": "image", "image": c} for c in content]}


CHATS = (
    [turn("user", A, "What is this?"), turn("assistant", "A cat."), turn("user", "Sure?"), turn("assistant", "It is.")],
    [turn("user", B, C, "A cup?"), turn("assistant", "A cup of coffee.")],
)
PAGE = "A cat:<|vision_start|><|image_pad|><|vision_end|>looks at you<|vision_start|><|image_pad|><|vision_end|>"


def plain() -> list[dict[str, Any]]:
    """Return the inputs of each document, from the processor, with its labels."""
    processor = processor_of("qwen2_5_vl")

    def inputs(text: str, *images: Any) -> dict[str, Any]:
        return dict(processor(text=[text], images=list(images) or None, add_special_tokens=False, return_tensors="pt"))

    documents = []
    for chat, images in zip(CHATS, ((A,), (B, C)), strict=True):
        document = inputs(processor.apply_chat_template(chat), *images)
        labels = torch.full_like(document["input_ids"], -100)
        for i in range(1, len(chat), 2):
            start, stop = (
                inputs(processor.apply_chat_template(chat[:n], add_generation_prompt=n == i), *images)["input_ids"].numel()
                for n in (i, i + 1)
            )
            labels[:, start:stop] = document["input_ids"][:, start:stop]
        documents.append({**document, "labels": labels})
    page = inputs(PAGE, C, A)
    return [*documents, {**page, "labels": page["input_ids"].masked_fill((page["input_ids"] >= 5) & (page["input_ids"] <= 8), -100)}]


def model() -> Any:
    torch.manual_seed(0)
    with quiet():
        return AUTOS[0].from_config(config_of("qwen2_5_vl"), attn_implementation="eager")


@pytest.mark.slow
def test_records_of_published_kinds_train_as_with_the_processor(tmp_path: Path) -> None:
    settings = mmpos.from_hf_config(config_of("qwen2_5_vl"))
    theirs = processor_of("qwen2_5_vl")
    images = settings.image_processor(mean=theirs.image_processor.image_mean, std=theirs.image_processor.image_std, min_pixels=56 * 56, max_pixels=28 * 28 * 20)
    builder = mmpos.SequenceBuilder(theirs.tokenizer, images=images, scheme=settings.scheme, markers=settings.markers)
    local = Images(tmp_path)
    formats = (Chat(images=local), FineVision(), TarDocuments())
    examples = [
        Preprocess(kind, builder)(record, here)
        for kind, reader in zip(formats, files(tmp_path), strict=True)
        for here, record in reader.records()
    ]
    documents = plain()
    for example, document in zip(examples, documents, strict=True):
        assert example.sequence.input_ids.tolist() == document["input_ids"][0].tolist()
        assert example.labels.tolist() == document["labels"][0].tolist()
    ours, plainly = model(), model()
    batch = ModelCollator(settings, images)(examples)
    trained = [int((document["labels"][:, 1:] != -100).sum()) for document in documents]
    for _ in range(3):
        loss = ours(**batch).loss
        losses = [plainly(**document, use_cache=False).loss for document in documents]
        want = sum(loss * count for loss, count in zip(losses, trained, strict=True)) / sum(trained)
        print(loss.item(), want.item(), [l.item() for l in losses])
        torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-4)
        for network, value in ((ours, loss), (plainly, want)):
            value.backward()
            with torch.no_grad():
                for weight in network.parameters():
                    if weight.grad is not None:
                        weight -= 0.01 * weight.grad
                        weight.grad = None
