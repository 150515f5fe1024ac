"""Entry point of the ``mmpos`` program."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

from mmpos.support.extras import needed_for
from mmpos.support.program import App, run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: command-line arguments after the program's name; None uses those of the process.

    Returns:
        Exit code, one of mmpos.support.program.EXIT_CODES.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    load = _info if words == ["info"] else partial(_app, "server" if "serve" in words[:2] else "cli")
    return run_program("mmpos", load, arguments)


def _info() -> App:
    """Create a program for ``mmpos info`` that needs no command-line packages and reports which ones are missing."""
    from mmpos.support.info import print_info

    return lambda **_: print_info()


def _app(extra: str) -> App:
    if "_MMPOS_COMPLETE" in os.environ:
        # typer wraps help texts at this width, and fish treats each wrapped line as a completion.
        os.environ["TERMINAL_WIDTH"] = "10000"
    with needed_for("the command line", extra=extra):
        from mmpos.cli import app
    return app


if __name__ == "__main__":
    sys.exit(main())
