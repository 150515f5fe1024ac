"""A server that is asked for more than it can do: what waits, what is refused, and what a stalled stream may hold."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_calls import Stream, Unary, ending
from waiting import eventually

from mmpos import SegmentTable, Text
from mmpos.client import AsyncClient, Client, PositionsQuery
from mmpos.errors import LimitExceededError, ServiceError, ServiceOverloadedError
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.rpc.v1 import sequences_pb2
from mmpos_server import admission
from mmpos_server.admission import Admission, Call, Clients, Gate, ItemWindow, Line, Pool
from mmpos_server.config import ClientLimits, Concurrency, Pools, Profiles, ServerConfig, load
from mmpos_server.methods import Run
from mmpos_server.sequence_service import SequenceService
from mmpos_server.services import place_method
from mmpos_server.testing import running
from mmpos_server.transport import Lane, Overload, Slot, Width

SEGMENTS = SegmentTable.from_documents([[Text(3)]])


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(admission, "monotonic", lambda: found.now)
    return found


def joins(line: Line, *, inside: bool = False) -> str:
    """Return the refusal of a call that joins a line; "" for none."""
    try:
        line.join(inside=inside)
    except ServiceOverloadedError as error:
        return str(error)
    return ""


def line(limit: int = 100, *, threads: int = 2, wait: int = 4, short_wait: int = 1) -> Line:
    return Line(Gate("places", limit), threads, wait, short_wait)


def test_calls_wait_until_they_would_wait_too_long(clock: Clock) -> None:
    found = line()
    found.tasks = 2 + 7  # two run, seven wait for two threads: three and a half turns
    assert joins(found) == ""
    found.tasks = 2 + 8
    assert joins(found) == "max_wait: got calls for 4.0 turns waiting, want less than 4"
    assert found.gate.taken == 1


def test_a_turn_is_what_a_call_takes_and_not_a_task(clock: Clock) -> None:
    found = line()
    for _ in range(200):
        found.left(8)
    found.tasks = 2 + 3 * 8 + 7
    assert joins(found) == ""
    found.tasks = 2 + 4 * 8
    assert joins(found) == "max_wait: got calls for 4.0 turns waiting, want less than 4"


def test_after_a_refusal_few_may_wait_until_nobody_was_refused_for_a_second(clock: Clock) -> None:
    found = line()
    found.tasks = 2 + 8
    assert joins(found)
    found.tasks, clock.now = 2 + 2, 0.9
    assert joins(found) == "max_wait_overloaded: got calls for 1.0 turns waiting, want less than 1"
    found.tasks, clock.now = 2 + 1, 1.8
    assert joins(found) == ""
    found.tasks, clock.now = 2 + 2, 1.9
    assert joins(found) == ""  # a second after the last refusal


def test_a_call_beyond_the_places_makes_a_pool_overloaded_too(clock: Clock) -> None:
    found = line(1)
    assert joins(found) == ""
    assert joins(found) == "places: got 1 taken of 1"
    found.gate.leave(0.1)
    found.tasks = 4
    assert joins(found).startswith("max_wait_overloaded: ")


def test_one_that_is_inside_takes_no_second_place(clock: Clock) -> None:
    found = line()
    assert joins(found, inside=True) == ""
    assert found.gate.taken == 0


class RefusedHereError(Exception):
    """Raised by a call of a test where it must not go further."""


class Refused:
    """A call that may not join the line of the images, and gives no task to any pool."""

    def join(self, pool: str) -> None:
        assert pool == "image"
        raise RefusedHereError

    def run(self, *_: Any) -> Any:
        raise AssertionError("it was begun")


def build(*parts: Any, patches: bool = True) -> sequences_pb2.SequencesQuery:
    return sequences_pb2.SequencesQuery(documents=[sequences_pb2.Document(parts=parts)], patches=patches)


def test_images_that_find_no_place_are_not_even_weighed() -> None:
    config = load()
    building = SequenceService(Profiles.from_config(config), config.limits)
    found = []
    for query in (
        build({"text": "a"}, {"image": b"x"}),
        build({"text": "a"}),
        build({"image": b"x"}, patches=False),
        sequences_pb2.SequencesQuery(patches=True),
    ):
        try:
            asyncio.run(building.build(query, sequences_pb2.Sequences(), Refused()))  # type: ignore[arg-type]
        except (RefusedHereError, AssertionError) as error:
            found.append(type(error))
    assert found == [RefusedHereError, AssertionError, AssertionError, AssertionError]


def crowded() -> Admission:
    """Lines that are too long for all who must wait."""
    found = Admission(Concurrency(), Pools(image=1))
    for each in found.lines.values():
        each.tasks = 10_000
    return found


def visitor(name: str, admission: Admission) -> Call:
    """A call of a client without limits."""
    return Call(name, admission, Clients(ClientLimits()).lease(name))


def test_what_was_begun_is_not_refused_by_another_pool() -> None:
    found = crowded()
    found.lines["image"].tasks = 0
    call = visitor("a", found)
    call.admit(10)
    call.join("image")
    assert (found.gates["place"].taken, found.gates["image"].taken, found.bytes.taken) == (0, 1, 10)
    found.lines["image"].tasks = 10_000
    call.join("image")
    call.join("place")
    call.release()
    assert (found.gates["place"].taken, found.gates["image"].taken, found.bytes.taken) == (0, 0, 0)
    other = visitor("b", found)
    other.admit(10)
    with pytest.raises(ServiceOverloadedError, match=r"^max_wait: "):
        other.join("place")


def test_what_was_cancelled_in_the_queue_holds_nothing() -> None:
    class Large:
        pass

    found, busy = Admission(Concurrency(), Pools(place=1)), threading.Event()
    large = Large()
    seen = weakref.ref(large)

    async def scenario(large: Large) -> None:
        working = asyncio.create_task(visitor("a", found).run("place", busy.wait, 30))
        queued = asyncio.create_task(visitor("b", found).run("place", lambda request: None, large))
        await asyncio.sleep(0.05)
        queued.cancel()
        await asyncio.wait([queued])
        del large, queued
        await asyncio.sleep(0)
        gone.append(seen() is None)
        busy.set()
        await working

    gone: list[bool] = []
    coroutine = scenario(large)
    del large
    asyncio.run(coroutine)
    found.close()
    assert (gone, found.lines["place"].tasks) == ([True], 0)


def test_items_of_a_stream_wait_and_are_not_refused() -> None:
    pools: list[Pool] = ["place", "image", "rotary"]
    for pool in pools:
        visitor("a", crowded()).item(1).join(pool)


def filled(window: ItemWindow) -> int:
    """Items that it takes until it is full."""
    for count in range(1000):
        if window.full:
            return count
        window.enter(10)
    return 1000


def test_a_window_begins_few_items_until_an_answer_tells_their_size() -> None:
    window = ItemWindow(100, 1000)
    assert filled(window) == 4
    window.answered(10)
    assert filled(window) > 10


def test_a_window_counts_answers_that_wait_and_expects_more_of_their_size() -> None:
    window = ItemWindow(100, 1000)
    filled(window)
    window.answered(300)  # 340 are here, and three times 300 are expected
    assert filled(window) == 0
    window.leave(310)
    window.answered(300)
    window.leave(310)
    assert filled(window) == 2  # 20 are here and 600 expected, then 40 and 1200


def test_one_item_alone_may_always_be_read() -> None:
    window, seen = ItemWindow(100, 1000), []
    for _ in range(2):
        seen.append(window.full)
        window.enter(5000)
        seen.append(window.full)
        window.answered(5000)
        window.leave(10_000)
    assert seen == [False, True] * 2


def test_a_reader_waits_for_room() -> None:
    async def read() -> list[bool]:
        window = ItemWindow(1, 1000)
        window.enter(1)
        reader = asyncio.ensure_future(window.room())
        await asyncio.sleep(0)
        before = [reader.done()]
        window.answered(1)
        window.leave(2)
        await reader
        return [*before, reader.done()]

    assert asyncio.run(read()) == [False, True]


Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers whose one method does this, with two threads for images and these settings of concurrency."""
    with ExitStack() as stack:

        def start(run: Run, **concurrency: int) -> str:
            tables = {"concurrency": concurrency, "pools": {"image": 2}}
            config = ServerConfig.model_validate({**load().model_dump(), **tables})
            return stack.enter_context(running(config, methods=lambda *_: [place_method(run)]))

        yield start


