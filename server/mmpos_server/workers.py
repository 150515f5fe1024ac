"""Run worker processes that share a port; a supervisor starts, watches, replaces and drains them."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from threading import Lock, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, NoReturn

from prometheus_client import values
from prometheus_client.multiprocess import mark_process_dead

from mmpos.errors import InvalidInputError, MmposError
from mmpos_server.access import TokenFile
from mmpos_server.config import Profiles, ServerConfig
from mmpos_server.flags import Flags
from mmpos_server.launch import Running, leave, prepare
from mmpos_server.listening import Listen, address, bind, notify, warn
from mmpos_server.telemetry import Logs, aggregate, logging_all

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

__all__ = ["supervise"]


_METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"

_YOUNG_SECONDS, _FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 0.1, 1.0
"""Bounds in seconds of the pause before a crashed worker is restarted; the pause doubles with each early crash."""

_WORKER_SECONDS = 5.0
"""Seconds within which workers must exit after the notice and the drain."""

_BEAT_SECONDS, _MOST_SILENCE = 1.0, 10
"""Seconds between a worker's heartbeats, and the number of missed heartbeats after which the worker is replaced."""

_STOP = "stop"


def supervise(options: Flags) -> None:
    """Serve with several processes until SIGTERM or SIGINT, and then until all of them have drained.

    Args:
        options: the command-line flags.

    Raises:
        InvalidInputError: a setting is wrong, the port is in use, or a worker could not start.
    """
    listen = options.listen
    if listen.uds:
        raise InvalidInputError(
            f"--uds cannot be combined with {options.workers} workers: processes cannot share a unix socket"
        )
    # The supervisor does not use gRPC's C++ core, so there are no lines of it to relay.
    with logging_all(options.log_level, core=False) as logs, ExitStack() as stack:
        # Report errors in files once instead of once per worker.
        config = options.settings()
        Profiles.from_config(config)
        if listen.tls:
            listen.tls.read()
        if listen.token_file:
            TokenFile(listen.token_file, logs)
        warn(listen, logs)
        # Bind first without sharing the port, since two servers that both share it would not notice each other.
        bind(listen.host, listen.port).close()
        reserved = stack.enter_context(bind(listen.host, listen.port, reuse_port=True))
        shared = replace(listen, port=reserved.getsockname()[1], reuse_port=True)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mmpos-metrics-"))
        stack.callback(os.close, _use(folder))
        os.environ[_METRICS_FOLDER] = folder  # before the process from which the workers are forked starts
        stack.callback(os.environ.pop, _METRICS_FOLDER)
        _Supervisor(options, shared, config, folder, logs).run()


@dataclass
class _Worker:
    """A supervisor's slot for a worker, which holds one process after another."""

    number: int
    due: float = 0.0
    """Time at which to start the next process."""
    pause: float = _FIRST_PAUSE
    process: BaseProcess | None = None
    pipe: Connection | None = None
    began: float = 0.0
    silent: int = 0
    """Number of missed heartbeats."""
    ready: bool = False
    serving: bool = False
    """Whether the process has accepted calls and must therefore drain before it stops."""
    served: bool = False
    """Whether any process of this slot has accepted calls."""
    failure: str | None = None
    """Error that the process reported before it ended."""


