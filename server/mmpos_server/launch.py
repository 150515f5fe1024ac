"""Server processes from start to drain: a server, or a supervisor of workers; reloading; settings of the allocator."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, process_time, sleep
from typing import TYPE_CHECKING, NoReturn

from prometheus_client.multiprocess import mark_process_dead

from mmpos.errors import InvalidInputError, MmposError
from mmpos_server.access import TokenFile
from mmpos_server.app import Server
from mmpos_server.config import Profiles, ServerConfig, load
from mmpos_server.listening import Listen, address, bind, inherits, notify, warn
from mmpos_server.shared_memory import SharedMemory
from mmpos_server.telemetry import Logs, ProcessMetrics, aggregate, logging_all

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from mmpos_server.telemetry import Form
    from mmpos_server.tracing import Tracing

__all__ = [
    "CUT_OFF",
    "LaunchOptions",
    "give_back_at_rest",
    "ignore_signals",
    "keep_large_blocks",
    "keep_reading",
    "leave",
    "serve",
    "supervise",
]


CUT_OFF = 3
"""Exit status of a process whose threads were still at work when it ended."""

_LAST_SECONDS = 3.0
"""Seconds after the drain for the process to exit; less than the supervisor waits."""


@dataclass(frozen=True)
class LaunchOptions:
    """Options of the command line.

    Args:
        listen: addresses to listen on, TLS and tokens.
        config: settings file; None is the embedded one.
        workers: processes that share the port; 1 is this process alone.
        metrics_host: address of the page of metrics, liveness and readiness; None is that of the server.
        metrics_port: port of this page; 0 is no page.
        notice_seconds: how long to serve on after health reports NOT_SERVING, so that load balancers notice.
        drain_seconds: how long calls at work may take.
        log_level: lowest level of log lines that are written.
        log_format: "json" or "console".
        otel: whether calls become spans of OpenTelemetry.
        shared_memory: prefix of shared memory objects of clients; None accepts none.
        worker: whether a supervisor holds the standard input, at whose end this process stops.
    """

    listen: Listen
    config: Path | None = None
    workers: int = 1
    metrics_host: str | None = None
    metrics_port: int = 0
    notice_seconds: float = 0.0
    drain_seconds: float = 30.0
    log_level: str = "info"
    log_format: Form = "json"
    otel: bool = False
    shared_memory: str | None = None
    worker: bool = False

    def page(self, registry: CollectorRegistry, ready: Callable[[], bool]) -> AbstractContextManager[object]:
        """Return a context manager that shows the page of metrics, liveness and readiness, if there is one."""
        if not self.metrics_port and not inherits():
            return nullcontext()
        from mmpos_server.page import Page, exposed  # here: aiohttp takes a quarter of the time of a start

        page = Page(registry, asyncio.get_running_loop(), ready)
        return exposed(page, self.metrics_host or self.listen.host, self.metrics_port)

    def settings(self) -> ServerConfig:
        """Read the settings of the file."""
        return load(self.config)

    def memory(self) -> SharedMemory:
        """Return the access to shared memory of clients.

        Raises:
            InvalidInputError: the prefix is wrong, or other machines can reach the server.
        """
        memory = SharedMemory(self.shared_memory)
        memory.check(self.listen)
        return memory


def serve(options: LaunchOptions) -> None:
    """Serve until SIGTERM or SIGINT, and then until no call is left; a second signal ends at once.

    Threads that are still at work after the drain are cut off, with exit status CUT_OFF. One line for each address is
    printed to stdout as soon as calls are answered.

    Raises:
        InvalidInputError: a setting is wrong, or an address is taken.
    """
    keep_large_blocks()
    give_back_at_rest()
    _raise_files()
    with logging_all(options.log_level, options.log_format) as logs:
        asyncio.run(_serve(options, logs))
        for thread in _at_work():  # while there is a log for the threads that are cut off
            thread.join()


async def _serve(options: LaunchOptions, logs: Logs) -> None:
    tracing = _tracing() if options.otel else None
    loop = asyncio.get_running_loop()
    first, second, reread = asyncio.Event(), asyncio.Event(), asyncio.Event()
    # From the start: the signal must not end a server that is not ready yet.
    loop.add_signal_handler(signal.SIGHUP, reread.set)
    server = Server(options.settings(), options.listen, logs=logs, shared_memory=options.memory(), tracing=tracing)
    with ExitStack() as closing:
        registry = server.metrics.registry
        registry.register(ProcessMetrics(options.listen.tls))
        closing.enter_context(options.page(registry, lambda: server.ready))
        addresses = await server.start()
        _watch(lambda: (second if first.is_set() else first).set(), reread.set, supervised=options.worker)
        reading = asyncio.create_task(keep_reading(reread, server.config, options.settings, server.renew, logs))
        closing.callback(reading.cancel)
        for listening_on in addresses[:1] if options.worker else addresses:
            print(f"mmpos_server listening on {listening_on}", flush=True)
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
    """Exit with status 0, without the last garbage collection of Python.

    With torch it takes seconds, in which no other thread runs, the one that cuts off late threads included.

    Raises:
        OSError: stdout cannot be written.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does: waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT, which would change the exit status of a process that is about to exit."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _tracing() -> Tracing:
    from mmpos_server.tracing import configured

    return configured()


