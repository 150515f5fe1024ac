"""The command line: every command calls one function of the library."""

from mmpos.cli import analysis, explore, planning, preprocess, remote  # they add their commands
from mmpos.cli.commands import app

__all__ = ["analysis", "app", "explore", "planning", "preprocess", "remote"]
