"""The workers of disaggregated.py, their messages, and a stand-in for a model: rotated q and k."""

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
    """Send a message as bytes."""
    to.send_bytes(message.SerializeToString())


def receive(source: Connection, kind: type[M]) -> M:
    """Receive the next message, which must be of this type."""
    return kind.FromString(source.recv_bytes())


def tensor(array: Array) -> tensor_pb2.Tensor:
    """Convert an array to a message."""
    message = tensor_pb2.Tensor()
    put_tensor(message, array)
    return message


@dataclasses.dataclass
class Witness:
    """Reports a worker's results to the judge.

    Args:
        judge: connection to the judge.
        forgets: whether this worker loses the delta, to check that the judge notices.
    """

    judge: Connection
    forgets: bool

    def sequence(self, message: sequences_pb2.Sequence) -> InterleavedSequence:
        """Read a message's sequence, without the delta if this worker forgets it."""
        sequence = get_sequence("sequence", message)
        return dataclasses.replace(sequence, positions=_without_delta(sequence.positions)) if self.forgets else sequence

    def report(self, label: str, request: int, start: int, window: PositionTable, ids: Array, turned: Array) -> None:
        """Report on a window of a request: its positions and delta, its token ids, and its rotated q and k."""
        positions = positions_pb2.Positions()
        put_result(positions, PositionsResult.of(window))
        send(self.judge, sequences_pb2.Part(text=label))
        send(self.judge, positions_pb2.Window(documents=[request], starts=[start], lengths=[window.num_tokens]))
        send(self.judge, positions)
        send(self.judge, tensor(ids))
        send(self.judge, tensor(turned))

    def report_end(self, request: int, generated: Array, k: Array, keys: list[bytes]) -> None:
        """Report the final state of a request: tokens after the prompt, all rotated k, and all block keys."""
        send(self.judge, sequences_pb2.Part(text="end"))
        send(self.judge, positions_pb2.Window(documents=[request]))
        for array in (generated, k, np.frombuffer(b"".join(keys), np.uint8)):
            send(self.judge, tensor(array))


def _without_delta(positions: PositionTable) -> PositionTable:
    """Set the next position to the number of tokens, as systems that lose the delta usually do."""
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
    """Return the (tokens, 2, heads, head_dim) q and k of text before rotation."""
    return _WORDS[ids]


def embed(sequence: InterleavedSequence) -> Array:
    """Return the (tokens, 2, heads, head_dim) q and k, before rotation, of a sequence with its pixels."""
    states = embed_text(sequence.input_ids)
    assert sequence.patches is not None
    # Use integers, so that sums are exact however tokens are batched.
    pixels = sequence.patches.reshape(-1, len(_PIXELS)).astype(np.int64) @ _PIXELS
    states[sequence.token_type_ids == 1] = (pixels / 2.0**16).reshape(-1, 2, HEADS, HEAD_DIM)
    return states


def rotate(x: Array, ids: Array) -> Array:
    """Rotate (tokens, 2, heads, head_dim) by (axes, tokens) ids, as apply_rotary does, in numpy.

    The angle is an integer multiple of 2⁻⁶⁴ turns, and cos and sin use only sums and products. Therefore the bits do
    not depend on where a window starts, which np.cos does not guarantee.
    """
    turn = ids.astype(np.int64).view(np.uint64)[ROTARY.pair_axis].T * ROTARY.turns
    angle = turn.view(np.int64) * (2 * pi * 2.0**-64)
    cos, sin = polyval(angle**2, _COS), angle * polyval(angle**2, _SIN)
    cos, sin = (part.astype(np.float32)[:, None, None] for part in (cos, sin))
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def next_token(k: Array) -> int:
    """Return the token that follows those with these rotated k; the token changes if a single bit of k changes."""
    return zlib.crc32(k.tobytes()) % 256


BLOCK = 16
"""Number of tokens in a block of the cache."""

CHUNK = 20
"""Number of tokens per prefill chunk; chunks may cut images."""

_PHOTOS = Path(mmpos.__file__).parent / "photos"
REQUESTS: Sequence[list[str | Path]] = (
    ["Look here: ", _PHOTOS / "coffee.jpg", " This is one. And here: ", _PHOTOS / "chelsea.jpg", " Who drinks what?"],
    ["Look here: ", _PHOTOS / "coffee.jpg", " This is one. Is it still hot?"],
)
"""Both requests start with the same text and photograph."""

BUILDER = SequenceBuilder(images=IMAGES, scheme="rope-tie")