async def _drain(server: Server, options: LaunchOptions, at_once: asyncio.Event, logs: Logs) -> None:
    """Announce the stop, serve on for the notice, then answer the calls at work; at_once cuts all of this short."""
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
    """Exit after so many seconds if the process has not exited by itself: a Python thread cannot be stopped."""

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
    """Return the threads of the pools that have not ended."""
    return [each for each in threading.enumerate() if each.name.startswith("mmpos-") and not each.daemon]


def _raise_files() -> None:
    """Raise the limit of open files to the highest allowed: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # more than this system takes
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _watch(stop: Callable[[], object], reread: Callable[[], object], *, supervised: bool) -> None:
    """Call stop on SIGTERM and SIGINT and when the supervisor has gone; call reread when it writes."""
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


# A worker that dies young is restarted after a pause that doubles, between these bounds.
_YOUNG, _FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 0.1, 10.0
# Seconds after the notice and the drain for the workers to exit.
_WORKER_SECONDS = 5.0


def supervise(options: LaunchOptions, arguments: Sequence[str]) -> None:
    """Serve with several processes until SIGTERM or SIGINT, and then until all have drained.

    Args:
        options: options of the command line.
        arguments: command line of the workers.

    Raises:
        InvalidInputError: a setting is wrong, the port is taken, or a worker could not start and has reported why.
    """
    if options.listen.uds:
        raise InvalidInputError(
            f"workers: got {options.workers} with --uds, want 1: processes can share a port, but not a unix socket"
        )
    with logging_all(options.log_level, options.log_format, core=False) as logs:
        _supervise(options, arguments, logs)


def _supervise(options: LaunchOptions, arguments: Sequence[str], logs: Logs) -> None:
    listen = options.listen
    # Errors in files are reported once, and not by every worker.
    config = options.settings()
    Profiles.from_config(config)
    options.memory()
    if listen.tls:
        listen.tls.read()
    if listen.token_file:
        TokenFile(listen.token_file, logs)
    warn(listen, logs)
    # Without sharing first: with it, two servers that both share would not see each other.
    bind(listen.host, listen.port).close()
    with ExitStack() as held:
        reserved = held.enter_context(bind(listen.host, listen.port, reuse_port=True))
        port = reserved.getsockname()[1]
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="mmpos-metrics-"))
        # Of an option that is repeated, the last one counts.
        words = [*arguments, "--port", str(port), "--workers", "1", "--metrics-port", "0", "--worker"]
        asyncio.run(_Supervisor(options, config, words, folder, logs).run(address(listen.host, port)))


class _Supervisor:
    """Supervisor of the workers of one server: starts them, restarts those that die, and drains them."""

    def __init__(
        self, options: LaunchOptions, config: ServerConfig, words: Sequence[str], folder: str, logs: Logs
    ) -> None:
        self._options, self._config, self._words, self._folder, self._logs = options, config, words, folder, logs
        self._alive: dict[int, asyncio.subprocess.Process] = {}
        self._serving: set[int] = set()
        self._stopping, self._reread = asyncio.Event(), asyncio.Event()
        self._failed = False

    @property
    def ready(self) -> bool:
        """Whether any worker takes calls; from any thread."""
        return bool(self._serving) and not self._stopping.is_set()

    async def run(self, listening_on: str) -> None:
        """Show the metrics page and keep the workers running until a signal, then drain them."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._reread.set)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        with ExitStack() as closing:
            registry = aggregate(self._folder)
            registry.register(ProcessMetrics(self._options.listen.tls))
            closing.enter_context(self._options.page(registry, lambda: self.ready))
            keeping = keep_reading(self._reread, self._config, self._options.settings, self._renew, self._logs)
            reading = asyncio.create_task(keeping)
            closing.callback(reading.cancel)
            await self._run(listening_on)

    async def _run(self, listening_on: str) -> None:
        loop = asyncio.get_running_loop()
        ready: list[asyncio.Future[None]] = [loop.create_future() for _ in range(self._options.workers)]
        keepers = [asyncio.create_task(self._keep(worker, first)) for worker, first in enumerate(ready)]
        stopping = asyncio.create_task(self._stopping.wait())
        all_ready = asyncio.create_task(asyncio.wait(ready))
        await asyncio.wait([all_ready, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not self._stopping.is_set():
            print(f"mmpos_server listening on {listening_on}", flush=True)
            notify("READY=1")
        await stopping
        notify("STOPPING=1")
        patience = self._options.notice_seconds + self._options.drain_seconds + _WORKER_SECONDS
        await asyncio.wait(keepers, timeout=patience)
        self._signal(signal.SIGKILL)
        await asyncio.gather(*keepers)
        all_ready.cancel()
        ignore_signals()
        if self._failed:
            raise InvalidInputError("workers: got one that could not start, want its error above fixed")

    async def _renew(self, config: ServerConfig) -> None:
        """Let the workers reread settings that were checked here; each logs the result.

        Raises:
            InvalidInputError: the settings are wrong, which is reported once, and not by every worker.
        """
        await asyncio.to_thread(Profiles.from_config, config)
        for process in self._alive.values():
            # Not by a signal, which would end a worker that has not installed its handler yet.
            assert process.stdin is not None
            process.stdin.write(b"\n")

    def _stop(self) -> None:
        """Pass a signal on: the first one drains the workers, the second one ends them at once."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        for process in self._alive.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, worker: int, ready: asyncio.Future[None]) -> None:
        """Run a worker, and restart it whenever it dies."""
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            began = monotonic()
            code = await self._one(worker, ready)
            if self._stopping.is_set():
                return
            if not ready.done():
                # The worker has never served: a restart would fail again.
                self._failed = True
                self._stop()
                return
            pause = _FIRST_PAUSE if monotonic() - began > _YOUNG else min(2 * pause, _LONGEST_PAUSE)
            self._logs.error("worker died", worker=worker, exit_code=code, again_in_seconds=pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _one(self, worker: int, ready: asyncio.Future[None]) -> int:
        """Run one worker until it exits; returns its exit code."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mmpos_server", *self._words),
            stdin=asyncio.subprocess.PIPE,  # held open as long as this process lives
            stdout=asyncio.subprocess.PIPE,
            # A worker tells this process alone that it is ready: the service manager hears of all of them at once.
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._folder, "NOTIFY_SOCKET": ""},
            start_new_session=True,  # an interrupt of the terminal reaches the worker through this process, once
        )
        self._alive[process.pid] = process
        try:
            if self._stopping.is_set():  # while it was started
                process.terminate()
            assert process.stdout is not None
            async for _ in process.stdout:
                if not ready.done():
                    ready.set_result(None)
                self._serving.add(process.pid)
                self._logs.info("worker serves", worker=worker, process=process.pid)
            return await process.wait()
        finally:
            del self._alive[process.pid]
            self._serving.discard(process.pid)
            mark_process_dead(process.pid, self._folder)  # type: ignore[no-untyped-call]


