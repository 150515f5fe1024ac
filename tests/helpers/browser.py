"""A headless Chromium, driven through the DevTools protocol: open pages, run scripts, collect console errors."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT = 60.0  # timeout of each step, in seconds


class Page:
    """One tab.

    Args:
        socket: connection to the tab's DevTools.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loaded = asyncio.Event()
        self._listener = asyncio.create_task(self._listen())

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a protocol method and return its result."""
        number = len(self._answers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(self._answers[number], WAIT)

    async def open(self, address: str, width: int = 1400, dark: bool = False) -> None:
        """Open an address in a window of this width, and wait until it has loaded."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded.clear()
        await self.call("Page.navigate", url=address)
        await asyncio.wait_for(self._loaded.wait(), WAIT)

    async def evaluate(self, script: str) -> Any:
        """Evaluate a JavaScript expression, await its promise, and return its value."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"]["exception"].get("description", script))
        return result["result"].get("value")

    async def _listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            method, parameters = event.get("method"), event.get("params", {})
            if "id" in event:
                future = self._answers[event["id"]]
                if "error" in event:
                    future.set_exception(AssertionError(event["error"]["message"]))
                else:
                    future.set_result(event["result"])
            elif method == "Page.loadEventFired":
                self._loaded.set()
            elif method == "Runtime.exceptionThrown":
                self.errors.append(str(parameters["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
                self.errors.append(str(parameters["args"]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                self.errors.append(str(parameters["entry"]))


@asynccontextmanager
async def new_page(folder: Path) -> AsyncIterator[Page]:
    """Start Chromium with an empty profile folder, and open a tab while the context is open."""
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    offline = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [CHROMIUM, *flags, *offline, f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = await _port(folder / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                targets = await response.json(content_type=None)
            (address,) = (target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.kill()
        process.wait()


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    """Wait for the file that contains the port of Chromium's DevTools, and return the port."""
    async with asyncio.timeout(WAIT):
        while not (file.exists() and (lines := file.read_text().splitlines())):
            assert process.poll() is None, "chromium did not start"
            await asyncio.sleep(0.05)
    return int(lines[0])


def run(folder: Path, steps: Callable[[Page], Any]) -> Any:
    """Run ``steps``, a coroutine function that takes a page, in a new Chromium."""

    async def all_steps() -> Any:
        async with new_page(folder) as page:
            return await steps(page)

    return asyncio.run(all_steps())