GO = threading.Event()
BEGUN: list[int] = []


async def slow(query: pb.PositionsQuery, answer: pb.Positions, call: Call) -> None:
    """Hold up the event loop, as many cheap calls at once do."""
    assert GO.wait(60)
    answer.cu_seqlens.append(1)


def test_what_waits_for_the_event_loop_is_bounded_and_the_rest_is_dropped_as_overload(serve: Serve) -> None:
    address = serve(slow, max_pending=4)
    dropped: list[str] = []

    async def ask() -> None:
        async with AsyncClient(address, attempts=1) as client:
            calls = [asyncio.ensure_future(client.query(PositionsQuery(SEGMENTS))) for _ in range(60)]
            for call in asyncio.as_completed(calls):
                try:
                    await call
                except ServiceOverloadedError as error:
                    dropped.append(str(error))
                    if len(dropped) > 20:  # while the loop is held up: nobody waits for all the others
                        GO.set()
                except ServiceError:  # the answer is no table
                    pass

    GO.set()
    with Client(address) as client, pytest.raises(ServiceError):  # connects
        client.place(SEGMENTS)
    GO.clear()
    asyncio.run(ask())
    assert set(dropped) == {"max_pending: got more calls than the server takes, want fewer at once"}
    assert 20 < len(dropped) < 60


