"""Index files of plans: one row per example of a pack, in the order in which ranks process them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet

from mmpos.data.examples import IGNORE_INDEX, Example
from mmpos.data.packing import Pack
from mmpos.data.paths import checked_path, is_url, open_parquet, write_file
from mmpos.data.planner.plan import Headers, TrainingPlan
from mmpos.data.storage import SequenceRows, SequenceShard
from mmpos.errors import InvalidInputError
from mmpos.support.checks import counted, instance, integer, naming
from mmpos.support.ragged import ragged_arange

__all__ = ["INDEX_SCHEMA", "PlannedPack", "PlannedPacks", "read_headers", "write_index"]

_TYPES = {
    "step": pa.int32(),
    "rank": pa.int32(),
    "microbatch": pa.int32(),
    "offset": pa.int32(),  # first token of the example in its pack
    "tokens": pa.int32(),
    "shard": pa.dictionary(pa.int32(), pa.string()),
    "row": pa.int64(),  # index of the example in its shard
    "weight": pa.float64(),  # factor of the mean loss of the pack
    "needs_image": pa.bool_(),  # a dummy, since other ranks run vision towers
}
INDEX_SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _TYPES.items()])

_VERSION = 1
_METADATA = b"mmpos.plan"
_FACTS = ("version", "ranks", "microbatches", "max_tokens", "steps")
_GROUP_ROWS = 2**16


def read_headers(shards: Iterable[SequenceShard], *, patches_per_token: int = 4) -> Headers:
    """Read the sizes of preprocessed examples, shard by shard, without reading their pixels.

    Args:
        shards: files of preprocessed sequences.
        patches_per_token: number of patches merged into one token, the square of spatial_merge_size.
    """
    merged = integer("patches_per_token", patches_per_token, minimum=1)
    tokens, labels, grids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros((0, 3), np.int64)]
    for i, shard in enumerate(shards):
        instance(f"shards[{i}]", shard, SequenceShard, "SequenceShard(path)")
        columns = shard.columns(["num_tokens", "labels", "grid_thw"])
        tokens.append(columns["num_tokens"].to_numpy())
        lists = columns["labels"].combine_chunks()
        ends = np.append(0, compute.list_value_length(lists).to_numpy().cumsum())
        trained = compute.not_equal(lists.flatten(), IGNORE_INDEX).to_numpy(zero_copy_only=False).astype(np.int64)
        trained[ends[:-1]] = 0  # no token predicts the first token of a document
        labels.append(np.diff(np.append(0, trained.cumsum())[ends]))
        grids += [np.frombuffer(grid, "<i8").reshape(-1, 3) for grid in columns["grid_thw"].to_pylist()]
    frames, height, width = np.concatenate(grids).T
    images = [grid[:, 0].sum() for grid in grids[1:]]
    patches = (height * width * merged).repeat(frames)
    return Headers(np.concatenate(tokens), np.concatenate(labels), patches, np.array(images, np.int64))


def write_index(path: str | os.PathLike[str], plan: TrainingPlan, shards: Sequence[SequenceShard]) -> None:
    """Write the index of a plan atomically to a Parquet file with ``INDEX_SCHEMA``.

    Args:
        path: path or URL of the file.
        plan: plan of the headers that ``read_headers`` returned for the shards.
        shards: the shards; relative paths are stored as absolute paths, which are right in every folder.

    Raises:
        InvalidInputError: the shards do not have as many examples as the plan.
    """
    count = instance("plan", plan, TrainingPlan, "mmpos.data.plan").pack_of.size
    shard, row = ragged_arange(np.array([one.count() for one in shards], np.int64))
    if row.size != count:
        raise InvalidInputError(f"shards: got {counted(row.size, 'example')}, want {count} as in the plan")
    members = np.argsort(plan.pack_of, kind="stable")
    pack, tokens = plan.pack_of[members], plan.headers.tokens[members]
    step, place = np.divmod(pack, plan.ranks * plan.microbatches)
    before = tokens.cumsum() - tokens
    names = [name if is_url(name) else os.path.abspath(name) for name in (one.source for one in shards)]
    columns = {
        "step": step,
        "rank": place // plan.microbatches,
        "microbatch": place % plan.microbatches,
        "offset": before - before[pack.searchsorted(pack)],
        "tokens": tokens,
        "shard": pa.DictionaryArray.from_arrays(shard[members].astype(np.int32), names),
        "row": row[members],
        "weight": plan.weights[pack],
        "needs_image": plan.needs_image[pack],
    }
    table = pa.table([pa.array(columns[field.name]).cast(field.type) for field in INDEX_SCHEMA], INDEX_SCHEMA)
    facts = (_VERSION, plan.ranks, plan.microbatches, plan.max_tokens, plan.num_steps)
    table = table.replace_schema_metadata({_METADATA: json.dumps(dict(zip(_FACTS, facts, strict=True)))})
    with write_file(checked_path("path", path)) as file:
        parquet.write_table(table, file, row_group_size=_GROUP_ROWS, compression="zstd", write_page_checksum=True)


@dataclass(frozen=True, eq=False)
class PlannedPack:
    """Pack that a rank processes in one microbatch of a step.

    Args:
        pack: the examples in order.
        weight: factor for the mean loss of the pack.
        needs_image: whether the model must process a dummy image, since another rank has an image.
    """

    pack: Pack
    weight: float
    needs_image: bool

    def with_dummy(self, dummy: Example) -> Pack:
        """Return the pack with a dummy example appended if it needs an image; the dummy is not trained on.

        Args:
            dummy: example with a small image; its tokens may exceed ``max_tokens`` of the pack.

        Raises:
            InvalidInputError: the dummy has no image.
        """
        if not self.needs_image:
            return self.pack
        if not len(dummy.sequence.grid_thw):
            raise InvalidInputError("dummy: got an example without an image, want an example with a small image")
        untrained = replace(dummy, labels=np.full_like(dummy.labels, IGNORE_INDEX))
        return Pack((*self.pack.examples, untrained), self.pack.max_tokens + dummy.num_tokens)


class PlannedPacks:
    """Packs of one rank, read according to an index file; iteration yields the list of microbatches of each step.

    Shards are read in place, with random access. Each iteration begins at the first step; ``steps`` resumes.

    Args:
        path: path or URL of the index from ``write_index``.
        rank: the rank.

    Raises:
        InvalidInputError: the index does not exist; or the index or a shard is damaged, or has changed since planning,
            raised here or during iteration.
        OSError: a file cannot be opened; the error names the file.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int) -> None:
        self._path = checked_path("path", path)
        try:
            with open_parquet(self._path, page_checksum_verification=True) as file:
                facts = json.loads((file.metadata.metadata or {}).get(_METADATA, b"{}"))
                if (version := facts.get("version")) != _VERSION:
                    raise ValueError(f"version {version}")
                rows = file.read(INDEX_SCHEMA.names).cast(INDEX_SCHEMA)
            rows.validate(full=True)
        except FileNotFoundError as error:
            raise InvalidInputError(f"path: got {self._path!r}, want an existing index of a plan") from error
        except (OSError, ValueError, AttributeError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:
                raise  # the file is not readable
            want = f"want the index of a plan, version {_VERSION}"
            raise InvalidInputError(f"{self._path}: got another file ({error}), {want}") from error
        numbers = [integer(f"{path}: {name}", facts.get(name), minimum=1) for name in _FACTS[1:]]
        self.ranks, self.microbatches, self.max_tokens, self.num_steps = numbers
        self.rank = integer("rank", rank, minimum=0, maximum=self.ranks - 1)
        self._rows = rows.filter(compute.equal(rows["rank"], self.rank)).combine_chunks()

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[PlannedPack]]:
        return self.steps()

    def steps(self, start: int = 0) -> Iterator[list[PlannedPack]]:
        """Yield the microbatches of each step.

        Args:
            start: index of the first step, to resume.
        """
        first = integer("start", start, minimum=0, maximum=self.num_steps)
        bounds = np.searchsorted(self._rows["step"].to_numpy(), np.arange(self.num_steps + 1))
        with ExitStack() as opened:
            shards: dict[str, SequenceRows] = {}
            for step in range(first, self.num_steps):
                rows = self._rows.slice(bounds[step], bounds[step + 1] - bounds[step]).to_pylist()
                packs = [list(own) for _, own in groupby(rows, itemgetter("microbatch"))]
                if len(packs) != self.microbatches:
                    got, want = f"{counted(len(packs), 'microbatch')} in step {step}", self.microbatches
                    raise InvalidInputError(f"{self._path}: got {got}, want {want}; the index has changed")
                for name in {row["shard"] for row in rows} - shards.keys():
                    shards[name] = opened.enter_context(closing(SequenceShard(name).rows()))
                yield [self._pack(own, shards) for own in packs]

    def _pack(self, rows: Sequence[Mapping[str, Any]], shards: Mapping[str, SequenceRows]) -> PlannedPack:
        examples = []
        for row in rows:
            name, number = row["shard"], row["row"]
            with naming(f"{self._path}: {name}"):
                examples.append(shards[name][number])
            if (tokens := examples[-1].num_tokens) != row["tokens"]:
                got = f"{tokens} tokens in {name}[{number}], want {row['tokens']}"
                raise InvalidInputError(f"{self._path}: got {got}; the shard has changed")
        return PlannedPack(Pack(tuple(examples), self.max_tokens), rows[0]["weight"], rows[0]["needs_image"])
