"""Test random messages and bytes: each is answered or refused, none with INTERNAL, and the server survives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis.strategies import SearchStrategy
from message_strategies import LIKELY, REQUESTS, STREAMS, corpus, for_each, messages, tensor
from mutations import mutate
from refusals import is_sentence
from victim import STATUSES, Answer, Victim

from mmpos.rpc.positions import get_result
from mmpos.rpc.sequences import get_sequence
from mmpos.rpc.v1 import positions_pb2, rotary_pb2, sequences_pb2

FAULTS = {*STATUSES.values(), "NOT_FOUND"} - {"INTERNAL"}
QUICK, LONG = 60, 250


@pytest.fixture(scope="module")
def server(hardy: Victim) -> Iterator[Victim]:
    # The first rotation imports torch, which must not be counted.
    first = rotary_pb2.CosSinRequest()
    first.positions.ids.CopyFrom(tensor([[0], [0]]))
    assert hardy.call("RotaryService/CosSin", first).status == "OK"
    before = hardy.memory()
    yield hardy
    assert hardy.memory() < before + 300, "the server has grown"


def check(method: str, answer: Answer) -> None:
    """Check that an answer is either a valid response or a sentence about the request."""
    if answer.status != "OK":
        assert answer.status in FAULTS
        assert is_sentence(answer.message), answer.message
        return
    response = REQUESTS[method][1].FromString(answer.data)
    if method == "PositionService/Place":
        result = get_result("positions", response.positions)
        assert (result.table is None) != (result.dense is None)
    if method == "SequenceService/Build":
        for built in response.sequences.results:
            if built.WhichOneof("outcome") == "error":
                assert STATUSES[built.error.code] in FAULTS
            else:
                get_sequence("sequence", built.sequence)


def ask(server: Victim, method: str, strategy: SearchStrategy[Any], number: int) -> None:
    def check_request(request: Any) -> None:
        check(method, server.call(method, request))

    for_each(strategy, number, check_request)


@pytest.mark.parametrize("method", REQUESTS)
def test_random_messages_are_answered_or_refused(server: Victim, method: str) -> None:
    ask(server, method, messages(REQUESTS[method][0]), QUICK)


@pytest.mark.parametrize("method", LIKELY)
def test_mostly_valid_messages_are_answered_or_refused(server: Victim, method: str) -> None:
    ask(server, method, LIKELY[method], QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("method", REQUESTS)
def test_many_messages_are_answered_or_refused(server: Victim, method: str) -> None:
    ask(server, method, messages(REQUESTS[method][0]), LONG)
    ask(server, method, LIKELY[method], LONG)


@pytest.mark.parametrize("method", STREAMS)
def test_stream_items_are_answered_in_order(server: Victim, method: str) -> None:
    request, response = STREAMS[method]
    items: list[Any] = []
    for_each(messages(request), QUICK, items.append)
    unary = LIKELY[method.replace("Stream", "")]
    for_each(unary, QUICK, lambda likely: items.append(request(id=len(items), query=likely.query)))
    answers, end = server.stream(method, [item.SerializeToString() for item in items])
    assert end.status == "OK"
    results = [response.FromString(answer) for answer in answers]
    assert [answer.id for answer in results] == [item.id for item in items]
    errors = [answer.error.code for answer in results if answer.WhichOneof("outcome") == "error"]
    assert 0 < len(errors) < len(results)
    assert {STATUSES[code] for code in errors} <= FAULTS


# Fields and values from later versions

UNKNOWN_FIELD = b"\x98\x06\x01"
"""Field 99 with the value 1."""


def build(part: bytes) -> Any:
    document = sequences_pb2.Document(parts=[sequences_pb2.Part.FromString(part)])
    return sequences_pb2.BuildRequest(query=sequences_pb2.SequencesQuery(documents=[document]))


NO_TOKENS: Any = {"ids": {"dtype": 2, "shape": [2, 0]}}
STRANGE: dict[str, tuple[str, Any, str]] = {
    "an unknown source": (
        "Position/Place",
        positions_pb2.PlaceRequest(query=positions_pb2.PositionsQuery.FromString(UNKNOWN_FIELD)),
        "query.source: got none, want one of segments, spans, input_ids",
    ),
    "an unknown part": (
        "Sequence/Build",
        build(UNKNOWN_FIELD),
        "parts[0]: got none, want one of text, token_ids, image, image_size, grid, pixels, audio, clip",
    ),
    "no positions": ("Rotary/CosSin", b"", "positions: got none, want a RotaryPositions"),
    "no q": ("Rotary/Rotate", rotary_pb2.RotateRequest(positions=NO_TOKENS), "q: got none, want a Tensor"),
    "an unknown layout": (
        "Rotary/CosSin",
        rotary_pb2.CosSinRequest(positions=NO_TOKENS, layout=99),  # type: ignore[arg-type]
        "layout: got 99, want one of COS_SIN_LAYOUT_UNSPECIFIED, COS_SIN_LAYOUT_PAIRS, COS_SIN_LAYOUT_TRANSFORMERS, "
        "COS_SIN_LAYOUT_TORCHTITAN, COS_SIN_LAYOUT_ANGLES",
    ),
}


@pytest.mark.parametrize(("method", "request_", "message"), STRANGE.values(), ids=STRANGE)
def test_missing_and_unknown_values_are_reported(server: Victim, method: str, request_: Any, message: str) -> None:
    answer = server.call(method.replace("/", "Service/"), request_)
    if method == "Sequence/Build":
        [result] = sequences_pb2.BuildResponse.FromString(answer.data).sequences.results
        answer = Answer(STATUSES[result.error.code], result.error.message)
    assert answer == Answer("INVALID_ARGUMENT", message)


def test_unknown_fields_are_ignored(server: Victim) -> None:
    request = positions_pb2.PlaceRequest(query={"spans": {"lengths": [4]}})  # type: ignore[arg-type]
    known = server.call("PositionService/Place", request)
    strange = server.call("PositionService/Place", request.SerializeToString() + UNKNOWN_FIELD)
    assert (known.status, known) == ("OK", strange)


def test_text_that_is_not_utf_8_is_refused(server: Victim) -> None:
    answer = server.call("PositionService/Place", b"\x0a\x05\x22\x03\xff\xfe\xfd")  # query.profile
    assert answer.status == "INVALID_ARGUMENT"


# Bytes.


def check_mutations(server: Victim, method: str, number: int) -> None:
    chance = random.Random(method)
    raw, statuses = corpus(method, 100), set()
    for _ in range(number):
        sent = mutate(chance.choice(raw), chance, raw)
        answer = server.call(method, sent)
        try:
            check(method, answer)
        except Exception as error:
            raise AssertionError(f"{method} of bytes.fromhex({sent.hex()!r}): {answer}") from error
        statuses.add(answer.status)
    assert statuses >= {"OK", "INVALID_ARGUMENT"}


MUTABLE = [method for method in REQUESTS if method != "InfoService/GetInfo"]


@pytest.mark.parametrize("method", MUTABLE)
def test_mutated_messages_are_answered_or_refused(server: Victim, method: str) -> None:
    check_mutations(server, method, 200)


@pytest.mark.slow
@pytest.mark.parametrize("method", MUTABLE)
def test_tens_of_thousands_of_mutated_messages_are_answered_or_refused(
    server: Victim, method: str, request: pytest.FixtureRequest
) -> None:
    check_mutations(server, method, int(request.config.getoption("--mutations")) // len(MUTABLE))


@pytest.mark.parametrize("method", REQUESTS)
def test_random_bytes_are_answered_or_refused(server: Victim, method: str) -> None:
    chance = random.Random(method)
    for _ in range(100):
        check(method, server.call(method, chance.randbytes(chance.randint(0, 64))))
