"""The program ``python -m mmpos_server``: serves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mmpos.support.extras import needed_for
from mmpos.support.program import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop.

    Args:
        arguments: what follows the program's name; None is the process's own.

    Returns:
        The exit code, one of mmpos.support.program.EXIT_CODES.
    """
    return run_program("mmpos_server", _app, arguments)


def _app() -> Any:
    with needed_for("mmpos_server", extra="server"):
        from mmpos_server.options import app
    return app


if __name__ == "__main__":
    sys.exit(main())
