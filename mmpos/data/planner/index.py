"""Index files of plans: one row per example of a pack, in the order in which ranks process them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet

from mmpos.data.examples import IGNORE_INDEX, Example
from mmpos.data.packing import Pack
from mmpos.data.paths import checked_path, is_url, open_parquet, write_file
from mmpos.data.planner.cost import Headers
from mmpos.data.planner.plan import TrainingPlan
from mmpos.data.storage import SequenceRows, SequenceShard
from mmpos.errors import InvalidInputError
from mmpos.support.checks import INT32_MAX, IntArray, first_bad, instance, int_array, integer
from mmpos.support.ragged import ragged_arange

__all__ = ["INDEX_SCHEMA", "PlannedPack", "PlannedPacks", "read_headers", "write_index"]

INDEX_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("microbatch", pa.int32(), nullable=False),
        pa.field("offset", pa.int32(), nullable=False),  # first token of the example in its pack
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("shard", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("row", pa.int64(), nullable=False),  # index of the example in its shard
        pa.field("weight", pa.float64(), nullable=False),  # factor of the mean loss of the pack
        pa.field("needs_image", pa.bool_(), nullable=False),  # a dummy, since other ranks run vision towers
    ]
)

_VERSION = 1
_METADATA = b"mmpos.plan"
_GROUP_ROWS = 2**16


def read_headers(shards: Iterable[SequenceShard], *, patches_per_token: int = 4) -> tuple[Headers, IntArray, IntArray]:
    """Read the sizes of ready examples without reading their pixels.

    Args:
        shards: files of preprocessed sequences.
        patches_per_token: number of patches merged into one token, the square of spatial_merge_size.

    Returns:
        the headers of all examples, and for each example the index of its shard and its row in the shard.
    """
    merged = integer("patches_per_token", patches_per_token, minimum=1)
    tokens, labels, grids, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], list[IntArray](), list[int]()
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
        counts.append(len(lists))
    frames = np.concatenate([np.zeros((0, 3), np.int64), *grids])
    patches = (frames[:, 1] * frames[:, 2] * merged).repeat(frames[:, 0])
    images = np.array([grid[:, 0].sum() for grid in grids], np.int64)
    return Headers(np.concatenate(tokens), np.concatenate(labels), patches, images), *ragged_arange(
        np.array(counts, int)
    )


def write_index(
    path: str | os.PathLike[str], plan: TrainingPlan, shards: Sequence[str], shard: object, row: object
) -> None:
    """Write the index of a plan atomically to a Parquet file with ``INDEX_SCHEMA``.

    Args:
        path: path or URL of the file.
        plan: the plan.
        shards: paths of the shards; relative ones are stored as absolute paths, which are right in every folder.
        shard: (examples,) index into ``shards`` of each example in the headers of the plan.
        row: (examples,) index of each example in its shard.

    Raises:
        InvalidInputError: shard or row does not have the length of the plan's headers, an index is out of range, or a
            pack has 2³¹ tokens or more.
    """
    count = instance("plan", plan, TrainingPlan, "mmpos.data.plan").members.size
    shard, row = int_array("shard", shard, (count,)), int_array("row", row, (count,))
    first_bad("row", row, minimum=0)
    first_bad("plan.tokens", plan.tokens, maximum=INT32_MAX)
    if count and not 0 <= int(shard.min()) <= int(shard.max()) < len(shards):
        raise InvalidInputError(f"shard: got {shard.min()} to {shard.max()}, want indices of {len(shards)} shards")
    sizes = np.diff(plan.pack_offsets)
    pack = np.arange(plan.num_packs).repeat(sizes)
    step, place = np.divmod(pack, plan.ranks * plan.microbatches)
    tokens = plan.member_tokens
    before = tokens.cumsum() - tokens
    names = [_absolute(str(name)) for name in shards]
    columns = {
        "step": step,
        "rank": place // plan.microbatches,
        "microbatch": place % plan.microbatches,
        "offset": before - before[plan.pack_offsets[:-1]].repeat(sizes),
        "tokens": tokens,
        "shard": pa.DictionaryArray.from_arrays(shard[plan.members].astype(np.int32), names),
        "row": row[plan.members],
        "weight": plan.weights[pack],
        "needs_image": plan.needs_image[pack],
    }
    table = pa.table([pa.array(columns[field.name]).cast(field.type) for field in INDEX_SCHEMA], INDEX_SCHEMA)
    facts = {"version": _VERSION, "ranks": plan.ranks, "microbatches": plan.microbatches, "steps": plan.num_steps}
    facts["max_tokens"] = plan.max_tokens
    table = table.replace_schema_metadata({_METADATA: json.dumps(facts)})
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

    Shards are read in place, with random access. Each iteration begins at the first step, except the one after
    ``load_state_dict``, which begins at the step of the state.

    Args:
        path: path or URL of the index from ``write_index``.
        rank: the rank.

    Raises:
        InvalidInputError: the index or a shard is damaged, or has changed since planning; raised here or during
            iteration.
        OSError: a file cannot be opened; the error names the file.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int) -> None:
        self._path = checked_path("path", path)
        with self._open() as file:
            facts = self._facts(file)
        self.ranks, self.microbatches, self.max_tokens, self.num_steps = (
            integer(f"{path}: {name}", facts.get(name), minimum=1)
            for name in ("ranks", "microbatches", "max_tokens", "steps")
        )
        self.rank = integer("rank", rank, minimum=0, maximum=self.ranks - 1)
        self._start = self._step = 0  # steps of the next iteration, and of the latest one

    def __len__(self) -> int:
        return self.num_steps

    def state_dict(self) -> dict[str, int]:
        """Return the next step of the latest iteration, with the ranks and microbatches that the index must have."""
        return {"step": self._step, "ranks": self.ranks, "microbatches": self.microbatches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume the next iteration from a state.

        Raises:
            InvalidInputError: the state is from a plan with other ranks or microbatches, or beyond the last step.
        """
        argument: object = state
        if not isinstance(argument, Mapping):
            raise InvalidInputError(f"state: got {type(argument).__name__}, want a mapping from state_dict")
        for name in ("ranks", "microbatches"):
            if state.get(name) != getattr(self, name):
                raise InvalidInputError(f"state.{name}: got {state.get(name)}, want {getattr(self, name)}")
        self._start = self._step = integer("state.step", state.get("step"), minimum=0, maximum=self.num_steps)

    def __iter__(self) -> Iterator[list[PlannedPack]]:
        self._step, self._start = self._start, 0
        return self._packs(self._step)

    def _packs(self, start: int) -> Iterator[list[PlannedPack]]:
        shards: dict[str, SequenceRows] = {}
        table = self._rows()
        bounds = np.searchsorted(table["step"].to_numpy(), np.arange(self.num_steps + 1)).tolist()
        try:
            for step in range(start, self.num_steps):
                rows = table.slice(bounds[step], bounds[step + 1] - bounds[step])
                packs = [self._pack(rows, step, microbatch, shards) for microbatch in range(self.microbatches)]
                self._step = step + 1
                yield packs
        finally:
            for opened in shards.values():
                opened.close()

    def _rows(self) -> pa.Table:
        """Read the rows of this rank."""
        own = [INDEX_SCHEMA.empty_table()]
        with self._open() as file:
            try:
                for group in range(file.num_row_groups):
                    rows = file.read_row_group(group, INDEX_SCHEMA.names).cast(INDEX_SCHEMA)
                    rows.validate(full=True)
                    own.append(rows.filter(compute.equal(rows["rank"], self.rank)))
            except (OSError, ValueError, pa.ArrowException) as error:
                got = f"rows that cannot be read ({error})"
                raise InvalidInputError(f"{self._path}: got {got}, want the index of a plan") from error
        return pa.concat_tables(own)

    def _pack(self, rows: pa.Table, step: int, microbatch: int, shards: dict[str, SequenceRows]) -> PlannedPack:
        mine = rows.filter(compute.equal(rows["microbatch"], microbatch)).to_pylist()
        here = f"step {step} and rank {self.rank}"
        if not mine:
            raise self._changed("index", f"no examples in microbatch {microbatch} of {here}", "one or more")
        examples: list[Example] = []
        before = 0
        for row in mine:
            if row["offset"] != before:
                raise self._changed("index", f"offset {row['offset']} in {here}", before)
            name, number = row["shard"], row["row"]
            opened = shards.get(name) or shards.setdefault(name, SequenceShard(name).rows())
            if not 0 <= number < len(opened):
                raise self._changed("shard", f"row {number} of {name}", f"one of its {len(opened)} rows")
            examples.append(opened[number])
            if examples[-1].num_tokens != row["tokens"]:
                raise self._changed("shard", f"{examples[-1].num_tokens} tokens in {name}[{number}]", row["tokens"])
            before += row["tokens"]
        return PlannedPack(Pack(tuple(examples), self.max_tokens), mine[0]["weight"], mine[0]["needs_image"])

    def _changed(self, what: str, got: str, want: object) -> InvalidInputError:
        return InvalidInputError(f"{self._path}: got {got}, want {want}; the {what} has changed")

    def _open(self) -> parquet.ParquetFile:
        try:
            return open_parquet(self._path, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:
                raise  # the file does not exist or is not readable
            raise InvalidInputError(f"{self._path}: got no Parquet file ({error}), want the index of a plan") from error

    def _facts(self, file: parquet.ParquetFile) -> Mapping[str, object]:
        stored = (file.metadata.metadata or {}).get(_METADATA)
        with suppress(ValueError, AttributeError):
            facts: Mapping[str, object] = json.loads(stored or b"{}")
            if facts.get("version") == _VERSION:
                return facts
        got = "a Parquet file without an index" if stored is None else f"the index {stored[:80]!r}"
        raise InvalidInputError(f"{self._path}: got {got}, want the index of a plan, version {_VERSION}")


def _absolute(path: str) -> str:
    return path if is_url(path) else os.path.abspath(path)
