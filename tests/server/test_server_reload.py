"""Test the files that a running server reloads: its settings on SIGHUP, and its certificates when they change."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import threading
from pathlib import Path

import pytest
from certificates import make_certificate
from server_program import Program, Start
from serving import KeptLogs
from waiting import eventually

from mmpos import SegmentTable, Text
from mmpos.client import Client, Tls
from mmpos.errors import LimitExceededError, MmposError
from mmpos_server import access, app
from mmpos_server.access import Certificates, TlsFiles
from mmpos_server.listening import Listen
from mmpos_server.telemetry import ProcessMetrics
from mmpos_server.testing import running

TWO = SegmentTable.from_documents([[Text(3)], [Text(3)]])


def put(path: Path, text: str) -> None:
    """Replace a file atomically, as an operator should."""
    (path.parent / "next").write_text(text)
    os.replace(path.parent / "next", path)


def events(server: Program, event: str) -> int:
    return sum(line["event"] == event for line in server.lines())


@pytest.mark.parametrize("workers", [1, 2])
def test_settings_are_reloaded_on_sighup_and_no_call_is_lost(start: Start, tmp_path: Path, workers: int) -> None:
    file = tmp_path / "settings.toml"
    put(file, "[limits]\ndocuments = 1\n[profiles.old]\n")
    server = start("--config", str(file), "--workers", str(workers), "--drain-seconds", "60")
    lines_per_reload = 1 if workers == 1 else 1 + workers
    done, lost, answered = threading.Event(), [], [0]
    one = SegmentTable.from_documents([[Text(3)]])

    def load() -> None:
        while not done.is_set():
            try:
                with Client(server.address, attempts=1) as client:
                    client.place(one)
                answered[0] += 1
            except MmposError as error:
                lost.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    with Client(server.address) as client:
        with pytest.raises(LimitExceededError):
            client.place(TWO)
        put(file, "[limits]\ndocuments = 2\n[concurrency]\nmax_streams = 1\n[profiles.new]\n")
        server.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: events(server, "settings read") == lines_per_reload)
        assert client.place(TWO).num_documents == 2
        assert [profile.name for profile in client.info().profiles] == ["new"]
        put(file, "[limits]\ndocuments = 0\n")
        server.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: events(server, "settings not reloaded") == 1)
        assert client.place(TWO).num_documents == 2
    before = answered[0]
    assert eventually(lambda: answered[0] > before or bool(lost))
    done.set()
    thread.join()
    assert lost == []
    lines = server.lines()
    reloads = [line for line in lines if line["event"] == "settings read"]
    assert [line["profiles"] for line in reloads] == [["new"]] * len(reloads)
    assert [line["from_next_start"] for line in reloads if line["from_next_start"]] == [["concurrency.max_streams"]]
    (wrong,) = (line for line in lines if line["event"] == "settings not reloaded")
    assert (wrong["level"], wrong["reason"]) == ("error", f"{file}: limits.documents: got 0, want >= 1")


def test_a_profile_that_cannot_be_built_changes_nothing(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    put(file, "[profiles.a]\n")
    server = start("--config", str(file))
    put(file, "[profiles.a]\n[profiles.b]\nscheme = 'x'\n")
    server.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: events(server, "settings not reloaded") == 1)
    (wrong,) = server.lines()
    assert wrong["reason"].startswith(f"{file}: profiles.b.scheme: got 'x', want ")
    put(file, "broken = = 1\n")
    server.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: events(server, "settings not reloaded") == 2)
    assert server.lines()[1]["reason"].startswith(f"{file}: want valid TOML (")
    assert "(at line 1, column 10)" in server.lines()[1]["reason"]
    with Client(server.address) as client:
        assert [profile.name for profile in client.info().profiles] == ["a"]


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
