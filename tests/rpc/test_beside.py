"""Large tensors kept beside their messages: parsing gives the same results as protobuf, including refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError, EncodeError, Message
from message_strategies import tensor

from mmpos.rpc import beside
from mmpos.rpc.beside import Beside
from mmpos.rpc.tensors import get_tensor, put_tensor
from mmpos.rpc.v1 import positions_pb2, rotary_pb2, sequences_pb2, tensor_pb2

Kind = type[Message]

TENSORS: dict[Kind, Callable[[Any], list[tensor_pb2.Tensor]]] = {
    rotary_pb2.RotateRequest: lambda message: [message.q, message.k, message.positions.ids],
    rotary_pb2.CosSinResponse: lambda message: [message.cos, message.sin, message.cache],
    positions_pb2.PlaceRequest: lambda message: [
        message.query.input_ids.input_ids,
        message.query.input_ids.attention_mask,
    ],
    tensor_pb2.Tensor: lambda message: [message],
}
"""The tensors that a message may contain."""


def parse_beside(kind: Kind, raw: bytes) -> Message | None:
    """Parse a message and put its large tensors back into it; return None if protobuf refuses the message."""
    kept = Beside()
    try:
        message = kept.parse(kind, raw)
    except DecodeError:
        return None
    for large in TENSORS[kind](message):
        if large.data:
            large.data = bytes(kept.data(large))
    return message


def parse_plain(kind: Kind, raw: bytes) -> Message | None:
    """Parse a message with protobuf; return None if protobuf refuses the message."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        return None


def examples() -> list[Message]:
    """Return a message of each kind, some with large and some with small tensors."""
    large, small = tensor(np.arange(40), "int64"), tensor([1, 2], "int64")
    ids = positions_pb2.InputIds(input_ids=large, attention_mask=large, image_grid_thw=[1, 2, 3])
    return [
        rotary_pb2.RotateRequest(q=large, k=large, positions=rotary_pb2.RotaryPositions(ids=large), conjugate=True),
        rotary_pb2.RotateRequest(q=small, k=large, positions=rotary_pb2.RotaryPositions(ids=small)),
        rotary_pb2.CosSinResponse(cos=large, sin=small, cache=large),
        positions_pb2.PlaceRequest(query=positions_pb2.PositionsQuery(input_ids=ids, profile="a")),
        large,
    ]


@pytest.mark.parametrize("message", examples(), ids=lambda message: type(message).__name__)
def test_valid_and_malformed_messages_are_parsed_as_by_protobuf(
    message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "LEAST_BYTES", 24)
    kind, raw = type(message), message.SerializeToString()
    assert parse_beside(kind, raw) == message
    assert len(Beside().parse(kind, raw).SerializeToString()) < len(raw)
    random = np.random.default_rng(len(raw))
    cases = [raw[:size] for size in range(len(raw))] + [raw + raw, raw + raw[: len(raw) // 2], b"\x0b" + raw]
    for _ in range(3000):
        broken = bytearray(raw)
        for at in random.integers(0, len(raw) if random.random() < 0.5 else 16, random.integers(1, 4)):
            broken[at] = int(random.choice([0, 1, 2, 10, 18, 26, 34, 127, 128, 255, int(random.integers(256))]))
        cases.append(bytes(broken))
    for case in cases:
        assert parse_beside(kind, case) == parse_plain(kind, case), case
    assert 100 < sum(parse_plain(kind, case) is None for case in cases) < len(cases) - 100


def test_a_message_with_many_fields_is_left_to_protobuf() -> None:
    q = tensor(np.zeros(2**16, np.uint8), "uint8")
    for fields, result in ((10, 1), (100, 0)):
        # Begin with unknown numeric fields.
        raw = b"\x98\x06\x01" * fields + rotary_pb2.RotateRequest(q=q).SerializeToString()
        kept = Beside()
        message = kept.parse(rotary_pb2.RotateRequest, raw)
        assert (len(message.q.data) < 100) == result
        assert bytes(kept.data(message.q)) == q.data


def test_an_endless_number_is_refused_immediately() -> None:
    with pytest.raises(DecodeError):
        Beside().parse(rotary_pb2.RotateRequest, b"\x08" + b"\xff" * 2**22)


def test_a_mark_from_another_message_is_treated_as_data() -> None:
    q = tensor(np.arange(2**16, dtype=np.int32), "int32")
    mark = Beside().parse(tensor_pb2.Tensor, q.SerializeToString()).data
    assert (len(mark), Beside().data(tensor_pb2.Tensor(data=mark))) == (32, mark)


def test_tensors_are_read_in_place() -> None:
    q = np.arange(2**16, dtype=np.int32)
    raw = rotary_pb2.RotateRequest(q=tensor(q, "int32"), k=tensor([1], "int32")).SerializeToString()
    kept = Beside()
    message = kept.parse(rotary_pb2.RotateRequest, raw)
    array = get_tensor("q", message.q, beside=kept)
    np.testing.assert_array_equal(array, q, strict=True)
    assert np.shares_memory(array, np.frombuffer(raw, np.uint8))
    assert get_tensor("k", message.k, beside=kept).tolist() == [1]


def test_a_large_channel_of_an_image_is_sent_in_order() -> None:
    channel = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)[:, :, 1]
    message, kept = tensor_pb2.Tensor(), Beside()
    put_tensor(message, channel, kept)
    assert tensor_pb2.Tensor.FromString(kept.serialize(message)).data == channel.tobytes()


def test_tensors_stay_in_their_messages_if_there_are_many_documents() -> None:
    document: Any = {"parts": [{"token_ids": tensor(np.arange(2**16, dtype=np.int32), "int32")}]}
    raw = sequences_pb2.BuildRequest(query={"documents": [document] * 2}).SerializeToString()  # type: ignore[arg-type]
    assert Beside().parse(sequences_pb2.BuildRequest, raw) == sequences_pb2.BuildRequest.FromString(raw)


def test_a_message_of_2_gib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_MOST_BYTES", 2**17)
    for size, refused in ((2**17 - 100, False), (2**17, True)):
        message, kept = rotary_pb2.RotateRequest(), Beside()
        put_tensor(message.q, np.zeros(size, np.uint8), kept)
        assert kept.size == size
        if refused:
            with pytest.raises(EncodeError):
                kept.serialize(message)
        else:
            assert len(kept.serialize(message)) < 2**17
