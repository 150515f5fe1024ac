"""The records of one consumer in the order of an epoch, from any place in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from mmpos.data.documents import Location
from mmpos.data.readers.base import Raw, Reader
from mmpos.data.shuffle import record_order
from mmpos.data.split import Portion
from mmpos.errors import InvalidInputError

__all__ = ["START", "Entry", "Feed", "Origin", "Place"]


class Origin(NamedTuple):
    """Which record of an epoch: the portion of its consumer, and its number in the shard."""

    portion: int
    record: int


class Place(NamedTuple):
    """A place between two records of an epoch, in its order.

    Args:
        portion: where the current window begins: the portion …
        record: … and the number in its shard of the first record that may belong to it.
        window: number of the window.
        done: records of the window before this place.
    """

    portion: int
    record: int
    window: int
    done: int


START = Place(0, 0, 0, 0)


class Entry(NamedTuple):
    """A record on its way.

    Args:
        origin: where to find it again.
        location: where it lies, for people.
        raw: the record, or its error.
        after: the place behind it.
    """

    origin: Origin
    location: Location
    raw: Raw
    after: Place


@dataclass(frozen=True)
class Feed:
    """What one consumer reads in one epoch.

    The records of its portions, one after the other, are cut into windows, and each window is shuffled by itself. A
    window is in memory, undecoded, while it is used; where it begins and how much of it is done says all.

    Args:
        readers: the shards of all consumers in the order of the epoch.
        portions: what this consumer reads of them.
        window: records that are shuffled among each other; 1 leaves the order as it is.
        seed: seed, epoch and number of the consumer.
    """

    readers: tuple[Reader, ...]
    portions: tuple[Portion, ...]
    window: int
    seed: tuple[int, int, int]

    def entries(self, place: Place = START) -> Iterator[Entry]:
        """The records behind a place, in order."""
        portion, record, window, done = place
        stream = self._stream(portion, record)
        while block := list(islice(stream, self.window)):
            last = block[-1][0]
            following = Place(last.portion, last.record + self.portions[last.portion].step, window + 1, 0)
            order = record_order(len(block), *self.seed, window) if self.window > 1 else range(len(block))
            taken = [block[i] for i in order][: done - 1 if done else None : -1]  # the next one last
            del block
            while taken:
                done += 1
                after = Place(portion, record, window, done) if len(taken) > 1 else following
                yield Entry(*taken.pop(), after)
            portion, record, window, done = following

    def find(self, origins: Collection[Origin]) -> Iterator[tuple[Origin, Location, Raw]]:
        """These records again, in the order of the shards; those between them are skipped.

        Raises:
            InvalidInputError: a shard has no such record any more.
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
                raise InvalidInputError(f"{here}: got no such record, want the shards that the state was made with")

    def _stream(self, portion: int, record: int) -> Iterator[tuple[Origin, Location, Raw]]:
        for number in range(portion, len(self.portions)):
            part = self.portions[number]
            start = max(part.first, record) if number == portion else part.first
            for location, raw in self.readers[part.shard].records(start, part.step):
                yield Origin(number, location.index), location, raw
