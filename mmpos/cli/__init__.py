"""The command line: every command is a door to one thing the library does."""

from mmpos.cli import check, compare, plot, preprocess, remote  # their commands join the app
from mmpos.cli.commands import app

__all__ = ["app", "check", "compare", "plot", "preprocess", "remote"]
