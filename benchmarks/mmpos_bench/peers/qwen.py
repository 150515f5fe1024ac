"""Patches by Transformers' fast Qwen2-VL processor: of single JPEG files, and of tar shards in torch's DataLoader."""

from __future__ import annotations

import io
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision.io import ImageReadMode, decode_image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

_PROCESSOR: Any = Qwen2VLImageProcessor()

Record = tuple[str, Tensor, Tensor]
Records = tuple[list[str], Tensor, Tensor]
Floats = npt.NDArray[np.float32]


def by_pillow(data: bytes) -> Floats:
    """Process a Pillow image, as users of Hugging Face datasets do."""
    photo: Image.Image = Image.open(io.BytesIO(data))
    return _PROCESSOR([photo], return_tensors="pt")["pixel_values"].numpy()


def by_torchvision(data: bytes) -> Floats:
    """Process a decoded tensor, as the processor's own loading of files does."""
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision would rather have torchcodec decode
        tensor = decode_image(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    return _PROCESSOR([tensor], return_tensors="pt")["pixel_values"].numpy()


class _Pairs(IterableDataset[Record]):
    """Keys, patches and the bytes of captions as tokens, of every image; workers share the shards."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__()
        self._paths = paths

    def __iter__(self) -> Iterator[Record]:
        worker = get_worker_info()
        for path in self._paths if worker is None else self._paths[worker.id :: worker.num_workers]:
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


def _collate(records: list[Record]) -> Records:
    keys, patches, tokens = zip(*records, strict=True)
    return list(keys), torch.cat(patches), torch.cat(tokens)


def loader(paths: list[Path], batch: int, workers: int) -> DataLoader[Any]:
    """Load batches of so many images from tar shards: keys, patches and tokens, with no position ids at all."""
    dataset = _Pairs(paths)
    return DataLoader(dataset, batch, num_workers=workers, persistent_workers=workers > 0, collate_fn=_collate)
