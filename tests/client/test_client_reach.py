"""Test unreachable, restarted and killed servers, for which clients wait or say why they cannot reach them; tokens."""

from __future__ import annotations

import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificate
from clients import failure, open_client
from server_program import Start
from waiting import eventually, free_port

from mmpos import SegmentTable, Text
from mmpos.client import AsyncClient, Client, PositionsQuery, Tls
from mmpos.client.channel import channel_options
from mmpos.errors import InvalidInputError, ServiceUnauthenticatedError, ServiceUnavailableError
from mmpos_server.access import TlsFiles
from mmpos_server.listening import Listen
from mmpos_server.testing import running

SEGMENTS = SegmentTable.from_documents([[Text(3)]])
WANT = ", want a running server: start one with mmpos serve, or pass another address"
GAP = 2.5
"""Seconds between the end of one server and the start of the next: longer than all attempts of one call take."""


def test_restarting_a_single_server_loses_no_call() -> None:
    listen, done, answered = Listen(port=free_port()), threading.Event(), {"sync": 0, "async": 0}

    def load(kind: str) -> None:
        with open_client(kind, f"127.0.0.1:{listen.port}", timeout=300) as client:
            while not done.is_set():
                client.place(SEGMENTS)
                answered[kind] += 1

    with ThreadPoolExecutor(2) as threads:
        with running(listen=listen):
            loads = [threads.submit(load, kind) for kind in answered]
            assert eventually(lambda: min(answered.values()) > 10)
        time.sleep(GAP)
        before = max(answered.values())
        with running(listen=listen):
            assert eventually(lambda: min(answered.values()) > before + 10)
            done.set()
            assert [load.result() for load in loads] == [None, None]


def cause(address: str, tls: Tls | None = None) -> str:
    """Return a call's error message without gRPC's details, and check that a stream raises the same message."""
    with Client(address, timeout=600, tls=tls, attempts=1) as client:
        with pytest.raises(ServiceUnavailableError) as raised:
            client.place(SEGMENTS)
        with pytest.raises(ServiceUnavailableError) as streamed:
            list(client.stream([PositionsQuery(SEGMENTS)]))
    head, _, _ = str(raised.value).partition(" (failed to connect")
    assert str(streamed.value).startswith(f"queries[0]: {head}")
    return head.removeprefix(f"{address}: got ").removesuffix(WANT)


def test_tls_failures_name_their_cause(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    other, other_key = make_certificate(tmp_path, "other")
    with running(listen=Listen(tls=TlsFiles(cert, key))) as address:
        untrusted = "tls.root_certificates: cannot verify the server's certificate"
        assert cause(address, Tls(other)) == untrusted
        misnamed = "tls.server_name: the server's certificate is valid only for other names"
        assert cause(address, Tls(cert, server_name="elsewhere")) == misnamed
        assert cause(address) == "Socket closed (a server that requires TLS closes it: tls=Tls(...))"
        assert cause(address, Tls(b"no PEM")) == "tls: the certificates are invalid, want PEM"
    with running(listen=Listen(tls=TlsFiles(cert, key, cert))) as address:
        unidentified = "a server that requires client certificates closes it: Tls(..., certificate, key)"
        assert cause(address, Tls(cert)) == f"Socket closed ({unidentified})"
        unknown = "Socket closed (a server that does not trust tls.certificate closes it)"
        assert cause(address, Tls(cert, other, other_key)) == unknown
        for kind in ("sync", "async"):
            with open_client(kind, address, tls=Tls(cert.read_bytes(), str(cert), key, "server")) as client:
                assert client.place(SEGMENTS).num_tokens == 3
    with running() as address:
        assert cause(address, Tls(cert)) == "tls: the server does not use TLS, want tls=None"


def test_a_client_limited_to_one_attempt_and_a_health_check_do_not_wait() -> None:
    with ExitStack() as clients, ExitStack() as serving:
        address = serving.enter_context(running())
        client = clients.enter_context(Client(address, timeout=600))
        once = clients.enter_context(Client(address, timeout=600, attempts=1))
        assert client.healthy()
        assert once.healthy()
        serving.close()
        assert not client.healthy()
        with pytest.raises(ServiceUnavailableError, match=rf"^{address}: got .*[^)]{WANT}$"):
            once.place(SEGMENTS)


@pytest.mark.parametrize(
    ("kind", "address", "reason"),
    [
        ("sync", "unix:/nowhere/mmpos.sock", "No such file or directory"),
        ("async", "ipv4:127.0.0.1:1,127.0.0.1:2", "Connection refused"),
        ("sync", "localhost:1", r"Connection refused at (127\.0\.0\.1|\[::1\]):1, the last address tried"),
    ],
)
def test_a_client_without_a_server_says_how_to_start_one(kind: str, address: str, reason: str) -> None:
    with open_client(kind, address, timeout=600) as client, pytest.raises(ServiceUnavailableError) as raised:
        client.place(SEGMENTS)
    assert re.fullmatch(rf"{re.escape(address)}: got {reason}{WANT}", str(raised.value))


@pytest.mark.slow
def test_killing_a_replica_loses_no_call(start: Start) -> None:
    servers, killed, ids = [start() for _ in range(3)], threading.Event(), list[int]()
    address = f"ipv4:{','.join(server.address for server in servers)}"

    def called(kind: str) -> None:
        """Make calls in sequence, a third of them before a server is killed."""
        with open_client(kind, address, timeout=300) as client:
            for number in range(600):
                ids.append(int(client.place(SEGMENTS, start=number).dense()[0, 0]))
                assert number < 200 or killed.wait(300)

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(called, kind) for kind in ("sync", "async") * 2]
        assert eventually(lambda: len(ids) > 400)
        servers[1].process.kill()
        killed.set()
        assert [call.result() for call in calls] == [None] * 4
    assert sorted(ids) == sorted([*range(600)] * 4)


