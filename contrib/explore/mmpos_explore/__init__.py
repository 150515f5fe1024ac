"""A page in the browser that shows the ids of a document while you change it, for people who study a scheme."""

from mmpos_explore.command import make_app, write_page
from mmpos_explore.request import Explorer

__all__ = ["Explorer", "make_app", "write_page"]
