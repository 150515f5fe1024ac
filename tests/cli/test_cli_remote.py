"""The commands that start and use a server: their output, and one-line errors."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import make_certificate
from fake_server import Fake, echo, serving
from serving import KeptLogs

from mmpos.cli.options import make_scheme
from mmpos_server.access import TlsFiles
from mmpos_server.config import ServerConfig
from mmpos_server.listening import Listen
from mmpos_server.testing import running

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running() as address:
        yield address


def test_positions_and_errors_are_printed_as_in_process(server: str, run: Run) -> None:
    for options, code in (
        (["3,2x3,2", "5"], 0),
        (["3,2x3,2", "5", "--json"], 0),
        (["3,2x3,2", "5", "--scheme", "rope-tie-v2,axes=3", "--start", "7"], 0),
        (["2x2,2x2"], 2),
    ):
        here = run("positions", *options)
        assert run("remote", "positions", *options, "--server", server) == here
        assert here[0] == code


def test_info_and_health_describe_the_server(server: str, run: Run) -> None:
    assert run("remote", "health", "--server", server) == (0, f"{server} is serving\n", "")
    code, out, _ = run("remote", "info", "--server", server)
    assert code == 0
    assert "default   rope-tie   256 " in out
    assert "documents" in out


@pytest.fixture(scope="module")
def profiles() -> Iterator[str]:
    """Start a server with profiles whose schemes differ from the command line's default."""
    config = """
        overload_ms = 60_000
        [profiles.floor]
        scheme = { name = "rope-tie-v2", rounding = "floor" }
        [profiles.qwen]
        scheme = "mrope"
        markers = { begin = 0, end = 8, patch = 9 }
    """
    with running(ServerConfig.read(config, Path("profiles.toml"))) as address:
        yield address


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        ([], "rope-tie-v2(rounding=floor)"),
        (["--profile", "qwen"], "mrope"),
        (["--profile", "qwen", "--scheme", "rope-tie"], "rope-tie"),
        (["--profile", "qwen", "--scheme", "rope-tie-lcm,axes=3"], "rope-tie-lcm,axes=3"),
    ],
)
def test_a_profile_keeps_its_scheme_unless_another_is_requested(
    options: list[str], scheme: str, profiles: str, run: Run
) -> None:
    command = "positions", "3,2x3,2", "--json"
    there = json.loads(run("remote", *command, *options, "--server", profiles)[1])
    here = json.loads(run(*command, "--scheme", scheme)[1])
    assert there["position_ids"] == here["position_ids"]
    assert make_scheme(there["scheme"]) == make_scheme(scheme)


def test_info_shows_the_markers_of_profiles(profiles: str, run: Run) -> None:
    (row,) = (line for line in run("remote", "info", "--server", profiles)[1].splitlines() if line.startswith("qwen"))
    assert row.split()[:5] == ["qwen", "mrope", "0", "8", "9"]


def test_a_server_uses_the_scheme_in_the_document_file(profiles: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"documents": [[{"text": 2}, {"grid": [2, 2]}]], "scheme": "rows"}))
    assert run("remote", "positions", str(file), "--server", profiles) == run("positions", str(file))


def test_a_server_that_is_down_causes_a_one_line_error_with_the_remedy(run: Run) -> None:
    with socket.socket() as free:  # bound, but not listening
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        code, out, err = run("remote", "health", "--server", address, "--timeout", "20")
    assert (code, out) == (4, "")
    want = "want a running server: start one with mmpos serve, or pass another --server"
    assert re.fullmatch(rf"mmpos: error: {address}: got [A-Za-z, _]+, {want}\n", err)


@pytest.mark.parametrize("command", [["health"], pytest.param(["positions", "3"], marks=pytest.mark.slow)])
def test_tls_errors_name_the_option_to_change(command: list[str], run: Run, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    other, _ = make_certificate(tmp_path, "other")
    with running(listen=Listen(tls=TlsFiles(cert, key))) as address:
        want = "want a running server: start one with mmpos serve, or pass another --server"
        closed = f"got Socket closed (a server that requires TLS closes it: pass --tls-ca), {want}"
        assert run("remote", *command, "--server", address) == (4, "", f"mmpos: error: {address}: {closed}\n")
        untrusted = f"mmpos: error: {address}: --tls-ca: cannot verify the server's certificate\n"
        assert run("remote", *command, "--server", address, "--tls-ca", str(other)) == (4, "", untrusted)
        assert run("remote", *command, "--server", address, "--tls-ca", str(cert))[0] == 0


def test_the_command_line_reads_a_token(run: Run, tmp_path: Path) -> None:
    tokens, file = tmp_path / "tokens", tmp_path / "token"
    tokens.write_text("alice secret-secret-secret\n")
    file.write_text("secret-secret-secret")
    with running(listen=Listen(token_file=tokens), logs=KeptLogs()) as address:
        for command in (["positions", "3"], ["info"], ["health"]):
            done = run("remote", *command, "--server", address, "--token-file", str(file))
            assert done[::2] == (0, "")
        message = 'mmpos: error: authorization: got no known token, want "Bearer TOKEN"\n'
        assert run("remote", "positions", "3", "--server", address) == (2, "", message)


def test_the_command_line_uses_a_client_certificate(run: Run, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "localhost")
    carol, secret = make_certificate(tmp_path, "carol")
    with running(listen=Listen(tls=TlsFiles(cert, key, carol)), logs=KeptLogs()) as address:
        command = ["remote", "positions", "3", "--server", address, "--tls-ca", str(cert), "--timeout", "20"]
        assert run(*command, "--tls-cert", str(carol), "--tls-key", str(secret))[::2] == (0, "")
        assert run(*command)[0] == 4
    message = "mmpos: error: tls.certificate requires tls.key\n"
    assert run("remote", "info", "--tls-cert", str(carol)) == (2, "", message)


@pytest.mark.slow  # another process, since gRPC reads its environment once
def test_a_failed_handshake_prints_only_its_error(server: str, tmp_path: Path) -> None:
    cert, _ = make_certificate(tmp_path, "server")
    command = [sys.executable, "-m", "mmpos", "remote", "health", "--server", server, "--tls-ca", str(cert)]
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == f"mmpos: error: {server}: tls: the server does not use TLS, want no --tls-ca\n"


def test_a_server_that_reports_not_serving_is_unhealthy(fail: Callable[..., tuple[int, str]]) -> None:
    with serving(Fake(echo), serving=False) as address:
        code, message = fail("remote", "health", "--server", address)
    assert (code, message.startswith(f"{address}: got NOT_SERVING, want a running server")) == (4, True)


def test_a_server_that_does_not_answer_causes_a_one_line_error_with_the_remedy(
    fail: Callable[..., tuple[int, str]],
) -> None:
    remedy = "check that mmpos serve is running, or pass a longer --timeout"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        message = f"{address}: got no answer within 0.2 s; {remedy}"
        assert fail("remote", "info", "--server", address, "--timeout", "0.2") == (4, message)


def test_serve_runs_until_terminated(run: Run) -> None:
    command = [sys.executable, "-m", "mmpos", "serve", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().removeprefix("mmpos_server listening on ").strip()
            code, out, _ = run("remote", "positions", "3", "--json", "--server", address)
            assert (code, json.loads(out)["position_ids"]) == (0, [[0, 1, 2], [0, 1, 2]])
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


def test_serve_reports_an_invalid_option_in_one_line(fail: Callable[..., tuple[int, str]]) -> None:
    code, message = fail("serve", "--workers", "many")
    assert (code, message.startswith("Invalid value for '--workers'")) == (2, True)
