"""Files of published kinds train a tiny Qwen2.5-VL with the losses of a plain loop around Transformers' processor."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from qwen_processors import SIZE, config_of, processor_of
from tiny_models import AUTOS, quiet

import mmpos
from mmpos.data import Chat, FineVision, Images, ModelCollator, Preprocess, RecordError, TarDocuments, shards
from mmpos.data.readers import Reader

A, B, C = (
    Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))
    for height, width in ((56, 84), (84, 56), (56, 112))
)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


def write_files(folder: Path) -> list[Reader]:
    """Write a record of LLaMA-Factory and ms-swift, one of FineVision, and a tar file of interleaved documents."""
    A.save(folder / "a.png")
    C.save(folder / "c.png")
    talk = [("user", "<image>What is this?"), ("assistant", "A cat."), ("user", "Sure?"), ("assistant", "It is.")]
    record = {"messages": [{"role": role, "content": text} for role, text in talk], "images": ["a.png"]}
    (folder / "chat.jsonl").write_text(json.dumps(record))
    row = {"images": [B, C], "texts": [{"user": "A cup?", "assistant": "A cup of coffee."}], "source": "tqa"}
    rows = datasets.Dataset.from_list([row]).cast_column("images", datasets.List(datasets.Image()))
    rows.to_parquet(folder / "finevision.parquet")
    page = {"texts": ["A cat:", None, "looks at you", None], "images": [None, "x1.png", None, "x2.png"]}
    (folder / "page.json").write_text(json.dumps(page))
    with tarfile.open(folder / "pages.tar", "w") as tar:
        for file, name in (("c.png", "x1.png"), ("page.json", "json"), ("a.png", "x2.png")):
            tar.add(folder / file, f"000017.{name}")
    return shards([str(folder / name) for name in ("chat.jsonl", "finevision.parquet", "pages.tar")])


def plain_documents(processor: Any) -> list[dict[str, Any]]:
    """Return the processor's output for each document, with labels for the answers or for the text of the page."""

    def inputs(text: str, *images: Image.Image) -> Any:
        return processor(text=[text], images=list(images) or None, add_special_tokens=False, return_tensors="pt")

    user, assistant = "<|user|>", "<|assistant|>"
    texts = (
        [f"<s>{user}{PLACE}What is this?{assistant}", "A cat.", f"{user}Sure?{assistant}", "It is."],
        [f"<s>{user}{PLACE}{PLACE}A cup?{assistant}", "A cup of coffee."],
        ["", "A cat:", PLACE, "looks at you", PLACE],
    )
    documents = []
    for runs, images in zip(texts, ([A], [B, C], [C, A]), strict=True):
        document = dict(inputs("".join(runs), *images))
        ids, labels = document["input_ids"], torch.full_like(document["input_ids"], -100)
        for i in range(1, len(runs), 2):
            stop = inputs("".join(runs[: i + 1]), *images[: "".join(runs[: i + 1]).count(PLACE)])["input_ids"].numel()
            start = stop - inputs(runs[i])["input_ids"].numel()
            labels[:, start:stop] = ids[:, start:stop]
        documents.append({**document, "labels": labels})
    return documents


def model() -> Any:
    torch.manual_seed(0)
    with quiet():
        return AUTOS[0].from_config(config_of("qwen2_5_vl"), attn_implementation="eager")


@pytest.mark.slow
def test_records_of_published_kinds_train_as_with_the_processor(tmp_path: Path) -> None:
    settings, theirs = mmpos.from_hf_config(config_of("qwen2_5_vl")), processor_of("qwen2_5_vl")
    look = {"mean": theirs.image_processor.image_mean, "std": theirs.image_processor.image_std}
    images = settings.image_processor(**look, min_pixels=SIZE["shortest_edge"], max_pixels=SIZE["longest_edge"])
    builder = mmpos.SequenceBuilder(theirs.tokenizer, images=images, scheme=settings.scheme, markers=settings.markers)
    formats = (Chat(images=Images(tmp_path)), FineVision(), TarDocuments())
    examples = [
        Preprocess(kind, builder)(record, here)
        for kind, reader in zip(formats, write_files(tmp_path), strict=True)
        for here, record in reader.records()
        if not isinstance(record, RecordError)
    ]
    documents = plain_documents(theirs)
    for example, document in zip(examples, documents, strict=True):
        assert example.sequence.input_ids.tolist() == document["input_ids"][0].tolist()
        assert example.labels.tolist() == document["labels"][0].tolist()
    batch = ModelCollator(settings, images)(examples)
    trained = [int((document["labels"][:, 1:] != -100).sum()) for document in documents]
    packed, plain = model(), model()
    optimizer = torch.optim.SGD([*packed.parameters(), *plain.parameters()], lr=0.01)
    for _ in range(3):
        losses = [plain(**document, use_cache=False).loss for document in documents]
        want = sum(loss * count for loss, count in zip(losses, trained, strict=True)) / sum(trained)
        got = packed(**batch).loss
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        (got + want).backward()
        optimizer.step()
        optimizer.zero_grad()
