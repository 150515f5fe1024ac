"""Common frame of ``mmpos`` and ``mmpos_server``: an error is one line on stderr, and its type sets the exit code."""

from __future__ import annotations

import codecs
import io
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from mmpos.errors import InvalidInputError, MmposError, ServiceError, ServiceUnauthenticatedError
from mmpos.support.extras import pip_install

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    *("DIFFERENT", "EXIT_CODES", "INTERRUPTED", "STDIN", "TERMINATED"),
    *("console", "read_input", "run_program", "write_output"),
]

STDIN = "-"
"""File name that stands for standard input and standard output."""

_WIDTH = 100

MISSING, WRONG, DIFFERENT, NO_ANSWER, INTERRUPTED, TERMINATED = 1, 2, 3, 4, 130, 143

EXIT_CODES: Mapping[int, str] = MappingProxyType(
    {
        0: "success",
        MISSING: (
            "something is missing: a package, memory, a writable path, disk space, or a process that reads the output"
        ),
        WRONG: "a wrong argument, option or input",
        DIFFERENT: "ids differ, according to mmpos check or another command",
        NO_ANSWER: "a server did not answer: it is down, overloaded or too slow",
        INTERRUPTED: "stopped by Ctrl-C",
        TERMINATED: "stopped by SIGTERM",
    }
)
"""Meanings of the exit codes, the same for both programs."""


class App(Protocol):
    """Typer app as a click command; it returns an exit code, or None for 0."""

    def __call__(self, *, args: Sequence[str] | None, prog_name: str, standalone_mode: bool) -> int | None:
        """Run the command with the given arguments."""


def run_program(name: str, load: Callable[[], App], arguments: Sequence[str] | None) -> int:
    """Run one command of a program.

    Args:
        name: name of the program in its messages.
        load: function that imports the typer app, whose requirements may be missing.
        arguments: command-line arguments after the program's name; None uses those of the process.

    Returns:
        The exit code, one of EXIT_CODES.
    """
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the parent process
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    codecs.register_error(_SIMILAR, _similar)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors=_SIMILAR)  # do not fail on a dash that the terminal cannot show
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: _say(name, "warning", str(message))
        return _run(name, load, arguments)


_SIMILAR = "mmpos.similar"
_ASCII = {"×": "x", "–": "-", "−": "-", "·": "*", "→": "->", "≥": ">=", "≤": "<=", "✓": "y", "✗": "n", "…": "..."}
_ASCII |= {"⌊": "floor(", "⌋": ")", "⌈": "ceil(", "⌉": ")", "δ": "delta", "θ": "theta", "π": "pi"}


def _similar(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an output cannot encode: our own by similar ones in ASCII, others by their escapes."""
    assert isinstance(error, UnicodeEncodeError)
    characters = error.object[error.start : error.end]
    return "".join(_ASCII.get(c) or ascii(c)[1:-1] for c in characters), error.end


def _run(name: str, load: Callable[[], App], arguments: Sequence[str] | None) -> int:
    try:
        code = int(load()(args=arguments, prog_name=name, standalone_mode=False) or 0)
        sys.stdout.flush()  # detect a full disk or a closed pipe here, not at interpreter exit
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _settle_output()
        return MISSING
    except ImportError as error:
        return _fail(name, str(error), MISSING)
    except MmposError as error:
        answered = not isinstance(error, ServiceError) or isinstance(error, ServiceUnauthenticatedError)
        return _fail(name, str(error), WRONG if answered else NO_ANSWER)
    except OSError as error:
        _settle_output()
        words = error.strerror or str(error)
        return _fail(name, words if error.filename is None else f"{error.filename}: {words}", MISSING)
    except MemoryError as error:
        return _fail(name, str(error) or "not enough memory", MISSING)
    except Exception as error:
        if type(error).__module__ == "google.protobuf.runtime_version":
            said = f"{error} Install all packages that need protobuf in one command: {pip_install('server')}"
            return _fail(name, said, MISSING)
        # Usage errors have their own messages; their base class depends on the version of typer.
        if not hasattr(error, "format_message"):
            raise
        said = error.format_message().strip().rstrip(".")
        command = getattr(getattr(error, "ctx", None), "command_path", name)
        return _fail(name, f"{said}{' See' if said.endswith('?') else '; see'} {command} --help", WRONG)


def read_input() -> bytes:
    """Read all of standard input.

    Raises:
        InvalidInputError: the process has no standard input.
    """
    if sys.stdin is None:
        raise InvalidInputError(f"{STDIN}: standard input is closed")
    return sys.stdin.buffer.read()


def console() -> Console:
    """Return a console for tables, at most 100 columns wide; without a terminal, it prints plain text of that width."""
    from rich.console import Console

    usual = Console()
    width = min(usual.width, _WIDTH) if usual.is_terminal else _WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def write_output(data: bytes) -> None:
    """Write bytes to standard output.

    Raises:
        InvalidInputError: standard output is a terminal.
    """
    if sys.stdout.isatty():
        raise InvalidInputError(f"{STDIN}: standard output is a terminal, want a pipe or a file")
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _settle_output() -> None:
    """Flush standard output; discard output that cannot be written, because Python would raise an error at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(name: str, message: str, code: int) -> int:
    _say(name, "error", message)
    return code


def _say(name: str, kind: str, message: str) -> None:
    with suppress(OSError):  # keep the exit code, even if the message cannot be written
        print(f"{name}: {kind}: {' '.join(message.split())}", file=sys.stderr)
