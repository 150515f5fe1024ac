"""The command line: every command is a door to one thing the library does."""

from mmpos.cli import bench, check, compare, plot, preprocess, remote  # their commands join the app
from mmpos.cli.commands import app

__all__ = ["app", "bench", "check", "compare", "plot", "preprocess", "remote"]
