"""Stream the batches of one worker: the records that it reads, their order, and how it resumes from a small state."""

from __future__ import annotations

import copy
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypedDict

import numpy as np

from mmpos.data.examples import Example, Location, MakeExample, RecordError
from mmpos.data.packing import Batching, Group, Pack, Packer
from mmpos.data.quarantine import Quarantine
from mmpos.data.readers import Raw, Reader
from mmpos.errors import InvalidInputError
from mmpos.support.checks import IntArray, integer, one_of

__all__ = [
    "START",
    "BatchStream",
    "Bookmark",
    "Collate",
    "Entry",
    "Feed",
    "Item",
    "Origin",
    "Portion",
    "Split",
    "SplitBy",
    "Stages",
    "StreamState",
    "record_order",
    "shard_order",
]

SplitBy = Literal["auto", "shards", "records"]


@dataclass(frozen=True, slots=True)
class Portion:
    """Records of a shard that one consumer reads: every ``step``-th record, starting at ``first``.

    Args:
        shard: index of the shard in the order of the epoch.
        first: index of the first record.
        step: difference between the indices of consecutive records.
    """

    shard: int
    first: int = 0
    step: int = 1


@dataclass(frozen=True)
class Split:
    """Share of the records that one consumer, a worker of a rank, reads.

    >>> Split(rank=1, world_size=2).portions(3)
    [Portion(shard=1, first=0, step=1)]
    >>> Split(rank=1, world_size=2, by="records").portions(2)
    [Portion(shard=0, first=1, step=2), Portion(shard=1, first=0, step=2)]

    Args:
        rank: 0 to world_size − 1.
        world_size: number of ranks.
        worker: 0 to num_workers − 1.
        num_workers: number of workers per rank, the same for all ranks; 1 if a rank loads in its own process.
        by: "shards" assigns whole shards to consumers; "records" assigns records of every shard in turn, so that record
            counts differ by at most one per shard, but every consumer reads through all shards; "auto" means "shards"
            if there are at least as many shards as consumers, else "records".

    Raises:
        InvalidInputError: a number is out of range, or by is invalid.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1
    by: SplitBy = "auto"

    def __post_init__(self) -> None:
        integer("world_size", self.world_size, minimum=1)
        integer("rank", self.rank, minimum=0, maximum=self.world_size - 1)
        integer("num_workers", self.num_workers, minimum=1)
        integer("worker", self.worker, minimum=0, maximum=self.num_workers - 1)
        one_of("by", self.by, ("auto", "shards", "records"))

    @property
    def consumers(self) -> int:
        """Total number of workers of all ranks."""
        return self.world_size * self.num_workers

    @property
    def consumer(self) -> int:
        """Index of this consumer. Ranks vary fastest, so that leftover shards go to different ranks."""
        return self.worker * self.world_size + self.rank

    def portions(self, num_shards: int) -> list[Portion]:
        """Return the portions that this consumer reads if there are this many shards."""
        consumer, consumers = self.consumer, self.consumers
        if self.by == "shards" or (self.by == "auto" and num_shards >= consumers):
            return [Portion(shard) for shard in range(consumer, num_shards, consumers)]
        # Each shard starts with the next consumer, so that short shards do not all go to the first consumers.
        return [Portion(shard, (consumer - shard) % consumers, consumers) for shard in range(num_shards)]


def shard_order(num_shards: int, seed: int, epoch: int) -> IntArray:
    """Return the (shards,) order in which an epoch reads the shards, the same for every consumer."""
    return np.random.default_rng((seed, epoch)).permutation(num_shards)


def record_order(num_records: int, seed: int, epoch: int, consumer: int, window: int) -> IntArray:
    """Return the (records,) order of the records in one window of one consumer."""
    return np.random.default_rng((seed, epoch, consumer, window)).permutation(num_records)


class Origin(NamedTuple):
    """Identity of a record in an epoch: index among the consumer's portions, and index in the shard."""

    portion: int
    record: int


class Bookmark(NamedTuple):
    """Point between two consecutive records of an epoch.

    Args:
        portion: index of the portion in which the current window starts.
        record: index in the shard of the first record that may belong to the window.
        window: number of the window.
        done: number of records in the window before this point.
    """

    portion: int
    record: int
    window: int
    done: int


START = Bookmark(0, 0, 0, 0)


class Entry(NamedTuple):
    """Record of an epoch, with the point after it.

    Args:
        origin: identity of the record, used to read it again.
        location: shard and index, for error messages.
        raw: the record, or its error.
        after: bookmark after the record.
    """

    origin: Origin
    location: Location
    raw: Raw
    after: Bookmark


