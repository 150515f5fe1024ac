"""Test that a running server rereads its certificates when their files change, and reports when they expire."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from certificates import make_certificate
from serving import KeptLogs
from waiting import eventually

from mmpos.client import Client, Tls
from mmpos.errors import InvalidInputError
from mmpos_server.access import Certificates, TlsFiles
from mmpos_server.listening import Listen
from mmpos_server.testing import running


def served(address: str) -> str:
    """Return the certificate that a server presents to a new connection, as PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as plain, context.wrap_socket(plain) as connection:
        return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"")


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
def test_a_wrong_file_prevents_the_start_and_later_changes_nothing_and_is_logged_once(
    tmp_path: Path, problem: str
) -> None:
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
