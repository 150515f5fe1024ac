"""Test that a running server reloads its certificates when their files change, and reports when they expire."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path

import pytest
from certificates import make_certificate
from serving import KeptLogs
from waiting import eventually

from mmpos.client import Client, Tls
from mmpos_server import access, app
from mmpos_server.access import Certificates, TlsFiles
from mmpos_server.listening import Listen
from mmpos_server.telemetry import ProcessMetrics
from mmpos_server.testing import running


def served(address: str) -> str:
    """Return the certificate that a server presents to a new connection, as PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as plain, context.wrap_socket(plain) as connection:
        return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"")


def test_a_replaced_certificate_is_used_for_new_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_TICK", "_REFRESH"):
        monkeypatch.setattr(app, name, 0.02)
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


def test_an_invalid_new_certificate_changes_nothing_and_is_logged_once(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    other, _ = make_certificate(tmp_path, "other")
    certificates = Certificates(TlsFiles(cert, key), logs := KeptLogs())
    os.replace(other, cert)
    for _ in range(3):
        certificates.refresh()
    (line,) = logs.lines()
    assert (line["level"], line["event"]) == ("error", "certificates not reloaded")
    assert line["reason"].startswith(f"tls-cert: got {cert} with {key} (")


def test_an_expired_certificate_is_reported_at_startup_and_on_reload(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server", days=-1)
    certificates = Certificates(TlsFiles(cert, key), logs := KeptLogs("warning"))
    certificates.refresh()
    for name in ("good", "old"):
        new_cert, new_key = make_certificate(tmp_path, name, days=1 if name == "good" else -2)
        os.replace(new_cert, cert)
        os.replace(new_key, key)
        certificates.refresh()
    lines = logs.lines()
    assert [(line["level"], line["event"], line["file"]) for line in lines] == [
        ("warning", "certificate has expired", str(cert))
    ] * 2
    assert lines[0]["not_after"] > lines[1]["not_after"]


def test_the_metrics_show_when_the_certificate_expires(tmp_path: Path) -> None:
    tls = TlsFiles(*make_certificate(tmp_path, "server"))
    families = {family.name: family for family in ProcessMetrics(tls).collect()}
    (sample,) = families["mmpos_certificate_not_after_seconds"].samples
    assert sample.value == access.not_after(tls.cert.read_bytes()).timestamp()
    assert "mmpos_certificate_not_after_seconds" not in {family.name for family in ProcessMetrics(None).collect()}