@dataclass(frozen=True)
class Feed:
    """Records that one consumer reads in one epoch.

    The concatenated records of its portions are cut into windows, and each window is shuffled. The current window is
    held in memory, undecoded; its start and the number of finished records are the entire state.

    Args:
        readers: readers of the shards in the order of the epoch.
        portions: records that this consumer reads.
        window: number of records in a shuffling window; 1 keeps the order.
        seed: seed, epoch and index of the consumer.
    """

    readers: tuple[Reader, ...]
    portions: tuple[Portion, ...]
    window: int
    seed: tuple[int, int, int]

    def entries(self, bookmark: Bookmark = START) -> Iterator[Entry]:
        """Read the records after a point, in order."""
        portion, record, window, done = bookmark
        stream = self._stream(portion, record)
        while block := list(islice(stream, self.window)):
            last, _, _ = block[-1]
            following = Bookmark(last.portion, last.record + self.portions[last.portion].step, window + 1, 0)
            order = record_order(len(block), *self.seed, window) if self.window > 1 else range(len(block))
            taken = [block[i] for i in order][: done - 1 if done else None : -1]  # reversed, for pop()
            del block
            while taken:
                done += 1
                after = Bookmark(portion, record, window, done) if len(taken) > 1 else following
                yield Entry(*taken.pop(), after)
            portion, record, window, done = following

    def find(self, origins: Collection[Origin]) -> Iterator[tuple[Origin, Location, Raw]]:
        """Read these records again, in the order of the shards, skipping the records between them.

        Raises:
            InvalidInputError: a shard no longer contains a record.
        """
        for portion in sorted({origin.portion for origin in origins}):
            wanted = {origin for origin in origins if origin.portion == portion}
            part = self.portions[portion]
            start = min(origin.record for origin in wanted)
            for location, raw in self.readers[part.shard].records(start, part.step):
                origin = Origin(portion, location.index)
                if origin in wanted:
                    wanted.remove(origin)
                    yield origin, location, raw
                if not wanted:
                    break
            if wanted:
                here = Location(self.readers[part.shard].source, min(wanted).record)
                raise InvalidInputError(f"{here}: got no such record, want the shards that the state was saved with")

    def _stream(self, portion: int, record: int) -> Iterator[tuple[Origin, Location, Raw]]:
        for number in range(portion, len(self.portions)):
            part = self.portions[number]
            start = max(part.first, record) if number == portion else part.first
            for location, raw in self.readers[part.shard].records(start, part.step):
                yield Origin(number, location.index), location, raw


@dataclass(frozen=True, eq=False)
class _Traced(Example):
    """Example, or a slice of one, with the identity of its record.

    Args:
        origin: identity of the record.
        cut: first token of the slice and one past its last; None for a whole example.
    """

    origin: Origin = Origin(0, 0)  # noqa: RUF009
    cut: tuple[int, int] | None = None

    @classmethod
    def of(cls, example: Example, origin: Origin) -> Self:
        return cls(example.key, example.sequence, example.labels, origin)

    def slice(self, start: int, stop: int) -> _Traced:
        part = super().slice(start, stop)
        first = self.cut[0] if self.cut else 0
        return _Traced(part.key, part.sequence, part.labels, self.origin, (first + start, first + stop))

    @property
    def trace(self) -> list[int]:
        """Identity of the record and bounds of the slice as a list of integers."""
        return [*self.origin, *(self.cut or ())]


Item: TypeAlias = Any
"""Batch returned by the collate function, or a group without one."""

Collate = Callable[[Any], Item]
"""Function that collates a group into a batch."""


class StreamState(TypedDict):
    """JSON-compatible state of a BatchStream between two batches.

    Args:
        bookmark: bookmark of the feed after the last record read.
        pending: traces of the examples buffered for batching.
        ready: traces of the examples of each group that has not been yielded.
        counts: counts since the start of the epoch.
    """

    bookmark: list[int]
    pending: list[list[int]]
    ready: list[list[list[int]]]
    counts: dict[str, int]


@dataclass(frozen=True)
class Stages:
    """Steps from a record to a batch.

    Args:
        preprocess: converts a raw record and its location to an example.
        batching: an empty Packer or Batcher; it is copied.
        collate: collates a group into a batch; None yields the groups.
        threads: number of threads that preprocess a few records ahead; 0 uses the caller's thread.
    """

    preprocess: MakeExample
    batching: Batching
    collate: Collate | None = None
    threads: int = 0


_LOG = logging.getLogger(__name__)


