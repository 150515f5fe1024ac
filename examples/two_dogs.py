"""Two dogs in one sentence: which encodings of positions let attention tell them apart, and what else they show.

A block of attention with random weights reads "The dog chased another dog" in float64. What it gives for one dog and
for the other (positions 1 and 4), with words exchanged and with the sentence reversed, is equal or it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmpos.encodings import ENCODINGS, Encoding, NoPE, SelfAttention

SENTENCE = ("The", "dog", "chased", "another", "dog")
DOGS = (1, 4)
EARLIER_EXCHANGED = (3, 1, 0, 2, 4)
"""Places of words: those before the last in another order, the last where it was."""
DIM, NUM_HEADS = 48, 4
EQUAL = 1e-12
"""Outputs are about one, and rounded in the sixteenth digit."""


@dataclass(frozen=True)
class Findings:
    """The largest differences between outputs that are equal where attention does not know positions.

    Args:
        dogs: of the two dogs, every word seeing every word.
        dogs_causal: of the two dogs, every word seeing those before it.
        order: of the last word, which sees all with and without a mask, after the words before it are exchanged.
        direction: of every word after the sentence is reversed, without a mask.
    """

    dogs: float
    dogs_causal: float
    order: float
    direction: float


def embeddings(words: Sequence[str] = SENTENCE, seed: int = 0) -> Tensor:
    """(1, words, DIM) random vectors, the same for the same word."""
    known = sorted(set(words))
    vectors = np.random.default_rng(seed).normal(size=(len(known), DIM))
    return torch.from_numpy(vectors[[known.index(word) for word in words]])[None]


def block(encoding: Encoding, *, causal: bool, seq: int = len(SENTENCE), seed: int = 1) -> SelfAttention:
    """Attention with weights under which scores are about one, in float64; the same for every encoding."""
    made = SelfAttention(DIM, NUM_HEADS, encoding, range(seq), causal=causal).double().requires_grad_(False)
    random = np.random.default_rng(seed)
    for linear in (made.qkv, made.out):
        linear.weight.copy_(torch.from_numpy(random.normal(scale=DIM**-0.5, size=linear.weight.shape)))
    return made


def find(encoding: Encoding) -> Findings:
    """Run a block with this encoding on the sentence."""
    full, causal = block(encoding, causal=False), block(encoding, causal=True)
    x, exchanged = embeddings(), list(EARLIER_EXCHANGED)

    def dogs(y: Tensor) -> float:
        return _apart(y[:, DOGS[0]], y[:, DOGS[1]])

    return Findings(
        dogs=dogs(full(x)),
        dogs_causal=dogs(causal(x)),
        order=_apart(full(x)[:, -1], full(x[:, exchanged])[:, -1]),
        direction=_apart(full(x).flip(1), full(x.flip(1))),
    )


def without_positions() -> dict[str, float]:
    """The largest difference that exchanging the words before the last makes to attention without an encoding."""
    full, causal, second = (block(NoPE(), causal=c, seed=s) for c, s in ((False, 1), (True, 1), (True, 2)))
    x, exchanged = embeddings(), list(EARLIER_EXCHANGED)
    moved = x[:, exchanged]
    return {
        "exchanging words exchanges the outputs": _apart(full(x)[:, exchanged], full(moved)),
        "the last word, its keys exchanged": _apart(full(x)[:, -1], full(moved)[:, -1]),
        "causal, the last word, those before it exchanged": _apart(causal(x)[:, -1], causal(moved)[:, -1]),
        "causal, all outputs exchanged alike": _apart(causal(x)[:, exchanged], causal(moved)),
        "two causal layers, the last word": _apart(second(causal(x))[:, -1], second(causal(moved))[:, -1]),
    }


def main() -> None:
    """Print the table and the sentences."""
    print(f"{' '.join(SENTENCE)}: largest difference of outputs\n")
    print(f"{'':18}{'two dogs':>16}{'exchanged':>11}{'reversed':>10}")
    print(f"{'encoding':18}{'full':>8}{'causal':>8}{'last word':>11}{'full':>10}")
    for name, encoding in ENCODINGS.items():
        found = find(encoding())
        dogs, causal, order, direction = map(_shown, (found.dogs, found.dogs_causal, found.order, found.direction))
        print(f"{name:18}{dogs:>8}{causal:>8}{order:>11}{direction:>10}")
    print("\nWithout positions, the words before the last exchanged:")
    for what, figure in without_positions().items():
        print(f"  {what}: {_shown(figure)}")


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _shown(figure: float) -> str:
    return "equal" if figure <= EQUAL else f"{figure:.2f}"


if __name__ == "__main__":
    main()
