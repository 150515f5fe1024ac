"""Lock a folder for one run, on disk or in a store.

A claim file is created exclusively and updated by a heartbeat.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict

from mmpos.data.stores import StorePath
from mmpos.errors import InvalidInputError

__all__ = ["Claim", "claimed"]

_NAME = re.compile(r"\.mmpos-claim-(\d{8})\.json")
_BEAT = 5.0  # seconds between heartbeats
_PATIENCE = 30.0  # seconds without a heartbeat after which a run on another machine counts as dead


class _Owner(TypedDict):
    """Content of a claim file: a random id, the machine and process of the run, its start, and its heartbeats."""

    id: str
    machine: str
    process: int
    born: str
    started: str
    beat: int


class Claim:
    """Claim that this process holds on a folder.

    Args:
        folder: the folder.
        path: path of the claim file.
        owner: content of the claim file.
    """

    def __init__(self, folder: StorePath, path: StorePath, owner: _Owner) -> None:
        self._folder, self._path, self._owner = folder, path, owner
        self._ended, self._lost = threading.Event(), False
        self._beats = threading.Thread(target=self._beat, daemon=True, name="mmpos-claim")
        self._beats.start()

    def check(self) -> None:
        """Check that no other run has taken over the folder, which can happen while this process is suspended.

        Raises:
            InvalidInputError: the claim is lost.
        """
        if self._lost:
            raise InvalidInputError(
                f"folder: got {str(self._folder)!r}, which another run took over while this one was suspended for "
                f"{_PATIENCE:g} s, or from which the claim file was removed, want one run at a time"
            )

    def release(self) -> None:
        """Remove the claim; if the store fails, the file stays and later counts as the claim of a dead run."""
        self._ended.set()
        self._beats.join()
        with suppress(OSError, InvalidInputError):  # an error here would hide the run's own error
            owner = _owner(self._path)
            if owner is not None and owner["id"] == self._owner["id"]:
                self._path.remove()

    def _beat(self) -> None:
        # Ctrl-C must reach the main thread, which may have blocked it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._ended.wait(_BEAT):
            with suppress(OSError):  # the store may respond at the next heartbeat
                claims = self._folder.glob(".mmpos-claim-*.json")
                if self._path not in claims or any(path > self._path for path in claims):
                    self._lost = True
                    return
                self._owner["beat"] += 1
                self._path.write_bytes(json.dumps(self._owner).encode())


@contextmanager
def claimed(folder: StorePath) -> Iterator[Claim]:
    """Claim a folder for the duration of the block, so that no other run writes to it.

    The claim of a dead run is ignored. A run on this machine is dead if its process is gone; a run on another machine
    is dead if it sends no heartbeat for half a minute.

    Raises:
        InvalidInputError: another run holds the folder, in this process or any other.
        UnsupportedError: the store cannot create files exclusively.
        OSError: the claim file cannot be created; the error names the file.
    """
    dead = _dead_claims(folder)
    number = max((_number(path) for path in dead), default=0) + 1
    path = folder / f".mmpos-claim-{number:08}.json"
    owner = _Owner(
        id=secrets.token_hex(8),
        machine=_machine(),
        process=os.getpid(),
        born=_start_time(os.getpid()),
        started=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        beat=0,
    )
    if not path.create(json.dumps(owner).encode()):
        raise _refusal(folder, _owner(path))
    claim = Claim(folder, path, owner)
    try:
        for other in folder.glob(".mmpos-claim-*.json"):
            if other in dead:
                other.remove()
            elif other != path:  # created after the first listing
                raise _refusal(folder, _owner(other))
        yield claim
    finally:
        claim.release()


def _dead_claims(folder: StorePath) -> set[StorePath]:
    """Return the claims of dead runs.

    Raises:
        InvalidInputError: a running process holds a claim.
    """
    dead = set()
    for path in folder.glob(".mmpos-claim-*.json"):
        owner = _owner(path)
        if owner is not None and _lives(path, owner):
            raise _refusal(folder, owner)
        dead.add(path)
    return dead


def _lives(path: StorePath, owner: _Owner) -> bool:
    if owner["machine"] == _machine():
        return _start_time(owner["process"]) == owner["born"]
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        time.sleep(_BEAT / 5)
        now = _owner(path)
        if now is None:
            return False
        if now["beat"] != owner["beat"]:
            return True
    return False


def _owner(path: StorePath) -> _Owner | None:
    """Return the content of a claim file, or None if the file is gone.

    Raises:
        InvalidInputError: the file is not a claim.
    """
    try:
        owner: _Owner = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidInputError(f"{path}: got a file that is not an mmpos claim; remove it") from error
    if not isinstance(owner, dict) or not _Owner.__required_keys__ <= owner.keys():
        raise InvalidInputError(f"{path}: got a file that is not an mmpos claim; remove it")
    return owner


def _number(path: StorePath) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def _machine() -> str:
    """Return the name of this machine and the PID namespace, in which process ids are unique."""
    with suppress(OSError):
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def _start_time(process: int) -> str:
    """Return the start time of a process on this machine; "unknown" if hidden, empty if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass  # the process belongs to another user
    return "unknown"


def _refusal(folder: StorePath, owner: _Owner | None) -> InvalidInputError:
    who = "" if owner is None else f" (process {owner['process']} on {owner['machine']}, since {owner['started']})"
    return InvalidInputError(
        f"folder: got {str(folder)!r}, to which another run is writing{who}, want one run at a time"
    )
