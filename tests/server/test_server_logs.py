"""Test the log: one JSON object per line, no matter which code writes it, and the warnings at startup."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificate
from server_program import Start
from waiting import eventually

import mmpos
from mmpos.client import Client
from mmpos_server.access import TlsFiles
from mmpos_server.listening import Listen, warn
from mmpos_server.telemetry import Logs, logging_all

WRITER = """
import asyncio, gc, logging, os, sys, threading, warnings
from mmpos_server.telemetry import logging_all

class Broken:
    def __del__(self):
        raise ValueError("in a finaliser")

async def forgotten():
    asyncio.get_running_loop().create_task(asyncio.sleep(0)).add_done_callback(lambda _: 1 / 0)
    await asyncio.sleep(0.01)

with logging_all("info") as logs:
    logs.info("ours", number=1)
    logging.getLogger("library").warning("two\\nlines")
    try:
        1 / 0
    except ZeroDivisionError:
        logging.getLogger("grpc._common").exception("Invalid encoding on %s", b"secret")
    warnings.warn("deprecated", stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0, name="broken")
    thread.start()
    thread.join()
    Broken()
    gc.collect()
    asyncio.run(forgotten())
    os.write(2, b"I1122 18:13:19.982883   32430 ssl.cc:2563] Handshake failed\\n")
    os.write(2, b"E1122 18:13:19.98 1 a.cc:1] bad\\n" * 3)
    os.write(2, b"half a ")
    print("line \\N{SNOWMAN} of somebody", file=sys.stderr)
    os.write(2, b"\\xff without an end")
print("after", file=sys.stderr)
"""


def test_every_line_is_one_json_object_no_matter_which_code_writes_it() -> None:
    completed = subprocess.run([sys.executable, "-c", WRITER], capture_output=True, timeout=60, check=True)
    *lines, last = completed.stderr.decode(errors="replace").splitlines()
    assert last == "after"
    records = [json.loads(line) for line in lines]
    # A thread logs the lines that bypass Python, perhaps between other lines.
    stray = [line for line in records if line.get("logger") in ("grpc", "stderr")]
    assert [(line["level"], line["event"], line["logger"]) for line in stray] == [
        ("info", "Handshake failed", "grpc"),
        ("error", "bad", "grpc"),
        ("warning", "half a line \N{SNOWMAN} of somebody", "stderr"),
        ("warning", "\\xff without an end", "stderr"),
    ]
    own = [line for line in records if line not in stray]
    assert [(line["level"], line.get("logger"), line["event"].splitlines()[0][:22]) for line in own] == [
        ("info", None, "ours"),
        ("warning", "library", "two"),
        ("warning", None, "metadata is not UTF-8"),
        ("warning", "py.warnings", "<string>:20: UserWarni"),
        ("error", None, "exception in a thread"),
        ("error", None, "exception ignored"),
        ("error", "asyncio", "Exception in callback "),
    ]
    errors = ["ZeroDivisionError", "ValueError", "ZeroDivisionError"]
    assert [line["exception"].splitlines()[-1].partition(":")[0] for line in own[4:]] == errors


def test_a_connection_without_tls_is_logged(start: Start, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    server = start("--tls-cert", str(cert), "--tls-key", str(key))
    with Client(server.address) as client:
        assert not client.healthy()
    wrong = ("info", "grpc")
    assert eventually(lambda: any("WRONG_VERSION_NUMBER" in line["event"] for line in server.lines()))
    assert {(line["level"], line["logger"]) for line in server.lines()} == {wrong}
    server.process.terminate()
    assert server.end()[0] == 0


def test_lines_that_cannot_be_written_are_counted_and_reported(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full, (tmp_path / "log").open("w") as file:
        logs = Logs("info", file=full)
        for _ in range(3):
            logs.info("lost")
        assert eventually(lambda: logs.dropped == 3)
        os.dup2(file.fileno(), full.fileno())  # accepts lines again
        assert eventually(lambda: (tmp_path / "log").stat().st_size > 0)
        logs.info("kept")
        logs.close()
    dropped, kept = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert (dropped["event"], dropped["level"], dropped["lines"]) == ("log lines dropped", "warning", 3)
    assert kept["event"] == "kept"


@pytest.mark.parametrize("flags", [[], ["--workers", "2"]])
def test_a_log_that_nobody_reads_blocks_neither_calls_nor_the_exit(torchless: dict[str, str], flags: list[str]) -> None:
    command = [sys.executable, "-m", "mmpos_server", "--port", "0", *flags]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=torchless) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)  # it can hold the lines of about 15 calls
            with Client(process.stdout.readline().split()[-1]) as client:
                for _ in range(100):
                    client.place(mmpos.SegmentTable.from_documents([[mmpos.Text(3)]]))
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def warned(listen: Listen, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    logs = Logs("info")
    warn(listen, logs)
    logs.close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert all(line.pop("level") == "warning" and line.pop("timestamp") for line in lines)
    return lines


def test_a_port_open_to_everybody_causes_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = make_certificate(tmp_path, "server")
    (tmp_path / "tokens").write_text("alice alice-alice-alice-1\n")
    for path in (key, tmp_path / "tokens"):
        path.chmod(0o640)
    no_tls = "anybody on the network may call and read the traffic: no TLS, no tokens"
    no_authentication = "anybody on the network may call: no tokens, no client certificates"
    tls, mutual = TlsFiles(cert, key), TlsFiles(cert, key, cert)
    for host in ("0.0.0.0", "::"):
        place = "0.0.0.0:1" if host == "0.0.0.0" else "[::]:1"
        assert warned(Listen(host, 1), capsys) == [{"event": no_tls, "address": place}]
        assert warned(Listen(host, 1, tls), capsys) == [{"event": no_authentication, "address": place}]
        assert warned(Listen(host, 1, mutual), capsys) == []
        assert warned(Listen(host, 1, tls, token_file=tmp_path / "tokens"), capsys) == []
    assert warned(Listen("127.0.0.1", 1), capsys) == []


def test_secrets_readable_by_other_users_cause_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = make_certificate(tmp_path, "server")
    tokens = tmp_path / "tokens"
    tokens.write_text("alice alice-alice-alice-1\n")
    for path in (key, tokens):
        path.chmod(0o644)
    event = "every user of this machine may read a secret"
    assert warned(Listen(tls=TlsFiles(cert, key), token_file=tokens), capsys) == [
        {"event": event, "setting": "token-file", "file": str(tokens)},
        {"event": event, "setting": "tls-key", "file": str(key)},
    ]


def test_a_server_with_workers_warns_once(start: Start, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice alice-alice-alice-1\n")
    tokens.chmod(0o644)
    server = start("--token-file", str(tokens), "--workers", "2")
    assert [line["setting"] for line in server.lines() if line["level"] == "warning"] == ["token-file"]


def test_logging_is_restored_after_the_server_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_all("info"):
        pass
    logging.getLogger("library").warning("later")
    assert capsys.readouterr().err == "later\n"
