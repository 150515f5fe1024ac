"""The explorer: a browser page for studying schemes, which shows the ids of a document as the document changes."""

from mmpos.cli.explore import command  # adds its command to the app

__all__ = ["command"]
