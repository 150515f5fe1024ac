"""The program ``python -m mmpos_server``: serves, and says every error in one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mmpos.errors import MmposError
from mmpos.extras import needed_for, pip_install


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop.

    Args:
        arguments: what follows the program's name; None is the process's own.

    Returns:
        The exit code: 0, 1 if something is missing on this machine, 2 if the command line or a setting is wrong.
    """
    try:
        with needed_for("mmpos_server", extra="server"):
            from mmpos_server.options import app

        return int(app(args=arguments, prog_name="mmpos_server", standalone_mode=False) or 0)
    except ImportError as error:
        return _fail(str(error), 1)
    except MmposError as error:
        return _fail(str(error), 2)
    except OSError as error:
        return _fail(str(error), 1)
    except Exception as error:
        # Errors of usage have a message of their own, under whichever base class this typer gives them.
        message = getattr(error, "format_message", None)
        if type(error).__module__ == "google.protobuf.runtime_version":
            return _fail(f"{error} Install what needs protobuf in one command, with {pip_install('server')}", 1)
        if message is None:
            raise
        return _fail(f"{message().strip().rstrip('.')}; mmpos_server --help tells more", 2)


def _fail(message: str, code: int) -> int:
    print(f"mmpos_server: error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
