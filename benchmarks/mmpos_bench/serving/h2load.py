"""Load by h2load, a client in C that costs next to nothing, where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from tempfile import NamedTemporaryFile

from mmpos_bench.proofs import NotEqualError, holds
from mmpos_bench.serving.loads import Turn
from mmpos_bench.serving.processes import ServerProcess

__all__ = ["H2Load"]

_RATE = re.compile(r"finished in .*?, ([\d.]+) req/s")
_DATA = re.compile(r"\((\d+)\) data$", re.MULTILINE)
_FRAME = 5  # bytes before a message of gRPC: whether it is compressed, and how long it is


class H2Load:
    """The same call so many times, and again each time it is called.

    Args:
        server: that is called.
        path: of the method.
        request: what to send.
        size: bytes of every answer, which are counted.
        calls: how many.
        clients: connections.
        in_flight: calls at once on each.
    """

    def __init__(
        self, server: ServerProcess, path: str, request: bytes, size: int, calls: int, clients: int, in_flight: int
    ) -> None:
        self._server, self._size, self._calls = server, size, calls
        self._frame = b"\0" + len(request).to_bytes(4, "big") + request
        self._words = [f"-n{calls}", f"-c{clients}", f"-m{in_flight}", "-Hcontent-type: application/grpc"]
        self._words += ["-Hte: trailers", f"http://{server.address}{path}"]

    @staticmethod
    def found() -> bool:
        """Whether it is on the path."""
        return shutil.which("h2load") is not None

    def __call__(self) -> Turn:
        """One turn.

        Raises:
            NotEqualError: not every call was answered in full.
        """
        began = self._server.cpu
        with NamedTemporaryFile() as body:
            body.write(self._frame)
            body.flush()
            words = ["h2load", "-d", body.name, *self._words]
            said = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        cpu = (self._server.cpu - began) / self._calls
        rate, data = _RATE.search(said), _DATA.search(said)
        if rate is None or data is None:
            raise NotEqualError(f"h2load: got {said[-200:]!r}, want a rate and the bytes that came")
        wanted = self._calls * (_FRAME + self._size)
        holds(int(data[1]) == wanted, f"h2load: {data[1]} bytes", f"{wanted}")
        return Turn(float(rate[1]), cpu)
