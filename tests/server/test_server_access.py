"""Test tokens and certificates, their rotation, calls that need no token, and client names."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from certificates import make_certificate
from clients import failure
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import CHECK, PLACE, REFLECTION, STREAM, WATCH, KeptLogs, ending
from waiting import eventually

from mmpos.client import Client, Tls
from mmpos.errors import InvalidInputError, ServiceError
from mmpos.rpc.v1 import info_pb2, positions_pb2, rotary_pb2, sequences_pb2
from mmpos_server.access import Certificates, TlsFiles, TokenFile
from mmpos_server.app import Server
from mmpos_server.config import load
from mmpos_server.listening import Listen
from mmpos_server.testing import running, started

ALICE, BOB = "alice-alice-alice-1", "bob-bob-bob-bob-bob="
UNAUTHENTICATED = ("UNAUTHENTICATED", 'authorization: got no known token, want "Bearer TOKEN"')


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# who may call\nalice {ALICE}\n\n  bob\t{BOB}\n")
    return path


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


connected: Any = grpc.insecure_channel


# The token file


def test_tokens_are_named_by_the_file_and_not_kept_in_plain_text(file: Path) -> None:
    file.write_text(f"alice {ALICE}\nbob {BOB}\nalice {ALICE}2\n")
    tokens = TokenFile(file, KeptLogs())
    candidates = (ALICE, BOB, f"{ALICE}2", f"{ALICE}3", "")
    assert [tokens.name(token) for token in candidates] == ["alice", "bob", "alice", None, None]
    assert "alice" in repr(vars(tokens))
    assert ALICE not in repr(vars(tokens))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "got {} (No such file or directory), want a file that can be read"),
        (b"alice \xff\n", "{}: got bytes that are not UTF-8, want text"),
        ("# alice only\n", "{}: got no token, want at least one line with a name and a token"),
        (f"\n{ALICE}\n", "{}: line 2: got 1 words, want 2: a name and a token"),
        (f"alice {ALICE} # hers\n", "{}: line 1: got 4 words, want 2: a name and a token"),
        ("alice short-short-1\n", "{}: line 1: got a token of 13 characters, want >= 16"),
        (f"alice {ALICE}ß\n", "{}: line 1: the token must consist of a-z, A-Z, 0-9 and -._~+/, and = at its end"),
        (f"al,ice {ALICE}\n", "{}: line 1: the name must be 1 to 128 characters from a-z, A-Z, 0-9 and _.:/+=@-"),
        (f"alice {ALICE}\nbob {ALICE}\n", "{}: line 2: the token is already on an earlier line"),
    ],
)
def test_the_line_of_an_invalid_token_file_is_reported(file: Path, text: str | bytes | None, message: str) -> None:
    file.unlink()
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert failure(TokenFile, file, KeptLogs()) == (InvalidInputError, f"--token-file: {message.format(file)}")


def test_a_token_file_is_reread_when_its_link_changes(tmp_path: Path) -> None:
    for version, token in (("one", "1" * 16), ("two", "2" * 16)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tokens").write_text(f"alice {token}\n")
        os.utime(tmp_path / version / "tokens", ns=(5, 5))  # both files have the same time and size
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "tokens").symlink_to("data/tokens")
    tokens = TokenFile(tmp_path / "tokens", KeptLogs())
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", tmp_path / "data")
    assert tokens.name("1" * 16) == "alice"
    tokens.refresh()
    assert [tokens.name("1" * 16), tokens.name("2" * 16)] == [None, "alice"]


@pytest.mark.parametrize("wrong", [f"alice {ALICE}\nsecret-secret-secret\n", "", None, os.mkfifo])
def test_an_invalid_new_token_file_changes_nothing_and_is_logged_once(file: Path, wrong: Any) -> None:
    tokens = TokenFile(file, logs := KeptLogs())
    file.unlink()
    if isinstance(wrong, str):
        file.write_text(wrong)
    elif wrong is not None:
        wrong(file)  # a pipe, which could be empty for ever
    for _ in range(3):
        tokens.refresh()
    assert [tokens.name(ALICE), tokens.name(BOB)] == ["alice", "bob"]
    file.unlink(missing_ok=True)
    file.write_text(f"bob {BOB}\n")
    tokens.refresh()
    assert [tokens.name(ALICE), tokens.name(BOB)] == [None, "bob"]
    line, after = logs.lines()
    assert (line["level"], line["event"]) == ("error", "tokens not reloaded")
    assert "secret" not in str(line)
    assert str(file) in line["reason"]
    assert (after["level"], after["event"], after["files"]) == ("info", "tokens read", [str(file)])


# Authentication


def test_a_call_is_answered_only_with_exactly_one_known_token(file: Path) -> None:
    wrong = ("", ALICE, "Bearer", "Bearer wrong-wrong-wrong-wrong", f"Basic {ALICE}")
    pairs = [[("authorization", header)] for header in wrong]
    pairs += [[], [*bearer(ALICE), *bearer(BOB)], [("x-token", f"Bearer {ALICE}")]]
    with running(listen=Listen(token_file=file)) as address, connected(address) as channel:
        ask = channel.unary_unary("/mmpos.rpc.v1.InfoService/GetInfo")
        assert [ending(ask, b"", metadata=metadata) for metadata in pairs] == [UNAUTHENTICATED] * len(pairs)
        assert ask(b"", metadata=bearer(ALICE)) == ask(b"", metadata=[("authorization", f"bearer {BOB}")])


def test_every_method_except_health_requires_a_token(file: Path) -> None:
    files = (module.DESCRIPTOR for module in (info_pb2, positions_pb2, rotary_pb2, sequences_pb2, health_pb2))
    services = [service for one in files for service in one.services_by_name.values()]
    paths = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    paths |= {REFLECTION, REFLECTION.replace("v1alpha", "v1")}
    with running(listen=Listen(token_file=file), rotations=True) as address, connected(address) as channel:
        for path in sorted(paths - {CHECK, WATCH} | {"/mmpos.rpc.v1.PositionService/None", "/x/y"}):
            assert ending(channel.unary_unary(path), b"", timeout=300) == UNAUTHENTICATED, path
            opened = channel.stream_stream(path)(iter([b""]), timeout=300)
            assert ending(list, opened) == UNAUTHENTICATED, path
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == 1
        assert next(health.Watch(health_pb2.HealthCheckRequest(), timeout=300)).status == 1


def test_a_request_without_a_token_is_not_read(file: Path) -> None:
    config = replace(load(), request_bytes=1024, overload_ms=60_000)
    with started(config, listen=Listen(token_file=file)) as (server, address), connected(address) as channel:
        ask, more = channel.unary_unary(PLACE), threading.Event()
        assert ending(ask, bytes(100_000)) == UNAUTHENTICATED
        assert ending(ask, bytes(100_000), metadata=bearer(ALICE))[0] == "RESOURCE_EXHAUSTED"

        def items() -> Iterator[bytes]:
            more.wait(300)
            yield b""

        # A stream is refused before its first item, so that nobody can hold it open.
        assert ending(list, channel.stream_stream(STREAM)(items(), timeout=300)) == UNAUTHENTICATED
        more.set()
        value = server.metrics.registry.get_sample_value
        assert value("mmpos_unauthenticated_total") == 2
        assert value("mmpos_refused_total", {"method": "Place", "reason": "unauthenticated"}) == 1


def test_tokens_require_tls_or_a_loopback_host(file: Path) -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        Listen(host, token_file=file)
    Listen("0.0.0.0", tls=TlsFiles(file, file), token_file=file)
    Listen("0.0.0.0", tcp=False, token_file=file)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.test"):
        with pytest.raises(InvalidInputError, match=f"others could read the tokens on {host}"):
            Listen(host, token_file=file)


# Names of clients


def caller(peer: str, **auth: list[bytes]) -> Any:
    """Return the context of a caller with an address and, optionally, the fields of a certificate."""
    return SimpleNamespace(invocation_metadata=list, peer=lambda: peer, auth_context=lambda: auth)


NAMES = [
    (caller("ipv4:1.2.3.4:5"), "1.2.3.4"),
    (caller("ipv6:%5B::1%5D:5"), "::1"),
    (caller("ipv6:%5Bfe80::1%25eth0%5D:5"), "fe80::1%eth0"),
    (caller("unix:"), "unix"),
    (caller("unix:/run/x"), "unix"),
    (caller("ipv4:1.2.3.4:5", x509_common_name=[b"carol"]), "carol"),
    (caller("unix:", x509_common_name=[b""], x509_subject_alternative_name=[b"spiffe://a/b", b"c"]), "spiffe://a/b"),
    (caller("ipv4:1.2.3.4:5", x509_common_name=[b""]), "1.2.3.4"),
]


def test_a_client_is_named_after_its_certificate_or_its_address() -> None:
    shared = Server(load(), methods=[])._shared
    assert [shared.client(context) for context, _ in NAMES] == [name for _, name in NAMES]


def test_tls_and_a_token_can_both_be_required_and_the_token_names_the_client(file: Path, tmp_path: Path) -> None:
    for name in ("localhost", "carol"):
        make_certificate(tmp_path, name)
    cert = tmp_path / "localhost.pem"
    tls = TlsFiles(cert, tmp_path / "localhost.key", tmp_path / "carol.pem")
    carol, nobody = Tls(cert, tmp_path / "carol.pem", tmp_path / "carol.key"), Tls(cert)

    def ask(address: str, tls: Tls, token: str | None = None) -> str:
        with Client(address.replace("0.0.0.0", "127.0.0.1"), tls=tls, token=token, attempts=1) as client:
            try:
                client.info()
            except ServiceError as error:
                return type(error).__name__
            return "answered"

    logs = KeptLogs()
    with running(listen=Listen(tls=tls), logs=logs) as address:
        assert [ask(address, carol), ask(address, nobody)] == ["answered", "ServiceUnavailableError"]
    both = Listen("0.0.0.0", tls=tls, token_file=file)
    with running(listen=both, logs=logs) as address:
        results = [ask(address, carol), ask(address, carol, BOB), ask(address, nobody, BOB)]
        assert results == ["ServiceUnauthenticatedError", "answered", "ServiceUnavailableError"]
    assert [line["client"] for line in logs.lines() if line.get("status") == "OK"] == ["carol", "bob"]


# Certificates


def served(address: str) -> str:
    """Return the certificate that a server presents to a new connection, as PEM."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=300)