class BatchStream(Iterator[Item]):
    """Iterator over the batches of one consumer in one epoch.

    The state between two batches is small: a bookmark after the last record read, the identities of the examples that
    are buffered for batching or in groups not yet yielded, and counts. A resumed stream reads and preprocesses these
    records again, and its batches are byte for byte those of the interrupted stream.

    Args:
        feed: the records.
        stages: steps from a record to a batch.
        quarantine: policy for unusable records.
        state: state to resume from; it comes from a stream with the same arguments.

    Raises:
        InvalidInputError: the state does not match the shards.
    """

    def __init__(self, feed: Feed, stages: Stages, quarantine: Quarantine, state: StreamState | None = None) -> None:
        self._feed, self._stages, self._quarantine = feed, stages, quarantine
        self._batching = copy.deepcopy(stages.batching)
        self._bookmark, self._ready, self._counts = START, deque[Group](), Counter[str]()
        if state is not None:
            self._restore(state)
        self._batches = self._run()

    def __next__(self) -> Item:
        return next(self._batches)

    def state_dict(self) -> StreamState:
        """Return the state of the stream."""
        return {
            "bookmark": list(self._bookmark),
            "pending": [_trace(example) for example in self._batching.pending],
            "ready": [[_trace(example) for example in _members(group)] for group in self._ready],
            "counts": dict(self.counts),
        }

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of records and batches, and those of a Packer, since the start of the epoch."""
        counts = self._counts + Counter(skipped=self._quarantine.skipped)
        return counts + Counter(asdict(self._batching.counts)) if isinstance(self._batching, Packer) else counts

    def _run(self) -> Iterator[Item]:
        for entry, example in self._examples():
            self._bookmark = entry.after
            self._counts["records"] += 1
            self._quarantine.limit.read()
            try:
                if isinstance(example, RecordError):
                    raise example
                if example.dropped_images:
                    self._counts["images_dropped"] += len(example.dropped_images)
                    self._quarantine.drop(entry.location, entry.raw, example.dropped_images)
                self._ready.extend(self._batching.add(_Traced.of(example, entry.origin)))
            except RecordError as error:
                self._quarantine.refuse(entry.location, entry.raw, error)
            yield from self._collated()
        self._quarantine.limit.end()
        self._ready.extend(self._batching.flush())
        yield from self._collated()
        if isinstance(self._batching, Packer):
            counts = asdict(self._batching.counts)
            lost = [f"{counts[name]} {name}" for name in ("dropped", "truncated", "tokens_lost") if counts[name]]
            if lost:
                _LOG.warning("examples too long for a pack: %s", ", ".join(lost))

    def _collated(self) -> Iterator[Item]:
        while self._ready:
            group = self._ready.popleft()
            self._counts["batches"] += 1
            yield group if self._stages.collate is None else self._stages.collate(group)

    def _examples(self) -> Iterator[tuple[Entry, Example | RecordError]]:
        entries = self._feed.entries(self._bookmark)
        if not self._stages.threads:
            for entry in entries:
                yield entry, self._example(entry.raw, entry.location)
            return
        pool = ThreadPoolExecutor(self._stages.threads, "mmpos-preprocess")
        try:
            ahead = deque[tuple[Entry, Future[Example | RecordError]]]()
            for entry in entries:
                ahead.append((entry, pool.submit(self._example, entry.raw, entry.location)))
                if len(ahead) > 2 * self._stages.threads:
                    first, future = ahead.popleft()
                    yield first, future.result()
            while ahead:
                first, future = ahead.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _example(self, raw: Raw, location: Location) -> Example | RecordError:
        if isinstance(raw, RecordError):
            return raw
        try:
            example = self._stages.preprocess(raw, location)
        except RecordError as error:
            return error
        except Exception as error:
            error.add_note(f"while preprocessing {location}")
            raise
        if not isinstance(example, Example):
            raise InvalidInputError(f"preprocess: got {type(example).__name__} for {location}, want an Example")
        return example

    def _restore(self, state: StreamState) -> None:
        traces = [*state["pending"], *(trace for group in state["ready"] for trace in group)]
        wholes: dict[Origin, _Traced] = {}
        for origin, location, raw in self._feed.find({Origin(*trace[:2]) for trace in traces}):
            example = self._example(raw, location)
            if isinstance(example, RecordError):
                raise InvalidInputError(f"state: got a record that is no longer usable: {example}") from example
            wholes[origin] = _Traced.of(example, origin)

        def again(trace: Sequence[int]) -> Example:
            whole = wholes[Origin(*trace[:2])]
            return whole.slice(*trace[2:]) if trace[2:] else whole

        for trace in state["pending"]:
            if self._batching.add(again(trace)):
                raise InvalidInputError(
                    "state: got more pending examples than the batching holds, "
                    "want a state saved with the same batching"
                )
        self._ready.extend(self._regroup([again(trace) for trace in group]) for group in state["ready"])
        self._bookmark, self._counts = Bookmark(*state["bookmark"]), Counter(state["counts"])

    def _regroup(self, examples: list[Example]) -> Group:
        """Group the examples again, in the form that the batching yields."""
        batching = self._batching
        return Pack(tuple(examples), batching.max_tokens) if isinstance(batching, Packer) else examples


def _trace(example: Example) -> list[int]:
    assert isinstance(example, _Traced), "batchings cut by slice only"
    return example.trace


def _members(group: Group) -> Sequence[Example]:
    """Return the examples of a group."""
    return group.examples if isinstance(group, Pack) else group
