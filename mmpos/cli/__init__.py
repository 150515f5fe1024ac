"""The command line: every command calls one function of the library."""

from mmpos.cli import analysis, planning, preprocess, remote  # they add their commands
from mmpos.cli.commands import app

__all__ = ["analysis", "app", "planning", "preprocess", "remote"]
