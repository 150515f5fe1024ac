"""Plan packs: assign examples to packs, and packs to steps, ranks and microbatches, so that ranks finish together."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.rotary.hf_config import Fields
from mmpos.support.checks import INT32_MAX, IntArray, counted, finite, first_bad, instance, int_array, integer, integers

__all__ = ["Cost", "Headers", "TrainingPlan", "plan"]

FloatArray = npt.NDArray[np.float64]

_MOST_TOKENS = 2**53  # largest sum of sizes that is exact in float64


@dataclass(frozen=True, eq=False)
class Headers:
    """Sizes of examples, known from text lengths and image headers alone.

    Args:
        tokens: (examples,) tokens of each example, including image tokens and markers; at least 1.
        labels: (examples,) trained tokens of each example, excluding the first token of a document, which no token
            predicts.
        patches: (images,) patches of each image or video frame, before they are merged into tokens.
        images: (examples,) images of each example, in the order of ``patches``; both are None without images.
    """

    tokens: IntArray
    labels: IntArray
    patches: IntArray
    images: IntArray

    def __init__(self, tokens: object, labels: object, patches: object = None, images: object = None) -> None:
        tokens = int_array("tokens", tokens, (None,))
        labels = int_array("labels", labels, (tokens.size,))
        patches = np.zeros(0, np.int64) if patches is None else int_array("patches", patches, (None,))
        images = np.zeros_like(tokens) if images is None else int_array("images", images, (tokens.size,))
        values = {"tokens": tokens, "labels": labels, "patches": patches, "images": images}
        for name, value in values.items():
            first_bad(name, value, minimum=int(name in ("tokens", "patches")))
        if (total := tokens.sum(dtype=np.float64)) > _MOST_TOKENS:
            raise InvalidInputError(f"tokens: got a sum of {total:g}, want at most {_MOST_TOKENS:g}")
        if (bad := np.flatnonzero(labels > tokens)).size:
            want = f"at most {tokens[bad[0]]}, the tokens of the example"
            raise InvalidInputError(f"labels[{bad[0]}]: got {labels[bad[0]]}, want {want}")
        if (num_images := int(images.sum(dtype=np.float64))) != patches.size:
            raise InvalidInputError(f"images: got a sum of {num_images}, want {patches.size} as in patches")
        vars(self).update(values)

    def __len__(self) -> int:
        return self.tokens.size


@dataclass(frozen=True)
class Cost:
    """Cost of an example with t tokens and images of p patches each, in any unit.

    language_linear·t + language_quadratic·t² + Σ (vision_linear·p + vision_quadratic·p²)

    The defaults are the FLOP of a language model with 7 billion parameters and a vision tower with 0.6 billion.

    Args:
        language_linear: cost per token, for products with weights.
        language_quadratic: cost per squared number of tokens, for attention within a document.
        vision_linear: cost per patch.
        vision_quadratic: cost per squared number of patches of an image or frame.
    """

    language_linear: float = 1.3e10
    language_quadratic: float = 2e5
    vision_linear: float = 1.26e9
    vision_quadratic: float = 1.64e5

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            vars(self)[name] = finite(f"Cost.{name}", value, minimum=0)
        if not self.language_linear:
            raise InvalidInputError("Cost.language_linear: got 0.0, want > 0; every token costs something")

    @classmethod
    def from_hf_config(cls, config: object) -> Cost:
        """Count the FLOP of a forward pass from a Transformers config; training takes three times as many.

        Causal attention counts as half of full attention. Windowed attention layers of a vision tower are not counted.

        Args:
            config: a config object, the mapping from its config.json, or the path of that file or its folder.

        Raises:
            InvalidInputError: a required size is missing.
        """
        root = Fields.of(config)
        thinker = root.part("thinker_config") or root
        language = thinker.part("text_config") or thinker
        linear, quadratic = _transformer_flops(language, "num_hidden_layers")
        vocabulary = language.integer("vocab_size") or 0
        hidden = language.integer("hidden_size", needed=True, minimum=1)
        vision = thinker.part("vision_config")
        vision_flops = (0.0, 0.0) if vision is None else _transformer_flops(vision, "depth", "num_hidden_layers")
        return cls(linear + 2.0 * vocabulary * hidden, quadratic / 2, *vision_flops)

    def of(self, headers: Headers) -> FloatArray:
        """Return the (examples,) cost of each example."""
        owner = np.arange(len(headers)).repeat(headers.images)
        patches, tokens = headers.patches.astype(np.float64), headers.tokens.astype(np.float64)
        per_image = [np.bincount(owner, power, len(headers)) for power in (patches, patches**2)]
        costs: FloatArray = np.array(astuple(self)) @ np.stack([tokens, tokens**2, *per_image])
        return costs


@dataclass(frozen=True, eq=False)
class TrainingPlan:
    """Assignment of examples to packs, and of packs to steps, ranks and microbatches.

    In each microbatch of a step, a rank processes pack (step·ranks + rank)·microbatches + microbatch.

    Args:
        pack_of: (examples,) pack of each example; no pack is empty.
        headers: sizes of the examples.
        costs: (examples,) cost of each example.
        ranks: number of data-parallel ranks.
        microbatches: number of packs per rank in a step.
        max_tokens: maximum number of tokens in a pack.
    """

    pack_of: IntArray
    headers: Headers
    costs: FloatArray
    ranks: int
    microbatches: int
    max_tokens: int

    def sums(self, sizes: npt.NDArray[np.number]) -> FloatArray:
        """Return the (packs,) sums of (examples,) sizes, such as ``headers.tokens``, over the examples of each pack."""
        return np.bincount(self.pack_of, sizes).astype(np.float64)  # exact, since Headers sum to at most 2**53

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return (int(self.pack_of.max()) + 1) // (self.ranks * self.microbatches)

    @property
    def weights(self) -> FloatArray:
        """(packs,) factor for the mean loss of each pack, chosen so that every label of the plan counts equally.

        The loss of a step is the mean, over ranks and microbatches, of the weight times the mean loss over the labels
        of the pack. Weights average to 1.
        """
        labels = self.sums(self.headers.labels)
        return labels * labels.size / max(labels.sum(), 1)

    @property
    def needs_image(self) -> npt.NDArray[np.bool_]:
        """(packs,) whether a pack has no image while the pack of another rank in the same microbatch has one.

        If the vision tower is sharded across ranks, all ranks must run it: give these packs a dummy image.
        """
        has = (self.sums(self.headers.images) > 0).reshape(-1, self.ranks, self.microbatches)
        return np.asarray(has.any(axis=1, keepdims=True) & ~has).ravel()

    @property
    def fill(self) -> float:
        """Tokens divided by the capacity of all packs."""
        return float(self.sums(self.headers.tokens).mean() / self.max_tokens)

    @property
    def straggling(self) -> float:
        """Sum over steps of the slowest rank's cost, divided by the sum over steps of the mean cost."""
        costs = self.sums(self.costs).reshape(-1, self.ranks, self.microbatches).sum(axis=2)
        return float(costs.max(axis=1).sum() / costs.mean(axis=1).sum())

    def packs(self, rank: int) -> list[list[IntArray]]:
        """Return the packs of a rank: for each step, the indices of the examples of each microbatch."""
        first = integer("rank", rank, minimum=0, maximum=self.ranks - 1) * self.microbatches
        packs = np.split(np.argsort(self.pack_of, kind="stable"), np.bincount(self.pack_of).cumsum()[:-1])
        starts = range(first, len(packs), self.ranks * self.microbatches)
        return [packs[start : start + self.microbatches] for start in starts]

    def __repr__(self) -> str:
        steps = f"{counted(self.num_steps, 'step')} of {counted(self.ranks, 'rank')}"
        packs = f"{counted(self.microbatches, 'microbatch')}, fill={self.fill:.3f}, straggling={self.straggling:.4f}"
        return f"TrainingPlan({steps} with {packs})"


