"""Test the server program: its start, its ports, its workers and its exit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import pytest
from certificates import make_certificate
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server_program import Program, Refused, Start, metrics_of
from waiting import eventually, free_port

from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos_server import launch
from mmpos_server.__main__ import main
from mmpos_server.access import TlsFiles
from mmpos_server.flags import Flags
from mmpos_server.testing import running

SERVING, NOT_SERVING = 1, 2
REQUEST = pb.PlaceRequest(query=pb.PositionsQuery(spans=pb.Spans(lengths=[4096], offsets=[100], grid_thw=[1, 24, 24])))


def place(channel: grpc.Channel) -> grpc.UnaryUnaryMultiCallable[pb.PlaceRequest, pb.PlaceResponse]:
    return channel.unary_unary(
        "/mmpos.rpc.v1.PositionService/Place", pb.PlaceRequest.SerializeToString, pb.PlaceResponse.FromString
    )


def stream(channel: grpc.Channel) -> grpc.StreamStreamMultiCallable[pb.StreamPlaceRequest, pb.StreamPlaceResponse]:
    return channel.stream_stream(
        "/mmpos.rpc.v1.PositionService/StreamPlace",
        pb.StreamPlaceRequest.SerializeToString,
        pb.StreamPlaceResponse.FromString,
    )


def test_sigterm_under_load_loses_no_call(start: Start) -> None:
    server = start()
    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(16) as threads:
        ask = place(channel)
        want = ask(REQUEST)

        def load(_: int) -> tuple[int, str]:
            """Return the number of answered calls, and the status of the call that failed."""
            answered = 0
            try:
                while True:
                    assert ask(REQUEST, timeout=60) == want
                    answered += 1
            except grpc.RpcError as error:
                return answered, error.code().name

        loads = threads.map(load, range(16))
        assert eventually(lambda: len(server.lines()) > 100)
        server.process.terminate()
        seen = list(loads)
    code, lines = server.end()
    # Every call was either answered or refused before any work, and every answer arrived.
    assert code == 0
    statuses = [status for _, status in seen]
    # The transport cancels calls that arrive while it is closing; on a busy machine, there may be such a call.
    assert set(statuses) <= {"UNAVAILABLE", "CANCELLED"}
    assert statuses.count("CANCELLED") <= 2
    assert sum(answered for answered, _ in seen) + 1 == sum(line.get("status") == "OK" for line in lines) > 100
    assert [line["event"] for line in lines if line["event"] != "request"] == ["draining", "stopped"]


def test_during_the_notice_health_is_not_serving_and_calls_are_answered_until_a_second_signal(start: Start) -> None:
    server = start("--notice-seconds", "600")
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        names = ["", "mmpos.rpc.v1.PositionService", "mmpos.rpc.v1.SequenceService"]
        requests = [health_pb2.HealthCheckRequest(service=name) for name in names]
        assert [health.Check(request).status for request in requests] == [SERVING] * 3
        # Two clients watch one service; after one has left, the other is still notified.
        watching, leaving = health.Watch(requests[1]), health.Watch(requests[1])
        assert [next(watching).status, next(leaving).status] == [SERVING, SERVING]
        leaving.cancel()
        server.process.terminate()
        assert next(watching).status == NOT_SERVING
        assert health.Check(requests[0]).status == NOT_SERVING
        assert place(channel)(REQUEST).positions.cu_seqlens == [0, 4096]
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.end()[0] == 0


def test_a_health_watcher_does_not_delay_server_exit(start: Start) -> None:
    server = start("--notice-seconds", "0.5", "--drain-seconds", "600")
    with grpc.insecure_channel(server.address) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watching).status == SERVING
        server.process.terminate()
        code, _ = server.end()
        assert code == 0


def test_a_stream_open_at_sigterm_receives_its_answers_and_ends_as_unavailable(start: Start) -> None:
    server = start()
    with grpc.insecure_channel(server.address) as channel:
        more = threading.Event()

        def items() -> Iterator[pb.StreamPlaceRequest]:
            for i in range(5):
                yield pb.StreamPlaceRequest(id=i, query=REQUEST.query)
            more.wait(60)

        answers = stream(channel)(items())
        results = [next(answers).id for _ in range(5)]
        server.process.terminate()
        with pytest.raises(grpc.RpcError) as raised:
            next(answers)
        more.set()
        assert results == [0, 1, 2, 3, 4]
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert raised.value.details() == "the server is about to stop: send unanswered items in a new stream"
        assert server.end()[0] == 0


STALLING_CLIENT = """
import grpc, os, sys, time
call = grpc.insecure_channel(sys.argv[1]).stream_stream("/mmpos.rpc.v1.PositionService/StreamPlace")
answers = call(iter([bytes.fromhex(sys.argv[2])] * 1000))
next(answers)
time.sleep(0.5)
os._exit(0)
"""


def test_a_client_that_stalls_and_dies_causes_no_error(start: Start) -> None:
    server = start()
    query = pb.PositionsQuery(spans=pb.Spans(lengths=[20000]), dense=pb.Dense())
    item = pb.StreamPlaceRequest(query=query).SerializeToString().hex()
    subprocess.run([sys.executable, "-c", STALLING_CLIENT, server.address, item], check=True, timeout=60)
    assert eventually(lambda: bool(server.lines()))
    server.process.terminate()
    code, lines = server.end()
    assert code == 0
    assert [line["event"] for line in lines] == ["stream", "draining", "stopped"]
    assert lines[0]["status"] == "CANCELLED"
    assert lines[0]["items"] < 200  # the server read no more than its window and the transport's buffers


ENDLESS = """
import sys, threading, mmpos_server.position_service
def work():
    print('{"event": "begun"}', file=sys.stderr, flush=True)
    threading.Event().wait()
