"""The command line: every command calls one thing that the library does."""

from mmpos.cli import analysis, conformance, explore, planning, preprocess, probe, remote  # their commands join the app
from mmpos.cli.commands import app

__all__ = ["analysis", "app", "conformance", "explore", "planning", "preprocess", "probe", "remote"]
