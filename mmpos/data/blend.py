"""Blend: one dataset that draws records from several corpora by weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_args

from mmpos.data.examples import MakeExample
from mmpos.data.loader import BatchDataset, Corpus
from mmpos.data.packing import Batching
from mmpos.data.readers import Reader
from mmpos.data.stream import Draws, Stop
from mmpos.errors import InvalidInputError
from mmpos.support.checks import finite, one_of

__all__ = ["Blend"]

_Item = TypeVar("_Item")


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

    def _named(self, shards: Any, preprocess: Any) -> tuple[Corpus, ...]:
        if isinstance(preprocess, Mapping):
            _same_names("preprocess", preprocess, shards)
        else:
            preprocess = dict.fromkeys(shards, preprocess)
        return tuple(Corpus.of(name, shards[name], preprocess[name]) for name in shards)

    def _identity(self) -> dict[str, object]:
        weights = [list(pair) for pair in zip(self._draws.names, self._draws.weights, strict=True)]
        return {**super()._identity(), "weights": weights, "stop": self._draws.stop}


def _same_names(argument: str, values: object, shards: Mapping[str, object]) -> None:
    got = sorted(values) if isinstance(values, Mapping) else type(values).__name__
    if got != sorted(shards):
        raise InvalidInputError(f"{argument}: got {got}, want the names in shards: {sorted(shards)}")
