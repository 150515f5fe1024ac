"""Turn image-text corpora into packed batches: records become documents, examples, packs and batches.

shards ──readers──▶ records ──formats──▶ Document ──Preprocess──▶ Example ──Packer──▶ Pack ──collate──▶ Batch
"""

from typing import TYPE_CHECKING

from mmpos.data.examples import IGNORE_INDEX, Document, Example, Location, Piece, Preprocess, RecordError
from mmpos.support.extras import lazy_names

if TYPE_CHECKING:
    from mmpos.data.batch import Batch
    from mmpos.data.collate import PackedCollator, PaddedCollator
    from mmpos.data.formats import (
        FORMATS,
        MMC4,
        Chat,
        ChatTemplate,
        FineVision,
        HFImages,
        LLaVA,
        Obelics,
        Pairs,
        TarDocuments,
        Texts,
        TokenizerTemplate,
        Turn,
    )
    from mmpos.data.formats.images import Images
    from mmpos.data.job import Counts, Output
    from mmpos.data.loader import BatchDataset, Blend
    from mmpos.data.model_inputs import ModelCollator, ProcessedInputs
    from mmpos.data.packing import Batcher, Pack, Packer, best_fit_decreasing
    from mmpos.data.planner.index import PlannedPack, PlannedPacks, read_headers, write_index
    from mmpos.data.planner.plan import Cost, Headers, TrainingPlan, plan
    from mmpos.data.preprocess import Progress, Summary, sequence_shards, write_sequences
    from mmpos.data.quarantine import read_quarantine
    from mmpos.data.ranks import RankLoader
    from mmpos.data.readers import Reader, dataset_shards, shards
    from mmpos.data.stage import Stage, read_examples
    from mmpos.data.storage import SCHEMA, SequenceShard, SequenceWriter, get_example
    from mmpos.data.videos import Videos

__all__ = [
    "FORMATS",
    "IGNORE_INDEX",
    "MMC4",
    "SCHEMA",
    "Batch",
    "BatchDataset",
    "Batcher",
    "Blend",
    "Chat",
    "ChatTemplate",
    "Cost",
    "Counts",
    "Document",
    "Example",
    "FineVision",
    "HFImages",
    "Headers",
    "Images",
    "LLaVA",
    "Location",
    "ModelCollator",
    "Obelics",
    "Output",
    "Pack",
    "PackedCollator",
    "Packer",
    "PaddedCollator",
    "Pairs",
    "Piece",
    "PlannedPack",
    "PlannedPacks",
    "Preprocess",
    "ProcessedInputs",
    "Progress",
    "RankLoader",
    "Reader",
    "RecordError",
    "SequenceShard",
    "SequenceWriter",
    "Stage",
    "Summary",
    "TarDocuments",
    "Texts",
    "TokenizerTemplate",
    "TrainingPlan",
    "Turn",
    "Videos",
    "best_fit_decreasing",
    "dataset_shards",
    "get_example",
    "plan",
    "read_examples",
    "read_headers",
    "read_quarantine",
    "sequence_shards",
    "shards",
    "write_index",
    "write_sequences",
]

# Imported on first access: batches need torch; readers and storage need the libraries of their formats.
_ROOMS = {
    "batch": ("Batch",),
    "collate": ("PackedCollator", "PaddedCollator"),
    "formats": (
        *("FORMATS", "MMC4", "Chat", "ChatTemplate", "FineVision", "HFImages", "LLaVA", "Obelics"),
        *("Pairs", "TarDocuments", "Texts", "TokenizerTemplate", "Turn"),
    ),
    "loader": ("BatchDataset", "Blend"),
    "model_inputs": ("ModelCollator", "ProcessedInputs"),
    "packing": ("Batcher", "Pack", "Packer", "best_fit_decreasing"),
    "planner.index": ("PlannedPack", "PlannedPacks", "read_headers", "write_index"),
    "planner.plan": ("Cost", "Headers", "TrainingPlan", "plan"),
    "job": ("Counts", "Output"),
    "preprocess": ("Progress", "Summary", "sequence_shards", "write_sequences"),
    "quarantine": ("read_quarantine",),
    "ranks": ("RankLoader",),
    "stage": ("Stage", "read_examples"),
    "videos": ("Videos",),
    "readers": ("Reader", "dataset_shards", "shards"),
    "formats.images": ("Images",),
    "storage": ("SCHEMA", "SequenceShard", "SequenceWriter", "get_example"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        "mmpos.data", {name: room for room, names in _ROOMS.items() for name in names}, extra="data"
    )
