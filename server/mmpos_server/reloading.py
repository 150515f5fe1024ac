"""Settings that are read again when SIGHUP says so, of which wrong ones change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from mmpos.errors import MmposError

if TYPE_CHECKING:
    from mmpos_server.config import ServerConfig
    from mmpos_server.logs import Logs

__all__ = ["keep_reading"]


async def keep_reading(
    asked: asyncio.Event,
    first: ServerConfig,
    read: Callable[[], ServerConfig],
    renew: Callable[[ServerConfig], Awaitable[None]],
    logs: Logs,
) -> None:
    """Read the settings whenever it is asked for, one time after the other, until cancelled.

    Args:
        asked: set by the signal.
        first: the settings of the start, of which concurrency and pools stay.
        read: gives the settings.
        renew: takes them, or raises what is wrong with them.
        logs: where it is written what became of them.
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
        except Exception as error:  # whatever it is: the next version must be read
            logs.error("settings stay as they were", error)
        else:
            logs.info("settings read", file=config.name, profiles=list(config.profiles), from_next_start=later)


def _later(first: ServerConfig, config: ServerConfig) -> list[str]:
    """The settings that count from the next start on."""
    later = [
        f"{table}.{field}"
        for table in ("concurrency", "pools")
        for field, value in getattr(config, table)
        if getattr(getattr(first, table), field) != value
    ]
    # The transport was told at the start how much it may read; less than that is compared with each request.
    if config.limits.request_bytes > first.limits.request_bytes:
        later.append("limits.request_bytes")
    return later