async def pooled(query: pb.PositionsQuery, answer: pb.Positions, call: Call) -> None:
    """As a call that needs a thread."""
    BEGUN.append(1)
    await call.run("image", GO.wait, 60)
    answer.cu_seqlens.append(1)


def statuses(address: str, calls: int) -> list[str]:
    """Of so many calls at once, by a client that repeats nothing: none is done before all have come."""
    BEGUN.clear()
    GO.clear()
    options = [("grpc.enable_retries", 0)]
    with grpc.insecure_channel(address, options=options) as channel, ThreadPoolExecutor(calls) as threads:
        ask: Unary = channel.unary_unary("/mmpos.rpc.v1.PositionService/Place")
        raw = pb.PlaceRequest(query=pb.PositionsQuery(profile="x")).SerializeToString()

        def status(_: int) -> str:
            code, details = ending(lambda: ask(raw, timeout=60))
            return code if code == "OK" else f"{code}: {details.partition(':')[0]}"

        found = threads.map(status, range(calls))
        assert eventually(lambda: len(BEGUN) == calls)
        GO.set()
        return sorted(found)


def test_a_loader_with_eight_workers_is_never_refused(serve: Serve) -> None:
    address = serve(pooled)
    for _ in range(3):
        assert statuses(address, 8) == ["OK"] * 8


