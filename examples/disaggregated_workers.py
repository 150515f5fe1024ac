"""The workers of disaggregated.py: processor, prefill and decode. Each knows of the others what messages say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from disaggregated_messages import Array, Witness, receive, send, tensor
from disaggregated_model import IMAGES, embed, embed_text, next_token, rotate

import mmpos
from mmpos import InterleavedSequence, PositionTable, SequenceBuilder
from mmpos.rpc.sequences import put_sequence
from mmpos.rpc.tensors import get_tensor
from mmpos.rpc.v1 import sequences_pb2, tensor_pb2

BLOCK = 16
"""Tokens of a block of the cache."""

CHUNK = 20
"""Tokens that prefill takes at a time, wherever that cuts an image."""

_PHOTOS = Path(mmpos.__file__).parent / "photos"
REQUESTS: Sequence[list[str | Path]] = (
    ["Look here: ", _PHOTOS / "coffee.jpg", " This is one. And here: ", _PHOTOS / "chelsea.jpg", " Who drinks what?"],
    ["Look here: ", _PHOTOS / "coffee.jpg", " This is one. Is it still hot?"],
)
"""Both begin with the same text and the same photograph."""

BUILDER = SequenceBuilder(images=IMAGES, scheme="rope-tie")


def processor(prefill: Connection, other_prefill: Connection) -> None:
    """Build and place every request once; one copy of the last waits where it will be needed when decode retracts."""
    for parts in REQUESTS:
        message = sequences_pb2.Sequence()
        put_sequence(message, BUILDER.build(parts))
        send(prefill, message)
    send(other_prefill, message)


def prefill(
    witness: Witness, processor: Connection, decode: Connection, requests: Sequence[int], retracted: bool
) -> None:
    """Rotate what the cache lacks, chunk by chunk, and hand over to decode: the message without its pixels, and k.

    Args:
        witness: tells the judge.
        processor: where sequences come from.
        decode: where they go.
        requests: their numbers, in order.
        retracted: whether decode sends what it has generated, to be prefilled after the prompt.
    """
    cache: dict[bytes, Array] = {}
    for request in requests:
        message = receive(processor, sequences_pb2.Sequence)
        sequence = witness.sequence(message)
        generated = get_tensor("generated", receive(decode, tensor_pb2.Tensor)) if retracted else np.zeros(0, np.int64)
        ids = np.concatenate([sequence.input_ids, generated])
        x = np.concatenate([embed(sequence), embed_text(generated)])
        keys = sequence.block_keys(BLOCK, generated=generated)
        hits = next((i for i, key in enumerate(keys) if key not in cache), len(keys))
        k = [cache[key] for key in keys[:hits]]
        what = f"after {hits} cached blocks" if hits else "chunk, again" if retracted else "chunk"
        for start in range(hits * BLOCK, ids.size, CHUNK):
            stop = min(start + CHUNK, ids.size)
            window = sequence.positions.window([0], [start], [stop - start])
            turned = rotate(x[start:stop], window.dense())
            witness.tell(what, request, start, window, ids[start:stop], turned)
            k.append(turned[:, 1])
        whole = np.concatenate(k)
        cache.update((key, whole[i * BLOCK : (i + 1) * BLOCK]) for i, key in enumerate(keys))
        message.ClearField("patches")
        send(decode, message)
        send(decode, tensor(whole))


@dataclasses.dataclass
class Decoding:
    """A request being decoded: its prompt, and what may grow and shrink.

    Args:
        witness: tells the judge.
        request: its number.
        sequence: the prompt.
        k: (tokens, heads, head_dim) rotated k of prompt and generated tokens.
        generated: tokens after the prompt.
        keys: of all full blocks.
    """

    witness: Witness
    request: int
    sequence: InterleavedSequence
    k: Array
    generated: list[int] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)

    def turn(self, start: int, tokens: Sequence[int]) -> tuple[PositionTable, Array]:
        """Positions, and rotated q and k, of tokens that begin at a place; nothing else decides where they stand."""
        window = self.sequence.positions.window([0], [start], [len(tokens)])
        return window, rotate(embed_text(np.array(tokens)), window.dense())

    def append(self, tokens: Sequence[int], what: str) -> None:
        """The next tokens, in one window."""
        start = len(self.k)
        window, turned = self.turn(start, tokens)
        self.witness.tell(what, self.request, start, window, np.array(tokens), turned)
        self.k = np.concatenate([self.k, turned[:, 1]])
        self.generated += tokens
        self.keys = self.sequence.block_keys(BLOCK, generated=self.generated, known=self.keys)

    def drop(self, count: int) -> None:
        """Forget the last tokens; no position has to be set back."""
        left = len(self.k) - count
        self.k, self.keys = self.k[:left], self.keys[: left // BLOCK]
        self.generated = self.generated[: len(self.generated) - count]

    def generate(self, count: int, what: str) -> None:
        """Tokens one by one."""
        for _ in range(count):
            self.append([next_token(self.k)], what)

    def speculate(self, right: int, wrong: int) -> None:
        """Verify a draft, whose first tokens are right, in one window, and drop it from its first mistake on."""
        draft: list[int] = []
        k, first = self.k, len(self.k)
        for i in range(right + wrong):
            draft.append((next_token(k) + (i >= right)) % 256)
            k = np.concatenate([k, self.turn(len(k), draft[-1:])[1][:, 1]])
        self.append(draft, f"draft of {len(draft)}")
        verdict = [token == next_token(self.k[: first + i]) for i, token in enumerate(draft)]
        self.drop(len(draft) - verdict.index(False))


def decode(witness: Witness, prefill: Connection, other_prefill: Connection) -> None:
    """Decode the first request with a draft and a step back, and the second until it is retracted, and on."""
    first = _begin(witness, prefill, 0)
    first.generate(6, "token")
    first.speculate(right=2, wrong=2)
    first.generate(16, "token")
    first.drop(9)
    first.generate(15, "token, after a step back")
    _end(first)

    second = _begin(witness, prefill, 1)
    second.generate(7, "token")
    generated = second.generated
    send(other_prefill, tensor(np.array(generated)))
    del second  # the cache was needed for others
    again = _begin(witness, other_prefill, 1, generated)
    again.generate(5, "token, after prefill elsewhere")
    _end(again)


def _begin(witness: Witness, prefill: Connection, request: int, generated: Sequence[int] = ()) -> Decoding:
    sequence = witness.sequence(receive(prefill, sequences_pb2.Sequence))
    k = get_tensor("k", receive(prefill, tensor_pb2.Tensor))
    return Decoding(witness, request, sequence, k, list(generated))


def _end(decoding: Decoding) -> None:
    decoding.witness.tell_end(decoding.request, np.array(decoding.generated), decoding.k, decoding.keys)
