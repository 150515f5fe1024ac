"""The commands that serve and that ask a server: what they print, and that every error is one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
from waiting import without_torch

from mmpos.__main__ import main
from mmpos_server.testing import running

PHOTOS = Path(str(resources.files("mmpos"))) / "photos"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running() as address:
        yield address


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_positions_are_printed_as_in_process(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--json"], ["--scheme", "rope-tie-v2", "--start", "7", "--axes", "3"]):
        here = run(capsys, "positions", "3,2x3,2", "5", *options)
        there = run(capsys, "remote", "positions", "3,2x3,2", "5", *options, "--server", server)
        assert there == here
        assert here[0] == 0


def test_errors_are_printed_as_in_process(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    here = run(capsys, "positions", "2x2,2x2")
    assert run(capsys, "remote", "positions", "2x2,2x2", "--server", server) == here
    assert here[0] == 2


def test_a_sequence_is_built_of_text_and_a_photo(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "remote", "build", "A photo of ", str(PHOTOS / "coffee.jpg"), "--server", server)
    assert (code, err) == (0, "")
    assert out.startswith("InterleavedSequence(112 tokens, 1 images, patches=uint8 (396, 14, 14, 3))\n")
    assert "grid 11×9" in out


def test_info_and_health_say_what_the_server_is(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "remote", "health", "--server", server) == (0, f"{server} is serving\n", "")
    code, out, _ = run(capsys, "remote", "info", "--server", server)
    assert code == 0
    assert "default   rope-tie   256 " in out
    assert "documents" in out


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "remote", "info", "--server", "127.0.0.1:9", "--timeout", "0.5")
    assert (code, out) == (2, "")
    assert err.startswith("mmpos: error: ")
    assert err.count("\n") == 1


def test_serve_serves_until_it_is_told_to_stop(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mmpos", "serve", "--port", "0", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=without_torch(tmp_path)) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().removeprefix("mmpos_server listening on ").strip()
            code, out, _ = run(capsys, "remote", "positions", "3", "--json", "--server", address)
            assert (code, json.loads(out)["position_ids"]) == (0, [[0, 1, 2], [0, 1, 2]])
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


def test_serve_refuses_a_wrong_option_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "serve", "--port", "many")
    assert (code, out) == (2, "")
    assert err.startswith("mmpos: error: Invalid value for '--port'")
    assert err.count("\n") == 1
