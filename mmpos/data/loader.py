"""BatchDataset and Blend: reproducible, resumable batches of one or several corpora for a torch DataLoader."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, cast, get_args

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from mmpos.data.examples import Example, Location, MakeExample, Record
from mmpos.data.packing import Batcher, Batching, Packer
from mmpos.data.quarantine import MAX_SKIPPED, OnError, Quarantine, QuarantineFile, skips_images
from mmpos.data.readers import Reader, checked_readers
from mmpos.data.stream import BatchStream, Draws, Feed, Split, SplitBy, Stop, StreamState
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.sequence.builder import InterleavedSequence
from mmpos.support.checks import IntArray, finite, integer, one_of
from mmpos.support.files import local_path

__all__ = ["BatchDataset", "Blend", "checked_state", "num_ranks"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # typing.TypeVar has defaults only since Python 3.13

    _Item = TypeVar("_Item", default=Any)
else:
    from typing import TypeVar

    _Item = TypeVar("_Item")

_VERSION = 1  # of the states of a BatchDataset and a RankLoader


class DatasetState(StreamState):
    """JSON-compatible state of a BatchDataset, with its version, the epoch and the arguments that it depends on."""

    version: int
    epoch: int
    of: dict[str, object]


class BatchDataset(IterableDataset[_Item], Generic[_Item]):  # generic to type checkers without torch as well
    """Dataset of batches, for ``DataLoader(dataset, batch_size=None)`` with any number of workers, forked or spawned.

    The batches depend only on the arguments, the epoch and the number of workers. All workers of all ranks together
    read every record once. torchdata's StatefulDataLoader can resume in the middle of an epoch: the batches after a
    resume are byte for byte those of an uninterrupted run. Ranks may get different numbers of batches; use a RankLoader
    to make them equal.

    Args:
        shards: readers from ``mmpos.data.readers`` or your own, the same on every rank.
        preprocess: converts a record to an example, in the workers.
        batching: a Packer for packed batches or a Batcher for padded ones; it is copied, not modified.
        collate: collates a group of examples into a batch, in the workers; None yields Packs or lists of examples.
        seed: seed for all shuffling.
        shuffle: 0 keeps the given order; n shuffles the shards, and the records in windows of n. Each worker holds one
            window of undecoded records in memory.
        split: see Split.
        rank: rank of this process; None uses torch.distributed, which must be initialised first, or 0 without it.
        world_size: number of ranks; None uses torch.distributed, or 1 without it.
        on_error: "raise" stops at the first unusable record and names it; "skip" writes it to quarantine. For images,
            on_image_error of a Preprocess decides. Configuration errors, such as a builder without an ImageProcessor
            for images, always stop.
        max_skipped: largest fraction of the first 1,000 records of a worker (of all its records, if it reads fewer)
            that may be skipped, 0 to 1; ten may always be skipped.
        quarantine: folder for skipped records and dropped images, with one file of JSON lines per worker; each record
            is listed once per epoch, even if the epoch is resumed.
        threads: number of threads per worker that preprocess a few records ahead, for a builder that waits for a
            service.

    Raises:
        InvalidInputError: an argument is invalid.
    """

    if TYPE_CHECKING:  # without torch, pyright reads __init__ only if it knows __new__

        def __new__(cls, *args: object, **options: object) -> Self: ...  # noqa: D102

    def __init__(
        self,
        shards: Iterable[Reader],
        preprocess: MakeExample,
        batching: Batching,
        collate: Callable[[Any], _Item] | None = None,
        *,
        seed: int = 0,
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
        self._corpora = [_corpus(*named) for named in self._named(shards, preprocess)]
        if not all(hasattr(batching, name) for name in ("add", "flush", "pending")):
            raise InvalidInputError(f"batching: got {type(batching).__name__}, want a Packer or a Batcher")
        one_of("split", split, get_args(SplitBy))
        if batching.pending:
            raise InvalidInputError(f"batching: got {len(batching.pending)} pending examples, want an empty one")
        self._batching, self._collate = batching, collate
        self._threads = integer("threads", threads, minimum=0)
        self._seed, self._shuffle = integer("seed", seed, minimum=0), integer("shuffle", shuffle, minimum=0)
        self._folder = None if quarantine is None else local_path("quarantine", quarantine)
        self._policy = (on_error, max_skipped)
        if Quarantine(*self._policy).on_error == "skip" and quarantine is None:
            raise InvalidInputError("quarantine: got None, want a path; skipped records are never dropped silently")
        if self._skips_images and quarantine is None:
            raise InvalidInputError("quarantine: got None, want a path; images are never dropped silently")
        # The assumption of a single rank is checked again when iteration starts.
        if (rank is None) != (world_size is None):
            raise InvalidInputError(f"rank: got rank {rank} and world_size {world_size}, want both or neither")
        self._guessed = rank is None and not _distributed()
        if rank is None or world_size is None:
            rank, world_size = torch.distributed.get_rank() if _distributed() else 0, num_ranks()
        self._split = Split(rank, world_size, by=split)
        # In shared memory, so that persistent workers see the next epoch, and this process sees that workers exist.
        self._epoch = torch.tensor(0).share_memory_()
        self._chosen = torch.tensor(False).share_memory_()
        self._in_workers = torch.tensor(False).share_memory_()
        self._stream: BatchStream | None = None
        self._streamed = self.epoch
        self._state: DatasetState | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, even in running workers; a loaded state finishes its own epoch first."""
        self._epoch.fill_(integer("epoch", epoch, minimum=0))
        self._chosen.fill_(True)

    def num_batches(self, num_workers: int = 0) -> int | None:
        """Count the batches of the next epoch on this rank from the sizes of records, without reading any.

        Sizes are known for shards with lengths (SequenceShard); a Batcher without max_tokens needs only the number of
        records.

        Args:
            num_workers: number of workers of the DataLoader.

        Returns:
            the number; None if sizes are unknown, ``batching`` cuts texts, or records or images may be skipped.
        """
        lengths = [[_lengths(shard, self._batching) for shard in shards] for shards, _ in self._corpora]
        unknown = any(shard is None for corpus in lengths for shard in corpus)
        if unknown or self._policy[0] != "raise" or self._skips_images or self._draws.stop is None:
            return None
        corpora = [(tuple(map(_Sizes, corpus)), _Sizes.example) for corpus in lengths]  # type: ignore[arg-type]
        count = 0
        for worker in range(workers := max(num_workers, 1)):
            feeds = self._feeds(corpora, replace(self._split, worker=worker, num_workers=workers), self.epoch)
            count += sum(1 for _ in BatchStream(feeds, self._batching, draws=self._draws))
        return count

    @property
    def generator(self) -> None:
        """None, since all shuffling follows from the seed; accelerate reads it before splitting a dataset across ranks.

        Raises:
            UnsupportedError: the dataset is already split across ranks.
        """
        if self._split.world_size > 1:
            got = f"a dataset for rank {self._split.rank} of {self._split.world_size}, which accelerate"
            want = "load it through mmpos.data.RankLoader"
            raise UnsupportedError(f"generator: got {got} is about to split across ranks again; {want}")

    def __iter__(self) -> Iterator[_Item]:
        """Iterate over the batches of an epoch, from its start or from the state that was loaded."""
        # A state continues its own epoch, whatever epoch has been set since.
        self._in_workers.fill_(get_worker_info() is not None)
        if self._state is not None:
            self._check(self._state)  # checked again, since the state may have been loaded in another process
        self._streamed = self.epoch if self._state is None else self._state["epoch"]
        split, epoch = self._worker_split(), self._streamed
        feeds = self._feeds(self._corpora, split, epoch, {} if self._state is None else self._state["counts"])
        options: dict[str, Any] = {"threads": self._threads, "draws": self._draws, "state": self._state}
        self._stream, self._state = BatchStream(feeds, self._batching, self._collate, **options), None
        return iter(self._stream)

    def state_dict(self) -> DatasetState:
        """Return the JSON-compatible state of the latest iterator: a few integers per pending example, no pixels.

        Raises:
            UnsupportedError: workers read the dataset; use the state of the DataLoader instead.
        """
        if self._in_workers and get_worker_info() is None:
            want = "the state_dict of torchdata's StatefulDataLoader"
            raise UnsupportedError(f"state_dict: got a dataset that workers read, want {want}")
        if self._state is not None:
            return self._state.copy()
        if self._stream is None:
            iter(self)
        assert self._stream is not None
        return {**self._stream.state_dict(), "version": _VERSION, "epoch": self._streamed, "of": self._identity()}

    def load_state_dict(self, state: DatasetState) -> None:
        """Resume the next iteration from a state; later iterations also use its epoch, unless set_epoch was called.

        Raises:
            InvalidInputError: the state is from a dataset with other arguments, or from another worker.
        """
        self._check(state)
        # StatefulDataLoader loads a state only when iteration starts, after set_epoch.
        if not self._chosen:
            self._epoch.fill_(state["epoch"])
        self._state = DatasetState(**state)

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of the latest iterator in this process; workers have their own.

        ``records`` and ``skipped`` records, ``images_dropped``, ``batches``, and the counts of a Packer.
        """
        return {} if self._stream is None else self._stream.counts

    def _check(self, state: object) -> None:
        of = checked_state(state, DatasetState.__required_keys__)["of"]
        for name, want in self._identity().items():
            if (got := of.get(name)) != want:
                raise InvalidInputError(f"state: got {name} {got}, want {want}")

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_stream": None}

    def _worker_split(self) -> Split:
        if self._guessed and num_ranks() > 1:
            got = "a dataset created before torch.distributed was initialised"
            raise InvalidInputError(f"rank: got {got}, want it created after, or with rank and world_size")
        info = get_worker_info()
        return self._split if info is None else replace(self._split, worker=info.id, num_workers=info.num_workers)

    _draws = Draws()

    @property
    def _skips_images(self) -> bool:
        return any(skips_images(preprocess) for _, preprocess in self._corpora)

    def _named(self, shards: Any, preprocess: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield the key, shards and preprocess of each corpus in the order of the names of _draws."""
        yield "", shards, preprocess

    def _feeds(
        self, corpora: Sequence[_Corpus], split: Split, epoch: int, counts: Mapping[str, int] | None = None
    ) -> list[Feed]:
        """Return one consumer's records of each corpus; without counts, no lines are kept."""
        path = self._folder and self._folder / f"rank{split.rank}-worker{split.worker}.jsonl"
        lines = QuarantineFile(path) if path and counts is not None else None
        feeds = []
        for i, (name, (shards, preprocess)) in enumerate(zip(self._draws.names, corpora, strict=True)):
            read = [(counts or {}).get(f"{what}/{name}" if name else what, 0) for what in ("records", "skipped")]
            quarantine = Quarantine(*self._policy, lines, {"epoch": epoch}, *read)
            feeds.append(Feed(shards, preprocess, quarantine, split, self._shuffle, (self._seed, epoch), i))
        return feeds

    def _identity(self) -> dict[str, object]:
        """Return the arguments that a state depends on."""
        split = self._worker_split()
        readers = [reader for shards, _ in self._corpora for reader in shards]
        names = "\n".join(os.path.basename(reader.source) for reader in readers)  # a corpus may move
        return {
            "shards": f"{len(readers)} with checksum {zlib.crc32(names.encode()):08x}",
            "consumer": f"{split.consumer} of {split.consumers} by {split.by}",
            "seed": self._seed,
            "shuffle": self._shuffle,
            "batching": {name: value for name, value in vars(self._batching).items() if name[0] != "_"},
        }


