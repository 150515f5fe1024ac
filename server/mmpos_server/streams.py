"""Answer streams: one task reads and answers the items, another sends the answers in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import TYPE_CHECKING, Any

from mmpos.rpc.errors import put_error
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
        assert method.item is not None
        self.method, self._shared, (self._request, self._response) = method, shared, method.item
        self.name = f"Stream{method.name}"
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
            answers: asyncio.Queue[Any] = asyncio.Queue(_AHEAD)
            running: set[asyncio.Task[bytes]] = set()
            reader = asyncio.create_task(self._read(context, call, request_id, answers, running))
            try:
                while (following := await answers.get()) is not None:
                    if isinstance(following, Exception):
                        raise following
                    answer, reserved = following
                    raw = answer if isinstance(answer, bytes) else await answer
                    with arrivals.sending(context, client, len(raw)):
                        arrivals.unread.leave(client, reserved)
                        call.reserved -= reserved
                        yield raw
                    items += 1
            finally:
                reader.cancel()
                for item in running:
                    item.cancel()
                arrivals.unread.leave(client, call.reserved)
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
            del call  # grpc keeps the frame of a stream that it aborts in a cycle

    async def _read(
        self,
        context: Any,
        stream: Call,
        request_id: str,
        answers: asyncio.Queue[Any],
        running: set[asyncio.Task[bytes]],
    ) -> None:
        """Read the items and answer them, large ones side by side; put the answers, an error, or None at the end."""
        arrivals = self._shared.arrivals

        def ended(item: asyncio.Task[bytes]) -> None:
            running.discard(item)
            if not item.cancelled():
                item.exception()  # asyncio logs an error that nobody asks for, as when the stream has been cancelled

        try:
            for number in count(1):
                await arrivals.room(stream.client)
                raw = await arrivals.message(context, stream.client, item=True, first=number == 1)
                call = Call(stream.client, arrivals, self._shared.threads, item=True)
                answer = self._item(raw, call, f"{request_id}.{number}")
                if self.method.side_by_side:
                    running.add(task := asyncio.create_task(answer))
                    task.add_done_callback(ended)
                    await answers.put((task, 0))
                    continue
                try:
                    done = await answer
                except BaseException:
                    arrivals.unread.leave(stream.client, call.reserved)
                    raise
                stream.reserved += call.reserved  # which a stream that ends gives back
                await answers.put((done, call.reserved))
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
        self._metrics.begin()
        status, answer = "CANCELLED", b""
        try:
            plain = call.plain(self.method.plain, raw)
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
        shared = self._shared
        request: Any = shared.parse(self._request, raw, call, self.method.bulky)
        response: Any = self._response()
        response.id = request.id
        try:
            await self.method.run(request, response, call)
            return shared.encode(response, call), "OK"
        except Exception as error:
            failed = shared.failed(error, request_id, self.name)
            response.Clear()
            response.id = request.id
            put_error(response.error, public(error, request_id))
            return response.SerializeToString(), failed.status
