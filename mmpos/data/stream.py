"""Stream the batches of one worker: the records that it reads, their order, and how it resumes from a small state."""

from __future__ import annotations

import copy
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, islice, repeat
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import numpy as np

from mmpos.data.examples import Example, Location, MakeExample, RecordError, make_example
from mmpos.data.packing import Batching, Group, Pack, Packer
from mmpos.data.quarantine import Quarantine
from mmpos.data.readers import Raw, Reader
from mmpos.errors import InvalidInputError
from mmpos.support.checks import counted, integer, one_of

__all__ = ["START", "BatchStream", "Bookmark", "Draws", "Feed", "Item", "Origin", "Portion", "Split", "SplitBy", "Stop"]

SplitBy = Literal["auto", "shards", "records"]

Stop = Literal["first", "last"]
"""Corpus whose end ends a stream: the first that ends, or the last; the others start over."""

_BLOCK = 1024  # draws made at once


@dataclass(frozen=True, slots=True)
class Portion:
    """Records of a shard, given by its place, that one consumer reads: every ``step``-th, starting at ``first``."""

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
            counts differ by at most one per shard; "auto" means "shards" if there are at least as many as consumers.

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

    def portions(self, num_shards: int, cycle: int = 0) -> list[Portion]:
        """Return the portions that this consumer reads if there are this many shards.

        In each cycle, consumers read the portions of the next one, so that all of them receive records of few.
        """
        consumers = self.world_size * self.num_workers
        consumer = (self.worker * self.world_size + self.rank + cycle) % consumers
        if self.by == "shards" or (self.by == "auto" and num_shards >= consumers):
            return [Portion(shard) for shard in range(consumer, num_shards, consumers)]
        # Each shard starts with the next consumer, so that short shards do not all go to the first consumers.
        return [Portion(shard, (consumer - shard) % consumers, consumers) for shard in range(num_shards)]


class Origin(NamedTuple):
    """Identity of a record in an epoch.

    Args:
        corpus: index of the corpus.
        cycle: number of times that the consumer has finished its portions of the corpus before.
        portion: index among the consumer's portions.
        record: index in the shard.
    """

    corpus: int
    cycle: int
    portion: int
    record: int


class Bookmark(NamedTuple):
    """Point between two consecutive records of a corpus.

    Args:
        cycle: as in Origin.
        portion: index of the portion in which the current window starts.
        record: index in the shard of the first record that may belong to the window.
        window: number of the window.
        done: number of records in the window before this point.
    """

    cycle: int = 0
    portion: int = 0
    record: int = 0
    window: int = 0
    done: int = 0


START = Bookmark()

_SAME_SHARDS = "want the shards that the state was saved with"


class Entry(NamedTuple):
    """Record of an epoch, or its error, with its identity and the point after it."""

    origin: Origin
    location: Location
    raw: Raw
    after: Bookmark


