"""Read the text of an SVG and the pixels of a PNG, and place tables to draw."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmpos.cli.options import read_specs
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.segments.table import SegmentTable


def table(*specs: str, scheme: str = "rope-tie") -> PositionTable:
    """Place the documents described by these specs with a scheme."""
    return place(SegmentTable.from_documents(read_specs(specs).documents), scheme)


def texts(path: Path) -> list[str]:
    """Return the text elements of an SVG in document order."""
    root = ElementTree.parse(path).getroot()
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


def pixels(path: Path) -> npt.NDArray[np.uint8]:
    """Read a PNG as (height, width, 3) pixels."""
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))
