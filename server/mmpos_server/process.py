"""Run a server process from start to drain: handle signals, and exit in time."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from time import monotonic
from typing import NoReturn

from prometheus_client import values

from mmpos.errors import MmposError
from mmpos_server.app import Server
from mmpos_server.config import ServerConfig
from mmpos_server.flags import Flags
from mmpos_server.listening import Listen, warn
from mmpos_server.logs import Logs, logging_all
from mmpos_server.page import exposed

__all__ = ["CUT_OFF", "END_SECONDS", "FAILED", "announce", "leave", "notify", "serve", "work"]


FAILED, CUT_OFF = 1, 3
"""Exit status of a process that failed, and of one that ended while calls or threads were still running."""

DRAIN_SECONDS, LAST_SECONDS = 30.0, 3.0
"""Seconds that running calls may take after a signal, and seconds that each later step of the exit may take."""

END_SECONDS = DRAIN_SECONDS + 3 * LAST_SECONDS
"""Seconds after a signal in which the process ends in any case."""


def serve(flags: Flags) -> NoReturn:
    """Serve in this process until a signal, drain, and exit; a second signal ends the process at once.

    Raises:
        InvalidInputError: a setting is wrong, or an address is in use.
    """
    config, listen = flags.settings(), flags.address
    with logging_all(config.log_sample) as logs, ExitStack() as stack:
        server = _server(flags, listen, config, logs)
        if flags.page:
            stack.enter_context(exposed(server.metrics.registry, lambda: True, lambda: server.ready, *flags.page))
        _serve(server, logs, partial(announce, listen, logs))


def work(flags: Flags, listen: Listen, config: ServerConfig, pipe: Connection, number: int) -> NoReturn:
    """Serve as a worker until a signal, or until the supervisor has died, drain, and exit.

    The worker sends "" through the pipe when it answers calls, or the reason why it cannot.
    """
    gc.freeze()  # the garbage collector then does not touch memory that is shared with the parent process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal also sends SIGINT to the supervisor
    # Name files by the worker's number, so that the next process continues the previous one's files.
    values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]
    with logging_all(config.log_sample) as logs:
        try:
            _serve(_server(flags, listen, config, logs), logs, lambda _: pipe.send(""), pipe)
        except (MmposError, ImportError) as error:
            pipe.send(str(error))
        except Exception as error:
            logs.error("worker failed", error)
        leave(logs, FAILED)


def _server(flags: Flags, listen: Listen, config: ServerConfig, logs: Logs) -> Server:
    """Set up this process, and return its server, which ends the process when it no longer answers its own calls."""
    sys.setswitchinterval(0.001)  # seconds for which a thread that computes keeps the loop waiting
    # Every connection needs an open file.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the limit is higher than this system allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return Server(config, listen, logs=logs, rotations=flags.rotations, failed=partial(_fail, logs))


def _serve(
    server: Server, logs: Logs, started: Callable[[list[str]], None], parent: Connection | None = None
) -> NoReturn:
    """Serve from start to drain, and exit; the drain also begins when the parent's end of the pipe is closed."""
    asyncio.run(_run(server, logs, started, parent))
    end = monotonic() + LAST_SECONDS
    for thread in _pool_threads():
        thread.join(max(0.0, end - monotonic()))
    if _pool_threads():
        _cut_off(logs)
    _send_spans()
    logs.info("stopped")
    leave(logs, 0)


def _send_spans() -> None:
    """Send the last spans of opentelemetry-instrument, which sends them in batches, unless their collector is slow."""
    if "opentelemetry.sdk.trace" in sys.modules:
        from opentelemetry.trace import get_tracer_provider

        if flush := getattr(get_tracer_provider(), "force_flush", None):
            sending = threading.Thread(target=flush, daemon=True)
            sending.start()
            sending.join(LAST_SECONDS)


async def _run(server: Server, logs: Logs, started: Callable[[list[str]], None], parent: Connection | None) -> None:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            logs.warning("ended by a second signal")
            leave(logs, CUT_OFF)
        stopping.set()

    def orphaned() -> None:
        assert parent is not None
        loop.remove_reader(parent)
        shutil.rmtree(os.environ["PROMETHEUS_MULTIPROC_DIR"], ignore_errors=True)  # the supervisor's folder
        stopping.set()

    addresses = await server.start()
    loop.add_signal_handler(signal.SIGTERM, stop)
    if parent is None:
        loop.add_signal_handler(signal.SIGINT, stop)
    else:
        loop.add_reader(parent, orphaned)
    try:
        started(addresses)
    except OSError as error:
        _fail(logs, f"the address cannot be announced: {error}")
    await stopping.wait()
    if parent is None:
        notify("STOPPING=1")
    logs.info("draining", seconds=DRAIN_SECONDS)
    signal.alarm(round(END_SECONDS))  # ends the process even if the loop hangs
    try:
        await asyncio.wait_for(server.stop(DRAIN_SECONDS), DRAIN_SECONDS + LAST_SECONDS)
    except Exception as error:
        logs.error("stop failed", error)
        _cut_off(logs)


def announce(listen: Listen, logs: Logs, addresses: list[str]) -> None:
    """Print a line for each address, log warnings, and tell the service manager that the server is ready.

    Raises:
        OSError: a line cannot be written, or the service manager cannot be reached.
    """
    warn(listen, logs)
    for listening_on in addresses:
        print(f"mmpos_server listening on {listening_on}", flush=True)
    notify("READY=1")


def notify(state: str) -> None:
    """Send a state such as ``READY=1`` to the service manager, if there is one."""
    if path := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)


def leave(logs: Logs, status: int) -> NoReturn:
    """Exit at once, without waiting for threads or Python's last garbage collection, which takes seconds with torch."""
    logs.close()
    os._exit(status)


def _fail(logs: Logs, reason: str) -> NoReturn:
    logs.error("server failed", reason=reason)
    leave(logs, FAILED)


def _pool_threads() -> list[threading.Thread]:
    """Return the threads of the server's pools that have not ended; their names end with numbers."""
    return [thread for thread in threading.enumerate() if re.fullmatch(r"mmpos-\w+_\d+", thread.name)]


def _cut_off(logs: Logs) -> NoReturn:
    """Log the tracebacks of the running threads and exit, since Python cannot stop a thread."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        logs.error("cut off", threads=[thread.name for thread in _pool_threads()], traceback=file.read())
    leave(logs, CUT_OFF)
