"""From the records of one consumer to its batches, with a small state from which they go on exactly."""

from __future__ import annotations

import copy
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Self

from mmpos.data.batching import Batching, members, regroup
from mmpos.data.documents import Location, RecordError
from mmpos.data.examples import Example
from mmpos.data.feed import START, Entry, Feed, Origin, Place
from mmpos.data.packing import Packer
from mmpos.data.quarantine import Quarantine
from mmpos.data.readers.base import Raw
from mmpos.errors import InvalidInputError

__all__ = ["BatchStream", "Stages"]


@dataclass(frozen=True, eq=False)
class _Traced(Example):
    """An example, or a slice of one, that knows its record.

    Args:
        origin: the record.
        cut: first token of the slice and one past its last; None for the whole.
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
        """The record and the slice as a few numbers."""
        return [*self.origin, *(self.cut or ())]


@dataclass(frozen=True)
class Stages:
    """What happens to a record.

    Args:
        preprocess: makes an example of a raw record and its location.
        batching: a Packer or a Batcher, empty; a copy of it makes the groups.
        collate: makes a batch of a group; None gives the groups.
        threads: how many preprocess records at once, a few ahead of the batches; 0 is the caller's own thread.
    """

    preprocess: Callable[[Mapping[str, Any], Location], Example]
    batching: Batching
    collate: Callable[[Any], Any] | None = None
    threads: int = 0


_LOG = logging.getLogger(__name__)


class BatchStream(Iterator[Any]):
    """The batches of one consumer in one epoch.

    The state between two batches is small: the place in the feed behind the last record that was taken, the records
    of the examples that wait in the packer or in groups not yet given, and counts. To go on, those records are read
    and preprocessed again, and what comes is byte for byte what would have come.

    Args:
        feed: the records.
        stages: what happens to them.
        quarantine: what happens to those that cannot be used.
        state: a state of a stream with the same arguments, to go on from there.

    Raises:
        InvalidInputError: the state does not fit the shards.
    """

    def __init__(
        self, feed: Feed, stages: Stages, quarantine: Quarantine, state: Mapping[str, Any] | None = None
    ) -> None:
        self._feed, self._stages, self._quarantine = feed, stages, quarantine
        self._batching = copy.deepcopy(stages.batching)
        self._place, self._ready, self._counts = START, deque[Any](), Counter[str]()
        if state is not None:
            self._restore(state)
        self._batches = self._run()

    def __next__(self) -> Any:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, as JSON has it."""
        return {
            "place": list(self._place),
            "pending": [_trace(example) for example in self._batching.pending],
            "ready": [[_trace(example) for example in members(group)] for group in self._ready],
            "counts": dict(self.counts),
        }

    @property
    def counts(self) -> Mapping[str, int]:
        """Records read, records skipped, batches given, and what the packer counts, from the begin of the epoch."""
        now = self._counts + Counter(skipped=self._quarantine.skipped)
        return now + Counter(asdict(self._batching.counts)) if isinstance(self._batching, Packer) else now

    def _run(self) -> Iterator[Any]:
        for entry, found in self._examples():
            self._place = entry.after
            self._counts["records"] += 1
            try:
                if isinstance(found, RecordError):
                    raise found
                self._ready.extend(self._batching.add(_Traced.of(found, entry.origin)))
            except RecordError as error:
                self._quarantine.refuse(entry.location, entry.raw, error)
            yield from self._collated()
        self._ready.extend(self._batching.flush())
        yield from self._collated()
        lost = {name: self.counts[name] for name in ("dropped", "truncated", "tokens_lost") if self.counts.get(name)}
        if lost:
            _LOG.warning("examples too long for a pack: %s", ", ".join(f"{n} {name}" for name, n in lost.items()))

    def _collated(self) -> Iterator[Any]:
        while self._ready:
            group = self._ready.popleft()
            self._counts["batches"] += 1
            yield group if self._stages.collate is None else self._stages.collate(group)

    def _examples(self) -> Iterator[tuple[Entry, Example | RecordError]]:
        entries = self._feed.entries(self._place)
        if not self._stages.threads:
            for entry in entries:
                yield entry, self._example(entry.raw, entry.location)
            return
        pool = ThreadPoolExecutor(self._stages.threads, "mmpos-preprocess")
        try:
            ahead = deque[Any]()
            for entry in entries:
                ahead.append((entry, pool.submit(self._example, entry.raw, entry.location)))
                if len(ahead) > 2 * self._stages.threads:
                    first, found = ahead.popleft()
                    yield first, found.result()
            while ahead:
                first, found = ahead.popleft()
                yield first, found.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _example(self, raw: Raw, location: Location) -> Example | RecordError:
        if isinstance(raw, RecordError):
            return raw
        try:
            found = self._stages.preprocess(raw, location)
        except RecordError as error:
            return error
        except Exception as error:
            error.add_note(f"while preprocessing {location}")
            raise
        if not isinstance(found, Example):
            raise InvalidInputError(f"preprocess: got {type(found).__name__} for {location}, want an Example")
        return found

    def _restore(self, state: Mapping[str, Any]) -> None:
        traces = [*state["pending"], *(trace for group in state["ready"] for trace in group)]
        wholes: dict[Origin, _Traced] = {}
        for origin, location, raw in self._feed.find({Origin(*trace[:2]) for trace in traces}):
            found = self._example(raw, location)
            if isinstance(found, RecordError):
                raise InvalidInputError(f"state: got a record that was whole and is not: {found}") from found
            wholes[origin] = _Traced.of(found, origin)

        def again(trace: Sequence[int]) -> Example:
            whole = wholes[Origin(*trace[:2])]
            return whole.slice(*trace[2:]) if trace[2:] else whole

        for trace in state["pending"]:
            if self._batching.add(again(trace)):
                raise InvalidInputError("state: got more pending examples than the packer holds, want its own state")
        self._ready.extend(regroup(self._batching, [again(trace) for trace in group]) for group in state["ready"])
        self._place, self._counts = Place(*state["place"]), Counter(state["counts"])


def _trace(example: Example) -> list[int]:
    assert isinstance(example, _Traced), "batchings cut by slice only"
    return example.trace
