"""The program ``mmpos``: runs the command line, and says every error in one line."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from mmpos.errors import MmposError
from mmpos.extras import needed_for, pip_install


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what follows the program's name; None is the process's own.

    Returns:
        The exit code: 0, 1 if something is missing on this machine, 2 if the command line or its input is wrong,
        3 if ids that were checked differ.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a dash that the terminal cannot show is no reason to stop
    words = sys.argv[1:] if arguments is None else arguments
    try:
        with needed_for("the command line", extra="server" if words and words[0] == "serve" else "cli"):
            from mmpos.cli import app

        return int(app(args=arguments, prog_name="mmpos", standalone_mode=False) or 0)
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
        command = getattr(getattr(error, "ctx", None), "command_path", "mmpos")
        return _fail(f"{message().strip().rstrip('.')}; {command} --help tells more", 2)


def _fail(message: str, code: int) -> int:
    print(f"mmpos: error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
