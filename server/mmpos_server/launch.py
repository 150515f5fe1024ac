"""One server as the program of a process: from its options to its drain."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmpos_server import malloc, metrics
from mmpos_server.app import Server
from mmpos_server.config import Concurrency, Pools, ServerConfig, load
from mmpos_server.listening import Listen
from mmpos_server.logs import Logs, adopt_standard_logging
from mmpos_server.shared_memory import SharedMemory

if TYPE_CHECKING:
    from mmpos_server.tracing import Tracing

__all__ = ["Options", "serve"]


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Args:
        listen: where to listen, and to whom.
        config: the file of settings; None is the embedded one.
        concurrency: fields of Concurrency that replace those of the file.
        pools: fields of Pools that replace those of the file.
        workers: processes that share the port; 1 is this process alone.
        metrics_port: of the metrics page; 0 is none.
        notice_seconds: how long to serve on after saying NOT_SERVING, so that balancers see it.
        drain_seconds: how long calls at work have to end.
        log_level: lowest level that is written.
        log_format: "json" or "console".
        otel: whether calls become spans of OpenTelemetry.
        shared_memory: how names of shared memory objects of clients begin; None takes none.
        worker: whether a supervisor holds the standard input, and its end is the end.
    """

    listen: Listen
    config: Path | None = None
    concurrency: dict[str, int] | None = None
    pools: dict[str, int] | None = None
    workers: int = 1
    metrics_port: int = 0
    notice_seconds: float = 0.0
    drain_seconds: float = 30.0
    log_level: str = "info"
    log_format: Any = "json"
    otel: bool = False
    shared_memory: str | None = None
    worker: bool = False

    def settings(self) -> ServerConfig:
        """The settings of the file, with those of the command line in their place."""
        config = load(self.config)
        concurrency = Concurrency(**{**config.concurrency.model_dump(), **(self.concurrency or {})})
        pools = Pools(**{**config.pools.model_dump(), **(self.pools or {})})
        return config.model_copy(update={"concurrency": concurrency, "pools": pools})

    def memory(self) -> SharedMemory:
        """What it takes of shared memory.

        Raises:
            InvalidInputError: a wrong prefix, or others than this machine can reach the server.
        """
        memory = SharedMemory(self.shared_memory)
        memory.check(self.listen)
        return memory


def serve(options: Options) -> None:
    """Serve until SIGTERM or SIGINT, and then until no call is left; a second signal ends at once.

    Prints one line for each address to stdout as soon as calls are answered.

    Raises:
        InvalidInputError: a setting is wrong, or a place is taken.
    """
    malloc.keep_large_blocks()
    logs = Logs(options.log_level, options.log_format)
    adopt_standard_logging(logs)
    asyncio.run(_serve(options, logs))


async def _serve(options: Options, logs: Logs) -> None:
    tracing = _tracing() if options.otel else None
    server = Server(options.settings(), options.listen, logs=logs, shared_memory=options.memory(), tracing=tracing)
    first, second = asyncio.Event(), asyncio.Event()
    with ExitStack() as closing:
        if options.metrics_port:
            _, close = metrics.expose(server.metrics.registry, options.listen.host, options.metrics_port)
            closing.callback(close)
        places = await server.start()
        _watch(lambda: (second if first.is_set() else first).set(), end_of_input=options.worker)
        for place in places[:1] if options.worker else places:
            print(f"mmpos_server listening on {place}", flush=True)
        await first.wait()
        logs.info("draining", notice_seconds=options.notice_seconds, drain_seconds=options.drain_seconds)
        await _drain(server, options, second)
        logs.info("stopped")


def _tracing() -> Tracing:
    from mmpos_server.tracing import configured

    return configured()


async def _drain(server: Server, options: Options, at_once: asyncio.Event) -> None:
    """Announce the end, serve on for the notice, then answer what has come; at_once cuts all of it short."""
    server.announce_stop()
    hurry = asyncio.create_task(at_once.wait())
    await asyncio.wait({hurry}, timeout=options.notice_seconds)
    stopping = asyncio.create_task(server.stop(None if at_once.is_set() else options.drain_seconds))
    await asyncio.wait({hurry, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        await server.stop(None)
    await stopping
    hurry.cancel()


def _watch(stop: Callable[[], object], *, end_of_input: bool) -> None:
    """Call stop for every signal to end, and when the supervisor is gone."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if end_of_input:
        fd = sys.stdin.fileno()

        def read() -> None:
            if not os.read(fd, 1):
                loop.remove_reader(fd)
                stop()

        loop.add_reader(fd, read)
