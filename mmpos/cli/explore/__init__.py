"""The explorer: a browser page for studying schemes; it shows the ids of a document while you change the document."""

from mmpos.cli.explore import command  # adds its command to the app

__all__ = ["command"]
