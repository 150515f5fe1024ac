"""Run worker processes that share a port; a supervisor starts, replaces and drains them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from math import inf
from multiprocessing.connection import wait
from time import monotonic
from typing import Any, NoReturn

from prometheus_client.multiprocess import mark_process_dead

from mmpos.errors import InvalidInputError, MmposError
from mmpos_server.config import ServerConfig
from mmpos_server.flags import Flags
from mmpos_server.listening import Listen, address, bind
from mmpos_server.logs import Logs
from mmpos_server.metrics import aggregate
from mmpos_server.page import exposed
from mmpos_server.process import CUT_OFF, END_SECONDS, FAILED, announce, leave, notify, work

__all__ = ["supervise"]

PAUSE_SECONDS, RESTART_SECONDS = 0.5, 5.0
"""Seconds after which a dead worker is replaced, and for which it may be missing while the server counts as ready."""


def supervise(flags: Flags) -> NoReturn:
    """Serve with several processes until a signal, drain them, and exit.

    Any failure ends all processes with status 1; the workers drain when the supervisor dies.

    Raises:
        InvalidInputError: a setting is wrong, the port is in use, or a worker could not start.
    """
    config, listen = flags.settings(), flags.address
    with closing(Logs(sample=config.log_sample)) as logs, ExitStack() as stack:
        # Bind first without sharing the port, since two servers that both share it would not notice each other.
        bind(listen.host, listen.port).close()
        reserved = stack.enter_context(bind(listen.host, listen.port, reuse_port=True))
        listen = replace(listen, port=reserved.getsockname()[1], reuse_port=True)
        folder = tempfile.TemporaryDirectory(prefix="mmpos-metrics-")
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = stack.enter_context(folder)
        supervisor = _Supervisor(flags, listen, config, logs)
        if flags.page:
            registry = aggregate(folder.name, lambda: [process.pid for process in supervisor.processes], listen.tls)
            stack.enter_context(exposed(registry, supervisor.is_live, supervisor.is_ready, *flags.page))
        try:
            supervisor.run()
        except BaseException as error:
            supervisor.send(signal.SIGKILL)
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
    """Keeps the workers running, which are forked from a process without threads and with gRPC not initialised."""

    def __init__(self, flags: Flags, listen: Listen, config: ServerConfig, logs: Logs) -> None:
        self._arguments, self._listen, self._logs = (flags, listen, config), listen, logs
        self._workers = [_Worker(number) for number in range(flags.workers)]
        self.status, self._ends, self._step = 0, inf, monotonic()  # the processes that are left are killed at _ends
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["mmpos_server.process", "mmpos_server.services"])

    @property
    def processes(self) -> list[Any]:
        return [process for process in [worker.process for worker in self._workers] if process]

    def send(self, number: int) -> None:
        for process in self.processes:  # by pid: Process sends none if the process that forked the worker has ended
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def is_live(self) -> bool:
        return monotonic() - self._step < 5.0

    def is_ready(self) -> bool:
        return self._ends == inf and all(w.served and monotonic() - w.missing < RESTART_SECONDS for w in self._workers)

    def run(self) -> None:
        signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: signals.append(number))
        while self._ends == inf or self.processes:
            self._step = monotonic()
            for worker in self._workers:
                if not worker.process and worker.due <= self._step and self._ends == inf:
                    worker.pipe, theirs = self._context.Pipe()
                    process = self._context.Process(target=work, args=(*self._arguments, theirs, worker.number))
                    process.start()
                    theirs.close()
                    worker.process = process
            pipes = {worker.pipe: worker for worker in self._workers if worker.process}
            for pipe in wait(list(pipes), 0.1):
                self._receive(pipes[pipe])
            while signals and signals.pop():  # a second ends the workers at once, and so does one before they serve
                if self._ends == inf:
                    self._ends = monotonic() + END_SECONDS
                    notify("STOPPING=1")
                self.send(signal.SIGTERM)
            if self._step > self._ends:
                self.send(signal.SIGKILL)

    def _receive(self, worker: _Worker) -> None:
        try:
            failure = worker.pipe.recv()
        except (EOFError, OSError):
            return self._ended(worker)
        if failure and not worker.served:  # another process would fail, too
            raise InvalidInputError(failure)
        if failure:
            return self._logs.error("worker cannot start", worker=worker.number, reason=failure)
        first, worker.served, worker.missing = not worker.served, True, inf
        self._logs.info("worker serves", worker=worker.number, process=worker.process.pid)
        if first and all(other.served for other in self._workers):
            announce(self._listen, self._logs, [address(self._listen.host, self._listen.port)])
        return None

    def _ended(self, worker: _Worker) -> None:
        worker.process.join()
        worker.pipe.close()
        code, worker.process = worker.process.exitcode, None
        mark_process_dead(worker.number)  # type: ignore[no-untyped-call]
        if self._ends == inf:
            self._logs.error("worker died", worker=worker.number, exit_code=code)
            if not worker.served:
                raise InvalidInputError("--workers: a worker could not start; its error is above")
            worker.missing, worker.due = min(worker.missing, monotonic()), monotonic() + PAUSE_SECONDS
        elif code == CUT_OFF:
            self.status = CUT_OFF