class Blend(BatchDataset[_Item]):
    """Dataset of batches from several corpora, whose records are drawn independently by weight.

    Each worker draws from its own share of every corpus, and a batch may hold examples of all of them. A corpus that
    ends starts over, in a new order if shuffle is set, unless ``stop`` ends the epoch. Everything else is as in a
    BatchDataset: draws depend only on the arguments, the epoch and the number of workers, a state is small, and the
    batches after a resume are byte for byte those of an uninterrupted run. ``counts`` and the state also count records
    and skipped records by corpus, as ``records/NAME`` and ``skipped/NAME``, and max_skipped holds for each corpus.

    Args:
        shards: readers of each corpus, by its name.
        preprocess: one for all corpora, or one for each, by name.
        batching: as in BatchDataset.
        collate: as in BatchDataset.
        weights: expected share of each corpus in the records, by name, up to a common factor; 3 and 1 draw three
            records of one for each record of the other.
        stop: "first" ends the epoch of a worker when it draws from a corpus after the last record, "last" when this has
            happened to every corpus; None never ends it, for a trainer that counts steps.
        options: keyword arguments of BatchDataset.

    Raises:
        InvalidInputError: an argument is invalid, or names differ between shards, weights and preprocess; or, raised
            while loading, a corpus that should start over has no records.
    """

    def __init__(
        self,
        shards: Mapping[str, Iterable[Reader]],
        preprocess: MakeExample | Mapping[str, MakeExample],
        batching: Batching,
        collate: Callable[[Any], _Item] | None = None,
        *,
        weights: Mapping[str, float],
        stop: Stop | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(shards, Mapping) or not shards:
            got = "none" if isinstance(shards, Mapping) else type(shards).__name__
            raise InvalidInputError(f"shards: got {got}, want a mapping from at least one name to readers")
        _same_names("weights", weights, shards)
        values = tuple(finite(f"weights[{name!r}]", weights[name], above=0) for name in shards)
        self._draws = Draws(tuple(shards), values, one_of("stop", stop, (None, *get_args(Stop))))
        super().__init__(shards, preprocess, batching, collate, **options)  # type: ignore[arg-type]

    def _named(self, shards: Any, preprocess: Any) -> Iterator[tuple[str, Any, Any]]:
        if isinstance(preprocess, Mapping):
            _same_names("preprocess", preprocess, shards)
        for name, readers in shards.items():
            yield f"[{name!r}]", readers, preprocess[name] if isinstance(preprocess, Mapping) else preprocess

    def _identity(self) -> dict[str, object]:
        weights = [list(pair) for pair in zip(self._draws.names, self._draws.weights, strict=True)]
        return {**super()._identity(), "weights": weights, "stop": self._draws.stop}


_Corpus: TypeAlias = tuple[tuple[Reader, ...], MakeExample]
"""Shards with the function that makes examples from their records."""


def _corpus(key: str, shards: Iterable[object], preprocess: object) -> _Corpus:
    """Check the shards and preprocess of a corpus with this key in a blend, or "" outside one."""
    readers = checked_readers(f"shards{key}", shards)
    if not callable(preprocess):
        got = type(preprocess).__name__
        raise InvalidInputError(f"preprocess{key}: got {got}, want a Preprocess, or get_example")
    return readers, preprocess


def _lengths(shard: Reader, batching: Batching) -> IntArray | None:
    """Return the (records,) token counts, ones if sizes do not matter, or None if the sizes are unknown."""
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
    """Reader of stand-in records with known (records,) numbers of tokens."""

    lengths: IntArray
    source: str = "sizes"

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Record]]:
        for index in range(start, self.lengths.size, step):
            yield Location(self.source, index), {"tokens": int(self.lengths[index])}

    def count(self) -> int:
        return self.lengths.size

    @staticmethod
    def example(record: Record, location: Location) -> Example:
        """Create an example that has this number of tokens but takes no memory."""
        tokens = np.broadcast_to(np.int64(0), record["tokens"])
        return Example(str(location), cast(InterleavedSequence, SimpleNamespace(input_ids=tokens)), tokens)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def num_ranks() -> int:
    """Return the number of ranks of torch.distributed, or 1 without it."""
    return torch.distributed.get_world_size() if _distributed() else 1


def checked_state(state: object, keys: Collection[str]) -> Mapping[str, Any]:
    """Return a state, and raise InvalidInputError if it is no mapping of the current version with these keys."""
    if isinstance(state, Mapping) and state.get("version") == _VERSION:
        if missing := sorted(set(keys) - state.keys()):
            raise InvalidInputError(f"state: got no {', '.join(missing)}, want all that state_dict returned")
        return state
    got = f"version {state.get('version')}" if isinstance(state, Mapping) else type(state).__name__
    raise InvalidInputError(f"state: got {got}, want version {_VERSION} from state_dict")


def _same_names(argument: str, values: object, shards: Mapping[str, object]) -> None:
    got = sorted(values) if isinstance(values, Mapping) else type(values).__name__
    if got != sorted(shards):
        raise InvalidInputError(f"{argument}: got {got}, want the names in shards: {sorted(shards)}")
