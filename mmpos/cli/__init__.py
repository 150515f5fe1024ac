"""The command line: every command calls one thing that the library does."""

from mmpos.cli import analysis, preprocess, remote  # their commands join the app
from mmpos.cli.commands import app

__all__ = ["analysis", "app", "preprocess", "remote"]
