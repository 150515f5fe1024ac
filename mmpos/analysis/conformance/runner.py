"""The runner, which starts a program, sends it the cases on standard input, and reports the differences."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mmpos.analysis.conformance.cases import Case, Tolerances, as_json
from mmpos.errors import InvalidInputError

__all__ = ["Mismatch", "Outcome", "run"]

LONGEST_ANSWER = 2**24
"""Largest number of bytes in an answer; the longest expected answer has a few thousand."""

LONGEST_WAIT = 3600.0
"""Longest single wait for a program in seconds; longer time limits are split."""

PATIENCE = 3
"""Number of consecutive cases without an answer after which the remaining cases are skipped."""


@dataclass(frozen=True)
class Mismatch:
    """A case with a wrong answer, or without an answer."""

    case: str
    message: str

    def __str__(self) -> str:
        return f"{self.case}: {self.message}"


@dataclass
class Outcome:
    """The result of a run.

    Args:
        same: number of cases with the expected answer.
        findings: the other cases, in order.
        unsupported: the program's reasons for declining cases, by case name.
        not_asked: number of cases that were skipped after too many consecutive failures.
        require_all: whether declining a case makes the program fail.
    """

    same: int = 0
    findings: list[Mismatch] = field(default_factory=list)
    unsupported: dict[str, str] = field(default_factory=dict)
    not_asked: int = 0
    require_all: bool = False

    @property
    def passed(self) -> bool:
        """Whether no answer differed, at least one was compared and, with ``require_all``, no case was declined."""
        return not self.findings and self.same > 0 and not (self.require_all and self.unsupported)


def run(
    command: Sequence[str],
    cases: Iterable[Case],
    *,
    time_limit: float = 60.0,
    tolerances: Tolerances | None = None,
    require_all: bool = False,
) -> Outcome:
    """Send every case to a program, one JSON object per line, and compare its answers.

    A case counts as a mismatch if the program crashes, is too slow or gives an invalid answer; the program is then
    restarted for the next case. Its standard error is passed through.

    Args:
        command: the program and its arguments.
        cases: cases from ``load_cases``.
        time_limit: seconds allowed for each answer; for the first, starting the program is included.
        tolerances: largest distances at which numbers count as equal.
        require_all: whether declining a case makes the program fail.

    Raises:
        InvalidInputError: the program cannot be run.
    """
    if not command:
        raise InvalidInputError("command: got an empty list, want a program and its arguments")
    if not time_limit > 0:
        raise InvalidInputError(f"time_limit: got {time_limit!r}, want seconds > 0")
    report, failures = Outcome(require_all=require_all), 0
    program, last = _Program(command, time_limit), ""
    try:
        for case in cases:
            if failures == PATIENCE:
                report.not_asked += 1
                continue
            last = case.name
            try:
                answer = program.ask(case)
            except _NoAnswerError as failed:
                program.stop()
                report.findings.append(Mismatch(case.name, str(failed)))
                failures += 1
                continue
            failures = 0
            reason = answer.get("unsupported")
            if reason is not None:
                report.unsupported[case.name] = _reason(reason)
                continue
            message = case.difference(answer, tolerances or Tolerances())
            if message is None:
                report.same += 1
            else:
                report.findings.append(Mismatch(case.name, message))
        message = program.finish()
        if message is not None:
            report.findings.append(Mismatch(last, message))
    finally:
        program.stop()
    return report


class _NoAnswerError(Exception):
    """The program gave no valid answer to a case; the message says what it did."""


class _Program:
    """A program that answers cases; it is started for the first case, and restarted after it was stopped."""

    def __init__(self, command: Sequence[str], time_limit: float) -> None:
        self.command, self.time_limit = list(command), time_limit
        self._process: subprocess.Popen[bytes] | None = None
        self._read = bytearray()

    def ask(self, case: Case) -> dict[str, Any]:
        """Return the answer to a case."""
        line = self._line(self._started(), json.dumps(case.request, separators=(",", ":")).encode() + b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise _NoAnswerError(f"got the line {_quoted(line)}, want a JSON object; logs belong on standard error")
        if answer.get("case") != case.name:
            raise _NoAnswerError(f"got an answer with case {_quoted(answer.get('case'))}, want {case.name!r}")
        return answer

    def finish(self) -> str | None:
        """Close the program's input; return an error message if it does not exit properly."""
        process = self._process
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            code = process.wait(self.time_limit)
        except subprocess.TimeoutExpired:
            return f"after the last case, the program did not exit within {self.time_limit:g} s of the end of its input"
        if code:
            return f"after the last case: {_code(code)}, want exit code 0"
        with suppress(BlockingIOError):  # a child process may keep the output open
            os.set_blocking(process.stdout.fileno(), False)
            self._read += os.read(process.stdout.fileno(), 2**16)
        line = _quoted(bytes(self._read))
        return f"after the last case: got the line {line}, want one line per case" if self._read else None

    def stop(self) -> None:
        """Kill the program and its children, if it is running."""
        process, self._process, self._read = self._process, None, bytearray()
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    self.command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                )
            except OSError as error:
                got = f"{self.command[0]!r} ({error.strerror})"
                raise InvalidInputError(f"command: got {got}, want a program that runs") from None
        return self._process

    def _line(self, process: subprocess.Popen[bytes], request: bytes) -> bytes:
        """Write a request while reading one line of the program's output, so that neither blocks the other."""
        assert process.stdin is not None
        assert process.stdout is not None
        deadline, searched = time.monotonic() + self.time_limit, 0
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            while request or (end := self._read.find(b"\n", searched)) < 0:
                searched = 0 if request else len(self._read)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _NoAnswerError(f"no answer within {self.time_limit:g} s")
                ready = [key.fileobj for key, _ in selector.select(min(left, LONGEST_WAIT))]
                if process.stdin in ready:
                    try:
                        request = request[os.write(process.stdin.fileno(), request) :]
                    except BrokenPipeError:  # the program has closed its input; its output is still read
                        request = b""
                    if not request:
                        selector.unregister(process.stdin)
                if process.stdout in ready:
                    part = os.read(process.stdout.fileno(), 2**16)
                    if not part:
                        raise _NoAnswerError(f"the program {self._ending(process, deadline)}, want an answer")
                    self._read += part
                if len(self._read) > LONGEST_ANSWER:
                    raise _NoAnswerError(f"got more than {LONGEST_ANSWER} bytes in one answer")
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return line

    def _ending(self, process: subprocess.Popen[bytes], deadline: float) -> str:
        try:
            return f"ended with {_code(process.wait(max(0.1, deadline - time.monotonic())))}"
        except subprocess.TimeoutExpired:
            return "closed its output"


def _code(code: int) -> str:
    """Format how a program ended."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _quoted(value: Any) -> str:
    if not isinstance(value, bytes):
        return repr(as_json(value))
    return repr(value if len(value) <= 60 else value[:57] + b"...").removeprefix("b")


def _reason(value: object) -> str:
    """Return printable text unchanged, and format anything else as JSON."""
    return value if isinstance(value, str) and value.isprintable() else as_json(value)