@dataclass(frozen=True)
class Feed:
    """Records of one corpus that one consumer reads in one epoch, over and over.

    The concatenated records of its portions are cut into windows, and each window is shuffled. The start of the current
    window, which is held in memory, undecoded, and the number of finished records are the entire state.

    Args:
        readers: readers of the shards.
        preprocess: converts a raw record and its location to an example.
        quarantine: policy for unusable records.
        split: the consumer.
        shuffle: 0 keeps the order; n shuffles the shards, and the records in windows of n.
        seed: seed and epoch.
        corpus: index of the corpus.
    """

    readers: tuple[Reader, ...]
    preprocess: MakeExample
    quarantine: Quarantine
    split: Split
    shuffle: int = 0
    seed: tuple[int, int] = (0, 0)
    corpus: int = 0

    def entries(self, bookmark: Bookmark = START) -> Iterator[Entry]:
        """Read the records after a point, in order, up to the end of the cycle."""
        cycle, portion, record, window, done = bookmark
        portions = self._portions(cycle)
        stream = self._stream(portions, bookmark)
        while (block := list(islice(stream, self.shuffle or 1))) or done:
            if done and done >= len(block):
                here = Location(self.readers[portions[portion].shard].source, record)
                got = f"{counted(len(block), 'record')} from here on, of which {done} were read"
                raise InvalidInputError(f"{here}: got {got}, {_SAME_SHARDS}")
            last = block[-1][0]
            following = Bookmark(cycle, last.portion, last.record + portions[last.portion].step, window + 1)
            if self.shuffle > 1:
                seed = (*self.seed, self.split.consumer, window, self.corpus, cycle)
                block = [block[i] for i in np.random.default_rng(seed).permutation(len(block))]
            taken = block[: done - 1 if done else None : -1]  # reversed, for pop()
            del block
            while taken:
                done += 1
                after = Bookmark(cycle, portion, record, window, done) if len(taken) > 1 else following
                yield Entry(*taken.pop(), after)
            _, portion, record, window, done = following

    def find(self, origins: Collection[Origin]) -> Iterator[tuple[Origin, Location, Raw]]:
        """Read these records again, in the order of the shards, skipping the records between them.

        Raises:
            InvalidInputError: a shard no longer contains a record.
        """
        for cycle, number in sorted({(origin.cycle, origin.portion) for origin in origins}):
            wanted = {origin.record for origin in origins if (origin.cycle, origin.portion) == (cycle, number)}
            portion = self._portions(cycle)[number]
            reader = self.readers[portion.shard]
            for location, raw in reader.records(min(wanted), portion.step):
                if location.index in wanted:
                    wanted.remove(location.index)
                    yield Origin(self.corpus, cycle, number, location.index), location, raw
                if not wanted:
                    break
            if wanted:
                here = Location(reader.source, min(wanted))
                raise InvalidInputError(f"{here}: got no such record, {_SAME_SHARDS}")

    def last(self, bookmark: Bookmark) -> set[Origin]:
        """Return the last record before the window of a bookmark, or none at the start of a cycle."""
        cycle, portion, record, _, _ = bookmark
        step = self._portions(cycle)[portion].step if record else 0
        return {Origin(self.corpus, cycle, portion, record - step)} if record else set()

    def _stream(self, portions: list[Portion], start: Bookmark) -> Iterator[tuple[Origin, Location, Raw]]:
        for number in range(start.portion, len(portions)):
            portion = portions[number]
            first = max(portion.first, start.record) if number == start.portion else portion.first
            for location, raw in self.readers[portion.shard].records(first, portion.step):
                yield Origin(self.corpus, start.cycle, number, location.index), location, raw

    def _portions(self, cycle: int) -> list[Portion]:
        """Return the portions of this consumer in a cycle; every consumer shuffles the shards alike."""
        portions = self.split.portions(len(self.readers), cycle)
        if not self.shuffle:
            return portions
        order = np.random.default_rng((*self.seed, self.corpus, cycle)).permutation(len(self.readers))
        return [replace(portion, shard=int(order[portion.shard])) for portion in portions]


