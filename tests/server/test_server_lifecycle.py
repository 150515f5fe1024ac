"""Test the server program: its start, its workers, its unix socket and its exit."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from server_program import PATIENT, Program, Start, answer, metrics_of
from waiting import alive, descendants, eventually, free_port

from mmpos import SegmentTable, Text
from mmpos.client import Client, Spans
from mmpos.errors import InvalidInputError, ServiceError, ServiceUnavailableError
from mmpos_server import process
from mmpos_server.listening import Listen, bind_uds
from mmpos_server.testing import running

SEGMENTS = SegmentTable.from_documents([[Text(3)]])


def answered(address: str, token: str | None = None) -> bool:
    """Return whether a new connection, which the kernel assigns to any worker, gets an answer."""
    with Client(address, timeout=300, token=token) as client:
        return client.place(SEGMENTS).num_tokens == 3


def ready(page: int) -> int:
    return answer(page, "/readyz")[0]


def events(server: Program) -> list[str]:
    return [line["event"] for line in server.lines()]


def test_sigterm_under_load_loses_no_call_and_removes_the_socket(start: Start, tmp_path: Path, short: Path) -> None:
    (tmp_path / "mmpos.toml").write_text(f"{PATIENT}log_sample = 1\n")
    uds = f"unix:{short}/socket"
    server = start("--config", str(tmp_path / "mmpos.toml"), "--listen", "127.0.0.1:0", "--listen", uds)
    assert server.process.stdout is not None
    assert server.process.stdout.readline() == f"mmpos_server listening on {uds}\n"
    with Client(server.address, timeout=300, attempts=1) as client, ThreadPoolExecutor(12) as threads:
        assert answered(uds)

        def load(_: int) -> tuple[int, ServiceError]:
            """Return the number of answered calls, and the error of the call that failed."""
            number = 0
            try:
                while True:
                    assert client.place(SEGMENTS).num_tokens == 3
                    number += 1
            except ServiceError as error:
                return number, error

        loads = threads.map(load, range(12))
        assert eventually(lambda: len(server.lines()) > 100)
        server.process.terminate()
        seen = list(loads)
    code, lines = server.end()
    assert (code, (short / "socket").exists()) == (0, False)
    # Every call was either answered or refused before any work, and every answer arrived. The transport cancels calls
    # that arrive while it is closing; on a busy machine, there may be such a call.
    cancelled = [str(error) for _, error in seen if not isinstance(error, ServiceUnavailableError)]
    assert all(error.startswith("CANCELLED: ") for error in cancelled)
    assert sum(number for number, _ in seen) + 1 == sum(line.get("status") == "OK" for line in lines) > 100
    assert [line["event"] for line in lines if line["event"] != "call"] == ["draining", "stopped"]


ENDLESS = """
import sys, threading, mmpos_server.position_service, mmpos_server.process
mmpos_server.process.DRAIN_SECONDS = {seconds}
def work():
    print('{{"event": "begun"}}', file=sys.stderr, flush=True)
    threading.Event().wait()
async def place(self, query, answer, call):
    await call.run("work", work)
mmpos_server.position_service.PositionService.place = place
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_a_server_exits_with_status_3_if_a_thread_never_returns(start: Start, signals: int) -> None:
    server = start(before=ENDLESS.format(seconds=0.2 if signals == 1 else 600))
    with Client(server.address, timeout=300) as client, ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.place, Spans([3], [], []))
        assert eventually(lambda: "begun" in events(server))
        for number in range(signals):
            assert not call.done()
            server.process.send_signal((signal.SIGTERM, signal.SIGINT)[number])
            assert eventually(lambda: "draining" in events(server))
        code, lines = server.end()
        client.close()
    assert code == process.CUT_OFF == 3
    if signals == 1:
        (cut,) = (line for line in lines if line["event"] == "cut off")
        assert (cut["level"], "in work" in cut["traceback"]) == ("error", True)
    else:
        assert lines[-1]["event"] == "ended by a second signal"


