"""Define the command line of ``mmpos serve`` and ``python -m mmpos_server``."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import typer

from mmpos_server.flags import Flags
from mmpos_server.launch import leave
from mmpos_server.launch import serve as serve_in_process
from mmpos_server.workers import supervise

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
    if options.otel:
        # Report a missing package once instead of once per worker.
        import_module("mmpos_server.tracing")
    if options.workers > 1:
        supervise(options)  # do not exit immediately: multiprocessing removes its folder at the end
        return
    serve_in_process(options)
    leave()


serve.__signature__ = inspect.signature(Flags, eval_str=True)  # type: ignore[attr-defined]  # read by typer
app.command()(serve)
