"""The explorer: a page in the browser that shows the ids of a document while it changes, to study schemes."""

from mmpos.cli.explore import command  # adds its command to the app

__all__ = ["command"]