class _Supervisor:
    """Supervisor of the workers of one server."""

    def __init__(self, options: Flags, listen: Listen, config: ServerConfig, folder: str, logs: Logs) -> None:
        self._options, self._listen, self._config = options, listen, config
        self._folder, self._logs = folder, logs
        self._workers = [_Worker(number) for number in range(options.workers)]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["mmpos_server.workers", "mmpos_server.services"])
        self._last_step = self._ticked = monotonic()
        self._announced = False
        self._ends = float("inf")
        """Time at which to kill the remaining workers; infinity until the stop."""
        self._failure: str | None = None

    @property
    def live(self) -> bool:
        """Whether the supervisor is still running its checks. This is thread-safe."""
        return monotonic() - self._last_step < 5.0

    @property
    def ready(self) -> bool:
        """Whether any worker accepts calls. This is thread-safe."""
        return any(worker.ready for worker in self._workers) and not self._stopping

    @property
    def _stopping(self) -> bool:
        return self._ends < float("inf")

    def run(self) -> None:
        """Serve the metrics page and keep the workers running until a signal, then drain them.

        Raises:
            InvalidInputError: a worker could not start.
        """
        signals = _catch_signals()
        with self._options.page(aggregate(self._folder), lambda: self.live, lambda: self.ready):
            while not self._stopping or any(worker.process for worker in self._workers):
                self._step(signals)
        if self._failure:
            raise InvalidInputError(self._failure)

    def _step(self, signals: int) -> None:
        """Start workers, wait briefly, and handle signals, messages and exited processes."""
        now = self._last_step = monotonic()
        for worker in self._workers:
            if worker.process is None and worker.due <= now and not self._stopping:
                self._start(worker)
        by_pipe = {worker.pipe: worker for worker in self._workers if worker.pipe is not None}
        due = [worker.due for worker in self._workers if worker.process is None and not self._stopping]
        pause = min([_BEAT_SECONDS, *(max(0.0, when - now) for when in due)])
        for readable in wait([*by_pipe, signals], pause):
            if isinstance(readable, Connection):
                self._receive(by_pipe[readable])
            else:
                for _ in os.read(signals, 64):
                    self._stop()
        if monotonic() - self._ticked >= _BEAT_SECONDS:
            self._ticked = monotonic()
            self._tick()

    def _tick(self) -> None:
        """Count missed heartbeats, except while this process itself was suspended."""
        for worker in self._workers:
            if worker.process is None:
                continue
            worker.silent += 1
            if worker.silent == _MOST_SILENCE:
                self._logs.error("worker hangs", worker=worker.number, process=worker.process.pid)
            if worker.silent >= _MOST_SILENCE or monotonic() > self._ends:
                _kill(worker)

    def _start(self, worker: _Worker) -> None:
        ours, theirs = self._context.Pipe()
        arguments = self._options, self._listen, self._config, theirs, worker.number, self._folder
        process = self._context.Process(target=_work, args=arguments, name=f"mmpos-worker-{worker.number}")
        try:
            process.start()
        except (OSError, EOFError) as error:  # no memory or descriptors left
            ours.close()
            self._logs.error("worker cannot be started", error, worker=worker.number)
            worker.due = monotonic() + _LONGEST_PAUSE
        else:
            worker.process, worker.pipe, worker.began = process, ours, monotonic()
            worker.silent, worker.serving, worker.failure = 0, False, None
        finally:
            theirs.close()

    def _receive(self, worker: _Worker) -> None:
        """Handle a worker's message (that it accepts calls, or why it cannot start) or the end of its process."""
        assert worker.pipe is not None
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self._ended(worker)
            return
        if isinstance(message, str):
            worker.failure = message
            return
        worker.silent = 0
        if message and not worker.serving:
            assert worker.process is not None
            worker.serving = worker.served = True
            self._logs.info("worker serves", worker=worker.number, process=worker.process.pid)
        worker.ready = message
        if not self._announced and not self._stopping and all(other.served for other in self._workers):
            self._announced = True
            print(f"mmpos_server listening on {address(self._listen.host, self._listen.port)}", flush=True)
            notify("READY=1")

    def _ended(self, worker: _Worker) -> None:
        process, pipe = worker.process, worker.pipe
        assert process is not None
        assert pipe is not None
        process.join(1.0)
        pipe.close()
        worker.process = worker.pipe = None
        worker.ready = False
        mark_process_dead(worker.number, self._folder)  # type: ignore[no-untyped-call]
        if self._stopping:
            return
        if not worker.served:
            # A restart would fail again.
            self._failure = worker.failure or "workers: a worker could not start, see its error above"
            self._stop()
            return
        if monotonic() - worker.began > _YOUNG_SECONDS:
            worker.pause = _FIRST_PAUSE
        details = {"worker": worker.number, "exit_code": process.exitcode, "again_in_seconds": worker.pause}
        self._logs.error("worker died", None, **details, **({"reason": worker.failure} if worker.failure else {}))
        worker.due, worker.pause = monotonic() + worker.pause, min(2 * worker.pause, _LONGEST_PAUSE)

    def _stop(self) -> None:
        """Drain the workers; a second call ends them immediately."""
        if not self._stopping:
            notify("STOPPING=1")
            self._ends = monotonic() + self._options.notice_seconds + self._options.drain_seconds + _WORKER_SECONDS
        for worker in self._workers:
            if not worker.serving:
                _kill(worker)
            elif worker.pipe is not None:
                with suppress(OSError):  # the process has just ended
                    worker.pipe.send(_STOP)


def _kill(worker: _Worker) -> None:
    """Kill a worker; its process id is not reused while its pipe is open."""
    if worker.process is not None and worker.process.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGKILL)


def _catch_signals() -> int:
    """Return the descriptor of a pipe that delivers a byte for each signal."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return reading


def _work(options: Flags, listen: Listen, config: ServerConfig, pipe: Connection, number: int, folder: str) -> NoReturn:
    """Serve as a worker until the supervisor stops this process or ends."""
    used = _use(folder)
    gc.freeze()  # the garbage collector then does not touch memory that is shared with the parent process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal also sends SIGINT to the supervisor
    # Name files by the worker's number, so that the next process continues the previous one's files.
    values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]
    prepare()
    sending = Lock()

    def report(message: bool | str) -> None:
        with sending, suppress(OSError):
            pipe.send(message)

    with logging_all(options.log_level) as logs:
        beating: list[Running] = []
        Thread(target=_beat, args=(beating, report), name="mmpos-beat", daemon=True).start()
        try:
            running = Running(options, listen, config, logs)
            beating.append(running)
            Thread(target=_follow, args=(pipe, running), name="mmpos-supervisor", daemon=True).start()

            def started(_: list[str]) -> None:
                signal.signal(signal.SIGTERM, lambda *_: running.stop())
                report(True)

            running.run(started)
        except (MmposError, ImportError) as error:
            report(str(error))
        except Exception as error:
            logs.error("worker failed", error)
    with suppress(BlockingIOError):  # the supervisor or other workers still use the folder
        fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    leave()


def _use(folder: str) -> int:
    """Open the metrics folder with a shared lock, so that the last process that uses it can remove it."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _beat(beating: list[Running], report: Callable[[bool | str], None]) -> None:
    """Report once per second whether the worker accepts calls."""
    while True:
        sleep(_BEAT_SECONDS)
        if all(running.live for running in beating):
            report(any(running.server.ready for running in beating))


def _follow(pipe: Connection, running: Running) -> None:
    """Stop when the supervisor asks for it, at each request, and when it has ended."""
    while True:
        try:
            pipe.recv()
        except (EOFError, OSError):
            running.stop()
            return
        running.stop()
