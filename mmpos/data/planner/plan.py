"""Plans: examples in packs that fit, and packs over steps, ranks and microbatches so that no rank waits for another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mmpos.data.planner.cost import Cost, FloatArray, Headers
from mmpos.errors import InvalidInputError
from mmpos.support.checks import IntArray, counted, finite, first_bad, integer

__all__ = ["TrainingPlan", "plan"]

WINDOW = 2**16
"""Examples that are planned together, by default: enough to balance 1,024 ranks, few enough to be read in order."""

_GROWTH = 1.02
"""How many times more packs are tried where the examples do not fit."""


@dataclass(frozen=True, eq=False)
class TrainingPlan:
    """Assignment of examples to packs, and of packs to steps, ranks and microbatches.

    Pack (step·ranks + rank)·microbatches + microbatch is what a rank computes in a microbatch of a step.

    Args:
        members: (examples,) index of each example, pack by pack.
        member_tokens: (examples,) tokens of each of these.
        pack_offsets: (packs + 1,) where each pack begins in ``members``; no pack is empty.
        ranks: data-parallel ranks.
        microbatches: packs of a rank in a step.
        max_tokens: most tokens in a pack.
        tokens: (packs,) tokens of each.
        labels: (packs,) label tokens of each.
        images: (packs,) images of each.
        costs: (packs,) cost of each.
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
        """Packs in all steps."""
        return self.tokens.size

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer."""
        return self.num_packs // (self.ranks * self.microbatches)

    @property
    def weights(self) -> FloatArray:
        """(packs,) factor of the mean loss of each pack: with it every label of the plan counts alike.

        The loss of a step is the mean over ranks and microbatches of weight times the mean loss of the pack's labels.
        Weights are 1 on average.
        """
        weights: FloatArray = self.labels.astype(np.float64) * self.num_packs / max(int(self.labels.sum()), 1)
        return weights

    @property
    def needs_image(self) -> npt.NDArray[np.bool_]:
        """(packs,) whether a pack has no image while another rank's has one in the same microbatch of the step.

        A model whose vision tower is sharded over ranks must run it everywhere: give these packs a dummy image.
        """
        has = (self.images > 0).reshape(self.num_steps, self.ranks, self.microbatches)
        return np.asarray(has.any(axis=1, keepdims=True) & ~has).ravel()

    @property
    def fill(self) -> float:
        """Tokens over the capacity of all packs."""
        return float(self.tokens.sum()) / (self.max_tokens * self.num_packs)

    @property
    def labels_per_step(self) -> IntArray:
        """(steps,) label tokens of each step."""
        return self.labels.reshape(self.num_steps, -1).sum(axis=1)

    def rank_costs(self, pipeline: int = 1) -> FloatArray:
        """Return the (steps, ranks) cost of what each rank computes in each step.

        Args:
            pipeline: stages of a pipeline: a rank then waits stages − 1 times for its slowest microbatch.
        """
        stages = integer("pipeline", pipeline, minimum=1)
        costs = self.costs.reshape(self.num_steps, self.ranks, self.microbatches)
        total: FloatArray = costs.sum(axis=2) + (stages - 1) * costs.max(axis=2)
        return total

    def straggling(self, pipeline: int = 1) -> float:
        """Return the time of the plan over that of a perfectly even one: all slowest ranks over all means."""
        costs = self.rank_costs(pipeline)
        return float(costs.max(axis=1).sum() / costs.mean(axis=1).sum())

    def packs(self, rank: int, start: int = 0) -> Iterator[list[IntArray]]:
        """Yield the packs of a rank, step by step: the indices of the examples of each microbatch.

        Args:
            rank: the rank.
            start: first step, to resume.
        """
        rank = integer("rank", rank, minimum=0, maximum=self.ranks - 1)
        for step in range(integer("start", start, minimum=0), self.num_steps):
            first = (step * self.ranks + rank) * self.microbatches
            bounds = self.pack_offsets[first : first + self.microbatches + 1].tolist()
            yield [self.members[a:b] for a, b in pairwise(bounds)]

    def __repr__(self) -> str:
        return (
            f"TrainingPlan({counted(self.num_steps, 'step')} of {counted(self.ranks, 'rank')} with "
            f"{counted(self.microbatches, 'microbatch')}, "
            f"fill={self.fill:.3f}, straggling={self.straggling():.4f})"
        )


def plan(
    headers: Headers,
    *,
    max_tokens: int,
    ranks: int,
    microbatches: int = 1,
    cost: Cost | None = None,
    tolerance: float = 0.02,
    window: int = WINDOW,
    seed: int = 0,
) -> TrainingPlan:
    """Plan packs so that the ranks of a step finish together; the same arguments give the same plan.

    Of each window of examples, the most expensive go first, each round of them to the packs that cost least so far and
    have room. Packs that cost about the same then share a step; among those within ``tolerance`` of each other, the
    labels of steps are evened. Steps of a window come in random order. A stream is planned by a call a window.

    Args:
        headers: sizes of the examples.
        max_tokens: most tokens in a pack.
        ranks: data-parallel ranks.
        microbatches: packs of a rank in a step.
        cost: what examples cost; None takes ``Cost()``.
        tolerance: how much more than the cheapest a pack of the same step may cost for the sake of even labels.
        window: examples that are planned together, in their order; the last ones join the window before them.
        seed: of the order of steps.

    Raises:
        InvalidInputError: an example longer than max_tokens, too few examples in a window to give every rank a pack,
            or costs that are not finite.
    """
    max_tokens = integer("max_tokens", max_tokens, minimum=1)
    ranks, microbatches = integer("ranks", ranks, minimum=1), integer("microbatches", microbatches, minimum=1)
    window, seed = integer("window", window, minimum=1), integer("seed", seed, minimum=0)
    tolerance = finite("tolerance", tolerance, minimum=0)
    costs = _costs(Cost() if cost is None else cost, headers)
    first_bad("headers.tokens", headers.tokens, maximum=max_tokens)
    group = ranks * microbatches
    random = np.random.default_rng(seed)
    pack_of = np.empty(len(headers), np.int64)
    packs = 0
    for start, stop in _windows(len(headers), window):
        where = slice(start, stop)
        own = _packed(headers.tokens[where], costs[where], max_tokens, group, whole=stop - start == len(headers))
        place = _ordered(own, costs[where], headers.labels[where], ranks, microbatches, tolerance, random)
        pack_of[where] = packs + place[own]
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


def _costs(cost: object, headers: object) -> FloatArray:
    """Return the cost of each example; their sum is finite."""
    if not isinstance(headers, Headers):
        raise InvalidInputError(f"headers: got {type(headers).__name__}, want Headers")
    if not isinstance(cost, Cost):
        raise InvalidInputError(f"cost: got {type(cost).__name__}, want a Cost")
    with np.errstate(over="ignore"):
        costs = cost.of(headers)
        total = costs.sum()
    if not np.isfinite(total):
        raise InvalidInputError(f"cost: got examples that cost {total} in all, want a finite number: smaller units")
    return costs


def _sums(pack_of: IntArray, sizes: IntArray) -> IntArray:
    """Sum the sizes of the examples of each pack."""
    return np.bincount(pack_of, sizes).astype(np.int64)  # exact: Headers have at most 2**53


def _windows(count: int, window: int) -> list[tuple[int, int]]:
    """Cut examples into windows; what is left of the last joins the one before it."""
    starts = [*range(0, max(count - window, 0) + 1, window)]
    return list(zip(starts, [*starts[1:], count], strict=True))


def _packed(tokens: IntArray, costs: FloatArray, max_tokens: int, group: int, *, whole: bool) -> IntArray:
    """Find the pack of each example: a multiple of ``group`` of them, none of them empty or too full."""
    least = -(-int(tokens.sum()) // max_tokens)
    packs = -(-max(least, 1) // group) * group
    while packs <= tokens.size:
        packed = _spread(tokens, costs, max_tokens, packs)
        if packed is not None:
            return packed
        packs = -(-max(int(packs * _GROWTH), packs + 1) // group) * group
    raise InvalidInputError(
        f"headers: got {tokens.size} examples that are planned together, want at least {packs}, "
        f"one for each of the {group} packs of a step, or fewer ranks or microbatches"
        f"{'' if whole else ', or a larger window'}"
    )


def _spread(tokens: IntArray, costs: FloatArray, max_tokens: int, packs: int) -> IntArray | None:
    """Spread examples over packs of even cost; None if some do not fit."""
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
    left = np.concatenate(waiting)
    for example in left[np.argsort(-tokens[left], kind="stable")].tolist():
        (open_packs,) = np.nonzero(room >= tokens[example])
        if not open_packs.size:
            return None
        pack = open_packs[sums[open_packs].argmin()]
        pack_of[example] = pack
        sums[pack] += costs[example]
        room[pack] -= tokens[example]
    return pack_of


def _ordered(
    pack_of: IntArray, costs: FloatArray, labels: IntArray, ranks: int, microbatches: int, tolerance: float,
    random: np.random.Generator,
) -> IntArray:  # fmt: skip
    """Find the place of each pack of a window: its step, rank and microbatch as one number."""
    group = ranks * microbatches
    of_packs, of_labels = np.bincount(pack_of, costs), _sums(pack_of, labels)
    order = np.argsort(of_packs, kind="stable")
    ascending = of_packs[order]
    steps, first = [], 0
    while first < order.size:
        alike = int(ascending.searchsorted(ascending[first] * (1 + tolerance), side="right")) - first
        stop = first + max(alike // group, 1) * group
        steps.append(_dealt(order[first:stop], of_labels, (stop - first) // group))
        first = stop
    shuffled = np.concatenate(steps)
    random.shuffle(shuffled)
    by_rank = np.concatenate([_dealt(packs, of_packs, ranks).ravel() for packs in shuffled])
    place = np.empty(order.size, np.int64)
    place[by_rank] = np.arange(order.size)
    return place


def _dealt(packs: IntArray, sizes: FloatArray | IntArray, hands: int) -> IntArray:
    """Deal packs out to hands of equally many, (hands, packs of each), with sums of sizes as even as can be."""
    rounds = packs[np.argsort(-sizes[packs], kind="stable")].reshape(-1, hands)
    dealt, sums = np.empty_like(rounds), np.zeros(hands)
    for number, each in enumerate(rounds):
        smallest = np.argsort(sums, kind="stable")
        dealt[number, smallest] = each
        sums[smallest] += sizes[each]
    return dealt.T
