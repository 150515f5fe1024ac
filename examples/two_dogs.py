"""Show which position encodings let attention distinguish two dogs in a sentence, word orders, and directions.

An attention block with random weights reads "The dog chased another dog" in float64. Its outputs are compared between
the two dogs (positions 1 and 4), after exchanging words, and after reversing the sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from mmpos.encodings import ENCODINGS, Encoding, NoPE, SelfAttention

SENTENCE = ("The", "dog", "chased", "another", "dog")
DOGS = (1, 4)
EARLIER_EXCHANGED = (3, 1, 0, 2, 4)
"""Permutation of the words that keeps the last one in place."""
DIM, NUM_HEADS = 48, 4
EQUAL = 1e-12
"""Outputs are about one, with rounding errors in the sixteenth digit."""


@dataclass(frozen=True)
class Findings:
    """Largest differences between outputs that would be equal without positions.

    Args:
        dogs: difference between the two dogs with full attention.
        dogs_causal: difference between the two dogs with causal attention.
        order: change in the last word's output when the words before it are exchanged; the last word attends to all
            words in both kinds of attention.
        direction: change in the outputs of all words when the sentence is reversed, with full attention.
    """

    dogs: float
    dogs_causal: float
    order: float
    direction: float


def embeddings(words: Sequence[str] = SENTENCE, seed: int = 0) -> Tensor:
    """Return (1, words, DIM) random vectors, equal for equal words."""
    known = sorted(set(words))
    vectors = np.random.default_rng(seed).normal(size=(len(known), DIM))
    return torch.from_numpy(vectors[[known.index(word) for word in words]])[None]


def block(encoding: Encoding, *, causal: bool, seq: int = len(SENTENCE), seed: int = 1) -> SelfAttention:
    """Create float64 attention; its weights, the same for every encoding, produce scores of about one."""
    attention = SelfAttention(DIM, NUM_HEADS, encoding, range(seq), causal=causal).double().requires_grad_(False)
    random = np.random.default_rng(seed)
    for linear in (attention.qkv, attention.out):
        linear.weight.copy_(torch.from_numpy(random.normal(scale=DIM**-0.5, size=linear.weight.shape)))
    return attention


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
    """Measure how exchanging the words before the last one affects attention without a position encoding."""
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
    """Print the table of encodings and the differences without positions."""
    print(f"{' '.join(SENTENCE)}: largest difference of outputs\n")
    print(f"{'':18}{'two dogs':>16}{'exchanged':>11}{'reversed':>10}")
    print(f"{'encoding':18}{'full':>8}{'causal':>8}{'last word':>11}{'full':>10}")
    for name, encoding in ENCODINGS.items():
        findings = find(encoding())
        dogs, causal, order, direction = (_shown(getattr(findings, field.name)) for field in fields(Findings))
        print(f"{name:18}{dogs:>8}{causal:>8}{order:>11}{direction:>10}")
    print("\nWithout positions, the words before the last exchanged:")
    for case, difference in without_positions().items():
        print(f"  {case}: {_shown(difference)}")


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _shown(difference: float) -> str:
    return "equal" if difference <= EQUAL else f"{difference:.2f}"


if __name__ == "__main__":
    main()
