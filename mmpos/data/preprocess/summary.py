"""What a job says: how far it is, and in the end what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

from mmpos.data.preprocess.shard_job import Counts, quarantine_of

__all__ = ["Fill", "Output", "Progress", "Summary"]


@dataclass(frozen=True)
class Progress:
    """How far the job is.

    Args:
        shards: in all.
        done: shards that are finished, those of earlier runs included.
        reused: those of earlier runs.
        counts: what has come of records in this run.
    """

    shards: int
    done: int
    reused: int
    counts: Counts


@dataclass(frozen=True)
class Output:
    """A finished shard.

    Args:
        source: path or name of its input.
        path: the file of ready sequences; SequenceShard reads it.
        counts: what came of its records.
        reused: whether an earlier run had made it.
    """

    source: str
    path: Path
    counts: Counts
    reused: bool

    @property
    def quarantine(self) -> Path:
        """The file of the records that were skipped; there is one if there are any."""
        return quarantine_of(self.path)


@dataclass(frozen=True)
class Fill:
    """What packing by first-fit decreasing would give.

    Args:
        max_tokens: most tokens in a pack.
        packs: packs of the documents that fit in one.
        tokens: tokens in them.
        longer: documents that do not fit, and would have to be cut.
    """

    max_tokens: int
    packs: int
    tokens: int
    longer: int

    @property
    def rate(self) -> float:
        """Tokens over capacity; 0 without packs."""
        return self.tokens / (self.packs * self.max_tokens) if self.packs else 0.0


@dataclass(frozen=True)
class Summary:
    """What came of the job.

    Args:
        outputs: in the order of the inputs.
        fill: of all their documents.
        seconds: that this run took, without the packing.
    """

    outputs: tuple[Output, ...]
    fill: Fill
    seconds: float

    @property
    def counts(self) -> Counts:
        """Of all outputs."""
        return reduce(add, (output.counts for output in self.outputs), Counts())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this run over its seconds."""
        tokens = sum(output.counts.tokens for output in self.outputs if not output.reused)
        return tokens / self.seconds if self.seconds else 0.0
