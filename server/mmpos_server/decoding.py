"""Decoding of expensive images in processes that end with the call that waits for them.

A decoder in a thread cannot be stopped, and its cost is known only roughly; a process can be killed, and has limits
of time and memory. Images that are cheap by their headers are decoded in threads.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, fields
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError, MmposError
from mmpos.images import ImageProcessor
from mmpos.images.decode import File, Source, decode, to_rgb
from mmpos.images.headers import Header, orient, read_header

__all__ = ["Decoders", "IsolatedImageProcessor", "is_heavy", "main"]

Pixels = npt.NDArray[np.uint8]

_BEAT = 0.05
"""Seconds between two checks whether a call still waits for the image."""

_NICE = 10
"""Niceness of the processes: expensive images yield to all other work."""

_ROOM_BYTES = 64 * 2**20
"""Memory beyond that of header and file, for modules that are imported on first use."""


def is_heavy(part: object) -> bool:
    """Check whether a part is an image that a process should decode."""
    return isinstance(part, bytes) and read_header(part).heavy(len(part))


@dataclass(frozen=True)
class IsolatedImageProcessor(ImageProcessor):
    """ImageProcessor whose expensive images are decoded by processes, with the same results.

    Args:
        decoders: processes that decode.
        checkpoint: raises as soon as nobody waits for the image.
    """

    _: KW_ONLY
    decoders: Decoders
    checkpoint: Callable[[], None]

    @classmethod
    def of(cls, images: ImageProcessor, decoders: Decoders, checkpoint: Callable[[], None]) -> Self:
        """Return a copy of a processor that decodes in processes."""
        settings = {field.name: getattr(images, field.name) for field in fields(ImageProcessor)}
        return cls(**settings, decoders=decoders, checkpoint=checkpoint)

    def _decode(self, source: Source) -> tuple[Pixels, str]:
        if isinstance(source, File):
            data = source.data()
            if source.header.heavy(len(data)):
                job = _Job(source.header, self.background, self.max_decode_bytes)
                pixels = self.decoders.decode(data, job, self.checkpoint)
                return orient(pixels, source.header.orientation), hashlib.sha256(data).hexdigest()
        return super()._decode(source)


@dataclass(frozen=True)
class _Job:
    """Settings with which a process decodes a file.

    Args:
        header: header of the file.
        background: color behind transparent pixels.
        max_bytes: most memory that decoding may take, the file aside.
    """

    header: Header
    background: tuple[int, int, int]
    max_bytes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the pixels: height, width, 3."""
        return (*self.header.stored, 3)


class Decoders:
    """Pool of decoding processes; a new one starts when all others are at work. Used from any thread.

    Args:
        seconds: processor seconds that one image may take.
    """

    def __init__(self, seconds: int) -> None:
        self._seconds, self._idle, self._closed = seconds, list[_Process](), False

    def decode(self, data: bytes, job: _Job, checkpoint: Callable[[], None]) -> Pixels:
        """Decode a file to pixels (h, w, 3) as stored, before orientation.

        Raises:
            InvalidInputError: the file is truncated or corrupt, or its decoder crashed.
            LimitExceededError: decoding took too long or too much memory.
            BaseException: error of the checkpoint; the process was killed.
        """
        try:
            process = self._idle.pop()
        except IndexError:
            process = _Process(self._seconds)
        try:
            pixels = process.decode(data, job, checkpoint)
        finally:
            if self._closed or not process.alive:
                process.kill()
            else:
                self._idle.append(process)
        return pixels

    def close(self) -> None:
        """End all processes; those at work end when they are done or nobody waits for them."""
        self._closed = True
        while self._idle:
            self._idle.pop().kill()


class _Process:
    """Process that decodes one image at a time."""

    def __init__(self, seconds: int) -> None:
        self._connection, theirs = Pipe()
        self._seconds = seconds
        self.alive = True
        """Whether the process can take another image."""
        with theirs:
            fd = theirs.fileno()
            # A program of its own, and no fork: it inherits no threads and no locks.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mmpos_server.decoding", str(fd), str(seconds)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's interrupt is for the server
            )

    def decode(self, data: bytes, job: _Job, checkpoint: Callable[[], None]) -> Pixels:
        """Decode a file, as ``Decoders.decode`` does."""
        self.alive = False  # until it has answered
        size = math.prod(job.shape)
        memory = os.memfd_create("mmpos-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory, size)
            # Sealed, so that the other process cannot shrink what is mapped here.
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            try:
                self._connection.send(job)
                send_handle(self._connection, memory, self._process.pid)
                self._connection.send_bytes(data)
                while not self._connection.poll(_BEAT):
                    checkpoint()
                error: MmposError | None = self._connection.recv()
            except (EOFError, OSError):
                raise self._died(job) from None
            self.alive = True
            if error is not None:
                raise error
            return np.frombuffer(mmap.mmap(memory, size), np.uint8).reshape(job.shape)
        finally:
            os.close(memory)

    def _died(self, job: _Job) -> MmposError:
        """Return the error of an image whose decoding ended the process."""
        self._connection.close()
        code = self._process.wait()
        kind = job.header.kind
        if code == -signal.SIGXCPU:
            return LimitExceededError(
                f"image: got a {kind} that takes more than {self._seconds} s to decode, want less"
            )
        if code >= 0:  # not by the image: stderr says how
            raise RuntimeError(f"a process that decodes ended with exit code {code}")
        name = signal.Signals(-code).name
        return InvalidInputError(f"image: got a {kind} that crashed its decoder ({name}), want a valid file")

    def kill(self) -> None:
        """Kill the process."""
        self.alive = False
        self._connection.close()
        self._process.kill()
        self._process.wait()


def main(fd: int, seconds: int) -> None:
    """Decode images until the server closes the connection.

    Args:
        fd: file descriptor of the connection.
        seconds: processor seconds that one image may take.
    """
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with Connection(fd) as connection, suppress(EOFError, OSError):
        while True:
            job: _Job = connection.recv()
            memory = recv_handle(connection)
            data = connection.recv_bytes()
            _limit(seconds, job.max_bytes + 4 * len(data) + _ROOM_BYTES)
            connection.send(_decoded(data, job, memory))


def _decoded(data: bytes, job: _Job, memory: int) -> MmposError | None:
    """Decode pixels into the memory; returns the error, or None."""
    try:
        pixels = np.frombuffer(mmap.mmap(memory, math.prod(job.shape)), np.uint8).reshape(job.shape)
        to_rgb(decode(data, job.header, "pillow"), job.background, out=pixels)
    except MemoryError:
        height, width = job.header.stored
        got = f"a {job.header.kind} of {height} x {width} pixels"
        return LimitExceededError(f"image: got {got} that takes more memory to decode than its limit, want less")
    except MmposError as error:
        return type(error)(str(error))  # without its cause, which may not pickle
    finally:
        os.close(memory)
    return None


def _limit(seconds: int, size: int) -> None:
    """Limit the further processor time and memory of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]
    for kind, most in (
        (resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime) + seconds),
        (resource.RLIMIT_DATA, int(used) * 1024 + size),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