@dataclass(frozen=True)
class Draws:
    """Rule by which the next record is drawn from one of several corpora.

    Args:
        names: name of each corpus, under which its records are counted; "" counts only all records.
        weights: weight of each corpus, above 0.
        stop: corpus whose end ends the stream, when a record is drawn from it after its last; None for no end.
    """

    names: tuple[str, ...] = ("",)
    weights: tuple[float, ...] = (1.0,)
    stop: Stop | None = "first"

    def entries(self, feeds: Sequence[Feed], drawn: int, bookmarks: Sequence[Bookmark]) -> Iterator[Entry]:
        """Draw records after this number of records, and after these points of the feeds.

        Raises:
            InvalidInputError: no consumer finds a record in a corpus that starts over.
        """
        marks = list(bookmarks)
        rest = [feed.entries(mark) for feed, mark in zip(feeds, marks, strict=True)]
        ends = any if self.stop == "first" else all
        for i in repeat(0) if len(feeds) == 1 else self._corpora(feeds[0], drawn):
            empty = 0
            while (entry := next(rest[i], None)) is None:
                empty += 1
                marks[i] = Bookmark(marks[i].cycle + 1)
                if self.stop is not None and ends(mark.cycle for mark in marks):
                    return
                if empty > feeds[i].split.consumers:
                    raise InvalidInputError(f"shards[{self.names[i]!r}]: got no records, want at least one")
                rest[i] = feeds[i].entries(marks[i])
            marks[i] = entry.after
            yield entry

    def _corpora(self, feed: Feed, drawn: int) -> Iterator[int]:
        """Yield the corpus of each draw after this number of draws."""
        bounds = np.cumsum(self.weights[:-1]) / sum(self.weights)
        block, first = divmod(drawn, _BLOCK)
        for number in count(block):
            numbers = np.random.default_rng((*feed.seed, feed.split.consumer, number, len(bounds))).random(_BLOCK)
            yield from np.searchsorted(bounds, numbers[first:], side="right").tolist()
            first = 0


Item: TypeAlias = Any
"""Batch returned by the collate function, or a group without one."""


class StreamState(TypedDict):
    """JSON-compatible state of a BatchStream between two batches.

    Args:
        bookmarks: bookmark of each corpus after the last record read.
        drawn: number of records read.
        pending: origins of the examples buffered for batching; see Example.
        ready: origins of the examples of each group that has not been yielded.
        counts: counts since the start of the epoch.
    """

    bookmarks: list[list[int]]
    drawn: int
    pending: list[list[int]]
    ready: list[list[list[int]]]
    counts: dict[str, int]


_LOG = logging.getLogger(__name__)


