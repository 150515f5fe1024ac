"""A stream that is waited for: the caller's thread reads its items, and threads of the stream do the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import grpc

from mmpos.client.failures import error_of
from mmpos.client.options import Metadata
from mmpos.client.streams import Window, no_answer
from mmpos.errors import MmposError

Q = TypeVar("Q")
T = TypeVar("T")

_END: Any = object()


class Link:
    """A stream that is open: requests are written and answers read by threads of its own, so that neither waits."""

    def __init__(self, opened: Any, metadata: Metadata) -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._call = opened(iter(self._requests.get, None), metadata=metadata)
        threading.Thread(target=self._read, name="mmpos-stream", daemon=True).start()

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
            self._answers.put(None)
        except grpc.RpcError as error:
            self._answers.put(error_of(error))

    @property
    def ready(self) -> bool:
        """Whether ``receive`` would not wait."""
        return not self._answers.empty()

    def send(self, request: bytes) -> None:
        """Have a request written."""
        self._requests.put(request)

    def finish(self) -> None:
        """No request follows."""
        self._requests.put(None)

    def receive(self, timeout: float) -> Any:
        """The next answer, None for the end, or the error that ended the stream."""
        try:
            return self._answers.get(timeout=timeout)
        except Empty:
            return no_answer(timeout)

    def close(self) -> None:
        """Cancel the stream, unless it has ended."""
        self.finish()
        self._call.cancel()


def _opened(connect: Callable[[], Link], window: Window[Any, Any], more: bool) -> Link:
    """A new stream on which all that has no answer was sent."""
    link = connect()
    for request in window.requests():
        link.send(request)
    if not more:
        link.finish()
    return link


def results(window: Window[Q, T], items: Iterator[Q], connect: Callable[[], Link], timeout: float) -> Iterator[T]:
    """The results of the items, in order, while later ones are on their way; closing it cancels the stream."""
    link: Link | None = None
    more = True
    try:
        while more or len(window):
            if window.refused:
                yield window.result()
            elif more and not window.full and (link is None or not link.ready):
                item = next(items, _END)
                more = item is not _END
                if link is not None and link.ready and not len(window):
                    link.close()  # it ended while nothing was under way
                    link = None
                request = window.add(item) if more else None
                if link is None:
                    link = _opened(connect, window, more) if request is not None else None
                elif request is not None:
                    link.send(request)
                elif not more:
                    link.finish()
            else:
                link = link or _opened(connect, window, more)
                answer = link.receive(timeout)
                if answer is None or isinstance(answer, MmposError):
                    link.close()
                    link = None
                    time.sleep(window.broken(answer))
                else:
                    yield window.result(answer)
        if link is not None:
            link.receive(timeout)  # the end, so that the server does not see a stream that was left
    finally:
        if link is not None:
            link.close()
