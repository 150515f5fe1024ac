"""The command line: every command calls one function of the library."""

from mmpos.cli import analysis, conformance, explore, planning, preprocess, remote  # they add their commands
from mmpos.cli.commands import app

__all__ = ["analysis", "app", "conformance", "explore", "planning", "preprocess", "remote"]
