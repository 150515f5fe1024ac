"""Test places, arriving messages, unread answers and the threads of calls, all without a server."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from waiting import bounded

from mmpos.errors import ServiceOverloadedError
from mmpos_server import arrivals as module
from mmpos_server.arrivals import Arrivals, Places
from mmpos_server.call import Call, GoneError, Threads


def refusal(places: Places, client: str, count: int = 1) -> str:
    """Return the message of a refusal, or "" if the client received its places."""
    try:
        places.take(client, count)
    except ServiceOverloadedError as error:
        return str(error)
    return ""


# Places


def test_places_are_refused_when_all_are_taken_and_to_a_client_that_holds_its_share() -> None:
    places = Places("slots", 5)
    results = [refusal(places, name) for name in ("a", "a", "a", "b", "b", "c", "d")]
    share, full = (
        f"slots: got {n} by all, want at most 2 and 5"
        for n in ("2 in use by this client and 2", "0 in use by this client and 5")
    )
    assert results == ["", "", share, "", "", "", full]
    places.leave("a")
    assert (refusal(places, "b") != "", refusal(places, "a")) == (True, "")
    for name in ("a", "a", "b", "b", "c"):
        places.leave(name)
    assert (places.taken, refusal(places, "a")) == (0, "")


def test_a_client_that_holds_none_may_take_more_than_its_share_and_anybody_all_that_are_free() -> None:
    places = Places("bytes", 1000)
    assert refusal(places, "a", 2000) == ""
    assert refusal(places, "b", 1) == "bytes: got 0 in use by this client and 2000 by all, want at most 500 and 1000"
    places.leave("a", 2000)
    assert [refusal(places, "a", 700), refusal(places, "b", 300)] == ["", ""]


async def _wait(places: Places, name: str, order: list[str]) -> None:
    await places.wait(name)
    order.append(name)


@bounded
async def test_the_client_that_holds_the_fewest_places_is_next() -> None:
    places, order = Places("slots", 4), list[str]()
    for name in ("a", "a", "b", "c"):
        await places.wait(name)
    waiting = [asyncio.create_task(_wait(places, name, order)) for name in ("a", "a", "b", "d", "e")]
    await asyncio.sleep(0)
    assert (places.wanted, order) == (True, [])
    for name in ("c", "b", "a", "a", "d"):  # each leaves its place to one that waits
        places.leave(name)
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert not places.wanted
    assert order == ["d", "b", "e", "a", "a"]


@bounded
async def test_few_calls_wait_for_each_place_and_half_of_them_may_be_of_one_client() -> None:
    places, counts, tasks = Places("slots", 1), [0, 0, 0], list[asyncio.Task[None]]()
    await places.wait("z")
    for number, client in enumerate("abc"):
        for _ in range(10):
            tasks.append(asyncio.create_task(places.wait(client)))
            await asyncio.sleep(0)
            counts[number] += not tasks[-1].done()
    refused = [str(task.exception()) for task in tasks if task.done()]
    assert refused[0] == "slots: got 4 waiting, 4 of this client; want fewer than 8 and 4"
    assert refused[-1] == "slots: got 8 waiting, 0 of this client; want fewer than 8 and 4"
    for task in tasks:
        task.cancel()
    assert counts == [4, 4, 0]


STEP = st.tuples(st.sampled_from("abc"), st.sampled_from(["wait", "wait", "leave", "give up"]), st.booleans())


@given(st.lists(STEP))
@example([*[("a", "wait", True)] * 3, ("a", "leave", False), ("a", "give up", True)])  # as it receives its place
@example([*[(name, "wait", True) for name in "aabbcc"], ("c", "give up", False), ("a", "leave", True)])
@bounded
async def test_places_never_exceed_their_number_and_none_stays_free_while_one_waits(
    steps: list[tuple[str, str, bool]],
) -> None:
    places, held, waiting = Places("slots", 4), list[str](), list[tuple[str, asyncio.Task[None]]]()
    for name, step, settles in [*steps, ("a", "wait", True)]:
        if step == "wait":
            waiting.append((name, asyncio.create_task(_wait(places, name, held))))
        elif step == "give up":  # while it waits, or in the moment in which it receives its place
            for _, task in [one for one in waiting if one[0] == name and not one[1].done()][:1]:
                task.cancel()
        elif name in held:
            held.remove(name)
            places.leave(name)
        if settles:
            for _ in range(3):
                await asyncio.sleep(0)
            pending = [task for _, task in waiting if not task.done()]
            assert places.taken == len(held) <= 4
            assert all(held.count(client) <= 2 for client in "abc")
            # A client waits although places are free only if it holds its share.
            assert places.taken == 4 or all(held.count(client) == 2 for client, task in waiting if task in pending)
            assert places.wanted == bool(pending)
    for _, task in waiting:
        task.cancel()


# Messages


class Context:
    """Context of a call whose messages a test sends."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        return await self.messages.get()

    def peer(self) -> str:
        return "ipv4:1.2.3.4:5"


