"""Readers of shards: tar files of webdataset, Parquet, JSON lines, and datasets of Hugging Face."""

from mmpos.data.readers.base import Raw, Reader
from mmpos.data.readers.huggingface import DatasetReader, dataset_shards
from mmpos.data.readers.jsonl import JsonlReader
from mmpos.data.readers.opening import SUFFIXES, shards
from mmpos.data.readers.parquet import ParquetReader
from mmpos.data.readers.tar import TarReader

__all__ = [
    "SUFFIXES",
    "DatasetReader",
    "JsonlReader",
    "ParquetReader",
    "Raw",
    "Reader",
    "TarReader",
    "dataset_shards",
    "shards",
]
