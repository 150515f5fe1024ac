"""One server as the program of a process: from its options to its drain."""

from __future__ import annotations

import asyncio
import atexit
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mmpos_server import malloc
from mmpos_server.app import Server
from mmpos_server.config import Concurrency, Pools, ServerConfig, load
from mmpos_server.listening import Listen, warn
from mmpos_server.logs import Logs, logging_all
from mmpos_server.metrics import About
from mmpos_server.page import Page, exposed
from mmpos_server.reloading import keep_reading
from mmpos_server.shared_memory import SharedMemory
from mmpos_server.systemd import inherits, notify

if TYPE_CHECKING:
    from mmpos_server.tracing import Tracing

__all__ = ["CUT_OFF", "Options", "ignore_signals", "leave", "serve"]

CUT_OFF = 3
"""Exit status of a process that ended while threads of it were at work."""

_LAST_SECONDS = 3.0
"""Beyond the drain, for the process to end; less than a supervisor gives."""


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Args:
        listen: where to listen, and to whom.
        config: the file of settings; None is the embedded one.
        concurrency: fields of Concurrency that replace those of the file.
        pools: fields of Pools that replace those of the file.
        workers: processes that share the port; 1 is this process alone.
        metrics_host: of the page of metrics, liveness and readiness; None is that of the server.
        metrics_port: of this page; 0 is none.
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
    metrics_host: str | None = None
    metrics_port: int = 0
    notice_seconds: float = 0.0
    drain_seconds: float = 30.0
    log_level: str = "info"
    log_format: Any = "json"
    otel: bool = False
    shared_memory: str | None = None
    worker: bool = False

    def page(self, page: Page) -> AbstractContextManager[object]:
        """Show the page of metrics, liveness and readiness while inside, if there is to be one."""
        if not self.metrics_port and not inherits():
            return nullcontext()
        return exposed(page, self.metrics_host or self.listen.host, self.metrics_port)

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

    What is at work after its time is cut off, with status CUT_OFF.

    Prints one line for each address to stdout as soon as calls are answered.

    Raises:
        InvalidInputError: a setting is wrong, or a place is taken.
    """
    malloc.keep_large_blocks()
    malloc.give_back_at_rest()
    _raise_files()
    with logging_all(options.log_level, options.log_format) as logs:
        asyncio.run(_serve(options, logs))
        for thread in _at_work():  # while there is a log: it is told what is cut off
            thread.join()


async def _serve(options: Options, logs: Logs) -> None:
    tracing = _tracing() if options.otel else None
    loop = asyncio.get_running_loop()
    first, second, reread = asyncio.Event(), asyncio.Event(), asyncio.Event()
    # From the start: the signal must not end a server that is not ready yet.
    loop.add_signal_handler(signal.SIGHUP, reread.set)
    server = Server(options.settings(), options.listen, logs=logs, shared_memory=options.memory(), tracing=tracing)
    with ExitStack() as closing:
        registry = server.metrics.registry
        registry.register(About(options.listen.tls))
        closing.enter_context(options.page(Page(registry, loop, lambda: server.ready)))
        places = await server.start()
        _watch(lambda: (second if first.is_set() else first).set(), reread.set, supervised=options.worker)
        reading = asyncio.create_task(keep_reading(reread, server.config, options.settings, server.renew, logs))
        closing.callback(reading.cancel)
        for place in places[:1] if options.worker else places:
            print(f"mmpos_server listening on {place}", flush=True)
        if not options.worker:
            warn(options.listen, logs)
        notify("READY=1")
        await first.wait()
        notify("STOPPING=1")
        logs.info("draining", notice_seconds=options.notice_seconds, drain_seconds=options.drain_seconds)
        _end_after(options.notice_seconds + options.drain_seconds + _LAST_SECONDS, logs)
        await _drain(server, options, second, logs)
        logs.info("stopped")
        _end_after(_LAST_SECONDS, logs)  # nobody waits for what threads still do
        ignore_signals()


def leave() -> NoReturn:
    """End the process with status 0 as its last line would, but without the last garbage collection of Python.

    With torch that takes seconds, in which no other thread runs, the one that cuts off what takes too long among them.

    Raises:
        OSError: nobody can take what is written to stdout.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does: waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def ignore_signals() -> None:
    """Let no further signal change the exit status of a process that is about to end, as a closed loop would."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _tracing() -> Tracing:
    from mmpos_server.tracing import configured

    return configured()


async def _drain(server: Server, options: Options, at_once: asyncio.Event, logs: Logs) -> None:
    """Announce the end, serve on for the notice, then answer what has come; at_once cuts all of it short."""
    server.announce_stop()
    hurry = asyncio.create_task(at_once.wait())
    await asyncio.wait({hurry}, timeout=options.notice_seconds)
    stopping = asyncio.create_task(server.stop(None if at_once.is_set() else options.drain_seconds))
    await asyncio.wait({hurry, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if at_once.is_set():
        _end_after(_LAST_SECONDS, logs)
    if not stopping.done():
        await server.stop(None)
    await stopping
    hurry.cancel()


def _end_after(seconds: float, logs: Logs) -> None:
    """End the process after so many seconds if it has not ended by itself: a thread of Python cannot be stopped."""

    def end() -> None:
        try:
            frames = sys._current_frames()
            where = {thread.name: frames.get(thread.ident or 0) for thread in _at_work()}
            logs.error("cut off", threads=[f"{name} in {at.f_code.co_qualname}" for name, at in where.items() if at])
        finally:
            os._exit(CUT_OFF)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _at_work() -> list[threading.Thread]:
    """The threads of the pools that have not ended."""
    return [each for each in threading.enumerate() if each.name.startswith("mmpos-") and not each.daemon]


def _raise_files() -> None:
    """Allow as many open files as the process may have: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # more than this system takes
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _watch(stop: Callable[[], object], reread: Callable[[], object], *, supervised: bool) -> None:
    """Call stop for every signal to end, and when the supervisor is gone; and reread when it writes."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if supervised:
        fd = sys.stdin.fileno()

        def read() -> None:
            if os.read(fd, 64):
                reread()
            else:
                loop.remove_reader(fd)
                stop()

        loop.add_reader(fd, read)