async def keep_reading(
    asked: asyncio.Event,
    first: ServerConfig,
    read: Callable[[], ServerConfig],
    renew: Callable[[ServerConfig], Awaitable[None]],
    logs: Logs,
) -> None:
    """Reread the settings whenever a signal asks for it, until cancelled; wrong settings change nothing.

    Args:
        asked: set by the signal.
        first: settings of the start, of which concurrency and pools stay.
        read: returns the settings.
        renew: applies settings, or raises an error.
        logs: gets a line for each result.
    """
    while True:
        await asked.wait()
        asked.clear()
        try:
            config = await asyncio.to_thread(read)
            later = _later(first, config)
            await renew(config.model_copy(update={"concurrency": first.concurrency, "pools": first.pools}))
        except (MmposError, ImportError) as error:
            logs.error("settings stay as they were", reason=str(error))
        except Exception as error:  # any error: the next version must be read
            logs.error("settings stay as they were", error)
        else:
            logs.info("settings read", file=config.name, profiles=list(config.profiles), from_next_start=later)


def _later(first: ServerConfig, config: ServerConfig) -> list[str]:
    """Return the names of changed settings that apply from the next start on."""
    later = [
        f"{table}.{field}"
        for table in ("concurrency", "pools")
        for field, value in getattr(config, table)
        if getattr(getattr(first, table), field) != value
    ]
    # The transport has its limit from the start; only a lower one can be checked for each request.
    if config.limits.request_bytes > first.limits.request_bytes:
        later.append("limits.request_bytes")
    return later


