"""How the processes of disaggregated.py talk: messages of mmpos.rpc.v1 over pipes, and what a witness tells."""

from __future__ import annotations

import dataclasses
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from mmpos import InterleavedSequence, PositionTable
from mmpos.rpc.positions import put_result
from mmpos.rpc.queries import PositionsResult
from mmpos.rpc.sequences import get_sequence
from mmpos.rpc.tensors import put_tensor
from mmpos.rpc.v1 import positions_pb2, sequences_pb2, tensor_pb2

Array = npt.NDArray[Any]
M = TypeVar("M", bound=Message)


def send(to: Connection, message: Message) -> None:
    """Send the bytes of a message, and nothing else."""
    to.send_bytes(message.SerializeToString())


def receive(source: Connection, kind: type[M]) -> M:
    """The next message, of this kind."""
    return kind.FromString(source.recv_bytes())


def tensor(array: Array) -> tensor_pb2.Tensor:
    """An array as a message."""
    message = tensor_pb2.Tensor()
    put_tensor(message, array)
    return message


@dataclasses.dataclass
class Witness:
    """Tells the judge what a worker has made of a window.

    Args:
        judge: compares it with the whole.
        forgets: whether this worker forgets the delta, to see that the judge notices.
    """

    judge: Connection
    forgets: bool

    def sequence(self, message: sequences_pb2.Sequence) -> InterleavedSequence:
        """The sequence of a message, as this worker understands it."""
        sequence = get_sequence("sequence", message)
        return dataclasses.replace(sequence, positions=_without_delta(sequence.positions)) if self.forgets else sequence

    def tell(self, what: str, request: int, start: int, window: PositionTable, ids: Array, turned: Array) -> None:
        """Report a window of a request: its positions and delta, its token ids, and its rotated q and k."""
        positions = positions_pb2.Positions()
        put_result(positions, PositionsResult.of(window))
        send(self.judge, sequences_pb2.Part(text=what))
        send(self.judge, positions_pb2.Window(documents=[request], starts=[start], lengths=[window.num_tokens]))
        send(self.judge, positions)
        send(self.judge, tensor(ids))
        send(self.judge, tensor(turned))

    def tell_end(self, request: int, generated: Array, k: Array, keys: list[bytes]) -> None:
        """Report what there is of a request in the end: tokens after the prompt, all rotated k, all block keys."""
        send(self.judge, sequences_pb2.Part(text="end"))
        send(self.judge, positions_pb2.Window(documents=[request]))
        for array in (generated, k, np.frombuffer(b"".join(keys), np.uint8)):
            send(self.judge, tensor(array))


def _without_delta(positions: PositionTable) -> PositionTable:
    """The mistake of systems that lose the delta on the way: the next position is the number of tokens."""
    documents = positions.documents.copy()
    documents[2:] = [[positions.num_tokens], [0]]
    return PositionTable.from_arrays(
        positions.table, documents, positions.num_tokens, fractional=positions.fractional, scheme=positions.scheme
    )
