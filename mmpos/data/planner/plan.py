"""Plan packs: assign examples to packs, and packs to steps, ranks and microbatches, so that ranks finish together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mmpos.data.planner.cost import Cost, FloatArray, Headers
from mmpos.errors import InvalidInputError
from mmpos.support.checks import IntArray, counted, first_bad, instance, integer

__all__ = ["TrainingPlan", "plan"]

WINDOW = 2**16
"""Default number of examples planned together: enough to balance 1,024 ranks, few enough to read almost in order."""

_GROWTH = 1.02
"""Factor by which the number of packs grows when the examples do not fit."""


@dataclass(frozen=True, eq=False)
class TrainingPlan:
    """Assignment of examples to packs, and of packs to steps, ranks and microbatches.

    In each microbatch of a step, a rank processes pack (step·ranks + rank)·microbatches + microbatch.

    Args:
        members: (examples,) indices of the examples, pack by pack.
        member_tokens: (examples,) tokens of the examples in ``members``.
        pack_offsets: (packs + 1,) start of each pack in ``members``, then the total; no pack is empty.
        ranks: number of data-parallel ranks.
        microbatches: number of packs per rank in a step.
        max_tokens: maximum number of tokens in a pack.
        tokens: (packs,) tokens of each pack.
        labels: (packs,) label tokens of each pack.
        images: (packs,) images of each pack.
        costs: (packs,) cost of each pack.
    """

    members: IntArray
    member_tokens: IntArray
    pack_offsets: IntArray
    ranks: int
    microbatches: int
    max_tokens: int
    tokens: IntArray
    labels: IntArray
    images: IntArray
    costs: FloatArray

    @property
    def num_packs(self) -> int:
        """Number of packs in all steps."""
        return self.tokens.size

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return self.num_packs // (self.ranks * self.microbatches)

    @property
    def weights(self) -> FloatArray:
        """(packs,) factor for the mean loss of each pack, chosen so that every label of the plan counts equally.

        The loss of a step is the mean, over ranks and microbatches, of the weight times the mean loss over the labels
        of the pack. Weights average to 1.
        """
        weights: FloatArray = self.labels.astype(np.float64) * self.num_packs / max(int(self.labels.sum()), 1)
        return weights

    @property
    def needs_image(self) -> npt.NDArray[np.bool_]:
        """(packs,) whether a pack has no image while the pack of another rank in the same microbatch has one.

        If the vision tower is sharded across ranks, all ranks must run it: give these packs a dummy image.
        """
        has = (self.images > 0).reshape(self.num_steps, self.ranks, self.microbatches)
        return np.asarray(has.any(axis=1, keepdims=True) & ~has).ravel()

    @property
    def fill(self) -> float:
        """Tokens divided by the capacity of all packs."""
        return float(self.tokens.sum()) / (self.max_tokens * self.num_packs)

    @property
    def labels_per_step(self) -> IntArray:
        """(steps,) label tokens of each step."""
        return self.labels.reshape(self.num_steps, -1).sum(axis=1)

    def rank_costs(self, pipeline: int = 1) -> FloatArray:
        """Return the (steps, ranks) cost of each rank in each step.

        Args:
            pipeline: number of pipeline stages; a rank waits stages − 1 times for its slowest microbatch.
        """
        stages = integer("pipeline", pipeline, minimum=1)
        costs = self.costs.reshape(self.num_steps, self.ranks, self.microbatches)
        total: FloatArray = costs.sum(axis=2) + (stages - 1) * costs.max(axis=2)
        return total

    def straggling(self, pipeline: int = 1) -> float:
        """Return the sum over steps of the slowest rank's cost, divided by the sum over steps of the mean cost."""
        costs = self.rank_costs(pipeline)
        return float(costs.max(axis=1).sum() / costs.mean(axis=1).sum())

    def packs(self, rank: int, start: int = 0) -> Iterator[list[IntArray]]:
        """Yield the packs of a rank, step by step: the indices of the examples of each microbatch.

        Args:
            rank: the rank.
            start: index of the first step, to resume.
        """
        rank = integer("rank", rank, minimum=0, maximum=self.ranks - 1)
        for step in range(integer("start", start, minimum=0), self.num_steps):
            first = (step * self.ranks + rank) * self.microbatches
            bounds = self.pack_offsets[first : first + self.microbatches + 1].tolist()
            yield [self.members[a:b] for a, b in pairwise(bounds)]

    def __repr__(self) -> str:
        steps = f"{counted(self.num_steps, 'step')} of {counted(self.ranks, 'rank')}"
        packs = f"{counted(self.microbatches, 'microbatch')}, fill={self.fill:.3f}, straggling={self.straggling():.4f}"
        return f"TrainingPlan({steps} with {packs})"