class BatchStream(Iterable[Item]):
    """Batches of one consumer in one epoch.

    The state between two batches is small: bookmarks, the identities of the examples that are buffered or not yet
    yielded, and counts. A resumed stream reads and preprocesses these records again, and its batches are byte for byte
    those of the interrupted stream.

    Args:
        feeds: records of each corpus.
        batching: an empty Packer or Batcher; it is copied.
        collate: collates a group into a batch; None yields the groups.
        threads: number of threads that preprocess a few records ahead; 0 uses the caller's thread.
        draws: rule that blends the corpora.
        state: state to resume from; it comes from a stream with the same arguments.

    Raises:
        InvalidInputError: the state does not match the shards.
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        batching: Batching,
        collate: Callable[[Any], Item] | None = None,
        *,
        threads: int = 0,
        draws: Draws | None = None,
        state: StreamState | None = None,
    ) -> None:
        self._feeds, self._collate, self._threads, self._draws = feeds, collate, threads, draws or Draws()
        self._batching = copy.deepcopy(batching)
        self._bookmarks, self._drawn = [START] * len(feeds), 0
        self._ready, self._counts = deque[Group](), Counter[str]()
        if state is not None:
            self._restore(state)

    def state_dict(self) -> StreamState:
        """Return the state."""
        return {
            "bookmarks": [list(bookmark) for bookmark in self._bookmarks],
            "drawn": self._drawn,
            "pending": [_origin(example) for example in self._batching.pending],
            "ready": [[_origin(example) for example in _members(group)] for group in self._ready],
            "counts": dict(self.counts),
        }

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of records and batches, and those of a Packer, since the start of the epoch."""
        packed = asdict(self._batching.counts) if isinstance(self._batching, Packer) else {}
        return self._counts + Counter(packed)

    def __iter__(self) -> Iterator[Item]:
        """Iterate over the remaining batches."""
        counts = self._counts
        for entry, example in chain(self._examples(), [(None, None)]):
            if entry is None or example is None:
                for feed in self._feeds:
                    feed.quarantine.end()
                self._ready.extend(self._batching.flush())
            else:
                self._bookmarks[entry.origin.corpus] = entry.after
                self._drawn += 1
                counts["records"] += 1
                if name := self._draws.names[entry.origin.corpus]:
                    counts[f"records/{name}"] += 1
                try:
                    quarantine = self._feeds[entry.origin.corpus].quarantine
                    quarantine.read()
                    if isinstance(example, RecordError):
                        raise example
                    if example.dropped_images:
                        counts["images_dropped"] += len(example.dropped_images)
                        quarantine.drop(entry.location, entry.raw, example.dropped_images)
                    self._ready.extend(self._batching.add(example))
                except RecordError as error:
                    quarantine.refuse(entry.location, entry.raw, error)
                    counts.update(["skipped", f"skipped/{name}"] if name else ["skipped"])
            while self._ready:
                group = self._ready.popleft()
                counts["batches"] += 1
                yield group if self._collate is None else self._collate(group)
        if isinstance(self._batching, Packer):
            packed = asdict(self._batching.counts)
            lost = [f"{packed[name]} {name}" for name in ("dropped", "truncated", "tokens_lost") if packed[name]]
            if lost:
                _LOG.warning("examples too long for a pack: %s", ", ".join(lost))

    def _examples(self) -> Iterator[tuple[Entry, Example | RecordError]]:
        entries = self._draws.entries(self._feeds, self._drawn, self._bookmarks)
        if not self._threads:
            for entry in entries:
                yield entry, self._example(entry.origin, entry.location, entry.raw)
            return
        pool = ThreadPoolExecutor(self._threads, "mmpos-preprocess")
        try:
            ahead = deque[tuple[Entry, Future[Example | RecordError]]]()
            for entry in entries:
                ahead.append((entry, pool.submit(self._example, entry.origin, entry.location, entry.raw)))
                if len(ahead) > 2 * self._threads:
                    first, future = ahead.popleft()
                    yield first, future.result()
            for first, future in ahead:
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _example(self, origin: Origin, location: Location, raw: Raw) -> Example | RecordError:
        try:
            example = make_example(self._feeds[origin.corpus].preprocess, raw, location)
        except RecordError as error:
            return error
        traced = object.__new__(Example)  # a copy, since several records may share an example
        vars(traced).update(vars(example), origin=origin)
        return traced

    def _restore(self, state: StreamState) -> None:
        wanted = [*state["pending"], *(origin for group in state["ready"] for origin in group)]
        origins = {Origin(*origin[:4]) for origin in wanted}
        wholes: dict[tuple[int, ...], Example] = {}
        self._bookmarks = [Bookmark(*bookmark) for bookmark in state["bookmarks"]]
        for i, feed in enumerate(self._feeds):
            last = feed.last(self._bookmarks[i])  # found only to see that no shard ends before its bookmark
            for origin, location, raw in feed.find(last.union(origin for origin in origins if origin.corpus == i)):
                if origin not in origins:
                    continue
                example = self._example(origin, location, raw)
                if isinstance(example, RecordError):
                    raise InvalidInputError(f"state: got a record that is no longer usable: {example}") from example
                wholes[origin] = example

        def again(origin: list[int]) -> Example:
            whole = wholes[tuple(origin[:4])]
            return whole.slice(*origin[4:]) if origin[4:] else whole

        for pending in state["pending"]:
            if self._batching.add(again(pending)):
                got = "more pending examples than the batching holds"
                raise InvalidInputError(f"state: got {got}, want a state saved with the same batching")
        for group in state["ready"]:
            examples, batching = [again(ready) for ready in group], self._batching
            whole = Pack(tuple(examples), batching.max_tokens) if isinstance(batching, Packer) else examples
            self._ready.append(whole)
        self._drawn, self._counts = state["drawn"], Counter(state["counts"])


def _origin(example: Example) -> list[int]:
    assert example.origin, "batchings cut by slice only"
    return list(example.origin)


def _members(group: Group) -> Sequence[Example]:
    return group.examples if isinstance(group, Pack) else group
