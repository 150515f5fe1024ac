"""Test the log: one JSON object per line, no matter which code writes it, and the warnings at startup."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from select import select

import grpc
import pytest
from certificates import make_certificate
from grpc import aio
from http2 import Connection
from server_program import Start
from serving import PLACE, KeptLogs, Serve, items, query, status_of
from waiting import eventually

from mmpos.client import Client
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.rpc.v1.scheme_pb2 import Scheme
from mmpos_server import logs as logs_module
from mmpos_server.access import TlsFiles
from mmpos_server.listening import Listen, warn
from mmpos_server.logs import Logs, logging_all

WRITER = """
import asyncio, gc, logging, threading, warnings
from mmpos_server.logs import logging_all

class Broken:
    def __del__(self):
        raise ValueError("in a finaliser")

async def forgotten():
    asyncio.get_running_loop().create_task(asyncio.sleep(0)).add_done_callback(lambda _: 1 / 0)
    await asyncio.sleep(0.01)

with logging_all() as logs:
    logs.info("ours", number=1, odd=b"\\xff")
    logging.getLogger("library").warning("two\\nlines of %s", "text")
    try:
        1 / 0
    except ZeroDivisionError:
        logging.getLogger("grpc").exception("Invalid encoding on %s", b"secret")
    warnings.warn("deprecated", stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0, name="broken")
    thread.start()
    thread.join()
    Broken()
    gc.collect()
    asyncio.run(forgotten())
