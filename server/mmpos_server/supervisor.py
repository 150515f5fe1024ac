"""Run worker processes that share a port; a supervisor starts, replaces and drains them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from math import inf
from multiprocessing.connection import wait
from time import monotonic
from typing import Any, NoReturn

from prometheus_client.multiprocess import mark_process_dead

from mmpos.errors import InvalidInputError, MmposError
from mmpos_server.config import ServerConfig
from mmpos_server.flags import Flags
from mmpos_server.listening import Listen, address, bind, split, warn
from mmpos_server.logs import Logs
from mmpos_server.metrics import aggregate
from mmpos_server.page import exposed
from mmpos_server.process import CUT_OFF, END_SECONDS, FAILED, announce, leave, notify, work

__all__ = ["supervise"]

PAUSE_SECONDS, RESTART_SECONDS = 0.5, 5.0
"""Seconds after which a dead worker is replaced, and for which it may be missing while the server counts as ready."""


def supervise(flags: Flags) -> NoReturn:
    """Serve with several processes until SIGTERM or SIGINT, and then until all of them have drained, and exit.

    Any failure of the supervisor ends all processes with status 1; the workers drain when it dies.

    Raises:
        InvalidInputError: a setting is wrong, the port is in use, or a worker could not start.
    """
    config, listen = flags.settings(), flags.address
    with closing(Logs(sample=config.log_sample)) as logs, ExitStack() as stack:
        # Bind first without sharing the port, since two servers that both share it would not notice each other.
        bind(listen.host, listen.port).close()
        reserved = stack.enter_context(bind(listen.host, listen.port, reuse_port=True))
        listen = replace(listen, port=reserved.getsockname()[1], reuse_port=True)
        warn(listen, logs)
        # The process from which the workers are forked inherits this.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mmpos-metrics-"))
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        supervisor = _Supervisor((flags, listen, config), logs)
        if flags.metrics:
            registry = aggregate(folder, supervisor.pids, listen.tls)
            page = split("--metrics", flags.metrics)
            stack.enter_context(exposed(registry, supervisor.is_live, supervisor.is_ready, *page))
        try:
            supervisor.run()
        except BaseException as error:
            supervisor.kill()
            if isinstance(error, MmposError):
                raise
            logs.error("supervisor failed", error)
            supervisor.status = FAILED
    leave(logs, supervisor.status)


@dataclass
class _Worker:
    """A slot for a worker, which holds one process after another."""

    number: int
    process: Any = None
    pipe: Any = None  # on which the process sends "" when it answers calls, or why it cannot start
    due: float = 0.0  # when to start the next process
    missing: float = 0.0  # since when it has not answered calls; infinity while it does
    served: bool = False  # whether any of its processes has answered calls


class _Supervisor:
    """Supervisor of the workers of one server."""

    def __init__(self, arguments: tuple[Flags, Listen, ServerConfig], logs: Logs) -> None:
        self._arguments, self._logs = arguments, logs
        self.workers = [_Worker(number) for number in range(arguments[0].workers)]
        self.status, self._ends, self._step = 0, inf, monotonic()  # the workers that are left are killed at _ends
        # The workers are forked from a process that has no threads and has not initialised gRPC.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["mmpos_server.process", "mmpos_server.services"])

    def is_live(self) -> bool:
        """Return whether the supervisor is running. This is thread-safe."""
        return monotonic() - self._step < RESTART_SECONDS

    def is_ready(self) -> bool:
        """Return whether no worker is missing for longer than a restart takes. This is thread-safe."""
        latest = monotonic() - RESTART_SECONDS
        return self._ends == inf and all(worker.served and worker.missing > latest for worker in self.workers)

    def pids(self) -> list[int]:
        """Return the ids of the worker processes. This is thread-safe."""
        return [process.pid for process in [worker.process for worker in self.workers] if process]

    def kill(self) -> None:
        """End all workers at once."""
        for worker in self.workers:
            if worker.process:
                worker.process.kill()

    def run(self) -> None:
        """Keep the workers running until a signal, then drain them.

        Raises:
            InvalidInputError: a worker could not start.
        """
        signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: signals.append(number))
        while self._ends == inf or any(worker.process for worker in self.workers):
            self._step = monotonic()
            for worker in self.workers:
                if not worker.process and worker.due <= self._step and self._ends == inf:
                    self._start(worker)
            pipes = {worker.pipe: worker for worker in self.workers if worker.process}
            for pipe in wait(list(pipes), 0.1):
                self._receive(pipes[pipe])
            while signals:
                signals.pop()
                self._stop()
            if self._step > self._ends:
                self.kill()

    def _start(self, worker: _Worker) -> None:
        worker.pipe, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(*self._arguments, theirs, worker.number))
        process.start()
        theirs.close()
        worker.process = process

    def _receive(self, worker: _Worker) -> None:
        """Handle a worker's message, or the end of its process."""
        try:
            failure = worker.pipe.recv()
        except (EOFError, OSError):
            self._ended(worker)
            return
        if failure:
            if not worker.served:  # another process would fail, too
                raise InvalidInputError(failure)
            self._logs.error("worker cannot start", worker=worker.number, reason=failure)
            return
        first, worker.served, worker.missing = not worker.served, True, inf
        self._logs.info("worker serves", worker=worker.number, process=worker.process.pid)
        if first and all(other.served for other in self.workers):
            _, listen, _ = self._arguments
            announce([address(listen.host, listen.port)])

    def _ended(self, worker: _Worker) -> None:
        worker.process.join()
        worker.pipe.close()
        code, worker.process = worker.process.exitcode, None
        mark_process_dead(worker.number)  # type: ignore[no-untyped-call]
        if self._ends < inf:
            self.status = CUT_OFF if code == CUT_OFF else self.status
            return
        self._logs.error("worker died", worker=worker.number, exit_code=code)
        if not worker.served:
            raise InvalidInputError("--workers: a worker could not start; its error is above")
        worker.missing = min(worker.missing, monotonic())
        worker.due = monotonic() + PAUSE_SECONDS

    def _stop(self) -> None:
        """Drain the workers; a second call ends them at once, and so does a call before they answer calls."""
        if self._ends == inf:
            self._ends = monotonic() + END_SECONDS
            notify("STOPPING=1")
        for worker in self.workers:
            if worker.process:
                worker.process.terminate()
