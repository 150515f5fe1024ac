"""From image-text corpora to packed batches: records become documents, examples, packs and batches.

shards ──readers──▶ records ──formats──▶ Document ──Preprocess──▶ Example ──Packer──▶ Pack ──collate──▶ Batch
"""

from typing import TYPE_CHECKING

from mmpos.data.documents import Document, Location, Piece, RecordError
from mmpos.data.examples import IGNORE_INDEX, Example, Preprocess
from mmpos.support.extras import lazy_names

if TYPE_CHECKING:
    from mmpos.data.batch import Batch
    from mmpos.data.batching import Batcher
    from mmpos.data.collate import PackedCollator, PaddedCollator, collate_packed, collate_padded
    from mmpos.data.formats import (
        FORMATS,
        MMC4,
        Chat,
        ChatTemplate,
        Energon,
        HFImages,
        LLaVA,
        Obelics,
        Pairs,
        Turn,
    )
    from mmpos.data.formats.resolve import Images
    from mmpos.data.loader import BatchDataset
    from mmpos.data.masks import mask_mod
    from mmpos.data.packing import Pack, Packer, first_fit_decreasing
    from mmpos.data.preprocess.job import write_sequences
    from mmpos.data.preprocess.storage import SequenceShard, SequenceWriter, ready
    from mmpos.data.preprocess.summary import Progress, Summary
    from mmpos.data.quarantine import read_quarantine
    from mmpos.data.readers import Reader, dataset_shards, shards

__all__ = [
    "FORMATS",
    "IGNORE_INDEX",
    "MMC4",
    "Batch",
    "BatchDataset",
    "Batcher",
    "Chat",
    "ChatTemplate",
    "Document",
    "Energon",
    "Example",
    "HFImages",
    "Images",
    "LLaVA",
    "Location",
    "Obelics",
    "Pack",
    "PackedCollator",
    "Packer",
    "PaddedCollator",
    "Pairs",
    "Piece",
    "Preprocess",
    "Progress",
    "Reader",
    "RecordError",
    "SequenceShard",
    "SequenceWriter",
    "Summary",
    "Turn",
    "collate_packed",
    "collate_padded",
    "dataset_shards",
    "first_fit_decreasing",
    "mask_mod",
    "read_quarantine",
    "ready",
    "shards",
    "write_sequences",
]

# Imported when they are first named: batches need torch, readers and storage what they read with.
_ROOMS = {
    "batch": ("Batch",),
    "batching": ("Batcher",),
    "collate": ("PackedCollator", "PaddedCollator", "collate_packed", "collate_padded"),
    "formats": (
        *("FORMATS", "MMC4", "Chat", "ChatTemplate", "Energon", "HFImages", "LLaVA", "Obelics", "Pairs", "Turn"),
    ),
    "loader": ("BatchDataset",),
    "masks": ("mask_mod",),
    "packing": ("Pack", "Packer", "first_fit_decreasing"),
    "preprocess.job": ("write_sequences",),
    "quarantine": ("read_quarantine",),
    "readers": ("Reader", "dataset_shards", "shards"),
    "formats.resolve": ("Images",),
    "preprocess.storage": ("SequenceShard", "SequenceWriter", "ready"),
    "preprocess.summary": ("Progress", "Summary"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        "mmpos.data", {name: room for room, names in _ROOMS.items() for name in names}, extra="data"
    )
