"""Client with blocking methods."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc

from mmpos.client import calls
from mmpos.client.calls import Built, Errors, ServiceCall
from mmpos.client.channel import BaseClient, OpenChannel, closed, failure
from mmpos.client.streams import Stream, build_stream, place_stream
from mmpos.errors import MmposError, ServiceError

if TYPE_CHECKING:
    from typing import Self

    import numpy.typing as npt
    import torch

    from mmpos.positions.table import PositionTable
    from mmpos.rotary.apply import Layout, TableLayout
    from mmpos.rotary.config import Rotary
    from mmpos.rpc.queries import InputIds, PositionsQuery, PositionsResult, Spans, View
    from mmpos.rpc.v1.info_pb2 import GetInfoResponse
    from mmpos.schemes import Scheme
    from mmpos.segments.table import SegmentTable
    from mmpos.sequence.builder import InterleavedSequence

Q = TypeVar("Q")
T = TypeVar("T")


class Client(BaseClient):
    """Blocking, thread-safe client for an mmpos service. See BaseClient for the arguments.

    A call raises the error of the function in process that it names, a LimitExceededError beyond a limit of the server,
    or a ServiceError if the server does not answer; a stream raises it while iterating.

    >>> Client("localhost:50051", profile="qwen-vl")
    Client('localhost:50051', profile='qwen-vl', timeout=30)
    """

    def place(
        self,
        segments: SegmentTable | Spans | InputIds,
        scheme: str | Scheme | None = None,
        start: npt.ArrayLike = 0,
        strict: bool | None = None,
        *,
        views: Sequence[View] = (),
    ) -> PositionTable:
        """Place documents like ``mmpos.place``; many documents in one call cost little more than one.

        Args:
            segments: documents, as a SegmentTable, Spans or InputIds.
            scheme: name from mmpos.SCHEMES or a scheme object; None selects the profile's scheme.
            start: id of each document's first token: one number for all, or (documents,).
            strict: whether two grids without text between them cause an error; None lets the scheme decide.
            views: methods to apply to the placed table in this order: Take, Window, Decode, Shard, Pad.

        Returns:
            A new PositionTable.
        """
        return self._ask(calls.place(self._options.profile, segments, scheme, start, strict, views))

    def query(self, query: PositionsQuery) -> PositionsResult:
        """Run a query on the server, like ``query.run``; the profile fills its unset fields.

        Args:
            query: documents, scheme, views, and whether to return the table or ids.
        """
        return self._ask(calls.query(self._options.profile, query))

    def build(
        self,
        parts: Sequence[object],
        *,
        scheme: str | Scheme | None = None,
        start: int = 0,
        patches: bool = True,
    ) -> InterleavedSequence:
        """Build a sequence from parts, like ``SequenceBuilder.build`` with the settings of the profile.

        Args:
            parts: text, token ids, Grid, ImageSize, Video and images, as in SequenceBuilder. A path is sent as the
                bytes of its file; a Pillow image, an array or a tensor as its upright pixels, without loss.
            scheme: name from mmpos.SCHEMES or a scheme object; None selects the profile's scheme.
            start: id of the first token.
            patches: whether to return patches; if not, no image is decoded.

        Returns:
            A new InterleavedSequence, with the same image hashes as a call in process.
        """
        return self._ask(calls.build(calls.settings(self._options.profile, scheme, start, patches), parts))

    def build_batch(
        self,
        documents: Sequence[Sequence[object]],
        errors: Errors = "raise",
        *,
        scheme: str | Scheme | None = None,
        start: int = 0,
        patches: bool = True,
    ) -> Built:
        """Build the sequences of several documents in one call.

        Args:
            documents: parts of each document; see ``build``.
            errors: "raise" raises the first error, which names ``documents[d].parts[i]``; "return" returns each error
                instead of the sequence.
            scheme: see ``build``.
            start: id of the first token of every document.
            patches: see ``build``.

        Returns:
            One sequence or error per document.
        """
        query = calls.settings(self._options.profile, scheme, start, patches)
        return self._ask(calls.build_batch(query, documents, errors))

    def cos_sin(
        self, rotary: Rotary | None, positions: PositionTable | torch.Tensor, layout: TableLayout = "pairs"
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """Compute cos and sin of all tokens like ``mmpos.rotary.cos_sin``.

        Args:
            rotary: rotation; None selects the profile's rotation.
            positions: PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).
            layout: "pairs", "transformers" or "torchtitan", as for ``mmpos.rotary.cos_sin``.

        Returns:
            New tensors, float32 or complex64, on the device of the positions.
        """
        return self._ask(calls.cos_sin(self._options.profile, rotary, positions, layout))

    def angles(self, rotary: Rotary | None, positions: PositionTable | torch.Tensor) -> torch.Tensor:
        """Compute exact angles, wrapped to [−π, π], like ``mmpos.rotary.angles``.

        Args:
            rotary: see ``cos_sin``.
            positions: see ``cos_sin``.

        Returns:
            A new float32 tensor on the device of the positions.
        """
        return self._ask(calls.angles(self._options.profile, rotary, positions))

    def apply_rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        positions: PositionTable | torch.Tensor,
        rotary: Rotary | None,
        *,
        layout: Layout | None = None,
        conjugate: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate q and k on the server like ``mmpos.rotary.apply_rotary``; both are sent to the server and back.

        Args:
            q: queries; see ``apply_rotary``. They must not require gradients.
            k: keys, or None.
            positions: see ``cos_sin``.
            rotary: see ``cos_sin``.
            layout: "thd", "bshd" or "bhsd"; None means thd for three dimensions and bshd for four.
            conjugate: whether to rotate by the negated angles.

        Returns:
            New tensors on the device of q.
        """
        return self._ask(calls.apply_rotary(self._options.profile, q, k, positions, rotary, layout, conjugate))

    def info(self) -> GetInfoResponse:
        """Get the version, schemes, limits and profiles of the server, as a message of ``info.proto``."""
        return self._ask(calls.info())

    def healthy(self) -> bool:
        """Return whether the server reports that it is serving; False if no server answers."""
        try:
            return self._ask(calls.healthy(), waits=False)
        except ServiceError:
            return False

    def stream(
        self, queries: Iterable[PositionsQuery], *, errors: Errors = "raise"
    ) -> Iterator[PositionsResult | MmposError]:
        """Send queries and yield their results in order.

        A thread of gRPC reads the queries, and sends them as far ahead of the results as the server accepts. If the
        source raises an error, it is raised after the results of the queries before it. Closing the iterator ends the
        stream. A broken stream raises an error that names the first unanswered query, ``queries[i]``.

        Args:
            queries: queries for ``query``.
            errors: "raise" raises the error of a query and ends the stream; "return" yields the error instead of the
                result.
        """
        return self._results(place_stream(self._options, errors), queries)

    def stream_build(
        self,
        batches: Iterable[Sequence[Sequence[object]]],
        *,
        errors: Errors = "raise",
        scheme: str | Scheme | None = None,
        start: int = 0,
        patches: bool = True,
    ) -> Iterator[Built]:
        """Send batches and yield their sequences in order; see ``stream``.

        Args:
            batches: documents of each batch; see ``build_batch``.
            errors: see ``build_batch``; with "return", a batch that is refused as a whole yields its error for every
                document.
            scheme: see ``build``.
            start: see ``build``.
            patches: see ``build``.
        """
        return self._results(build_stream(self._options, errors, scheme, start, patches), batches)

    def close(self) -> None:
        """Close the client and its channel of this process; running calls and streams fail, later calls too."""
        channel = self._channels.close()
        if channel is not None:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _opened(self) -> OpenChannel:
        return self._open(grpc.secure_channel, grpc.insecure_channel)

    def _ask(self, call: ServiceCall[T], *, waits: bool = True) -> T:
        opened = self._opened()
        settings = self._settings(opened, waits=waits)
        try:
            raw = opened.method(call.path)(call.data, self._options.timeout, **settings)
        except grpc.RpcError as error:
            raise failure(error, call.path, self._options, opened.answered) from None
        except ValueError:
            raise closed() from None
        opened.answered = True
        return call.read(raw)

    def _results(self, stream: Stream[Q, T], items: Iterable[Q]) -> Iterator[T]:
        stream.check(items, Iterable)
        return self._streamed(stream, items)

    def _streamed(self, stream: Stream[Q, T], items: Iterable[Q]) -> Iterator[T]:
        opened, over = self._opened(), threading.Event()
        settings = self._settings(opened)

        def requests() -> Iterator[bytes]:
            try:
                for item in items:
                    yield stream.request(item)
                stream.exhausted = True
            except Exception as error:  # the stream raises it at its end
                stream.failed = error

        def watch() -> None:
            while (left := stream.left()) > 0:
                if over.wait(left):
                    return
            call.cancel()

        try:
            call = opened.channel.stream_stream(stream.method.path)(requests(), **settings)
        except ValueError:
            raise closed() from None
        threading.Thread(target=watch, name="mmpos-stream", daemon=True).start()
        try:
            stream.wait()
            for raw in call:
                opened.answered = True
                yield stream.result(raw)
                stream.wait()
        except grpc.RpcError as error:
            raise stream.broken(failure(error, stream.method.path, self._options, opened.answered)) from None
        finally:
            over.set()
            call.cancel()
        stream.end()
