"""Test random messages and bytes: each is answered or refused, none with INTERNAL, and the server survives."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from message_strategies import LIKELY, REQUESTS, corpus, for_each, messages, tensor
from mutations import mutate
from refusals import is_sentence
from victim import STATUSES, Answer, Victim

from mmpos.rpc.positions import get_result
from mmpos.rpc.sequences import get_sequence
from mmpos.rpc.v1 import rotary_pb2

FAULTS = {*STATUSES.values(), "NOT_FOUND"} - {"INTERNAL"}


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


@pytest.mark.parametrize("method", REQUESTS)
def test_random_and_mostly_valid_messages_are_answered_or_refused(server: Victim, method: str) -> None:
    for strategy in (messages(REQUESTS[method][0]), LIKELY[method]):
        for_each(strategy, 60, lambda request: check(method, server.call(method, request)))


MUTABLE = [method for method in REQUESTS if method != "InfoService/GetInfo"]


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", MUTABLE)
def test_mutated_messages_are_answered_or_refused(
    server: Victim, method: str, many: bool, request: pytest.FixtureRequest
) -> None:
    number = int(request.config.getoption("--mutations")) // len(MUTABLE) if many else 300
    chance, raw, statuses = random.Random(method), corpus(method, 100), set()
    for turn in range(number):
        sent = mutate(chance.choice(raw), chance, raw) if turn % 3 else chance.randbytes(chance.randint(0, 64))
        answer = server.call(method, sent)
        try:
            check(method, answer)
        except Exception as error:
            raise AssertionError(f"{method} of bytes.fromhex({sent.hex()!r}): {answer}") from error
        statuses.add(answer.status)
    assert statuses >= {"OK", "INVALID_ARGUMENT"}