# Tokens

TOKEN, OTHER = "secret-secret-secret", "hidden-hidden-hidden"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "tokens"
    file.write_text(f"alice {TOKEN}\n")
    with running(listen=Listen(token_file=file)) as address:
        yield address


def mistake(call: Callable[..., object], *args: object, **kwargs: object) -> str:
    kind, words = failure(call, *args, **kwargs)
    assert kind is InvalidInputError
    assert "secret" not in words
    return words


FAR = ["10.0.0.1:1", "example.test:1", "[2001:db8::1]:1", "dns:///example.test:1", "ipv4:127.0.0.1:1"]
HERE = ["localhost:1", "127.9.9.9:1", "[::1]:1", "dns:///localhost:1", "dns:localhost:1", "unix:/x", "unix-abstract:x"]


@pytest.mark.parametrize("address", [*FAR, *HERE])
def test_a_token_requires_tls_unless_the_server_is_on_this_machine_where_it_bypasses_proxies(address: str) -> None:
    def bypasses(**options: Any) -> bool:
        return dict(channel_options(Client(address, **options)._options)).get("grpc.enable_http_proxy") == 0

    assert (bypasses(), bypasses(token=TOKEN, tls=Tls())) == (False, False)
    if address in HERE:
        assert bypasses(token=TOKEN)
    else:
        words = f"token requires tls for {address!r}; others could read the token"
        assert mistake(Client, address, token=TOKEN) == words


def test_a_malformed_token_is_refused_without_being_quoted() -> None:
    want = "a-z, A-Z, 0-9 and -._~+/, and = at its end"
    for wrong in ("", "secret secret", "secret\n", "secretß", "=secret"):
        assert mistake(Client, token=wrong) == f"token must consist of {want}"
    assert mistake(Client, token=b"secret") == "token: got bytes, want a token, the path of a token file, or None"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_token_is_not_shown_and_is_pickled_with_its_client(kind: Any, tmp_path: Path) -> None:
    for token in (TOKEN, tmp_path / "token"):
        client = kind(token=token)
        other = pickle.loads(pickle.dumps(client))
        assert other._options.token._source == client._options.token._source == token
        for shown in (client, client._options, client._options.token, client.with_options(timeout=1)):
            assert "secret" not in repr(shown)


def sent(client: Client) -> str:
    """Return the metadata of the next call."""
    assert client._options.token is not None
    key, value = client._options.token.pair()
    assert key == "authorization"
    return value


def test_a_token_file_is_reread_when_it_changes_and_the_token_kept_while_the_file_is_unusable(tmp_path: Path) -> None:
    file = tmp_path / "token"
    client = Client(token=file)
    want = "want a file that holds only the token"
    assert mistake(client.info) == f"token: got {file} (No such file or directory), {want}"
    for wrong in ("secret and secret", "secretß"):
        file.write_text(wrong)
        assert mistake(client.info) == f"token: got {file} (no token in it), {want}"
    file.write_text(f"# clients\nalice {TOKEN}\n")
    of_a_server = "names and tokens: this looks like the token file of a server"
    assert mistake(client.info) == f"token: got {file} ({of_a_server}), {want}"
    seen = []
    for text in (f"{TOKEN}\n", f"{OTHER}\n", "", None, f"  {TOKEN}  "):
        # Replace the file each time, since timestamps alone are too coarse.
        (tmp_path / "next").write_text(text or "")
        os.replace(tmp_path / "next", file)
        if text is None:
            file.unlink()
        seen.append(sent(client))
    assert seen == [f"Bearer {token}" for token in (TOKEN, OTHER, OTHER, OTHER, TOKEN)]
    raw = pickle.dumps(client)
    file.write_text(OTHER + OTHER)
    assert (TOKEN.encode() in raw, sent(pickle.loads(raw))) == (False, f"Bearer {OTHER}{OTHER}")


def test_calls_and_streams_of_both_clients_carry_the_token(kind: str, server: str) -> None:
    queries = [PositionsQuery(SEGMENTS)] * 3
    with open_client(kind, server, token=TOKEN) as client:
        assert (client.place(SEGMENTS).num_tokens, len(list(client.stream(queries)))) == (3, 3)
        assert client.with_options(timeout=300).place(SEGMENTS).num_tokens == 3
    error = ServiceUnauthenticatedError, 'authorization: got no known token, want "Bearer TOKEN"'
    for token in (None, OTHER):
        with open_client(kind, server, token=token) as client:
            assert failure(client.place, SEGMENTS) == error
            for _ in range(20):  # grpc.aio forgets the status of a stream refused during a write
                failed = failure(lambda client=client: list(client.stream(queries)))
                assert failed == (error[0], f"queries[0]: {error[1]}")
            assert client.healthy()