def ticks(arrivals: Arrivals, seconds: float) -> None:
    for _ in range(round(seconds / module.TICK_SECONDS)):
        arrivals.check()


async def begin(arrivals: Arrivals, client: str = "a", **options: bool) -> asyncio.Task[Any]:
    """Begin to read the message of a call."""
    task = asyncio.create_task(arrivals.message(Context(), client, **options))
    await asyncio.sleep(0)
    return task


@bounded
async def test_a_slow_message_makes_room_for_one_that_waits_but_an_item_of_a_stream_does_not() -> None:
    arrivals = Arrivals(1.0)
    slow = [await begin(arrivals, name) for name in "ab" for _ in range(module.MESSAGES // 2)]
    item = await begin(arrivals, "d", item=True)
    ticks(arrivals, 0.5)  # now they are late and have taken all places
    waiting = asyncio.create_task(arrivals.messages.wait("c"))
    await asyncio.sleep(0)
    ticks(arrivals, 4.0)
    await asyncio.sleep(0)
    assert not waiting.done()
    ticks(arrivals, 1.0)
    with pytest.raises(ServiceOverloadedError, match=r"^late_messages: others wait for the place of this slow"):
        await slow[0]
    await asyncio.sleep(0)
    assert waiting.done()
    assert not item.done()


@bounded
async def test_a_cancelled_call_stays_cancelled_and_gives_its_place_back() -> None:
    arrivals = Arrivals(1.0)
    reading = await begin(arrivals)
    ticks(arrivals, 0.5)
    assert arrivals.messages.taken == 1
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert arrivals.messages.taken == 0


# Threads


@bounded
async def test_all_threads_start_at_once_and_run_work_in_parallel(threads: Threads) -> None:
    before, together = set(threading.enumerate()), threading.Barrier(2, timeout=300)
    call = Call("a", Arrivals(1.0), threads)

    def work(number: int) -> tuple[int, str]:
        together.wait()
        return number, threading.current_thread().name.rpartition("_")[0]

    assert await call.map("work", work, [(1,), (2,)]) == [(1, "mmpos-work"), (2, "mmpos-work")]
    assert await call.run("image", lambda a, b: a + b, 1, 2) == 3
    assert [stage for stage, _ in call.stages] == ["queue"] * 3
    assert set(threading.enumerate()) <= before


@bounded
async def test_the_first_error_ends_a_call_and_cancels_its_queued_work(threads: Threads) -> None:
    begun = []

    def fail(number: int) -> None:
        begun.append(number)
        raise KeyError(number)

    call = Call("a", Arrivals(1.0), threads)
    with pytest.raises(KeyError):
        await call.map("work", fail, [(number,) for number in range(500)])
    threads.pools["work"].submit(int).result(300)
    assert len(begun) < 500


@bounded
async def test_queued_work_ends_when_its_call_is_cancelled(threads: Threads) -> None:
    class Large:
        pass

    arrivals, busy = Arrivals(1.0), threading.Event()
    first = [threads.pools["work"].submit(busy.wait, 300) for _ in range(2)]
    call, large, begun = Call("a", arrivals, threads), Large(), list[object]()
    seen = weakref.ref(large)
    queued = asyncio.create_task(call.run("work", begun.append, large))
    await asyncio.sleep(0.01)
    assert arrivals.work.taken == 1
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    busy.set()
    assert all(waiting.result(300) for waiting in first)
    together = threading.Barrier(2, timeout=300)  # which both threads reach once they have dropped the queued work
    for waiting in [threads.pools["work"].submit(together.wait) for _ in range(2)]:
        waiting.result(300)
    del large, queued
    await asyncio.sleep(0)  # for the callbacks of the cancelled futures
    gc.collect()
    assert (begun, arrivals.work.taken, seen()) == ([], 0, None)
    call.gone = True
    with pytest.raises(GoneError):
        await call.run("work", int)


@bounded
async def test_calls_that_wait_for_threads_are_limited_but_items_of_streams_wait(threads: Threads) -> None:
    arrivals = Arrivals(1.0)
    arrivals.work.add("b", module.WORK)
    with pytest.raises(ServiceOverloadedError, match=r"^waiting_calls: got 0 in use by this client and 64 by all"):
        await Call("a", arrivals, threads).run("work", int)
    assert await Call("a", arrivals, threads, item=True).run("work", int) == 0
