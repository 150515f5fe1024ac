"""Several processes behind one port: the supervisor holds it, starts them, and starts again those that die."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from time import monotonic
from typing import TYPE_CHECKING

from prometheus_client.multiprocess import mark_process_dead

from mmpos.errors import InvalidInputError
from mmpos_server.launch import Options, ignore_signals
from mmpos_server.listening import address, bind, bind_http, warn
from mmpos_server.logs import Logs, logging_all
from mmpos_server.metrics import About, aggregate
from mmpos_server.page import Page
from mmpos_server.profiles import Profiles
from mmpos_server.reloading import keep_reading
from mmpos_server.systemd import notify
from mmpos_server.tokens import Tokens

if TYPE_CHECKING:
    from mmpos_server.config import ServerConfig

__all__ = ["supervise"]

# A worker that dies within this time is started again later and later.
_YOUNG, _FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 0.1, 10.0
# Beyond the notice and the drain, for the processes to end.
_LAST_SECONDS = 5.0


def supervise(options: Options, arguments: Sequence[str]) -> None:
    """Serve with several processes until SIGTERM or SIGINT, and then until all have drained.

    Args:
        options: of the command line.
        arguments: its words, from which those of the workers follow.

    Raises:
        InvalidInputError: a setting is wrong, the port is taken, or a worker could not start and has said why.
    """
    if options.listen.uds:
        raise InvalidInputError(
            f"workers: got {options.workers} with --uds, want 1: processes can share a port, but not a unix socket"
        )
    with logging_all(options.log_level, options.log_format, core=False) as logs:
        _supervise(options, arguments, logs)


def _supervise(options: Options, arguments: Sequence[str], logs: Logs) -> None:
    listen = options.listen
    # What is wrong with a file is said once, and not by every worker.
    config = options.settings()
    Profiles.from_config(config)
    options.memory()
    if listen.tls:
        listen.tls.read()
    if listen.token_file:
        Tokens(listen.token_file, logs)
    warn(listen, logs)
    # Without sharing first: with it, two servers that both share would not see each other.
    bind(listen.host, listen.port).close()
    if listen.http_port is not None:
        bind_http(listen).close()
    with ExitStack() as held:
        reserved = held.enter_context(bind(listen.host, listen.port, reuse_port=True))
        port = reserved.getsockname()[1]
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="mmpos-metrics-"))
        # The last of an option counts.
        words = [*arguments, "--port", str(port), "--workers", "1", "--metrics-port", "0", "--worker"]
        asyncio.run(_Supervisor(options, config, words, folder, logs).run(address(listen.host, port)))


class _Supervisor:
    """The workers of one server."""

    def __init__(self, options: Options, config: ServerConfig, words: Sequence[str], folder: str, logs: Logs) -> None:
        self._options, self._config, self._words, self._folder, self._logs = options, config, words, folder, logs
        self._alive: dict[int, asyncio.subprocess.Process] = {}
        self._serving: set[int] = set()
        self._stopping, self._reread = asyncio.Event(), asyncio.Event()
        self._failed = False

    @property
    def ready(self) -> bool:
        """Whether a worker takes calls; from any thread."""
        return bool(self._serving) and not self._stopping.is_set()

    async def run(self, place: str) -> None:
        """Show the page, and keep the workers until a signal comes, then let them drain."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._reread.set)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        with ExitStack() as closing:
            registry = aggregate(self._folder)
            registry.register(About(self._options.listen.tls))
            closing.enter_context(self._options.page(Page(registry, loop, lambda: self.ready)))
            keeping = keep_reading(self._reread, self._config, self._options.settings, self._renew, self._logs)
            reading = asyncio.create_task(keeping)
            closing.callback(reading.cancel)
            await self._run(place)

    async def _run(self, place: str) -> None:
        loop = asyncio.get_running_loop()
        ready: list[asyncio.Future[None]] = [loop.create_future() for _ in range(self._options.workers)]
        keepers = [asyncio.create_task(self._keep(worker, first)) for worker, first in enumerate(ready)]
        stopping = asyncio.create_task(self._stopping.wait())
        all_ready = asyncio.create_task(asyncio.wait(ready))
        await asyncio.wait([all_ready, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not self._stopping.is_set():
            print(f"mmpos_server listening on {place}", flush=True)
            notify("READY=1")
        await stopping
        notify("STOPPING=1")
        patience = self._options.notice_seconds + self._options.drain_seconds + _LAST_SECONDS
        await asyncio.wait(keepers, timeout=patience)
        self._signal(signal.SIGKILL)
        await asyncio.gather(*keepers)
        all_ready.cancel()
        ignore_signals()
        if self._failed:
            raise InvalidInputError("workers: got one that could not start, want what it says above to be mended")

    async def _renew(self, config: ServerConfig) -> None:
        """Have the workers read settings that are right; each says what it makes of them.

        Raises:
            InvalidInputError: they are wrong, which is said once, and not by every worker.
        """
        await asyncio.to_thread(Profiles.from_config, config)
        for process in self._alive.values():
            # Not by a signal, which would end a worker that is not ready for it yet.
            assert process.stdin is not None
            process.stdin.write(b"\n")

    def _stop(self) -> None:
        """The first signal drains the workers, the next one ends them at once: they count, too."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        for process in self._alive.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, worker: int, ready: asyncio.Future[None]) -> None:
        """One worker after the other in the same place."""
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            began = monotonic()
            code = await self._one(worker, ready)
            if self._stopping.is_set():
                return
            if not ready.done():
                # It has never served: starting it again would fail again.
                self._failed = True
                self._stop()
                return
            pause = _FIRST_PAUSE if monotonic() - began > _YOUNG else min(2 * pause, _LONGEST_PAUSE)
            self._logs.error("worker died", worker=worker, exit_code=code, again_in_seconds=pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _one(self, worker: int, ready: asyncio.Future[None]) -> int:
        """Run one worker until it ends; gives its exit code."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mmpos_server", *self._words),
            stdin=asyncio.subprocess.PIPE,  # held open as long as this process lives
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._folder},
            start_new_session=True,  # a terminal's interrupt comes through this process, once
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
