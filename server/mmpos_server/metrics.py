"""Prometheus metrics of one server, and the HTTP page that shows metrics, liveness and readiness."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from platform import python_version
from time import time
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from mmpos.errors import InvalidInputError
from mmpos.support.info import version
from mmpos_server.certificates import Tls, not_after
from mmpos_server.listening import bind, inherited

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["MethodMetrics", "Metrics", "Page", "ProcessMetrics", "aggregate", "exposed"]


_SECONDS = (50e-6, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """Metrics of one server, in a registry of its own.

    In workers prometheus_client keeps the values in files that the supervisor reads, as the environment variable
    PROMETHEUS_MULTIPROC_DIR says.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry, method = self.registry, ["method"]
        self.requests = Counter(
            "mmpos_requests", "Calls, and items of streams, by status.", ["method", "status"], registry=registry
        )
        self.refused = Counter("mmpos_refused", "Calls and streams refused for overload.", method, registry=registry)
        self.unauthenticated = Counter(
            "mmpos_unauthenticated", "Calls and streams refused for want of a credential.", registry=registry
        )
        self.documents = Counter("mmpos_documents", "Documents answered.", method, registry=registry)
        self.tokens = Counter("mmpos_tokens", "Tokens answered.", method, registry=registry)
        self.images = Counter("mmpos_images", "Images answered.", method, registry=registry)
        self.bytes_in = Counter("mmpos_request_bytes", "Bytes of requests.", method, registry=registry)
        self.bytes_out = Counter("mmpos_response_bytes", "Bytes of answers.", method, registry=registry)
        self.in_flight = Gauge(
            "mmpos_in_flight", "Calls, and items of streams, at work.", registry=registry, multiprocess_mode="livesum"
        )
        self.streams = Gauge("mmpos_streams", "Open streams.", registry=registry, multiprocess_mode="livesum")
        self.stages = Histogram(
            "mmpos_stage_seconds",
            "Time of each stage of a call, and of the whole (total).",
            ["method", "stage"],
            buckets=_SECONDS,
            registry=registry,
        )


class MethodMetrics:
    """Metrics of one method, with labels resolved once; used from the event loop only.

    Args:
        metrics: metrics of the server.
        method: name of the method.
    """

    def __init__(self, metrics: Metrics, method: str) -> None:
        self._metrics, self._method = metrics, method
        self._stages: dict[str, Histogram] = {}
        self._requests: dict[str, Counter] = {}
        self._counts = {name: getattr(metrics, name).labels(method) for name in ("documents", "tokens", "images")}
        self._bytes_in = metrics.bytes_in.labels(method)
        self._bytes_out = metrics.bytes_out.labels(method)
        self.refused = metrics.refused.labels(method)

    def begin(self, size: int) -> None:
        """Count a request of so many bytes."""
        self._metrics.in_flight.inc()
        self._bytes_in.inc(size)

    def end(self, status: str, stages: Iterable[tuple[str, float]], counts: dict[str, int], size: int) -> None:
        """Count the end of a request.

        Args:
            status: name of the gRPC status.
            stages: name and seconds of each stage.
            counts: documents, tokens and images of the answer.
            size: bytes of the answer.
        """
        self._metrics.in_flight.dec()
        requests = self._requests.get(status)
        if requests is None:
            requests = self._requests[status] = self._metrics.requests.labels(self._method, status)
        requests.inc()
        for stage, seconds in stages:
            child = self._stages.get(stage)
            if child is None:
                child = self._stages[stage] = self._metrics.stages.labels(self._method, stage)
            child.observe(seconds)
        if status == "OK":
            self._bytes_out.inc(size)
            for name, count in counts.items():
                self._counts[name].inc(count)