def test_a_replaced_certificate_is_used_for_new_connections(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    new_cert, new_key = make_certificate(tmp_path, "new")
    first, second = cert.read_text(), new_cert.read_text()
    with running(listen=Listen(tls=TlsFiles(cert, key))) as address, Client(address, tls=Tls(cert)) as client:
        assert client.healthy()
        assert served(address) == first
        os.replace(new_cert, cert)  # matches the key only after the next line
        os.replace(new_key, key)
        assert eventually(lambda: served(address) == second)
        assert client.healthy()  # on its open connection
        with Client(address, tls=Tls(cert)) as late:
            assert late.healthy()


WRONG: dict[str, Callable[[Path, Path], object]] = {
    "the key is not the certificate's": lambda cert, other: os.replace(other, cert),
    "a pipe or a device": lambda cert, _: [function(cert) for function in (Path.unlink, os.mkfifo)],
    "No such file or directory": lambda cert, _: cert.unlink(),
    "Unable to load PEM file": lambda cert, _: cert.write_text("no certificate"),
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_wrong_file_prevents_the_start_later_changes_nothing_and_is_logged_once(tmp_path: Path, problem: str) -> None:
    cert, key = make_certificate(tmp_path, "server")
    other, _ = make_certificate(tmp_path, "other")
    certificates = Certificates(TlsFiles(cert, key, cert), logs := KeptLogs())
    before = certificates._latest
    WRONG[problem](cert, other)
    for _ in range(3):
        certificates.refresh()
    assert certificates._latest is before
    with pytest.raises(InvalidInputError) as raised:
        Certificates(TlsFiles(cert, key), KeptLogs())
    assert str(raised.value).startswith(f"--tls-cert: got {cert}")
    assert problem in str(raised.value)
    (line,) = logs.lines()
    assert (line["level"], line["event"]) == ("error", "certificates not reloaded")
    assert problem in line["reason"]


def test_an_expired_certificate_is_reported_at_the_start_and_when_it_is_reread(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server", days=-1)
    certificates = Certificates(TlsFiles(cert, key), logs := KeptLogs())
    certificates.refresh()
    for name in ("good", "old"):
        new_cert, new_key = make_certificate(tmp_path, name, days=1 if name == "good" else -2)
        os.replace(new_cert, cert)
        os.replace(new_key, key)
        certificates.refresh()
    expired = [line for line in logs.lines() if line["event"] == "certificate has expired"]
    assert [line["level"] for line in expired] == ["warning"] * 2
    assert expired[0]["not_after"] > expired[1]["not_after"]
