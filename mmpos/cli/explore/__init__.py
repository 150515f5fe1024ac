"""The explorer: a page in the browser that shows ids as a document changes, for whoever studies a scheme."""

from mmpos.cli.explore import command  # joins the app

__all__ = ["command"]
