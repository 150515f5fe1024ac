"""Test clients that share only the protocol with mmpos: Node with .proto files, and buf through reflection."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import make_certificate

from mmpos import SCHEMES, SegmentTable, place
from mmpos_server.access import TlsFiles
from mmpos_server.config import ServerConfig
from mmpos_server.listening import Listen
from mmpos_server.testing import running

ROOT = Path(__file__).parents[2]
BIN = str(Path(sys.executable).parent)
NODE = ROOT / "tests" / "foreign" / "node"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    # Use the same backend as the tests below, since torchvision rounds pixels differently.
    config = ServerConfig({"default": {"images": {"backend": "pillow"}}}, overload_ms=60_000)
    with running(config, rotations=True) as address:
        yield address


def node(program: Path, *arguments: object) -> str:
    """Install the packages in package.json unless another pytest worker has, run a program, and return its output."""
    manifest, marker = NODE / "package.json", NODE / "node_modules" / ".package-lock.json"
    with manifest.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.exists() or marker.stat().st_mtime < manifest.stat().st_mtime:
            flags = ["--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
            subprocess.run([f"{BIN}/npm", "install", *flags], cwd=NODE, check=True, capture_output=True)
            marker.touch()
    command = [f"{BIN}/node", str(program), *map(str, arguments)]
    environment = {**os.environ, "NODE_PATH": str(NODE / "node_modules")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def summary(server: str) -> Any:
    return json.loads(node(NODE / "client.js", server, ROOT / "proto", ROOT / "tests" / "golden" / "positions.json"))


def test_node_expands_every_golden_table(summary: Any) -> None:
    assert (summary["schemes"], summary["golden"]) == (list(SCHEMES), {"cases": 157, "wrong": []})
    assert summary["refusal"] == {"code": "INVALID_ARGUMENT", "message": "extents[1, 0]: got 0, want >= 1"}


def test_node_streams_batches_and_receives_an_error_in_order(summary: Any) -> None:
    batches = summary["stream"]["right"]
    bad = str(2**64 - 1)
    message = "offsets[0]: the span of 4 tokens ends at 5, want <= 3, the length of document 0"
    assert summary["stream"]["ids"] == ["1", "2", bad, *(str(i) for i in range(3, batches + 1))]
    assert summary["stream"]["errors"] == [
        {"id": bad, "error": {"code": "ERROR_CODE_INVALID_INPUT", "message": message}, "outcome": "error"}
    ]
    assert batches == 19


PAGE = (ROOT / "docs" / "protocol-clients.md").read_text()
FILES = dict(re.findall(r"```js\n(?=// (\S+)\n)(.*?)```", PAGE, re.DOTALL))
"""The named JavaScript files of the page."""
(CREDENTIALS,) = re.findall(r"```js\n(?!// )(.*?)```", PAGE, re.DOTALL)
PRINTED_BY_PLACE, PRINTED_BY_BUILD = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


def page(folder: Path, server: str, program: str, *edits: tuple[str, str]) -> str:
    """Write the files of the page with these edits into a folder, run one of them, and return the output."""
    changes = [("localhost:50051", server), *edits]
    for name in ("protocol.js", program):
        code = FILES[name]
        for old, new in changes:
            code = code.replace(old, new)
        (folder / name).write_text(code)
    assert all(old in FILES["protocol.js"] + FILES[program] for old, _ in changes)
    return node(folder / program)


def test_the_documented_client_places_a_document(server: str, tmp_path: Path) -> None:
    positions = place(SegmentTable.from_spans([11], [3], [[1, 2, 3]]), "mrope")
    rows = [*positions.dense().tolist(), ["next:", *positions.next_positions.tolist()]]
    want = "".join(" ".join(map(str, row)) + "\n" for row in rows)
    assert page(tmp_path, server, "place.js") == PRINTED_BY_PLACE == want
    printed = page(tmp_path, server, "place.js", (', scheme: { name: "mrope" }, profile: "default"', ""))
    assert printed == "0 1 2 6 6 6 10 10 10 14 15\n0 1 2 5 8 11 5 8 11 14 15\nnext: 16\n"


def test_the_documented_client_lists_profiles_and_schemes(server: str, tmp_path: Path) -> None:
    first, *schemes = page(tmp_path, server, "info.js").splitlines()
    assert first == "profile default with scheme rope-tie"
    assert [line.split()[0] for line in schemes] == list(SCHEMES)
    assert "v2pe 1 stride" in schemes


def test_the_documented_client_uses_tls_and_a_token(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    (tmp_path / "tokens").write_text("alice secret-secret-secret\n")
    (tmp_path / "token").write_text("secret-secret-secret\n")
    (tmp_path / "token.bad").write_text("secret-secret-secrets\n")
    block = CREDENTIALS.replace('"ca.pem"', json.dumps(str(cert)))
    head = 'require("./protocol.js");\n'
    secured = ("grpc.credentials.createInsecure()", "credentials")

    def with_token(file: str) -> tuple[str, str]:
        return head, head + block.replace('"token"', json.dumps(str(tmp_path / file)))

    with running(listen=Listen(tls=TlsFiles(cert, key), token_file=tmp_path / "tokens")) as address:
        assert page(tmp_path, address, "place.js", secured, with_token("token")) == PRINTED_BY_PLACE
        refusal = 'authorization: got no known token, want "Bearer TOKEN"\n'
        assert page(tmp_path, address, "place.js", secured, with_token("token.bad")) == refusal


def test_the_documented_client_builds_a_sequence_with_two_images(server: str, tmp_path: Path) -> None:
    assert page(tmp_path, server, "build.js") == PRINTED_BY_BUILD


def test_large_answers_require_the_documented_limit(server: str, tmp_path: Path) -> None:
    ten = ("[{ parts }]", "Array(10).fill({ parts })")
    assert page(tmp_path, server, "build.js", ten) == 10 * PRINTED_BY_BUILD
    refusal = "RESOURCE_EXHAUSTED Received message larger than max"
    assert page(tmp_path, server, "build.js", ten, (", noLimit", "")).startswith(refusal)


def test_buf_finds_a_call_through_reflection(server: str) -> None:
    address = f"http://{server}/mmpos.rpc.v1.PositionService/Place"
    data = json.dumps({"query": {"spans": {"lengths": [11], "offsets": [3], "gridThw": [1, 2, 3]}, "dense": {}}})
    command = [f"{BIN}/buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", data, address]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    positions = json.loads(completed.stdout)["positions"]
    ids = np.frombuffer(base64.b64decode(positions["dense"]["data"]), "<i4").reshape(2, 11)
    assert ids.tolist() == place(SegmentTable.from_spans([11], [3], [[1, 2, 3]])).dense().tolist()
    assert (positions["nextPositions"], positions["deltas"], positions["cuSeqlens"]) == (["16"], ["5"], [0, 11])
