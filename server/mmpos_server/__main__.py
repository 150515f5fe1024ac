"""Run the server as ``python -m mmpos_server``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mmpos.support.extras import needed_for
from mmpos.support.program import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until a signal stops it.

    Args:
        arguments: command line after the program's name; None means the command line of the process.

    Returns:
        exit code, one of mmpos.support.program.EXIT_CODES.
    """
    return run_program("mmpos_server", _app, arguments)


def _app() -> Any:
    with needed_for("mmpos_server", extra="server"):
        from mmpos_server.options import app
    return app


if __name__ == "__main__":
    sys.exit(main())
