"""Test gates, pools, stream windows, messages in transit and calls, all without a server."""

from __future__ import annotations

import io
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import grpc
import pytest
from waiting import eventually

from mmpos.errors import InvalidInputError, ServiceOverloadedError, ServiceTimeoutError, ServiceUnavailableError
from mmpos_server import admission as admission_module
from mmpos_server import transit as transit_module
from mmpos_server.admission import Admission, Gate, PoolName, WorkPool
from mmpos_server.call import Call, GoneError
from mmpos_server.config import ClientLimits, Concurrency
from mmpos_server.streams import ItemWindow
from mmpos_server.telemetry import Logs
from mmpos_server.transit import Transit


class Clock:
    """Clock that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (admission_module, transit_module):
        monkeypatch.setattr(module, "monotonic", clock)
    return clock


def refusal(enter: Callable[..., object], *arguments: object) -> tuple[str, float]:
    """Return the message and retry delay of a refusal, or "" and 0 if the call is accepted."""
    try:
        enter(*arguments)
    except ServiceOverloadedError as error:
        return str(error), error.retry_after
    return "", 0.0


def message(enter: Callable[..., object], *arguments: object) -> str:
    return refusal(enter, *arguments)[0]


# Gates


def test_a_gate_refuses_every_client_when_full_and_a_client_that_uses_its_full_share() -> None:
    gate = Gate("slots", 5, 0.5)
    results = [message(gate.enter, name) for name in ("a", "a", "a", "b", "b", "c", "d")]
    share = "clients.max_share of slots for 'a': got 2 of 2 in use"
    assert results == ["", "", share, "", "", "", "slots: got 5 of 5 in use"]
    gate.leave("a")
    assert [message(gate.enter, "b"), message(gate.enter, "a")] == [share.replace("'a'", "'b'"), ""]
    for name in ("a", "a", "b", "b", "c"):
        gate.leave(name)
    assert (gate.taken, message(gate.enter, "a")) == (0, "")


@pytest.mark.parametrize(("limit", "share", "most"), [(1, 0.5, 1), (3, 0.5, 1), (4, 0.5, 2), (4, 0.0, 4), (4, 1.0, 4)])
def test_a_client_may_take_its_share_or_one_slot_if_that_is_more_and_all_slots_if_no_share_is_set(
    limit: int, share: float, most: int
) -> None:
    gate = Gate("slots", limit, share)
    assert [message(gate.enter, "a") for _ in range(most + 1)].index(message(gate.enter, "a")) == most


def test_a_call_larger_than_the_gate_enters_while_no_other_call_holds_slots() -> None:
    gate = Gate("bytes", 1000, 0.5)
    gate.enter("a", 2000)
    assert message(gate.enter, "b") == "bytes: got 2000 of 1000 in use"
    gate.enter("a", 500, 2000)
    gate.leave("a", 2500)
    gate.enter("a", 100)
    gate.enter("b", 100)
    assert message(gate.enter, "a", 900, 100) == "bytes: got 200 of 1000 in use"
    assert message(gate.enter, "a", 401) == "clients.max_share of bytes for 'a': got 100 of 500 in use"


def test_the_retry_delay_follows_the_duration_of_calls() -> None:
    gate = Gate("slots", 1)
    waits = []
    for seconds in (None, 2.0, 2.0, 1000.0, 0.0):
        gate.enter("a")
        waits.append(refusal(gate.enter, "b")[1])
        gate.leave("a", 1, seconds)
    assert waits == [1.0, 1.0, 2.0, 2.0, 30.0]
    gate.enter("a")
    for _ in range(200):
        gate.leave("a", 1, 0.0)
        gate.enter("a")
    assert refusal(gate.enter, "b")[1] == 0.05


def test_a_gate_counts_correctly_across_many_threads() -> None:
    gate, entered = Gate("slots", 8, 0.5), [0]

    def work(name: str) -> None:
        for _ in range(2000):
            if not message(gate.enter, name):
                entered[0] += 1
                gate.leave(name, 1, 0.0)

    threads = [threading.Thread(target=work, args=(f"{number % 3}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entered[0] > 0
    assert gate.taken == 0


# Pools


def test_a_refusal_shortens_the_queue_until_a_second_passes_without_one(clock: Clock) -> None:
    pool = WorkPool("pool", 2, Gate("slots", 20))
    assert {message(pool.enter, "a") for _ in range(20)} == {""}
    assert message(pool.enter, "a") == "slots: got 20 of 20 in use"
    pool.gate.leave("a", 14)
    clock.now = 0.9
    short = "slots: got 6 of 6 in use under overload"
    assert message(pool.enter, "a") == short
    pool.gate.leave("a")
    assert [message(pool.enter, "a"), message(pool.enter, "a")] == ["", short]
    clock.now = 1.91
    assert {message(pool.enter, "a") for _ in range(14)} == {""}


def test_a_client_that_exceeds_its_share_does_not_shorten_the_queue_for_others() -> None:
    pool = WorkPool("pool", 1, Gate("slots", 20, 0.5))
    for _ in range(10):
        pool.enter("a")
    assert message(pool.enter, "a").startswith("clients.max_share of slots for 'a'")
    assert message(pool.enter, "b") == ""


# Windows of streams


def filled(window: ItemWindow) -> int:
    """Enter items until the window is full, and return their number."""
    for count in range(1000):
        if window.full:
            return count
        window.enter(10)
    return 1000


def test_a_window_admits_few_items_until_an_answer_shows_their_size() -> None:
    window = ItemWindow(100, 1000)
    assert filled(window) == 4
    window.answered(10)
    assert filled(window) > 10


def test_a_window_counts_unread_answers_and_expects_later_ones_to_be_as_large() -> None:
    window = ItemWindow(100, 1000)
    filled(window)
    window.answered(300)  # 340 bytes are held, and three times 300 are expected
    assert filled(window) == 0
    window.leave(310)
    window.answered(300)
    window.leave(310)
    assert filled(window) == 2  # 20 bytes are held and 600 expected, then 40 held and 1200 expected


def test_a_first_item_may_always_be_read_but_never_more_items_than_fit_in_the_window() -> None:
    window, seen = ItemWindow(100, 1000), []
    for _ in range(2):
        seen.append(window.full)
        window.enter(5000)
        seen.append(window.full)
        window.answered(5000)
        window.leave(10_000)
    assert seen == [False, True] * 2
    small = ItemWindow(3, 1000)
    small.enter(1)
    small.answered(1)
    assert filled(small) == 2


@pytest.mark.parametrize("how", ["leave", "close"])
def test_a_reader_waits_for_room_or_the_end_of_the_stream(how: str) -> None:
    window, results = ItemWindow(1, 1000), list[bool]()
    window.enter(1)
    reader = threading.Thread(target=lambda: results.append(window.room()))
    reader.start()
    window.answered(1)
    reader.join(0.05)
    assert reader.is_alive()
    window.leave(2) if how == "leave" else window.close()
    reader.join(60)
    assert results == [how == "leave"]


# Messages in transit


class Transport:
    """Fake transport of a call."""

    def __init__(self) -> None:
        self.active, self.cancelled = True, threading.Event()
        self.callbacks: list[Callable[[], None]] | None = []

    def is_active(self) -> bool:
        return self.active

    def add_callback(self, callback: Callable[[], None]) -> bool:
        if self.callbacks is not None:
            self.callbacks.append(callback)
        return self.callbacks is not None

    def cancel(self) -> None:
        self.active = False
        self.cancelled.set()

    def messages(self) -> Iterator[bytes]:
        """Return an iterator that waits until the call is cancelled, and then raises."""

        def next_message() -> bytes:
            assert self.cancelled.wait(60)
            raise grpc.RpcError

        return iter(next_message, b"")


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def transit(log: io.StringIO) -> Transit:
    return Transit(Logs("info", file=log))


def test_a_missing_message_is_refused_and_a_call_ends_when_its_client_leaves(transit: Transit) -> None:
    assert transit.request(iter([b"a"]), Transport()) == b"a"
    with pytest.raises(InvalidInputError, match=r"^request: got no message, want one$"):
        transit.request(iter([]), Transport())
    gone = Transport()
    gone.cancel()
    with pytest.raises(GoneError):
        transit.request(gone.messages(), gone)
    assert transit.quiet


@pytest.mark.parametrize(("draining", "seconds"), [(False, 30.0), (True, 1.0)])
def test_a_request_that_does_not_arrive_in_time_ends_its_call(
    transit: Transit, clock: Clock, log: io.StringIO, draining: bool, seconds: float
) -> None:
    transport, ended = Transport(), threading.Event()

    def wait() -> None:
        with pytest.raises(GoneError):
            transit.request(transport.messages(), transport)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert eventually(lambda: not transit.quiet)
    if draining:
        transit.drain()
    clock.now = seconds - 0.1
    transit.check()
    assert not transport.cancelled.is_set()
    clock.now = seconds + 0.1
    transit.check()
    assert ended.wait(60)
    thread.join()
    assert eventually(lambda: '"event": "request did not arrive in time"' in log.getvalue())


def test_an_answer_holds_bytes_until_it_is_read_or_times_out(transit: Transit, clock: Clock) -> None:
    admission = Admission(Concurrency(), ClientLimits())
    slow, quick, gone = Transport(), Transport(), Transport()
    gone.callbacks = None
    for transport in (slow, quick, gone):
        transit.send(Call("id", "a", admission, transport), transport, 100)
    assert admission.bytes.taken == 200  # a client that has left holds no bytes
    for callback in quick.callbacks or ():
        callback()
    clock.now = 119.0
    transit.check()
    assert not slow.cancelled.is_set()
    clock.now = 121.0
    transit.check()
    assert [transport.cancelled.is_set() for transport in (slow, quick, gone)] == [True, False, False]
    for callback in slow.callbacks or ():
        callback()
    assert (admission.bytes.taken, transit.quiet) == (0, True)


# Calls


@pytest.fixture
def admission() -> Iterator[Admission]:
    admission = Admission(
        Concurrency(max_in_flight=8, max_in_flight_images=2, image_threads=1), ClientLimits(max_share=1)
    )
    yield admission
    admission.close()


def taken(admission: Admission) -> list[int]:
    gates = [pool.gate for pool in admission.pools.values()]
    return [gate.taken for gate in (*gates, admission.calls, admission.bytes)]


def test_a_call_takes_one_slot_of_each_pool_and_returns_all(admission: Admission) -> None:
    call = Call("id", "a", admission, Transport())
    call.admit(admission.calls)
    call.hold(100)
    pools: list[PoolName] = ["image", "place", "image"]
    for pool in pools:
        call.join(pool)
    assert taken(admission) == [1, 1, 0, 0, 1, 100]
    call.release()
    assert taken(admission) == [0, 0, 0, 0, 0, 100]  # an answer may still be in transit
    call.free()
    call.free()
    assert taken(admission) == [0] * 6


def test_work_runs_in_parallel_in_pool_threads(admission: Admission) -> None:
    call, together = Call("id", "a", admission, Transport()), threading.Barrier(2, timeout=60)

    def work(number: int) -> tuple[int, str]:
        together.wait()
        return number, threading.current_thread().name.rpartition("_")[0]

    assert call.map("place", work, [(1,), (2,)]) == [(1, "mmpos-place"), (2, "mmpos-place")]
    assert call.run("image", lambda a, b: a + b, 1, 2) == 3
    assert [stage for stage, _ in call.stages] == ["queue"] * 3
    call.release()


def test_the_first_error_ends_a_call_and_cancels_its_queued_work(admission: Admission) -> None:
    begun = []

    def fail(number: int) -> None:
        begun.append(number)
        raise KeyError(number)

    with pytest.raises(KeyError):
        Call("id", "a", admission, Transport()).map("image", fail, [(number,) for number in range(50)])
    admission.pools["image"].executor.submit(int).result(60)  # the queue now holds none of the call's work
    assert len(begun) < 50


@pytest.mark.parametrize("how", ["gone", "late"])
def test_queued_work_ends_when_its_client_leaves_or_its_deadline_passes(
    admission: Admission, clock: Clock, how: str
) -> None:
    transport, busy = Transport(), threading.Event()
    call = Call("id", "a", admission, transport, None if how == "gone" else float("inf"))

    class Large:
        pass

    def leave() -> None:
        assert eventually(lambda: bool(admission.pools["image"].gate.taken))
        if how == "gone":
            transport.active = False
        else:
            call._deadline = 0.0

    large, begun = Large(), list[object]()
    seen = weakref.ref(large)
    first = admission.pools["image"].executor.submit(busy.wait, 60)
    leaving = threading.Thread(target=leave)
    leaving.start()
    with pytest.raises(GoneError if how == "gone" else ServiceTimeoutError):
        call.run("image", begun.append, large)
    leaving.join()
    call.release()
    busy.set()
    first.result(60)
    admission.pools["image"].executor.submit(int).result(60)  # cancelled work has left the queue
    del large
    assert (begun, taken(admission), seen()) == ([], [0] * 6, None)


def test_a_full_pool_refuses_a_call_but_a_stream_item_waits(admission: Admission) -> None:
    others = [Call("id", "b", admission, Transport()) for _ in range(2)]
    for other in others:
        other.join("image")
    call = Call("id", "a", admission, Transport())
    assert message(call.run, "image", int) == "max_in_flight_images: got 2 of 2 in use"
    item, results = call.of_item(3), list[int]()
    waiting = threading.Thread(target=lambda: results.append(item.run("image", int)))
    waiting.start()
    waiting.join(0.1)
    assert (item.request_id, waiting.is_alive()) == ("id.3", True)
    others[0].release()
    assert eventually(lambda: admission.pools["image"].gate.taken < 2 or results == [0])
    waiting.join(60)
    assert results == [0]
    others[1].release()
    item.release()
    assert taken(admission) == [0] * 6


def test_bytes_beyond_the_limit_are_refused_for_a_call_but_a_stream_item_waits() -> None:
    admission = Admission(Concurrency(max_in_flight_bytes=1024), ClientLimits(max_share=1))
    one, other = (Call("id", name, admission, Transport()) for name in "ab")
    one.hold(400)
    one.hold(500)
    assert message(other.hold, 125) == "max_in_flight_bytes: got 900 of 1024 in use"
    item = other.of_item(1)
    waiting = threading.Thread(target=partial(item.hold, 125))
    waiting.start()
    waiting.join(0.1)
    assert (waiting.is_alive(), item.held) == (True, 0)
    one.free()
    waiting.join(60)
    assert (item.held, admission.bytes.taken) == (125, 125)
    item.free()
    admission.close()


def test_a_waiting_stream_item_ends_when_its_client_leaves(admission: Admission) -> None:
    other, transport = Call("id", "b", admission, Transport()), Transport()
    other.hold(2**30)
    item = Call("id", "a", admission, transport).of_item(1)
    threading.Timer(0.05, transport.cancel).start()
    with pytest.raises(GoneError):
        item.hold(1)
    other.free()


def test_closing_a_pool_ends_waiting_calls_without_an_internal_error(admission: Admission) -> None:
    transport, busy = Transport(), threading.Event()
    admission.pools["image"].executor.submit(busy.wait, 60)
    call, ended = Call("id", "a", admission, transport), list[object]()

    def run() -> None:
        try:
            call.run("image", int)
        except BaseException as error:
            ended.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert eventually(lambda: bool(admission.pools["image"].gate.taken))
    transport.cancel()
    admission.close()
    thread.join(60)
    busy.set()
    assert ended == [GoneError]


def test_calls_are_counted_and_refused_once_the_server_is_about_to_stop(admission: Admission, clock: Clock) -> None:
    clock.now = 5.0
    admission.arrive()
    assert (admission.arrivals, admission.last_arrival) == (1, 5.0)
    admission.ending = True
    with pytest.raises(ServiceUnavailableError, match=r"^the server is about to stop$"):
        admission.arrive()
    assert admission.arrivals == 2


def test_a_call_reports_whether_it_is_late_and_counts_its_answer(admission: Admission) -> None:
    calls = [Call("id", "a", admission, Transport(), deadline) for deadline in (None, float("inf"), 0.0)]
    assert [call.late for call in calls] == [False, False, True]
    calls[0].count(documents=1, tokens=2)
    calls[0].count(documents=1, images=0)
    assert (calls[0].counts, calls[0].trace) == ({"documents": 2, "tokens": 2}, {})
