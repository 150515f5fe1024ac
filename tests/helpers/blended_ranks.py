"""The work of two ranks that fine-tune a tiny Qwen2.5-VL on a blend, in a module that spawned processes can import."""

from __future__ import annotations

import io
import json
import tarfile
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from data_corpus import photo
from torch import nn
from torch.utils.data import DataLoader
from training_models import tiny_config, tiny_images, tiny_model

import mmpos
from mmpos.data import (
    Blend,
    Chat,
    ChatTemplate,
    FineVision,
    Images,
    ModelCollator,
    Packer,
    Preprocess,
    RankLoader,
    TarDocuments,
    Videos,
    shards,
)

STEPS, STOP = 10, 4

WEIGHTS = {"chats": 3, "pairs": 1, "pages": 1}


def write_corpora(folder: Path) -> None:
    """Write a file as for LLaMA-Factory with a video, a Parquet file as of FineVision, and a tar of documents."""
    with av.open(folder / "clip.mp4", "w") as clip:
        stream: Any = clip.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for i in range(16):
            clip.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((32, 32, 3), 10 * i, np.uint8), "rgb24")))
        clip.mux(stream.encode())
    (folder / "cat.jpg").write_bytes(photo(0))
    lines = []
    for i in range(30):
        medium, columns = ("<video>", {"videos": ["clip.mp4"]}) if i % 5 == 3 else ("<image>", {"images": ["cat.jpg"]})
        turns = [
            {"role": "user", "content": f"{medium}What is it? {i}"},
            {"role": "assistant", "content": f"It is {'grey' if medium == '<video>' else 'a cat'}."},
        ]
        lines.append(json.dumps({"messages": turns, **columns}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    pairs = [
        {
            "images": [{"bytes": photo(i % 6), "path": None}],
            "texts": [{"user": f"Describe {i}.", "assistant": "A photo."}],
            "source": "photos",
            "relevance_ratings": [5],
        }
        for i in range(9)
    ]
    pq.write_table(pa.Table.from_pylist(pairs), folder / "pairs.parquet")
    with tarfile.open(folder / "pages.tar", "w") as tar:
        for i in range(20):
            page = {"images": [None, "a.jpg", None], "texts": [f"Page {i}.", None, "The end."]}
            for name, data in ((f"{i:03}.json", json.dumps(page).encode()), (f"{i:03}.a.jpg", photo(i % 6))):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def blend(folder: Path, rank: int, settings: Any, collate: Any = None) -> Blend[Any]:
    """Blend the corpora for one of two ranks."""
    images = tiny_images(settings)
    builder = mmpos.SequenceBuilder(images=images, scheme=settings.scheme, markers=settings.markers)
    files = Images(base=folder)
    formats: dict[str, Any] = {
        "chats": Chat(ChatTemplate(), images=files, media=Videos(files, fps=2)),
        "pairs": FineVision(ChatTemplate()),
        "pages": TarDocuments(),
    }
    paths = {"chats": "chats.jsonl", "pairs": "pairs.parquet", "pages": "pages.tar"}
    return Blend(
        {name: shards(folder / path) for name, path in paths.items()},
        {name: Preprocess(format_, builder) for name, format_ in formats.items()},
        Packer(300, buffer=8, split_text=True),
        collate and collate(settings, images),
        weights=WEIGHTS,
        seed=5,
        shuffle=7,
        rank=rank,
        world_size=2,
    )


def run(rank: int, folder: Path) -> None:
    """Train without a stop; train again up to the stop; continue in new objects; write all losses of this rank."""
    torch.set_num_threads(1)
    store, limit = f"file://{folder}/store", timedelta(seconds=300)
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=2, timeout=limit)
    whole = _train(folder, rank, STEPS)
    head = _train(folder, rank, STOP, save=True)
    rest = _train(folder, rank, STEPS - STOP, load=True)
    (folder / f"losses{rank}").write_text(json.dumps([whole, head + rest]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _train(folder: Path, rank: int, steps: int, *, save: bool = False, load: bool = False) -> list[float]:
    """Train for some steps, from a checkpoint or from the start, and return the losses."""
    config = tiny_config("qwen2_5_vl")
    settings = mmpos.from_hf_config(config)
    loader = RankLoader(DataLoader(blend(folder, rank, settings, ModelCollator), batch_size=None), "drop")
    model: Any = nn.parallel.DistributedDataParallel(tiny_model(config), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path = folder / f"checkpoint{rank}"
    if load:
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["loader"])
    losses = []
    for arguments in islice(loader, steps):
        loss = model(**arguments).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    if save:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(states, path)
    return losses
