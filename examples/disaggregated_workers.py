"""The workers of disaggregated.py, their messages, and a stand-in for a model: q and k, rotated."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from math import factorial, pi
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message
from numpy.polynomial.polynomial import polyval

import mmpos
from mmpos import ImageProcessor, InterleavedSequence, PositionTable, SequenceBuilder
from mmpos.client import PositionsResult
from mmpos.rotary import Rotary
from mmpos.rpc.positions import put_result
from mmpos.rpc.sequences import get_sequence, put_sequence
from mmpos.rpc.tensors import get_tensor, put_tensor
from mmpos.rpc.v1 import positions_pb2, sequences_pb2, tensor_pb2

Array = npt.NDArray[Any]
M = TypeVar("M", bound=Message)


def send(to: Connection, message: Message) -> None:
    """Send the bytes of a message, and nothing else."""
    to.send_bytes(message.SerializeToString())


def receive(source: Connection, kind: type[M]) -> M:
    """The next message, of this kind."""
    return kind.FromString(source.recv_bytes())


def tensor(array: Array) -> tensor_pb2.Tensor:
    """An array as a message."""
    message = tensor_pb2.Tensor()
    put_tensor(message, array)
    return message


@dataclasses.dataclass
class Witness:
    """Tells the judge what a worker has made of a window.

    Args:
        judge: compares it with the whole.
        forgets: whether this worker forgets the delta, to see that the judge notices.
    """

    judge: Connection
    forgets: bool

    def sequence(self, message: sequences_pb2.Sequence) -> InterleavedSequence:
        """The sequence of a message, as this worker understands it."""
        sequence = get_sequence("sequence", message)
        return dataclasses.replace(sequence, positions=_without_delta(sequence.positions)) if self.forgets else sequence

    def tell(self, what: str, request: int, start: int, window: PositionTable, ids: Array, turned: Array) -> None:
        """Report a window of a request: its positions and delta, its token ids, and its rotated q and k."""
        positions = positions_pb2.Positions()
        put_result(positions, PositionsResult.of(window))
        send(self.judge, sequences_pb2.Part(text=what))
        send(self.judge, positions_pb2.Window(documents=[request], starts=[start], lengths=[window.num_tokens]))
        send(self.judge, positions)
        send(self.judge, tensor(ids))
        send(self.judge, tensor(turned))

    def tell_end(self, request: int, generated: Array, k: Array, keys: list[bytes]) -> None:
        """Report what there is of a request in the end: tokens after the prompt, all rotated k, all block keys."""
        send(self.judge, sequences_pb2.Part(text="end"))
        send(self.judge, positions_pb2.Window(documents=[request]))
        for array in (generated, k, np.frombuffer(b"".join(keys), np.uint8)):
            send(self.judge, tensor(array))


def _without_delta(positions: PositionTable) -> PositionTable:
    """The mistake of systems that lose the delta on the way: the next position is the number of tokens."""
    documents = positions.documents.copy()
    documents[2:] = [[positions.num_tokens], [0]]
    return PositionTable.from_arrays(
        positions.table, documents, positions.num_tokens, fractional=positions.fractional, scheme=positions.scheme
    )


HEADS, HEAD_DIM = 2, 16
IMAGES = ImageProcessor(backend="pillow", order="merged", max_tokens=48)
ROTARY = Rotary(head_dim=HEAD_DIM, axes=2)

_RANDOM = np.random.default_rng(0)
_WORDS = _RANDOM.standard_normal((259, 2, HEADS, HEAD_DIM), np.float32)
_PIXELS = _RANDOM.integers(-3, 4, (4 * 14 * 14 * 3, 2 * HEADS * HEAD_DIM))
_COS = [(-1) ** n / factorial(2 * n) for n in range(14)]
_SIN = [(-1) ** n / factorial(2 * n + 1) for n in range(14)]


def embed_text(ids: Array) -> Array:
    """(tokens, 2, heads, head_dim) q and k of text, before rotation."""
    return _WORDS[ids]


def embed(sequence: InterleavedSequence) -> Array:
    """(tokens, 2, heads, head_dim) q and k of a sequence with its pixels, before rotation."""
    states = embed_text(sequence.input_ids)
    assert sequence.patches is not None
    # Whole numbers, so that a sum has the same bits however the tokens are batched.
    pixels = sequence.patches.reshape(-1, len(_PIXELS)).astype(np.int64) @ _PIXELS
    states[sequence.token_type_ids == 1] = (pixels / 2.0**16).reshape(-1, 2, HEADS, HEAD_DIM)
    return states


def rotate(x: Array, ids: Array) -> Array:
    """Rotate (tokens, 2, heads, head_dim) by (axes, tokens) ids: what apply_rotary does, in numpy.

    The angle is a whole number of 2⁻⁶⁴ turns, and sums and products are all there is to cos and sin: the same bits
    wherever a window begins, which np.cos does not promise.
    """
    turn = ids.astype(np.int64).view(np.uint64)[ROTARY.pair_axis].T * ROTARY.turns
    angle = turn.view(np.int64) * (2 * pi * 2.0**-64)
    cos, sin = polyval(angle**2, _COS), angle * polyval(angle**2, _SIN)
    cos, sin = (part.astype(np.float32)[:, None, None] for part in (cos, sin))
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def next_token(k: Array) -> int:
    """The token after those whose rotated k this is: another one if a single bit of them differs."""
    return zlib.crc32(k.tobytes()) % 256


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
