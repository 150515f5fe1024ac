"""Test client tokens: which connections may carry a token, token files, and that a token is never revealed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import failure, open_client

from mmpos import SegmentTable, Text
from mmpos.client import AsyncClient, Client, PositionsQuery, Tls
from mmpos.client.channel import channel_options
from mmpos.errors import InvalidInputError, ServiceUnauthenticatedError
from mmpos_server.listening import Listen
from mmpos_server.testing import running

TOKEN, OTHER = "secret-secret-secret", "hidden-hidden-hidden"
SEGMENTS = SegmentTable.from_documents([[Text(3)]])


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


def test_a_token_file_is_reread_when_it_changes_and_the_token_kept_while_the_file_is_unusable(
    tmp_path: Path,
) -> None:
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
