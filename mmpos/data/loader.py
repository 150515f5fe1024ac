"""BatchDataset: batches of image-text corpora for a torch DataLoader, reproducible and resumable."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from mmpos.data.examples import Example, Location, MakeExample, Record
from mmpos.data.packing import Batcher, Batching, Packer
from mmpos.data.quarantine import MAX_SKIPPED, OnError, Quarantine, QuarantineFile, SkipLimit, skips_images
from mmpos.data.readers.base import Reader
from mmpos.data.stream import BatchStream, Feed, Split, SplitBy, Stages, StreamState, shard_order
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.sequence.builder import InterleavedSequence
from mmpos.support.checks import IntArray, integer, one_of
from mmpos.support.files import local_path

__all__ = ["BatchDataset"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # which has defaults; that of typing has them from Python 3.13 on

    _Item = TypeVar("_Item", default=Any)
else:
    from typing import TypeVar

    _Item = TypeVar("_Item")

_VERSION = 1


class DatasetState(StreamState):
    """State of a BatchDataset, fit for JSON.

    Args:
        version: of this form.
        epoch: the epoch that is read.
        of: arguments that the state depends on.
    """

    version: int
    epoch: int
    of: dict[str, object]


class BatchDataset(IterableDataset[_Item]):
    """Dataset of batches, for ``DataLoader(dataset, batch_size=None)`` with any number of workers, forked or spawned.

    The batches depend on the arguments, the epoch and the number of workers alone. All workers of all ranks together
    read every record once. torchdata's StatefulDataLoader resumes it in the middle of an epoch: the batches after a
    resume are byte for byte those of a run that was not interrupted. Ranks may get different numbers of batches, which
    a RankLoader evens.

    Args:
        shards: readers of ``mmpos.data.readers`` or of your own, the same on every rank.
        preprocess: makes an example of a record; runs in the workers.
        batching: a Packer for packed batches, a Batcher for padded ones; it stays as it is, copies of it are used.
        collate: makes a batch of a group of examples, in the workers; None gives Packs or lists of examples.
        seed: of all shuffling.
        epoch: the first epoch; see set_epoch.
        shuffle: 0 reads everything in the order given. n shuffles the shards, and the records in windows of n, of
            which one per worker is in memory, undecoded.
        split: see Split.
        rank: of this process; None asks torch.distributed, which must be initialised by then, or is 0 without it.
        world_size: ranks; None likewise.
        on_error: "raise" stops at the first record that cannot be used, naming it; "skip" writes it to quarantine. The
            on_image_error of a Preprocess decides about images. A mistake of the set-up, such as a builder without an
            ImageProcessor for images, always stops.
        max_skipped: largest share of the first 1,000 records of a worker (of all, where it reads fewer) that may be
            skipped, 0 to 1; ten may always be skipped.
        quarantine: folder for the skipped records and dropped images, one file of JSON lines per worker, each record
            once an epoch, also where an epoch is resumed.
        threads: threads per worker that preprocess, a few records ahead: for a builder that waits for a service.

    Raises:
        InvalidInputError: an argument does not fit.
    """

    def __init__(
        self,
        shards: Iterable[Reader],
        preprocess: MakeExample,
        batching: Batching,
        collate: Callable[[Any], _Item] | None = None,
        *,
        seed: int = 0,
        epoch: int = 0,
        shuffle: int = 0,
        split: SplitBy = "auto",
        rank: int | None = None,
        world_size: int | None = None,
        on_error: OnError = "raise",
        max_skipped: float = MAX_SKIPPED,
        quarantine: str | os.PathLike[str] | None = None,
        threads: int = 0,
    ) -> None:
        super().__init__()
        self._shards = tuple(shards)
        for i, shard in enumerate(self._shards):
            if not isinstance(shard, Reader):
                raise InvalidInputError(
                    f"shards[{i}]: got {type(shard).__name__}, want a reader; readers.shards opens files"
                )
        if not callable(preprocess):
            raise InvalidInputError(f"preprocess: got {type(preprocess).__name__}, want a Preprocess, or get_example")
        if not all(hasattr(batching, name) for name in ("add", "flush", "pending")):
            raise InvalidInputError(f"batching: got {type(batching).__name__}, want a Packer or a Batcher")
        one_of("split", split, get_args(SplitBy))
        if batching.pending:
            raise InvalidInputError(f"batching: got {len(batching.pending)} pending examples, want an empty one")
        self._stages = Stages(preprocess, batching, collate, integer("threads", threads, minimum=0))
        self._seed, self._shuffle = integer("seed", seed, minimum=0), integer("shuffle", shuffle, minimum=0)
        self._folder = None if quarantine is None else local_path("quarantine", quarantine)
        self._on_error: OnError = on_error
        self._max_skipped = max_skipped
        SkipLimit(max_skipped)
        if one_of("on_error", on_error, ("raise", "skip")) == "skip" and quarantine is None:
            raise InvalidInputError("quarantine: got None, want a path, as skipped records are never dropped silently")
        if skips_images(preprocess) and quarantine is None:
            raise InvalidInputError("quarantine: got None, want a path, as no image is dropped silently")
        # The guess that there is one rank is checked again when reading begins.
        self._guessed = rank is None and world_size is None and not _distributed()
        self._split = Split(*_ranks(rank, world_size), by=split)
        # Shared, so that workers that outlive an epoch see the next one, and this process sees that there are workers.
        self._epoch = torch.tensor(integer("epoch", epoch, minimum=0)).share_memory_()
        self._chosen = torch.tensor(False).share_memory_()
        self._in_workers = torch.tensor(False).share_memory_()
        self._stream: BatchStream | None = None
        self._streamed = self.epoch
        self._state: DatasetState | None = None

    @property
    def epoch(self) -> int:
        """Epoch that the next iteration reads."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration, after the rest of a state; running workers also see it."""
        self._epoch.fill_(integer("epoch", epoch, minimum=0))
        self._chosen.fill_(True)

    def num_batches(self, num_workers: int = 0) -> int | None:
        """Count the batches of the next epoch on this rank by the sizes of records, reading none; None if unknown.

        Sizes are known of shards with lengths (SequenceShard), and for a Batcher that takes any of shards with a count.
        Texts are split or truncated by more than sizes: then, and where records or images may be left out, nothing is
        known.

        Args:
            num_workers: of the DataLoader.
        """
        batching, epoch, workers = self._stages.batching, self.epoch, max(num_workers, 1)
        lengths = [_lengths(shard, batching) for shard in self._readers(epoch)]
        skips = self._on_error != "raise" or skips_images(self._stages.preprocess)
        if skips or any(each is None for each in lengths):
            return None
        readers = tuple(_Sizes(each) for each in lengths if each is not None)
        count = 0
        for worker in range(workers):
            split = replace(self._split, worker=worker, num_workers=workers)
            stages, quarantine = Stages(_Sizes.example, batching), Quarantine("raise", None, SkipLimit())
            count += sum(1 for _ in BatchStream(self._feed(readers, split, epoch), stages, quarantine))
        return count

    @property
    def generator(self) -> None:
        """None: all shuffling follows from the seed; accelerate looks here before it shares a dataset over ranks.

        Raises:
            UnsupportedError: ranks share the dataset already, and would lose what accelerate gives to others.
        """
        if self._split.world_size > 1:
            raise UnsupportedError(
                f"generator: got a dataset for rank {self._split.rank} of {self._split.world_size}, which accelerate "
                "is about to share over ranks again, want it left as it is: load through mmpos.data.RankLoader"
            )

    def __iter__(self) -> Iterator[_Item]:
        """Iterate over the batches of an epoch, from its start or from the state that was loaded."""
        # The epoch of a state is its own, whatever was set since.
        self._in_workers.fill_(get_worker_info() is not None)
        if self._state is not None:
            self._check(self._state)  # again: the state was loaded in another process
        self._streamed = self.epoch if self._state is None else self._state["epoch"]
        split, epoch = self._here(), self._streamed
        feed = self._feed(self._readers(epoch), split, epoch)
        lines = self._lines(f"rank{split.rank}-worker{split.worker}.jsonl")
        before = {} if self._state is None else self._state["counts"]
        limit = SkipLimit(self._max_skipped, before.get("records", 0), before.get("skipped", 0))
        quarantine = Quarantine(self._on_error, lines, limit, {"epoch": epoch})
        self._stream, self._state = BatchStream(feed, self._stages, quarantine, self._state), None
        return self._stream

    def state_dict(self) -> DatasetState:
        """Return the state of the latest iterator: a few numbers per pending example and no pixels, fit for JSON.

        Raises:
            UnsupportedError: workers read the dataset, and only the DataLoader can ask them.
        """
        if self._in_workers and get_worker_info() is None:
            raise UnsupportedError(
                "state_dict: got a dataset that workers read, want the state_dict of torchdata's StatefulDataLoader"
            )
        if self._state is not None:
            return self._state.copy()
        if self._stream is None:
            iter(self)
        assert self._stream is not None
        return {**self._stream.state_dict(), "version": _VERSION, "epoch": self._streamed, "of": self._identity()}

    def load_state_dict(self, state: DatasetState) -> None:
        """Let the next iteration resume from a state; later ones also read its epoch, unless set_epoch was called.

        Raises:
            InvalidInputError: the state is of a dataset with other arguments, or of another worker.
        """
        self._check(state)
        # StatefulDataLoader loads a state only when reading begins, after the epoch was chosen.
        if not self._chosen:
            self._epoch.fill_(state["epoch"])
        self._state = DatasetState(**state)

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of the latest iterator of this process: read, skipped, dropped and given; workers log theirs.

        Images that were dropped are ``images_dropped``.
        """
        return {} if self._stream is None else self._stream.counts

    def _check(self, state: object) -> None:
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            got = f"version {state.get('version')}" if isinstance(state, Mapping) else type(state).__name__
            raise InvalidInputError(f"state: got {got}, want one of version {_VERSION} from state_dict")
        for name, want in self._identity().items():
            if state["of"][name] != want:
                raise InvalidInputError(f"state: got {name} {state['of'][name]}, want {want}")

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_stream": None}

    def _here(self) -> Split:
        """Return the split as seen from this worker."""
        if self._guessed and _distributed() and torch.distributed.get_world_size() > 1:
            raise InvalidInputError(
                "rank: got a dataset made before torch.distributed was initialised, want it made after, or with rank "
                "and world_size"
            )
        info = get_worker_info()
        if info is None:
            return self._split
        return Split(self._split.rank, self._split.world_size, info.id, info.num_workers, self._split.by)

    def _readers(self, epoch: int) -> tuple[Reader, ...]:
        """Return the shards in the order of an epoch."""
        order = shard_order(len(self._shards), self._seed, epoch) if self._shuffle else range(len(self._shards))
        return tuple(self._shards[i] for i in order)

    def _feed(self, readers: tuple[Reader, ...], split: Split, epoch: int) -> Feed:
        """Return the records of one consumer."""
        seed = (self._seed, epoch, split.consumer)
        return Feed(readers, tuple(split.portions(len(readers))), max(self._shuffle, 1), seed)

    def _lines(self, name: str) -> QuarantineFile | None:
        return None if self._folder is None else QuarantineFile(self._folder / name)

    def _identity(self) -> dict[str, object]:
        """Return the arguments that a state depends on."""
        split = self._here()
        names = "\n".join(os.path.basename(shard.source) for shard in self._shards)  # a corpus may move
        return {
            "shards": f"{len(self._shards)} with checksum {zlib.crc32(names.encode()):08x}",
            "consumer": f"{split.consumer} of {split.consumers} by {split.by}",
            "seed": self._seed,
            "shuffle": self._shuffle,
            "batching": {name: value for name, value in vars(self._stages.batching).items() if name[0] != "_"},
        }


def _lengths(shard: Reader, batching: Batching) -> IntArray | None:
    """(records,) the tokens of each record, or ones if they make no difference; None if they are not known."""
    if isinstance(batching, Packer) and (batching.split_text or batching.overlong == "truncate"):
        return None
    if not isinstance(batching, Packer | Batcher):
        return None
    lengths: IntArray | None = getattr(shard, "lengths", None)
    if lengths is None and isinstance(batching, Batcher) and batching.max_tokens is None:
        count = shard.count()
        return None if count is None else np.ones(count, np.int64)
    return lengths


@dataclass(frozen=True)
class _Sizes:
    """Reader of records of which only the size is known.

    Args:
        lengths: (records,) tokens of each.
    """

    lengths: IntArray
    source: str = "sizes"

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Record]]:
        for index in range(start, self.lengths.size, step):
            yield Location(self.source, index), {"tokens": int(self.lengths[index])}

    def count(self) -> int:
        return self.lengths.size

    @staticmethod
    def example(record: Record, location: Location) -> Example:
        """Make an example of so many tokens, which take no memory."""
        tokens = np.broadcast_to(np.int64(0), record["tokens"])
        return Example(str(location), cast(InterleavedSequence, SimpleNamespace(input_ids=tokens)), tokens)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise InvalidInputError(f"rank: got rank {rank} and world_size {world_size}, want both or none")
    if rank is not None and world_size is not None:
        return rank, world_size
    if _distributed():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
