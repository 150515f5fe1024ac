"""Answer streams: one task reads and answers the items, another sends the answers in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import TYPE_CHECKING, Any

from mmpos_server.arrivals import StreamEndedError
from mmpos_server.call import Call, GoneError
from mmpos_server.methods import failure, public
from mmpos_server.metrics import MethodMetrics

if TYPE_CHECKING:
    from mmpos_server.endpoints import Shared
    from mmpos_server.methods import Method

__all__ = ["StreamEndpoint"]

_AHEAD = 4
"""Number of items of one stream that are read before their answers are sent."""


class StreamEndpoint:
    """Streaming endpoint of a method, which answers in order; an item that fails does not affect the others.

    Args:
        method: a method with a streaming form.
        shared: state that the methods share.
    """

    def __init__(self, method: Method, shared: Shared) -> None:
        assert method.twin is not None
        self.method, self._twin, self._shared = method, method.twin, shared
        self.name = self._twin.name
        self._metrics = MethodMetrics(shared.metrics, self.name)

    async def answers(self, _: object, context: Any) -> AsyncIterator[bytes]:
        """Yield the answers to the items of one stream until the client ends it.

        Raises:
            AbortError: the stream failed; the status is set.
        """
        shared, arrivals = self._shared, self._shared.arrivals
        call, failed, cause = Call("", arrivals, shared.threads), None, None
        status, entered, items = "CANCELLED", False, 0
        # This comes first: after its call, a context cannot be asked.
        request_id, peer = shared.request_id(context), context.peer()
        shared.metrics.streams.inc()
        shared.arrivals.running += 1
        try:
            call.client = client = shared.client(context)
            arrivals.check_open()
            arrivals.streams.take(client)
            entered = True
            answers: asyncio.Queue[asyncio.Task[bytes] | bytes | Exception | None] = asyncio.Queue(_AHEAD)
            reader = asyncio.create_task(self._read(context, call, request_id, answers))
            try:
                while (answer := await answers.get()) is not None:
                    if isinstance(answer, Exception):
                        raise answer
                    raw = answer if isinstance(answer, bytes) else await answer
                    with arrivals.sending(context, client, len(raw)):
                        yield raw
                    items += 1
            finally:
                reader.cancel()
                while not answers.empty():
                    if isinstance(waiting := answers.get_nowait(), asyncio.Task):
                        waiting.cancel()
            status = "OK"
        except GoneError:
            raise asyncio.CancelledError from None
        except Exception as error:
            cause, failed = error, shared.failed(error, request_id, self.name)
            status = failed.status
            await context.abort(failed.code, failed.message, failed.metadata)
        finally:
            call.gone = True
            shared.arrivals.running -= 1
            shared.metrics.streams.dec()
            if entered:
                arrivals.streams.leave(client)
            if status != "OK" or shared.logs.sampled():
                shared.ended(self.name, status, request_id, peer, call, cause, failed, items=items)

    async def _read(self, context: Any, stream: Call, request_id: str, answers: asyncio.Queue[Any]) -> None:
        """Read the items and answer them, large ones side by side; put the answers, an error, or None at the end."""
        arrivals = self._shared.arrivals
        try:
            for number in count(1):
                await arrivals.room(stream.client)
                raw = await arrivals.message(context, stream.client, item=True, first=number == 1)
                call = Call(stream.client, arrivals, self._shared.threads, item=True)
                answer = self._item(raw, call, f"{request_id}.{number}")
                if self._twin.side_by_side:
                    task = asyncio.create_task(answer)
                    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may await it
                    await answers.put(task)
                else:
                    await answers.put(await answer)
        except StreamEndedError:
            await answers.put(None)
        except Exception as error:
            await answers.put(error)

    async def _item(self, raw: bytes, call: Call, request_id: str) -> bytes:
        """Answer one item of a stream; if the item fails, its answer contains the error.

        Raises:
            DecodeError: the bytes are not a request, so the item has no id.
            LimitExceededError: the item has too many fields and numbers.
        """
        twin = self._twin
        self._metrics.begin()
        status, answer = "CANCELLED", b""
        try:
            plain = None if twin.plain is None else call.plain(twin.plain, raw)
            answer, status = await self._outcome(raw, call, request_id) if plain is None else (plain, "OK")
            return answer
        except Exception as error:
            status = failure(error, "").status
            raise
        finally:
            call.gone = True
            call.staged("total", call.began)
            self._metrics.end(status, call.stages, call.counts, request_bytes=len(raw), response_bytes=len(answer))

    async def _outcome(self, raw: bytes, call: Call, request_id: str) -> tuple[bytes, str]:
        """Return the answer to one item and the item's status."""
        twin, shared = self._twin, self._shared
        request, response = shared.parse(twin.request, raw, call, self.method.bulky), twin.response()
        try:
            await twin.run(request, response, call)
            return shared.encode(response, call), "OK"
        except Exception as error:
            failed = shared.failed(error, request_id, self.name)
            response = twin.response()
            twin.refuse(request, response, public(error, request_id))
            return response.SerializeToString(), failed.status