BROKEN = [
    ("mmpos_server.app.Server.stop = lambda *_: 1 / 0", "stop failed", process.CUT_OFF),
    (
        "import signal; mmpos_server.pulse.Pulse.start = lambda self, _: "
        "signal.signal(signal.SIGUSR1, lambda *_: self._failed('3 calls to itself failed'))",
        "server failed",
        process.FAILED,
    ),
]


@pytest.mark.parametrize(("code", "event", "status"), BROKEN)
def test_a_server_that_fails_ends_with_a_reason(start: Start, code: str, event: str, status: int) -> None:
    server = start(before=f"import mmpos_server.app\n{code}")
    server.process.send_signal(signal.SIGTERM if event == "stop failed" else signal.SIGUSR1)
    assert server.end()[0] == status
    (line,) = (line for line in server.lines() if line["event"] == event)
    assert "ZeroDivisionError" in line["exception"] if event == "stop failed" else line["reason"].endswith("failed")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_server_whose_stdout_cannot_be_written_ends_with_a_reason(tmp_path: Path, workers: str) -> None:
    command = [sys.executable, "-m", "mmpos_server", "--listen", "127.0.0.1:0", "--workers", workers]
    log, children = tmp_path / "log", set[int]()
    with (
        open("/dev/full", "w") as out,
        log.open("w") as err,
        subprocess.Popen(command, stdout=out, stderr=err) as server,
    ):

        def ended() -> bool:
            children.update(descendants(server.pid))
            return server.poll() is not None

        assert eventually(ended)
    assert server.returncode == process.FAILED == 1
    assert "No space left on device" in log.read_text()
    assert eventually(lambda: not any(map(alive, children)))


def test_many_connections_leave_file_descriptors_for_the_page_and_earlier_connections(start: Start) -> None:
    page = free_port()
    few_files = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (50, 200))"
    server = start("--metrics", f"127.0.0.1:{page}", before=few_files)
    with Client(server.address, timeout=300) as client, ExitStack() as opened:
        assert client.healthy()
        for _ in range(400):
            opened.enter_context(socket.create_connection(("127.0.0.1", int(server.port)), timeout=300))
        for _ in range(5):
            assert (ready(page), client.place(SEGMENTS).num_tokens) == (200, 3)
    server.process.terminate()
    code, lines = server.end()
    assert (code, [line for line in lines if "exception" in line]) == (0, [])
    assert len(lines) < 50


