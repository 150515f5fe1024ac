"""Tar shards to batches of Transformers' patches: a plain dataset and collate function in torch's DataLoader."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mmpos_bench.peers.qwen_images import by_torchvision

__all__ = ["loader"]

Record = tuple[str, Tensor, Tensor]


class _Pairs(IterableDataset[Any]):
    """Key, patches and the bytes of the caption as tokens, of every image; workers share the shards."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__()
        self._paths = paths

    def __iter__(self) -> Iterator[Record]:
        worker = get_worker_info()
        mine = self._paths if worker is None else self._paths[worker.id :: worker.num_workers]
        for path in mine:
            with tarfile.open(path) as tar:
                members: dict[str, bytes] = {}
                for member in tar:
                    file = tar.extractfile(member)
                    assert file is not None
                    members[member.name] = file.read()
                    key, _, extension = member.name.partition(".")
                    if extension == "txt":  # it follows its image
                        patches = torch.from_numpy(by_torchvision(members.pop(f"{key}.jpg")))
                        yield key, patches, torch.tensor(list(members.pop(member.name)))


def _collate(records: list[Record]) -> tuple[list[str], Tensor, Tensor]:
    keys, patches, tokens = zip(*records, strict=True)
    return list(keys), torch.cat(patches), torch.cat(tokens)


def loader(paths: list[Path], batch: int, workers: int) -> DataLoader[Any]:
    """Batches of keys, patches and tokens, with no position ids at all.

    Args:
        paths: of tar shards of JPEG files and captions.
        batch: images in each.
        workers: processes; none is this one.
    """
    dataset = _Pairs(paths)
    return DataLoader(dataset, batch, num_workers=workers, persistent_workers=workers > 0, collate_fn=_collate)
