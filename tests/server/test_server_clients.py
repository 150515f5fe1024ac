"""Limits of one client, at once and per second, while the others go on as if it were not there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mmpos import SegmentTable, Text
from mmpos.client import Client, PositionsQuery
from mmpos.errors import ServiceOverloadedError
from mmpos_server import admission as admission_module
from mmpos_server.admission import Admission, Call, Clients, Pool, Rate
from mmpos_server.config import ClientLimits, Concurrency, Pools, ServerConfig, load
from mmpos_server.listening import Listen
from mmpos_server.testing import running

SEGMENTS = SegmentTable.from_documents([[Text(3)]])
TOKENS = {"alice": "alice-alice-alice-1", "bob": "bob-bob-bob-bob-bob"}


@contextmanager
def served(tmp_path: Path, **limits: float) -> Iterator[tuple[Client, Client]]:
    """Alice and Bob, each a client of a server with these limits."""
    file = tmp_path / "tokens"
    file.write_text("".join(f"{name} {token}\n" for name, token in TOKENS.items()))
    config = ServerConfig.model_validate({**load().model_dump(), "clients": limits})
    with (
        running(config, listen=Listen(token_file=file)) as address,
        Client(address, token=TOKENS["alice"]) as alice,
        Client(address, token=TOKENS["bob"]) as bob,
    ):
        yield alice, bob


def refusal(call: Any, *args: Any) -> tuple[str, float]:
    """Return the refusal of a client that has or asks for too much, and when it may come back."""
    with pytest.raises(ServiceOverloadedError) as raised:
        call(*args)
    return str(raised.value), raised.value.retry_after


def query(length: int) -> PositionsQuery:
    return PositionsQuery(SegmentTable.from_documents([[Text(length)]]))


def lengths(results: Iterable[Any]) -> list[int]:
    return [result.table.num_tokens for result in results]


def calls(limits: ClientLimits) -> Any:
    """Makes calls of clients by name, all of one server."""
    admission, found = Admission(Concurrency(), Pools()), Clients(limits)
    return lambda name: Call("id", admission, found.lease(name)), admission, found


def test_a_client_that_asks_too_often_is_told_when_to_come_back_and_no_other(tmp_path: Path) -> None:
    with served(tmp_path, requests_per_second=0.001, burst=2) as (alice, bob):
        for _ in range(2):
            alice.place(SEGMENTS)
        said, wait = refusal(alice.place, SEGMENTS)
        assert said == "clients.requests_per_second of 'alice': got more, want <= 0.001 on average"
        assert 900 < wait <= 1000
        bob.place(SEGMENTS)


def test_items_of_a_stream_wait_for_their_turn_and_calls_wait_for_them(tmp_path: Path) -> None:
    with served(tmp_path, requests_per_second=20, burst=1) as (alice, bob):
        begun = time.monotonic()
        assert lengths(alice.stream(map(query, range(1, 5)))) == [1, 2, 3, 4]
        assert time.monotonic() - begun >= 3 / 20
    with served(tmp_path, requests_per_second=0.001, burst=4) as (alice, bob):
        assert lengths(alice.stream(map(query, range(1, 5)))) == [1, 2, 3, 4]
        refusal(alice.place, SEGMENTS)
        bob.place(SEGMENTS)


def test_a_client_with_its_number_of_streams_gets_no_other_one_and_others_do(tmp_path: Path) -> None:
    with served(tmp_path, max_streams=1) as (alice, bob):
        first = alice.with_options(window=1).stream(map(query, [1, 2]))
        next(first)
        said, _ = refusal(list, alice.stream([query(3)]))
        assert said == "clients.max_streams of 'alice': got 1 taken of 1"
        alice.place(SEGMENTS)
        assert lengths(bob.stream([query(3)])) == [3]
        assert lengths(first) == [2]
        assert lengths(alice.stream([query(3)])) == [3]


@pytest.mark.parametrize(
    ("limits", "size", "said"),
    [
        (ClientLimits(max_in_flight=2), 5, "clients.max_in_flight of 'alice': got 2 taken of 2"),
        (ClientLimits(max_in_flight_bytes=14), 5, "clients.max_in_flight_bytes of 'alice': got 10 taken of 14"),
    ],
)
def test_a_client_with_its_calls_at_work_gets_no_other_one_and_others_do(
    limits: ClientLimits, size: int, said: str
) -> None:
    call, admission, found = calls(limits)
    begun = [call("alice") for _ in range(2)]
    for one in begun:
        one.admit(size)
    third = call("alice")
    assert refusal(third.admit, size)[0] == said
    third.release()
    bob = call("bob")
    bob.admit(size)
    begun[0].release()
    fourth = call("alice")
    fourth.admit(size)
    assert (admission.gates["place"].taken, admission.bytes.taken) == (3, 3 * size)
    for one in (begun[1], bob, fourth):
        one.release()
    # What was taken was given back, of the server's places, too; and nobody is remembered.
    assert (admission.gates["place"].taken, admission.bytes.taken, len(found)) == (0, 0, 0)
    call("alice").admit(size)


def test_what_a_client_has_in_shared_memory_counts_as_bytes_of_its_calls() -> None:
    call, admission, found = calls(ClientLimits(max_in_flight_bytes=1000))
    one, other, bob = call("alice"), call("alice"), call("bob")

    async def scenario() -> None:
        for each in (one, other, bob):
            each.admit(100)
        await one.weigh(700)
        assert await said(other, 101) == "clients.max_in_flight_bytes of 'alice': got 900 taken of 1000"
        await bob.weigh(900)
        one.release()
        await other.weigh(2000)  # alone

    async def said(one: Call, size: int) -> str:
        with pytest.raises(ServiceOverloadedError) as raised:
            await one.weigh(size)
        return str(raised.value)

    asyncio.run(scenario())
    other.release()
    bob.release()
    assert (admission.bytes.taken, len(found)) == (0, 0)


@pytest.mark.parametrize(
    ("pool", "setting"),
    [("image", "max_in_flight_images"), ("heavy", "max_in_flight_heavy"), ("rotary", "max_in_flight_rotary")],
)
@pytest.mark.parametrize(("places", "share"), [(4, 2), (5, 2), (2, 1)])
def test_a_client_has_half_of_the_places_for_long_work_and_others_the_rest(
    pool: Pool, setting: str, places: int, share: int
) -> None:
    admission, found = Admission(Concurrency.model_validate({setting: places}), Pools()), Clients(ClientLimits())

    def begun(name: str) -> Call:
        call = Call("id", admission, found.lease(name))
        call.admit(1)
        return call

    at_work = [begun("alice") for _ in range(share)]
    for call in at_work:
        call.join(pool)
    more = begun("alice")
    said = f"clients.max_share of {setting} of 'alice': got {share} taken of {share}"
    assert refusal(more.join, pool)[0] == said
    more.release()
    for _ in range(places - share):
        at_work.append(begun(f"bob {len(at_work)}"))
        at_work[-1].join(pool)
    carol = begun("carol")
    assert refusal(carol.join, pool)[0] == f"{setting}: got {places} taken of {places}"
    for call in (*at_work, carol):
        call.release()
    again = begun("alice")
    again.join(pool)
    again.release()
    assert ({gate.taken for gate in admission.gates.values()}, len(found)) == ({0}, 0)


def test_a_call_that_goes_on_to_heavy_images_gives_back_its_share_of_the_others() -> None:
    admission = Admission(Concurrency(max_in_flight_images=2, max_in_flight_heavy=2), Pools())
    found = Clients(ClientLimits())
    first, second = (Call("id", admission, found.lease("alice")) for _ in range(2))
    first.admit(1)
    first.join("image")
    first.move("heavy")
    second.admit(1)
    second.join("image")
    assert refusal(second.move, "heavy")[0] == "clients.max_share of max_in_flight_heavy of 'alice': got 1 taken of 1"
    first.release()
    second.release()


@pytest.mark.parametrize(("pool", "setting"), [("image", "max_in_flight_images"), ("heavy", "max_in_flight_heavy")])
def test_items_of_streams_wait_for_places_before_long_work_and_leave_half_to_others(pool: Pool, setting: str) -> None:
    admission, found = Admission(Concurrency.model_validate({setting: 2}), Pools()), Clients(ClientLimits())
    streams = [Call("id", admission, found.lease("alice")) for _ in range(2)]

    async def scenario() -> None:
        first, second, bob = streams[0].item(1), streams[1].item(1), Call("id", admission, found.lease("bob"))
        await first.turn(pool)
        waiting = asyncio.create_task(second.turn(pool))
        await asyncio.sleep(0)
        bob.admit(1)
        bob.move(pool)
        assert (admission.gates[pool].taken, waiting.done()) == (2, False)
        bob.release()
        first.release()
        await waiting
        assert admission.gates[pool].taken == 1
        second.release()

    for stream in streams:
        stream.lease.begin_stream()
    asyncio.run(scenario())
    for stream in streams:
        stream.lease.end(0.0)
    assert (admission.gates[pool].taken, len(found)) == (0, 0)


def test_a_client_without_a_share_has_all_places() -> None:
    admission, found = Admission(Concurrency(max_in_flight_rotary=2), Pools()), Clients(ClientLimits(max_share=0))
    for _ in range(2):
        call = Call("id", admission, found.lease("alice"))
        call.admit(1)
        call.join("rotary")


def test_a_call_that_the_server_has_no_place_for_is_no_call_of_its_client() -> None:
    found = Clients(ClientLimits(max_in_flight=1))
    admission = Admission(Concurrency(max_in_flight=1), Pools())
    first, second = (Call("id", admission, found.lease(name)) for name in ("alice", "bob"))
    first.admit(1)
    assert refusal(second.admit, 1)[0] == "max_in_flight: got 1 taken of 1"
    second.release()
    first.release()
    Call("id", admission, found.lease("bob")).admit(1)


def test_many_clients_leave_nothing_behind_and_those_with_a_rate_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "_MOST_IDLE", 3)
    call, _, found = calls(ClientLimits(requests_per_second=0.001, burst=1))
    for name in "abcdef":
        one = call(name)
        one.admit(1)
        one.release()
    assert len(found) == 3
    refusal(call("f").admit, 1)  # among the last ones
    call("a").admit(1)  # forgotten


def test_a_client_at_work_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "_MOST_IDLE", 1)
    call, _, _ = calls(ClientLimits(max_in_flight=1, requests_per_second=0.001, burst=2))
    call("alice").admit(1)
    for name in "abcd":
        one = call(name)
        one.admit(1)
        one.release()
    assert refusal(call("alice").admit, 1)[0] == "clients.max_in_flight of 'alice': got 1 taken of 1"


def test_clients_that_have_rested_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(Rate, "__init__", _with_clock(Rate.__init__, lambda: now[0]))
    call, _, found = calls(ClientLimits(requests_per_second=1, burst=1))
    for name in "ab":
        one = call(name)
        one.admit(1)
        one.release()
    assert len(found) == 2
    now[0] += 1.0
    one = call("c")
    one.admit(1)
    one.release()
    assert len(found) == 1


def _with_clock(init: Any, clock: Any) -> Any:
    return lambda self, per_second, burst=0: init(self, per_second, burst, clock)


def test_a_rate_gives_its_burst_and_then_one_turn_after_the_other() -> None:
    now = [0.0]
    rate = Rate(4.0, 2, lambda: now[0])
    waits = []
    for _ in range(4):
        waits.append(rate.wait)
        now[0] += rate.wait
        rate.take()
    assert waits == [0.0, 0.0, 0.25, 0.25]
    now[0] += 100
    assert [rate.wait, rate.rested] == [0.0, True]
    for _ in range(2):
        rate.take()
    assert rate.wait == 0.25  # no more than the burst was saved


@pytest.mark.parametrize(("per_second", "burst", "at_once"), [(3.0, 0, 3), (0.5, 0, 1), (3.0, 7, 7)])
def test_the_burst_is_what_is_set_or_that_of_a_second_and_one_at_least(
    per_second: float, burst: int, at_once: int
) -> None:
    rate = Rate(per_second, burst, lambda: 0.0)
    taken = 0
    while not rate.wait:
        rate.take()
        taken += 1
    assert taken == at_once


def test_without_limits_nothing_is_remembered_or_refused() -> None:
    call, _, found = calls(ClientLimits(**(dict.fromkeys(ClientLimits.model_fields, 0) | {"burst": 1})))
    for _ in range(100):
        call("alice").admit(1)
    assert len(found) == 0