def test_a_second_server_on_the_same_port_and_wrong_settings_are_refused_once(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[profiles.a]\nscheme = 'x'\n")
    with running() as address:
        for flags, message in (
            (["--listen", address], f"--listen: got {address} (Address already in use), want a free port of "),
            (
                ["--workers", "2", "--listen", "127.0.0.1:0", "--config", str(wrong)],
                f"{wrong}: profiles.a.scheme: got 'x', want a Scheme",
            ),
        ):
            command = [sys.executable, "-m", "mmpos_server", *flags]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
            assert done.stderr.startswith(f"mmpos_server: error: {message}")


def test_a_dead_worker_is_replaced_and_the_page_is_not_ready_while_it_is_missing(
    start: Start, tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, tokens, token = free_port(), tmp_path / "tokens", "alice-alice-alice-1"
    monkeypatch.setenv("TMPDIR", str(short))  # where multiprocessing creates sockets
    tokens.write_text(f"alice {token}\n")
    impatient = "import mmpos_server.supervisor as s; s.PAUSE_SECONDS = s.RESTART_SECONDS = 0.2"
    flags = ["--workers", "2", "--metrics", f"127.0.0.1:{page}", "--token-file", str(tokens)]
    server = start(*flags, before=impatient)
    assert ready(page) == 200
    assert all(answered(server.address, token) for _ in range(12))
    counted = 'mmpos_requests_total{method="Place",status="OK"}'
    assert eventually(lambda: metrics_of(page).get(counted) == 12)
    killed, other = server.workers
    tokens.write_text("")  # which the other worker does not accept
    os.kill(killed, signal.SIGKILL)
    assert eventually(lambda: "worker cannot start" in events(server))
    assert eventually(lambda: ready(page) == 503)
    tokens.write_text(f"alice {token}\n")
    assert eventually(lambda: ready(page) == 200)
    assert (len(server.workers), other in server.workers, killed in server.workers) == (2, True, False)
    assert all(answered(server.address, token) for _ in range(12))
    assert eventually(lambda: metrics_of(page).get(counted) == 24)  # a dead worker's calls stay counted
    for pid in (*server.workers, server.process.pid):  # as a terminal does
        os.kill(pid, signal.SIGINT)
    code, lines = server.end()
    assert code == 0
    assert next(line["exit_code"] for line in lines if line["event"] == "worker died") == -9
    assert [line["event"] for line in lines].count("stopped") == 2
    assert eventually(lambda: not list(short.glob("mmpos-metrics-*")))


def test_workers_end_without_an_error_or_a_metrics_folder_when_their_supervisor_is_killed(
    start: Start, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short))
    server = start("--workers", "2")
    workers = server.workers
    assert len(workers) == 2
    assert len(list(short.glob("mmpos-metrics-*"))) == 1
    assert all(answered(server.address) for _ in range(8))
    server.process.kill()
    assert eventually(lambda: not any(map(alive, workers)))
    assert [line for line in server.lines() if line["level"] == "error"] == []
    assert list(short.glob("mmpos-metrics-*")) == []


def test_workers_drain_although_the_process_that_forked_them_has_ended(start: Start) -> None:
    server = start("--workers", "2")
    workers = server.workers
    forking = next(pid for pid in descendants(server.process.pid) if set(workers) <= set(descendants(pid)))
    os.kill(forking, signal.SIGKILL)
    os.kill(workers[0], signal.SIGKILL)
    assert eventually(lambda: [line["event"] for line in server.lines()].count("worker serves") == 3)
    server.process.terminate()
    code, lines = server.end()
    assert (code, [line["event"] for line in lines].count("stopped")) == (0, 2)
    assert not any(map(alive, workers))


# Unix sockets


@pytest.fixture
def path(short: Path) -> Path:
    return short / "socket"


def mistake(uds: Path) -> str:
    with pytest.raises(InvalidInputError) as raised, running(listen=Listen(tcp=False, uds=uds)):
        pass
    return str(raised.value).replace(str(uds), "PATH")


def test_only_this_user_may_connect_to_a_socket_from_the_moment_it_exists_and_it_is_removed_at_exit(path: Path) -> None:
    before = os.umask(0)
    with running(listen=Listen(uds=path)) as port:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert mistake(path) == "--listen: got unix:PATH (in use), want a path to listen on"
        for address in (port, f"unix:{path}"):
            with Client(address) as client:
                assert client.place(SEGMENTS).num_tokens == 3
    assert not path.exists()
    seen = []
    with socket.socket(socket.AF_UNIX) as server:

        def add(address: str) -> None:
            server.bind(address.removeprefix("unix:"))
            seen.append(stat.S_IMODE(path.stat().st_mode))

        bind_uds(path, add)
    assert (seen, os.umask(before)) == ([0o600], 0)


def test_a_socket_is_replaced_only_if_nobody_listens_on_it(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with running(listen=Listen(tcp=False, uds=path)) as address, Client(address) as client:
        assert client.healthy()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        assert mistake(path) == "--listen: got unix:PATH (in use), want a path to listen on"
        assert path.is_socket()


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("elsewhere")])
def test_any_other_file_at_the_path_is_left_unchanged(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    before = path.lstat()
    assert mistake(path) == "--listen: got unix:PATH (not a socket), want a path to listen on"
    assert path.lstat() == before
    for wrong in (path.parent / "none" / "socket", path.parent / ("x" * 200)):
        assert mistake(wrong).startswith("--listen: got unix:PATH (")
