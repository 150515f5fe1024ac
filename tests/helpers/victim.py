"""A server in a separate process, called with raw bytes, and the cost of each answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from mmpos.rpc.v1 import error_pb2

SETTINGS = """
overload_ms = 60_000
[profiles.default]
images = { backend = "pillow" }
rotary = { head_dim = 8 }
"""
STATUSES = {
    error_pb2.ERROR_CODE_INVALID_INPUT: "INVALID_ARGUMENT",
    error_pb2.ERROR_CODE_UNSUPPORTED: "UNIMPLEMENTED",
    error_pb2.ERROR_CODE_LIMIT_EXCEEDED: "RESOURCE_EXHAUSTED",
    error_pb2.ERROR_CODE_INTERNAL: "INTERNAL",
}
"""Status of a call by the error code of an item."""


class Answer(NamedTuple):
    """The status of a call with its message, and the serialized response, which is empty after an error."""

    status: str
    message: str = ""
    data: bytes = b""


class Victim:
    """A server under test.

    Args:
        pid: the server's process id.
        address: address at which the server listens.
    """

    def __init__(self, pid: int, address: str) -> None:
        self.pid = pid
        unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self.channel = grpc.insecure_channel(address, options=unlimited)

    def call(self, method: str, request: Any) -> Answer:
        """Send a message, or arbitrary bytes, and return the answer."""
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        try:
            call: Any = self.channel.unary_unary(f"/mmpos.rpc.v1.{method}")
            return Answer("OK", data=call(raw, timeout=300))
        except grpc.RpcError as error:
            return Answer(error.code().name, error.details() or "")

    def costly(self, method: str, request: Any) -> tuple[Answer, float, float]:
        """Send a message; return the answer, the server's CPU seconds, and the MiB by which its peak memory rose."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # resets the peak
        memory, seconds = self.memory("VmRSS"), self.seconds()
        answer = self.call(method, request)
        return answer, self.seconds() - seconds, self.memory("VmHWM") - memory

    def memory(self, which: str = "VmRSS") -> float:
        """Return the memory in MiB that the server uses (VmRSS), or used at its peak (VmHWM)."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{which}:"))

    def seconds(self) -> float:
        """Return the CPU seconds that the server has used so far."""
        values = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