def place(self, query, answer, call):
    call.run("place", work)
mmpos_server.position_service.PositionService.place = place
"""


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM]])
def test_a_server_exits_after_its_drain_even_if_a_thread_never_returns(
    start: Start, tmp_path: Path, torchless: dict[str, str], signals: list[signal.Signals]
) -> None:
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write(ENDLESS)
    server = start("--drain-seconds", "0.2" if len(signals) == 1 else "600")
    with grpc.insecure_channel(server.address) as channel:
        call = place(channel).future(REQUEST, timeout=60)
        assert eventually(lambda: bool(server.lines()))
        assert not call.done()
        for number in signals:
            server.process.send_signal(number)
            assert eventually(lambda: len(server.lines()) > 1)
        code, lines = server.end()
    assert code == launch.CUT_OFF
    cut = [line for line in lines if line["event"] == "cut off"]
    assert [line["level"] for line in cut] == ["error"]
    assert cut[0]["threads"] == ["mmpos-place_0"]
    assert "sitecustomize.py" in cut[0]["traceback"]


FAILING_STOP = """
import mmpos_server.app
def stop(self, grace):
    raise ZeroDivisionError
mmpos_server.app.Server.stop = stop
"""


def test_a_failed_stop_is_logged_and_sets_the_exit_code(
    start: Start, tmp_path: Path, torchless: dict[str, str]
) -> None:
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write(FAILING_STOP)
    server = start("--drain-seconds", "600")
    server.process.terminate()
    code, lines = server.end()
    assert code == launch.CUT_OFF
    assert [line["event"] for line in lines] == ["draining", "stop failed", "cut off"]


FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (50, 200))\n"


def test_many_connections_leave_file_descriptors_for_the_metrics_page_and_earlier_connections(
    start: Start, tmp_path: Path, torchless: dict[str, str]
) -> None:
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write(f"\n{FEW_FILES}")
    metrics = free_port()
    server = start("--metrics-port", str(metrics))
    with grpc.insecure_channel(server.address) as channel, ExitStack() as opened:
        place(channel)(REQUEST)
        for _ in range(400):
            opened.enter_context(socket.create_connection(("127.0.0.1", int(server.port)), timeout=60))
        for _ in range(5):
            assert metrics_of(metrics)["mmpos_in_flight"] == 0
            assert place(channel)(REQUEST, timeout=60).positions.cu_seqlens == [0, 4096]
    server.process.terminate()
    code, lines = server.end()
    assert (code, [line for line in lines if "exception" in line]) == (0, [])
    assert len(lines) < 50


def test_a_second_server_on_the_same_port_is_refused_with_and_without_workers(
    refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    with running() as address:
        port = address.rpartition(":")[2]
        message = f"port: {port} is in use on 127.0.0.1, want a free port (0 picks one)"
        assert main(["--port", port]) == 2
        assert capsys.readouterr() == ("", f"mmpos_server: error: {message}\n")
        assert refused("--port", port, "--workers", "2") == message


def test_workers_share_a_port_and_a_dead_worker_is_replaced(
    start: Start, tmp_path: Path, torchless: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, temporary = free_port(), tmp_path / "t"
    temporary.mkdir()
    torchless["TMPDIR"] = str(temporary)
    server = start("--workers", "2", "--metrics-port", str(metrics))
    assert main(["--port", server.port]) == 2
    assert capsys.readouterr().err.startswith(f"mmpos_server: error: port: {server.port} is in use")
    workers = server.workers
    assert len(workers) == 2

    def ask() -> list[int]:
        # The kernel assigns each connection to a process, and each call opens its own connection.
        with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            return list(place(channel)(REQUEST, wait_for_ready=True, timeout=60).positions.cu_seqlens)

    assert [ask() for _ in range(12)] == [[0, 4096]] * 12
    counted = 'mmpos_requests_total{method="Place",status="OK"}'
    assert eventually(lambda: metrics_of(metrics).get(counted) == 12)  # workers write metrics a few times a second
    os.kill(workers[0], signal.SIGKILL)
    assert eventually(partial(served, server, 3))
    assert len(server.workers) == 2
    assert workers[0] not in server.workers
    assert [ask() for _ in range(12)] == [[0, 4096]] * 12
    assert eventually(lambda: metrics_of(metrics).get(counted) == 24)  # a dead worker's calls stay counted
    assert metrics_of(metrics)["mmpos_in_flight"] == 0
    server.process.terminate()
    code, lines = server.end()
    assert code == 0
    deaths = [line for line in lines if line["event"] == "worker died"]
    assert [(line["exit_code"], line["level"]) for line in deaths] == [(-9, "error")]
    assert sum(line["event"] == "stopped" for line in lines) == 2
    assert list(temporary.iterdir()) == []


IMPATIENT = """
import mmpos_server.workers
mmpos_server.workers._MOST_SILENCE = 4
"""
"""Two ticks of the supervisor, or more under load, may pass between two beats of a healthy worker."""


def test_a_hanging_worker_is_replaced(start: Start, tmp_path: Path, torchless: dict[str, str]) -> None:
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write(IMPATIENT)
    server = start("--workers", "2")
    hung, healthy = server.workers
    os.kill(hung, signal.SIGSTOP)
    assert eventually(partial(served, server, 3))
    assert healthy in server.workers
    assert hung not in server.workers
    events = [line["event"] for line in server.lines() if line["level"] == "error"]
    assert events == ["worker hangs", "worker died"]


def test_workers_that_die_repeatedly_restart_within_a_second_and_keep_their_metrics(start: Start) -> None:
    metrics = free_port()
    server = start("--workers", "2", "--metrics-port", str(metrics))
    for want in (4, 6, 8, 10, 12):
        for worker in server.workers:
            os.kill(worker, signal.SIGKILL)
        assert eventually(partial(served, server, want))
    pauses = [line["again_in_seconds"] for line in server.lines() if line["event"] == "worker died"]
    assert len(pauses) == 10
    assert max(pauses) <= 1.0
    assert metrics_of(metrics)["mmpos_in_flight"] == 0


def served(server: Program, times: int) -> bool:
    """Return whether workers have started serving this many times in all."""
    return sum(line["event"] == "worker serves" for line in server.lines()) == times


def test_an_error_in_the_settings_is_reported_once_and_not_by_every_worker(tmp_path: Path, refused: Refused) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("[profiles.a]\nscheme = 'x'\n")
    message = refused("--port", "0", "--workers", "2", "--config", str(file))
    assert message.startswith(f"{file}: profiles.a.scheme: got 'x', want a Scheme or one of ")


def test_workers_exit_without_an_error_or_a_metrics_folder_when_their_supervisor_is_killed(
    start: Start, tmp_path: Path, torchless: dict[str, str]
) -> None:
    torchless["TMPDIR"] = str(tmp_path)
    server = start("--workers", "3")
    killed, *workers = server.workers
    assert len(workers) == 2
    assert len(list(tmp_path.glob("mmpos-metrics-*"))) == 1
    for _ in range(8):  # both workers have metrics to write
        with grpc.insecure_channel(server.address) as channel:
            place(channel)(REQUEST)
    server.process.kill()
    os.kill(killed, signal.SIGKILL)
    assert eventually(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert [line for line in server.lines() if line["level"] == "error"] == []
    assert eventually(lambda: list(tmp_path.glob("mmpos-metrics-*")) == [])


def test_the_metrics_page_counts_calls_stages_and_bytes(start: Start) -> None:
    metrics = free_port()
    server = start("--metrics-port", str(metrics))
    with grpc.insecure_channel(server.address) as channel:
        answer = place(channel)(REQUEST)
        with pytest.raises(grpc.RpcError):
            place(channel)(pb.PlaceRequest())
        list(stream(channel)(iter([pb.StreamPlaceRequest(query=REQUEST.query)] * 2)))
        numbers = metrics_of(metrics)
    expected = {
        'mmpos_requests_total{method="Place",status="OK"}': 1,
        'mmpos_requests_total{method="Place",status="INVALID_ARGUMENT"}': 1,
        'mmpos_requests_total{method="StreamPlace",status="OK"}': 2,
        'mmpos_documents_total{method="StreamPlace"}': 2,
        'mmpos_tokens_total{method="Place"}': 4096,
        'mmpos_images_total{method="Place"}': 1,
        'mmpos_request_bytes_total{method="Place"}': REQUEST.ByteSize(),
        'mmpos_response_bytes_total{method="Place"}': answer.ByteSize(),
        'mmpos_stage_seconds_count{method="Place",stage="decode"}': 2,
        'mmpos_stage_seconds_count{method="Place",stage="encode"}': 1,
        'mmpos_stage_seconds_count{method="Place",stage="total"}': 2,
        "mmpos_in_flight": 0,
        "mmpos_streams": 0,
    }
    assert {name: numbers.get(name) for name in expected} == expected


def test_certificate_flags_require_each_other_and_must_match(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = make_certificate(tmp_path, "server")
    _, other = make_certificate(tmp_path, "other")
    assert Flags(tls_cert=cert, tls_key=key, tls_client_ca=other).listen.tls == TlsFiles(cert, key, other)
    assert main(["--port", "0", "--tls-cert", str(cert)]) == 2
    assert capsys.readouterr().err == "mmpos_server: error: --tls-cert requires both --tls-cert and --tls-key\n"
    assert main(["--port", "0", "--tls-cert", str(cert), "--tls-key", str(other)]) == 2
    assert capsys.readouterr().err.startswith(f"mmpos_server: error: tls-cert: got {cert} with {other} (")


def test_an_address_of_another_machine_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    message = "port: got 192.0.2.1:50051 (Cannot assign requested address), want an address to listen on"
    assert main(["--host", "192.0.2.1"]) == 2
    assert capsys.readouterr() == ("", f"mmpos_server: error: {message}\n")


BLOCKING_FINALIZER = """
import threading
class Last:
    def __del__(self):
        threading.Event().wait()
last = Last()
"""


def test_a_blocking_finalizer_does_not_delay_the_exit(start: Start, tmp_path: Path, torchless: dict[str, str]) -> None:
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write(BLOCKING_FINALIZER)
    server = start()
    server.process.terminate()
    code, lines = server.end()
    assert code == 0
    assert [line["event"] for line in lines] == ["draining", "stopped"]