def plan(
    headers: Headers,
    *,
    max_tokens: int,
    ranks: int,
    microbatches: int = 1,
    cost: Cost | None = None,
    window: int = 2**16,
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
        window: number of consecutive examples planned together; a shorter remainder joins the last window. The default
            is enough to balance 1,024 ranks, and small enough to read files almost in order.
        seed: seed for the order of steps.

    Raises:
        InvalidInputError: an example is longer than max_tokens, a window has too few examples to give every rank a
            pack, or costs are not finite.
    """
    max_tokens = integer("max_tokens", max_tokens, minimum=1, maximum=INT32_MAX)
    ranks, microbatches = integer("ranks", ranks, minimum=1), integer("microbatches", microbatches, minimum=1)
    window, seed = integer("window", window, minimum=1), integer("seed", seed, minimum=0)
    instance("headers", headers, Headers, "read_headers")
    with np.errstate(over="ignore"):
        costs = (Cost() if cost is None else instance("cost", cost, Cost, "Cost.from_hf_config")).of(headers)
    if not np.isfinite(total := costs.sum()):
        raise InvalidInputError(f"cost: got a sum of {total} over the examples, want a finite one; use smaller units")
    first_bad("headers.tokens", headers.tokens, maximum=max_tokens)
    random = np.random.default_rng(seed)
    count, packs = len(headers), 0
    pack_of = np.empty(count, np.int64)
    for start, stop in pairwise([*range(0, max(count - window, 0) + 1, window), count]):
        part = slice(start, stop)
        own = _packed(headers.tokens[part], costs[part], max_tokens, ranks * microbatches, stop - start < count)
        place = _ordered(np.bincount(own, costs[part]).astype(np.float64), ranks, microbatches, random)
        pack_of[part] = packs + place[own]
        packs += place.size
    return TrainingPlan(pack_of, headers, costs, ranks, microbatches, max_tokens)


def _packed(tokens: IntArray, costs: FloatArray, max_tokens: int, group: int, windowed: bool) -> IntArray:
    """Assign each example to a pack; the number of packs is a multiple of ``group``, and no pack is empty."""
    packs = -(-max(-(-int(tokens.sum()) // max_tokens), 1) // group) * group
    while packs <= tokens.size:
        packed = _spread(tokens, costs, max_tokens, packs)
        if packed is not None:
            return packed
        packs += -(-packs // 50 // group) * group  # by about 2 %
    raise InvalidInputError(
        f"headers: got {tokens.size} examples to plan together, want at least {packs}, "
        f"one for each of the {group} packs of a step, or fewer ranks or microbatches"
        f"{', or a larger window' if windowed else ''}"
    )


def _spread(tokens: IntArray, costs: FloatArray, max_tokens: int, packs: int) -> IntArray | None:
    """Distribute examples over packs of even cost; return the pack of each, or None if some do not fit."""
    order = np.argsort(-costs, kind="stable")
    pack_of = np.empty(tokens.size, np.int64)
    sums, room = np.zeros(packs), np.full(packs, max_tokens)

    def put(examples: IntArray, into: IntArray) -> None:
        pack_of[examples] = into
        sums[into] += costs[examples]
        room[into] -= tokens[examples]

    waiting = []
    for first in range(0, order.size, packs):
        examples = order[first : first + packs]
        cheapest = np.argsort(sums, kind="stable")[: examples.size]
        fits = tokens[examples] <= room[cheapest]
        waiting.append(examples[~fits])
        put(examples[fits], cheapest[fits])
    rest = np.concatenate(waiting)
    for example in rest[np.argsort(-tokens[rest], kind="stable")]:
        (open_packs,) = np.nonzero(room >= tokens[example])
        if not open_packs.size:
            return None
        put(example, open_packs[sums[open_packs].argmin()])
    return pack_of


def _ordered(costs: FloatArray, ranks: int, microbatches: int, random: np.random.Generator) -> IntArray:
    """Return the place of each pack of a window: its step, rank and microbatch, encoded as one number."""
    steps = np.argsort(costs, kind="stable").reshape(-1, ranks * microbatches)
    random.shuffle(steps)
    place, one = np.empty(costs.size, np.int64), np.ones(ranks * microbatches, np.int64)
    for number, packs in enumerate(steps):
        rank = _spread(one, costs[packs], microbatches, ranks)
        assert rank is not None, "each round gives every rank one pack"
        place[packs[np.argsort(rank, kind="stable")]] = number * one.size + np.arange(one.size)
    return place


def _transformer_flops(fields: Fields, *layers: str) -> tuple[float, float]:
    """Count the FLOP of a stack of layers per token and per pair of tokens."""
    depth = fields.integer(*layers, needed=True, minimum=1)
    width = fields.integer("embed_dim", "hidden_size", needed=True, minimum=1)
    heads = fields.integer("num_attention_heads", "num_heads", needed=True, minimum=1)
    head_dim = fields.integer("head_dim") or width // heads
    attention = width * head_dim * (2 * heads + 2 * (fields.integer("num_key_value_heads") or heads))
    full = fields.get("fullatt_block_indexes")
    quadratic_layers = depth if full is None else len(integers(f"{fields.name}.fullatt_block_indexes", full))
    return 2.0 * depth * (attention + _mlp(fields, width)), 4.0 * quadratic_layers * heads * head_dim


def _mlp(fields: Fields, width: int) -> float:
    """Count the feed-forward weights that are applied to a token."""
    plain = fields.get("hidden_act") in ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu")
    inner = fields.integer("intermediate_size")
    if experts := fields.integer("num_experts_per_tok"):
        expert = fields.integer("moe_intermediate_size", "intermediate_size", needed=True)
        inner = experts * expert + (fields.integer("shared_expert_intermediate_size") or 0)
    if inner:
        return float((2 if plain else 3) * width * inner)
    ratio = fields.get("mlp_ratio")
    return 2.0 * width * width * finite(f"{fields.name}.mlp_ratio", 4 if ratio is None else ratio, minimum=0)