# From malloc.h of glibc. Its largest allowed threshold on 64 bits is 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_BYTES, _TRIM_BYTES, _ARENAS = 32 * 2**20, 256 * 2**20, 4

_REST_SECONDS, _REST_SHARE = 5.0, 0.05
"""A process is at rest after so many seconds with at most this share of a processor."""
_GROWN_BYTES = 32 * 2**20
"""Growth of memory above which it is given back."""


def keep_large_blocks() -> bool:
    """Let malloc serve blocks up to 32 MiB from the heap and keep 256 MiB of it; for a process's entry point only.

    Otherwise page faults dominate large replies. Each arena keeps as much, and there are eight per core by default;
    the limit of four arenas bounds the memory that is kept.

    Returns:
        Whether the settings were applied: only glibc has them.
    """
    library = _glibc()
    if library is None:
        return False
    settings = {_M_MMAP_THRESHOLD: _MMAP_BYTES, _M_TRIM_THRESHOLD: _TRIM_BYTES, _M_ARENA_MAX: _ARENAS}
    return all(library.mallopt(name, value) for name, value in settings.items())


def give_back_at_rest(seconds: float = _REST_SECONDS) -> bool:
    """Start a thread that returns free memory to the system when the process rests; for its entry point only.

    After a peak far more is free than the arenas may keep, since free blocks between others count for no threshold.

    Args:
        seconds: length of a rest.

    Returns:
        Whether the thread was started: only glibc can return memory.
    """
    library = _glibc()
    if library is None:
        return False
    threading.Thread(target=_keep_giving_back, args=(library, seconds), name="mmpos-malloc", daemon=True).start()
    return True


def _keep_giving_back(library: ctypes.CDLL, seconds: float) -> None:
    with suppress(OSError):  # a system without /proc
        least, used = _resident_bytes(), process_time()
        while True:
            sleep(seconds)
            before, used = used, process_time()
            if used - before <= _REST_SHARE * seconds and _resident_bytes() > least + _GROWN_BYTES:
                library.malloc_trim(0)  # without the lock of Python
                least = _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, TypeError):  # no such library, as on Windows
        return None