def processor(prefill: Connection, other_prefill: Connection) -> None:
    """Build and place each request once; also send the last one to the worker that prefills it after retraction."""
    for parts in REQUESTS:
        message = sequences_pb2.Sequence()
        put_sequence(message, BUILDER.build(parts))
        send(prefill, message)
    send(other_prefill, message)


def prefill(
    witness: Witness, processor: Connection, decode: Connection, requests: Sequence[int], retracted: bool
) -> None:
    """Rotate uncached tokens chunk by chunk; send k, and the message without its pixels, to the decode worker.

    Args:
        witness: reports results to the judge.
        processor: connection to the processor, which sends sequences.
        decode: connection to the decode worker.
        requests: numbers of the requests, in order.
        retracted: whether the decode worker sends generated tokens to be prefilled after the prompt.
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
        label = f"after {hits} cached blocks" if hits else "chunk, again" if retracted else "chunk"
        for start in range(hits * BLOCK, ids.size, CHUNK):
            stop = min(start + CHUNK, ids.size)
            window = sequence.positions.window([0], [start], [stop - start])
            turned = rotate(x[start:stop], window.dense())
            witness.report(label, request, start, window, ids[start:stop], turned)
            k.append(turned[:, 1])
        all_k = np.concatenate(k)
        cache.update((key, all_k[i * BLOCK : (i + 1) * BLOCK]) for i, key in enumerate(keys))
        message.ClearField("patches")
        send(decode, message)
        send(decode, tensor(all_k))


@dataclasses.dataclass
class Decoding:
    """State of a request during decoding.

    Args:
        witness: reports results to the judge.
        request: number of the request.
        sequence: sequence of the prompt.
        k: (tokens, heads, head_dim) rotated k of the prompt and the generated tokens.
        generated: tokens generated after the prompt.
        keys: keys of all full blocks.
    """

    witness: Witness
    request: int
    sequence: InterleavedSequence
    k: Array
    generated: list[int] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)

    def rotate(self, start: int, tokens: Sequence[int]) -> tuple[PositionTable, Array]:
        """Return positions, and rotated q and k, for tokens starting at this index; they depend on nothing else."""
        window = self.sequence.positions.window([0], [start], [len(tokens)])
        return window, rotate(embed_text(np.array(tokens)), window.dense())

    def append(self, tokens: Sequence[int], label: str) -> None:
        """Append tokens in one window."""
        start = len(self.k)
        window, turned = self.rotate(start, tokens)
        self.witness.report(label, self.request, start, window, np.array(tokens), turned)
        self.k = np.concatenate([self.k, turned[:, 1]])
        self.generated += tokens
        self.keys = self.sequence.block_keys(BLOCK, generated=self.generated, known=self.keys)

    def drop(self, count: int) -> None:
        """Remove the last tokens; there is no position state to reset."""
        length = len(self.k) - count
        self.k, self.keys = self.k[:length], self.keys[: length // BLOCK]
        self.generated = self.generated[: len(self.generated) - count]

    def generate(self, count: int, label: str) -> None:
        """Generate tokens one by one."""
        for _ in range(count):
            self.append([next_token(self.k)], label)

    def speculate(self, right: int, wrong: int) -> None:
        """Verify a draft in one window, dropping all tokens from the first wrong one; its first tokens are right."""
        draft: list[int] = []
        k, first = self.k, len(self.k)
        for i in range(right + wrong):
            draft.append((next_token(k) + (i >= right)) % 256)
            k = np.concatenate([k, self.rotate(len(k), draft[-1:])[1][:, 1]])
        self.append(draft, f"draft of {len(draft)}")
        accepted = [token == next_token(self.k[: first + i]) for i, token in enumerate(draft)]
        self.drop(len(draft) - accepted.index(False))


def decode(witness: Witness, prefill: Connection, other_prefill: Connection) -> None:
    """Decode the first request with a draft and a rollback, and the second request before and after its retraction."""
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
    del second  # other requests need the cache
    again = _begin(witness, other_prefill, 1, generated)
    again.generate(5, "token, after prefill elsewhere")
    _end(again)


def _begin(witness: Witness, prefill: Connection, request: int, generated: Sequence[int] = ()) -> Decoding:
    sequence = witness.sequence(receive(prefill, sequences_pb2.Sequence))
    k = get_tensor("k", receive(prefill, tensor_pb2.Tensor))
    return Decoding(witness, request, sequence, k, list(generated))


def _end(decoding: Decoding) -> None:
    decoding.witness.report_end(decoding.request, np.array(decoding.generated), decoding.k, decoding.keys)