def test_a_pool_refuses_by_the_turns_that_a_call_would_wait(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_CALM", 600)
    found = statuses(serve(pooled, max_wait=2, max_pending=1000), 40)
    # Two are at work and four wait, for up to two turns of two threads.
    overloaded = ["RESOURCE_EXHAUSTED: max_wait_overloaded"] * 33
    assert found == ["OK"] * 6 + ["RESOURCE_EXHAUSTED: max_wait"] + overloaded


def test_a_limit_of_the_transport_is_no_overload() -> None:
    config = ServerConfig.model_validate({**load().model_dump(), "limits": {"request_bytes": 1024}})
    with running(config) as address, Client(address) as client, pytest.raises(LimitExceededError, match="larger than"):
        client.place(SegmentTable.from_documents([[Text(1)] * 2000]))


async def large(query: pb.PositionsQuery, answer: pb.Positions, call: Call) -> None:
    """An answer of two megabytes, and a mark that it was made."""
    call.count(documents=1)
    BEGUN.append(1)
    answer.cu_seqlens.extend([2**30] * 400_000)


def test_a_stream_that_is_not_read_holds_so_many_bytes_of_answers(serve: Serve) -> None:
    BEGUN.clear()
    address = serve(large, stream_bytes=1024)
    with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        ask: Stream = channel.stream_stream("/mmpos.rpc.v1.PositionService/StreamPlace")
        item = pb.StreamPlaceRequest(query=pb.PositionsQuery()).SerializeToString()
        call = ask(iter([item] * 40))
        assert eventually(lambda: len(BEGUN) >= 2)
        time.sleep(0.5)
        assert 2 <= len(BEGUN) <= 8  # the first few, and what the transport took; not the window of sixteen
        assert sum(1 for _ in call) == 40


async def held(query: pb.PositionsQuery, answer: pb.Positions, call: Call) -> None:
    BEGUN.append(1)
    await asyncio.sleep(0.3)
    answer.cu_seqlens.append(1)


def test_a_stream_that_finds_no_place_waits_for_one(serve: Serve) -> None:
    BEGUN.clear()
    address = serve(held, max_streams=1)
    with grpc.insecure_channel(address) as channel, Client(address) as client:
        ask: Stream = channel.stream_stream("/mmpos.rpc.v1.PositionService/StreamPlace")
        first = ask(iter([pb.StreamPlaceRequest(query=pb.PositionsQuery()).SerializeToString()]))
        assert eventually(lambda: bool(BEGUN))
        with pytest.raises(ServiceError, match="got neither table nor dense"):  # so it was answered
            next(client.stream([PositionsQuery(SEGMENTS)]))
        assert len(list(first)) == 1


class Transport:
    """Transport of a lane, by hand."""

    def __init__(self, ahead: int, most: int, few: int) -> None:
        self.asked, self.overload = 0, Overload(ahead)
        self.lane = Lane(self._ask, ahead, Width(most, few), self.overload)
        self.lane.fill()

    def _ask(self) -> None:
        self.asked += 1

    def send(self) -> Slot:
        """A call that was asked for."""
        assert self.asked
        self.asked -= 1
        return self.lane.come()


def test_a_lane_asks_for_a_burst_and_for_no_more_than_there_are_places() -> None:
    transport = Transport(ahead=4, most=6, few=2)
    assert transport.asked == 4
    places = [transport.send() for _ in range(3)]
    assert transport.asked == 3
    places[0].leave()
    places[0].leave()
    assert transport.asked == 4


def test_a_lane_takes_few_calls_under_overload() -> None:
    transport = Transport(ahead=4, most=6, few=2)
    places = [transport.send() for _ in range(6)]
    transport.overload.here = True
    asked = []
    for place in places:
        place.begin()
        place.leave()
        asked.append(transport.asked)
    assert asked == [0, 0, 0, 0, 1, 2]
    transport.overload.here = False
    transport.lane.look()
    assert transport.asked == 4


def test_a_call_whose_request_does_not_come_loses_its_place_until_it_does() -> None:
    transport = Transport(ahead=2, most=2, few=2)
    begun, absent = transport.send(), transport.send()
    begun.begin()
    transport.lane.look()
    assert transport.asked == 0  # it came since the last look
    transport.lane.look()
    assert transport.asked == 1
    absent.begin()
    begun.leave()
    assert transport.asked == 1
    absent.leave()
    assert transport.asked == 2


def test_overload_is_what_lasts_longer_than_a_burst_until_nothing_was_dropped_for_a_second(clock: Clock) -> None:
    overload, missing = Overload(0, lambda: clock.now), 0
    seen = []
    for dropped in (9, 0, 0, 9, 0, 9, 9, *[0] * 4, 9):
        clock.now += 0.25
        missing += dropped
        overload.look(missing)
        seen.append(overload.here)
    #                0.00   0.25   0.50   0.75  1.00  1.25  1.50  1.75  2.00  2.25  2.50   2.75
    assert seen == [False, False, False, True, True, True, True, True, True, True, False, False]


def test_calls_on_their_way_through_a_slow_event_loop_are_no_overload(clock: Clock) -> None:
    overload = Overload(64, lambda: clock.now)
    for missing in (128, 3, 128, 0, 100, 128, 1, 128, 128):
        clock.now += 0.25
        overload.look(missing)
        assert not overload.here
    for missing in (300, 500, 700):
        clock.now += 0.25
        overload.look(missing)
    assert overload.here


async def gated(query: pb.PositionsQuery, answer: pb.Positions, call: Call) -> None:
    """Wait beside others until the test lets all go."""
    BEGUN.append(1)
    while not GO.is_set():
        await asyncio.sleep(0.01)
    answer.cu_seqlens.append(1)


def test_a_burst_at_an_idle_server_is_answered_in_full(serve: Serve) -> None:
    assert statuses(serve(gated), 64) == ["OK"] * 64


def begun(calls: int) -> bool:
    """Check whether so many calls are at work."""
    return len(BEGUN) == calls


def test_a_client_is_answered_beside_another_that_has_two_hundred_calls_on_one_connection(serve: Serve) -> None:
    address, options = serve(gated), [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    raw = pb.PlaceRequest(query=pb.PositionsQuery(profile="x")).SerializeToString()
    BEGUN.clear()
    GO.clear()
    with (
        grpc.insecure_channel(address, options=options) as crowded,
        grpc.insecure_channel(address, options=options) as polite,
        ThreadPoolExecutor(1) as threads,
    ):
        crowd: Unary = crowded.unary_unary("/mmpos.rpc.v1.PositionService/Place")
        alone: Unary = polite.unary_unary("/mmpos.rpc.v1.PositionService/Place")
        calls: list[Any] = []
        for wave in range(1, 5):  # no more than may come in one moment
            calls += [crowd.future(raw, timeout=60) for _ in range(50)]
            assert eventually(partial(begun, 50 * wave))
        answers = threads.submit(lambda: [alone(raw, timeout=60) for _ in range(3)])
        assert eventually(partial(begun, 201))
        GO.set()
        assert len(answers.result()) == 3
        assert Counter(call.code().name for call in calls) == {"OK": 200}


def test_calls_beyond_the_places_are_dropped_by_the_transport(serve: Serve) -> None:
    address, options = serve(gated, max_at_work=8), [("grpc.enable_retries", 0)]
    raw = pb.PlaceRequest(query=pb.PositionsQuery(profile="x")).SerializeToString()
    BEGUN.clear()
    GO.clear()
    with grpc.insecure_channel(address, options=options) as channel:
        place: Unary = channel.unary_unary("/mmpos.rpc.v1.PositionService/Place")
        calls: list[Any] = [place.future(raw, timeout=60) for _ in range(40)]
        assert eventually(lambda: sum(call.done() for call in calls) == 31)  # one waits in the transport
        GO.set()
        statuses = Counter(call.code().name for call in calls)
    assert statuses == {"OK": 9, "CANCELLED": 31}