def aggregate(folder: str) -> CollectorRegistry:
    """Return a registry of the sums over all workers that keep their values in a folder."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
    return registry


class ProcessMetrics(Collector):
    """Metrics of the process: build, start time, and expiry of the certificate.

    Args:
        tls: TLS files of the server; None is no TLS.
    """

    def __init__(self, tls: Tls | None) -> None:
        self._tls, self._started = tls, time()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, without that of a certificate that cannot be read."""
        build = {"version": version(), "python": python_version()}
        yield InfoMetricFamily("mmpos_build", "Version of the server, and of its Python.", build)
        yield GaugeMetricFamily("mmpos_start_time_seconds", "When the server started, in unix time.", self._started)
        if self._tls is None:
            return
        try:
            seconds = not_after(self._tls.cert.read_bytes()).timestamp()
        except (OSError, InvalidInputError):
            return
        yield GaugeMetricFamily(
            "mmpos_certificate_not_after_seconds", "When the certificate expires, in unix time.", seconds
        )


MOST_CONNECTIONS = 256
"""Most connections of the page; further ones close the oldest, so that idle clients never keep a probe out."""

SECONDS = 5.0
"""Seconds of a connection of the page: each is closed after at most twice this time."""


class Page:
    """HTTP page of metrics, liveness and readiness.

    Args:
        registry: metrics to show.
        loop: event loop of the server; the server is live as long as the loop runs callbacks.
        ready: returns whether the server takes calls; called from the thread of the page.
    """

    def __init__(self, registry: CollectorRegistry, loop: asyncio.AbstractEventLoop, ready: Callable[[], bool]) -> None:
        self._registry, self._loop, self._ready = registry, loop, ready

    def application(self) -> web.Application:
        """Return the application with the paths /metrics, /livez and /readyz."""
        application = web.Application()
        application.on_response_prepare.append(_last)
        application.add_routes(
            [web.get("/metrics", self._metrics), web.get("/livez", self._livez), web.get("/readyz", self._readyz)]
        )
        return application

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": kind})

    async def _livez(self, request: web.Request) -> web.Response:
        """Wait for a round of the event loop; the timeout of the probe decides how long that may take."""
        turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(turn), SECONDS)
        except TimeoutError:
            return web.Response(status=503, text=f"the event loop has not turned for {SECONDS:g} s\n")
        return web.Response(text="live\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        if self._ready():
            return web.Response(text="ready\n")
        return web.Response(status=503, text="not serving\n")


@contextmanager
def exposed(page: Page, host: str, port: int) -> Iterator[int]:
    """Serve the page in a thread while the context is open; yields the port.

    Args:
        page: page to serve.
        host: address to listen on, unless systemd passes a socket.
        port: port to listen on, likewise; 0 picks a free one.

    Raises:
        InvalidInputError: the port is taken or the address is not of this machine.
    """
    listening = inherited() or _listening(host, port)
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()
    thread = threading.Thread(
        target=loop.run_until_complete, args=(_serve(page, listening, ended),), name="mmpos-page", daemon=True
    )
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        listening = bind(host, port)
        listening.listen(MOST_CONNECTIONS)
    except InvalidInputError as error:
        raise InvalidInputError(f"metrics-{error}".removesuffix(" (0 picks one)")) from None
    return listening


async def _last(request: web.Request, response: web.StreamResponse) -> None:
    """Close the connection after one request."""
    response.force_close()


async def _serve(page: Page, listening: socket.socket, ended: asyncio.Event) -> None:
    runner = web.AppRunner(page.application(), access_log=None, lingering_time=0)
    await runner.setup()
    server = runner.server
    assert server is not None

    loop = asyncio.get_running_loop()

    def connection() -> asyncio.Protocol:
        # Two rounds later, when this connection is among those of the server.
        loop.call_soon(loop.call_soon, limit)
        return server()

    def limit() -> None:
        connections = server.connections  # oldest first
        for handler in connections[: max(0, len(connections) - MOST_CONNECTIONS)]:
            _abort(handler)

    accepting = await loop.create_server(connection, sock=listening)
    sweeping = asyncio.create_task(_sweep(server))
    await ended.wait()
    accepting.close()
    sweeping.cancel()
    with suppress(asyncio.CancelledError):
        await sweeping
    await runner.cleanup()


async def _sweep(server: web.Server) -> None:
    """Close connections that were open at the previous check: idle and slow ones, and those that do not read."""
    before: set[web.RequestHandler] = set()
    while True:
        await asyncio.sleep(SECONDS)
        now = set(server.connections)
        for handler in before & now:
            _abort(handler)
        before = now


def _abort(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()