"""


def test_every_line_is_one_json_object_no_matter_which_code_writes_it() -> None:
    completed = subprocess.run([sys.executable, "-c", WRITER], capture_output=True, timeout=300, check=True)
    lines = [json.loads(line) for line in completed.stderr.splitlines()]
    assert [(line["level"], line.get("logger"), line["event"].splitlines()[0][:22]) for line in lines] == [
        ("info", None, "ours"),
        ("warning", "library", "two"),
        ("warning", None, "a path or metadata is "),
        ("warning", "py.warnings", "<string>:20: UserWarni"),
        ("error", None, "exception in a thread"),
        ("error", None, "exception ignored"),
        ("error", "asyncio", "Exception in callback "),
    ]
    assert lines[0].keys() == {"timestamp", "level", "event", "number", "odd"}
    assert (lines[0]["number"], lines[0]["odd"], lines[1]["event"]) == (1, "b'\\xff'", "two\nlines of text")
    errors = ["ZeroDivisionError", "ValueError", "ZeroDivisionError"]
    assert [line["exception"].splitlines()[-1].partition(":")[0] for line in lines[4:]] == errors
    assert b"secret" not in completed.stderr


def test_failed_calls_are_logged_and_answered_ones_sampled() -> None:
    for sample, numbers in ((0, [1]), (3, [0, 1, 4]), (1, list(range(7)))):
        logs = KeptLogs(sample)
        for number in range(7):
            if number == 1 or logs.sampled():
                logs.call(failed=number == 1, number=number)
        lines = logs.lines()
        assert [line["number"] for line in lines] == numbers
        assert all(line.get("sampled") == (sample if line["level"] == "info" else None) for line in lines)


def test_the_line_of_a_call_says_who_called_and_why_it_failed(serve: Serve) -> None:
    logs = KeptLogs()
    server = serve(options={"logs": logs})
    named = [("x-request-id", "me")]
    server.place(query("echo 7"), metadata=named)
    request = pb.PlaceRequest(query=pb.PositionsQuery(profile="fail limit", scheme=Scheme(name="x" * 300)))
    with pytest.raises(grpc.RpcError):
        server.place(request.SerializeToString(), metadata=named)
    list(server.stream(items("echo 1", "fail bug"), metadata=named))
    with Connection(server.address) as connection:
        assert status_of(connection, f"{PLACE}Nothing", b"", (b"x-request-id", b"me")) == "UNIMPLEMENTED"
    answered, failed, bug, stream, unknown = logs.lines()
    for line in (answered, failed, stream, unknown):
        assert (line["event"], line["client"] or "127.0.0.1", line["request_id"]) == ("call", "127.0.0.1", "me")
        assert line["peer"].startswith("ipv4:127.0.0.1:")
        assert line.get("sampled") == (1 if line["status"] == "OK" else None)
    sizes = {"request_bytes": len(query("echo 7")), "response_bytes": 5, "documents": 1, "tokens": 2, "images": 3}
    assert answered.items() >= {"level": "info", "method": "Place", "status": "OK", **sizes}.items()
    why = {"status": "RESOURCE_EXHAUSTED", "reason": "", "profile": "fail limit", "scheme": "x" * 100}
    assert failed.items() >= {"level": "warning", "request_bytes": request.ByteSize(), **why}.items()
    assert failed["message"].startswith("why ééé")
    assert not any("exception" in line for line in (answered, failed, stream, unknown))
    assert (bug["event"], bug["level"], "KeyError" in bug["exception"]) == ("internal error", "error", True)
    assert (stream["method"], stream["items"], unknown["status"]) == ("StreamPlace", 2, "UNIMPLEMENTED")


def test_a_repeated_event_is_written_at_most_once_a_second_with_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    logs, now = KeptLogs(), [10.0]
    monkeypatch.setattr(logs_module, "monotonic", lambda: now[0])
    for now[0] in (10.0, 10.1, 10.9, 11.0, 11.5, 20.0):
        logs.seldom("wrong", at=now[0])
    monkeypatch.undo()
    assert [(line["times"], line["at"]) for line in logs.lines()] == [(1, 10.0), (3, 11.0), (2, 20.0)]


def test_clients_that_leave_are_counted_without_tracebacks_and_our_own_errors_keep_theirs() -> None:
    logs, grpcs = KeptLogs(), logging.getLogger("a name of grpc")
    grpcs.addHandler(logs)
    for _ in range(3):
        try:
            raise aio.InternalError("secret")
        except aio.InternalError as error:
            grpcs.exception("error raised in core by servicer method [%s]", "/secret")
            logs.error("internal error", error, method="Place")
    logs.error("internal error", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "secret"), method="Place")
    grpcs.removeHandler(logs)
    lines = logs.lines()
    assert [line["event"] for line in lines] == ["a client left before its answer was sent", *["internal error"] * 4]
    assert "exception" not in lines[0]
    assert "secret" not in str(lines[0])
    assert all("secret" in line["exception"] for line in lines[1:])


def test_lines_that_a_full_disk_refuses_are_counted_and_a_torn_one_spoils_no_other(
    tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    with (tmp_path / "log").open("w") as file:
        logs = Logs(file)
        with full_disk(70):
            for _ in range(3):
                logs.info("lost", text="x" * 100)
            assert eventually(lambda: logs.lost == 3)
        for event in ("kept", "also"):
            logs.info(event)
        logs.close(60.0)
    torn, *lines = (tmp_path / "log").read_bytes().splitlines()
    assert len(torn) == 70
    seen = [(line["event"], line["level"], line.get("lines")) for line in map(json.loads, lines)]
    assert seen == [("log lines dropped", "warning", 3), ("kept", "info", None), ("also", "info", None)]


def test_a_log_that_nobody_reads_keeps_nobody_waiting() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe, open(writing, "w") as file:
        logs = Logs(file)
        for number in range(10_500):
            logs.info("line", number=number, text="x" * 1000)
            if number == 2000:  # from here on, the thread waits for the full pipe
                assert eventually(lambda: not select([], [file], [], 0)[1])
        logs.close(0.1)
        dropped = logs.dropped
        assert 0 < dropped <= 500
        lines = [json.loads(pipe.readline()) for _ in range(10_501 - dropped)]
    (report,) = [line for line in lines if line["event"] == "log lines dropped"]
    assert report["lines"] == dropped
    assert [line["number"] for line in lines if line != report] == list(range(10_500 - dropped))


def test_callers_cannot_make_grpc_write_to_the_log(start: Start, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    server = start("--tls-cert", str(cert), "--tls-key", str(key))
    with Client(server.address) as client:
        assert not client.healthy()
    server.process.terminate()
    assert server.end()[0] == 0
    plain = start()
    with Connection(plain.address) as connection:
        status_of(connection, PLACE, b"", (b"grpc-timeout", b"bad"), (b"secret", b"secret\xff"))
        status_of(connection, b"/secret\xff", b"", (b"authorization", b"Bearer secret\xff"))
    plain.process.terminate()
    plain.end()
    assert {line["event"] for line in server.lines()} == {"draining", "stopped"}
    assert "secret" not in plain.log.read_text()
    assert {line["level"] for line in plain.lines()} <= {"info", "warning"}


def warned(listen: Listen, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    logs = Logs()
    warn(listen, logs)
    logs.close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert all(line.pop("level") == "warning" and line.pop("timestamp") for line in lines)
    return lines


def test_an_open_port_and_readable_secrets_cause_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = make_certificate(tmp_path, "server")
    tokens = tmp_path / "tokens"
    tokens.write_text("alice alice-alice-alice-1\n")
    for path in (key, tokens):
        path.chmod(0o640)
    no_tls = "anybody on the network may call and read the traffic: no TLS, no tokens"
    no_authentication = "anybody on the network may call: no tokens, no client certificates"
    tls, mutual = TlsFiles(cert, key), TlsFiles(cert, key, cert)
    for host, place in (("0.0.0.0", "0.0.0.0:1"), ("::", "[::]:1")):
        assert warned(Listen(host, 1), capsys) == [{"event": no_tls, "address": place}]
        assert warned(Listen(host, 1, tls), capsys) == [{"event": no_authentication, "address": place}]
        assert warned(Listen(host, 1, mutual), capsys) == []
        assert warned(Listen(host, 1, tls, token_file=tokens), capsys) == []
    assert warned(Listen("127.0.0.1", 1), capsys) == []
    for path in (key, tokens):
        path.chmod(0o644)
    event = "every user of this machine may read a secret"
    seen = warned(Listen(tls=TlsFiles(cert, key), token_file=tokens), capsys)
    assert seen == [{"event": event, "file": str(path)} for path in (tokens, key)]


def test_logging_is_restored_after_the_server_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_all():
        pass
    logging.getLogger("library").warning("later")
    assert capsys.readouterr().err == "later\n"
