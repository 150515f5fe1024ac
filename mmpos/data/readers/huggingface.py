"""Datasets of the library ``datasets``, by map or by stream, with their images as they were stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mmpos.data.documents import Location
from mmpos.data.readers.base import Raw, is_chosen, stride
from mmpos.data.readers.parquet import row
from mmpos.errors import InvalidInputError
from mmpos.support.checks import integer

__all__ = ["DatasetReader", "dataset_shards"]


@dataclass(frozen=True, eq=False)
class DatasetReader:
    """A Dataset or an IterableDataset as one shard; images stay structs of bytes and path.

    Args:
        dataset: the object; errors of its own code (a map function, a download) are raised as they are.
        source: its name in messages.
        batch_rows: rows that are fetched at once.
    """

    dataset: Any = field(repr=False)
    source: str = "dataset"
    batch_rows: int = 16

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "with_format"):
            raise InvalidInputError(f"dataset: got {type(self.dataset).__name__}, want a Dataset or an IterableDataset")

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """See Reader. A Dataset reads the rows that are wanted, an IterableDataset those before them, too."""
        start, step = stride(start, step)
        arrow = self.dataset.with_format("arrow")  # the stored columns: nothing is decoded
        if hasattr(arrow, "__len__"):
            for first in range(start, len(arrow), step * self.batch_rows):
                wanted = range(first, min(first + step * self.batch_rows, len(arrow)), step)
                rows = arrow[wanted]
                for i, index in enumerate(wanted):
                    yield Location(self.source, index), row(rows.slice(i, 1), index, self.source)
            return
        # iter, and not a for loop, in which a worker of a DataLoader would get a share of its own.
        index = start
        for rows in arrow.skip(start).iter(self.batch_rows):
            for i in range(rows.num_rows):
                if is_chosen(index, start, step):
                    yield Location(self.source, index), row(rows.slice(i, 1), index, self.source)
                index += 1

    def count(self) -> int | None:
        """Rows of a Dataset; None for an IterableDataset."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None


def dataset_shards(dataset: Any, num_shards: int | None = None, name: str = "dataset") -> list[DatasetReader]:
    """A dataset as shards.

    Args:
        dataset: a Dataset or an IterableDataset.
        num_shards: how many; None is those that an IterableDataset has, and 1 for a Dataset.
        name: what messages call it.
    """
    whole = DatasetReader(dataset, name)
    if num_shards is None:
        num_shards = 1 if whole.count() is not None else dataset.num_shards
    num_shards = integer("num_shards", num_shards, minimum=1)
    if num_shards == 1:
        return [whole]
    return [
        DatasetReader(dataset.shard(num_shards=num_shards, index=i), f"{name}-{i:05}-of-{num_shards:05}")
        for i in range(num_shards)
    ]
