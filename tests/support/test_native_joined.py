"""Large tensors of answers, put into the bytes of their messages: the same bytes as protobuf writes."""

from __future__ import annotations

import numpy as np
import pytest

from mmpos.rpc.tensors import put_tensor
from mmpos.rpc.v1 import positions_pb2, rotary_pb2, sequences_pb2, tensor_pb2
from mmpos.support import native
from mmpos_server import shared_memory
from mmpos_server.shared_memory import Exchange

assert native.core is not None, "the extension was not built"
CORE = native.core

SIZES = [1, 100, 127, 128, 16_000, 16_383, 16_384, 70_000]
"""Around those where the length of a message, or of one around it, takes a byte more."""


def array(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return (np.arange(size) % 251).astype(np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("least", [0, 128])
def test_an_answer_has_the_bytes_that_protobuf_writes(
    way: str, monkeypatch: pytest.MonkeyPatch, size: int, least: int
) -> None:
    monkeypatch.setattr(shared_memory, "LEAST_BYTES", least)

    def answers(memory: Exchange | None) -> list[bytes]:
        place = positions_pb2.StreamPlaceResponse(id=3)
        place.positions.cu_seqlens.extend([0, 300])
        put_tensor(place.positions.dense, array(size), memory)
        place.positions.next_positions.extend([7] * 200)
        build = sequences_pb2.BuildResponse()
        for number in range(3):
            sequence = build.sequences.results.add().sequence
            put_tensor(sequence.input_ids, array(size + number), memory)
            put_tensor(sequence.patches, array(size // (1 + number)), memory)
        rotated = rotary_pb2.RotateResponse()
        put_tensor(rotated.q, array(size), memory)
        put_tensor(rotated.k, array(2 * size), memory)
        alone = tensor_pb2.Tensor()
        put_tensor(alone, array(size), memory)
        return [(memory or Exchange()).serialize(message) for message in (place, build, rotated, alone)]

    assert answers(Exchange()) == answers(None)


def test_a_large_tensor_is_copied_once() -> None:
    data, memory, message = array(shared_memory.LEAST_BYTES), Exchange(), tensor_pb2.Tensor()
    put_tensor(message, data, memory)
    assert message.ByteSize() < 100
    (kept,) = memory._large
    assert np.shares_memory(kept, data)
    assert tensor_pb2.Tensor.FromString(memory.serialize(message)).data == data.tobytes()


def test_buffers_are_joined_in_order_and_what_is_none_is_declined() -> None:
    large = array(3 * 2**20)
    parts = (b"", b"ab", memoryview(b"cd"), np.zeros(0, np.uint8), large, np.arange(3, dtype="<i2"))
    assert CORE.joined(parts) == b"abcd" + large.tobytes() + b"\0\0\1\0\2\0"
    assert CORE.joined(()) == b""
    assert CORE.joined([b"a"]) is None  # type: ignore[arg-type]  # no tuple
    assert CORE.joined((b"a", "text")) is None  # type: ignore[arg-type]  # no buffer
    assert CORE.joined((b"a", large[::2])) is None
