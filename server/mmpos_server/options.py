"""Define the command line of ``mmpos serve`` and ``python -m mmpos_server``."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from mmpos_server.config import Profiles, load
from mmpos_server.flags import Flags
from mmpos_server.process import serve as serve_in_process
from mmpos_server.supervisor import supervise

__all__ = ["app", "serve"]


app = typer.Typer(
    name="mmpos_server",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def serve(**flags: Any) -> None:
    """Serve positions, sequences and rotations over gRPC.

    SIGTERM and SIGINT drain the server: health reports NOT_SERVING, and the server answers the calls that have arrived
    and exits. A second signal ends the server at once.
    """
    options = Flags(**flags)
    if options.check:
        names = ", ".join(profile.name for profile in Profiles.from_config(load(options.check)))
        print(f"{options.check}: the settings and the profiles {names} are valid")
    elif options.workers > 1:
        supervise(options)
    else:
        serve_in_process(options)


serve.__signature__ = inspect.signature(Flags, eval_str=True)  # type: ignore[attr-defined]  # read by typer
app.command()(serve)
