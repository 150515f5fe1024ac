"""Tables joined to one batch: their columns and documents side by side, tokens and segments counted on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmpos.errors import InvalidInputError
from mmpos.positions.columns import NEXT_POSITION, OFFSET, Columns
from mmpos.support.checks import IntArray


def join(tables: Sequence[Columns]) -> tuple[IntArray, IntArray, int, bool, str]:
    """What the fields of the joined table are; see PositionTable.concatenate."""
    for i, table in enumerate(tables):
        if not isinstance(table, Columns) or table.axes != tables[0].axes:
            got = f"{table.axes} axes" if isinstance(table, Columns) else type(table).__name__
            raise InvalidInputError(f"tables[{i}]: got {got}, want PositionTables with the axes of the first")
    if not tables:
        raise InvalidInputError("tables: got none, want at least one")
    columns = np.concatenate([table.table for table in tables], axis=1)
    documents = np.concatenate([table.documents for table in tables], axis=1)
    sizes = np.array([(table.num_segments, table.num_tokens) for table in tables]).T
    before = np.cumsum(sizes, axis=1) - sizes
    columns[OFFSET] += before[1].repeat(sizes[0])
    documents[:NEXT_POSITION] += before.repeat([table.num_documents for table in tables], axis=1)
    schemes = dict.fromkeys(table.scheme for table in tables)
    return columns, documents, int(sizes[1].sum()), any(table.fractional for table in tables), " + ".join(schemes)