def plan(
    headers: Headers,
    *,
    max_tokens: int,
    ranks: int,
    microbatches: int = 1,
    cost: Cost | None = None,
    window: int = WINDOW,
    seed: int = 0,
) -> TrainingPlan:
    """Plan packs so that all ranks finish a step together; the same arguments always give the same plan.

    The examples of a window are assigned in rounds, the most expensive first, to the packs with the lowest cost so far
    that have room. Packs of similar cost share a step. The steps of a window are in random order. To plan a stream,
    call this once per window.

    Args:
        headers: sizes of the examples.
        max_tokens: maximum number of tokens in a pack.
        ranks: number of data-parallel ranks.
        microbatches: number of packs per rank in a step.
        cost: cost model; None uses ``Cost()``.
        window: number of consecutive examples planned together; a shorter remainder joins the last window.
        seed: seed for the order of steps.

    Raises:
        InvalidInputError: an example is longer than max_tokens, a window has too few examples to give every rank a
            pack, or costs are not finite.
    """
    max_tokens = integer("max_tokens", max_tokens, minimum=1)
    ranks, microbatches = integer("ranks", ranks, minimum=1), integer("microbatches", microbatches, minimum=1)
    window, seed = integer("window", window, minimum=1), integer("seed", seed, minimum=0)
    costs = _costs(Cost() if cost is None else cost, headers)
    first_bad("headers.tokens", headers.tokens, maximum=max_tokens)
    group = ranks * microbatches
    random = np.random.default_rng(seed)
    pack_of = np.empty(len(headers), np.int64)
    packs = 0
    for start, stop in _windows(len(headers), window):
        part = slice(start, stop)
        own = _packed(headers.tokens[part], costs[part], max_tokens, group, is_whole=stop - start == len(headers))
        place = _ordered(np.bincount(own, costs[part]).astype(np.float64), ranks, microbatches, random)
        pack_of[part] = packs + place[own]
        packs += place.size
    members = np.argsort(pack_of, kind="stable")
    return TrainingPlan(
        members=members,
        member_tokens=headers.tokens[members],
        pack_offsets=np.append(0, np.bincount(pack_of, minlength=packs).cumsum()),
        ranks=ranks,
        microbatches=microbatches,
        max_tokens=max_tokens,
        tokens=_sums(pack_of, headers.tokens),
        labels=_sums(pack_of, headers.labels),
        images=_sums(pack_of, headers.images),
        costs=np.bincount(pack_of, costs).astype(np.float64),
    )


def _costs(cost: Cost, headers: Headers) -> FloatArray:
    """Return the cost of each example, and check that the sum is finite."""
    instance("headers", headers, Headers, "Headers.of")
    with np.errstate(over="ignore"):
        costs = instance("cost", cost, Cost, "Cost.from_hf_config").of(headers)
    if not np.isfinite(total := costs.sum()):
        raise InvalidInputError(f"cost: got a sum of {total} over the examples, want a finite one; use smaller units")
    return costs


def _sums(pack_of: IntArray, sizes: IntArray) -> IntArray:
    """Sum the sizes of the examples in each pack."""
    return np.bincount(pack_of, sizes).astype(np.int64)  # exact, since Headers sum to at most 2**53


def _windows(count: int, window: int) -> list[tuple[int, int]]:
    """Return the (start, stop) of each window; a shorter remainder joins the last window."""
    starts = [*range(0, max(count - window, 0) + 1, window)]
    return list(zip(starts, [*starts[1:], count], strict=True))


def _packed(tokens: IntArray, costs: FloatArray, max_tokens: int, group: int, *, is_whole: bool) -> IntArray:
    """Assign each example to a pack; the number of packs is a multiple of ``group``, and no pack is empty."""
    least = -(-int(tokens.sum()) // max_tokens)
    packs = -(-max(least, 1) // group) * group
    while packs <= tokens.size:
        packed = _spread(tokens, costs, max_tokens, packs)
        if packed is not None:
            return packed
        packs = -(-max(int(packs * _GROWTH), packs + 1) // group) * group
    raise InvalidInputError(
        f"headers: got {tokens.size} examples to plan together, want at least {packs}, "
        f"one for each of the {group} packs of a step, or fewer ranks or microbatches"
        f"{'' if is_whole else ', or a larger window'}"
    )


def _spread(tokens: IntArray, costs: FloatArray, max_tokens: int, packs: int) -> IntArray | None:
    """Distribute examples over packs of even cost; return None if some do not fit."""
    order = np.argsort(-costs, kind="stable")
    pack_of = np.empty(tokens.size, np.int64)
    sums, room = np.zeros(packs), np.full(packs, max_tokens)
    waiting = []
    for first in range(0, order.size, packs):
        examples = order[first : first + packs]
        cheapest = np.argsort(sums, kind="stable")[: examples.size]
        fits = tokens[examples] <= room[cheapest]
        waiting.append(examples[~fits])
        examples, cheapest = examples[fits], cheapest[fits]
        pack_of[examples] = cheapest
        sums[cheapest] += costs[examples]
        room[cheapest] -= tokens[examples]
    rest = np.concatenate(waiting)
    for example in rest[np.argsort(-tokens[rest], kind="stable")].tolist():
        (open_packs,) = np.nonzero(room >= tokens[example])
        if not open_packs.size:
            return None
        pack = open_packs[sums[open_packs].argmin()]
        pack_of[example] = pack
        sums[pack] += costs[example]
        room[pack] -= tokens[example]
    return pack_of


def _ordered(costs: FloatArray, ranks: int, microbatches: int, random: np.random.Generator) -> IntArray:
    """Return the place of each pack of a window: its step, rank and microbatch, encoded as one number."""
    steps = np.argsort(costs, kind="stable").reshape(-1, ranks * microbatches)
    random.shuffle(steps)
    place = np.empty(costs.size, np.int64)
    place[np.concatenate([_dealt(packs, costs, ranks).ravel() for packs in steps])] = np.arange(costs.size)
    return place


def _dealt(packs: IntArray, sizes: FloatArray, hands: int) -> IntArray:
    """Deal packs greedily into hands of equal length with nearly even sums of sizes: (hands, packs per hand)."""
    rounds = packs[np.argsort(-sizes[packs], kind="stable")].reshape(-1, hands)
    dealt, sums = np.empty_like(rounds), np.zeros(hands)
    for number, row in enumerate(rounds):
        smallest = np.argsort(sums, kind="stable")
        dealt[number, smallest] = row
        sums[smallest] += sizes[row]
    return dealt.T
