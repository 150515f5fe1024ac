"""The placed table: segments under a scheme as one int64 array, and everything derived from it."""

from mmpos.positions.block_keys import block_keys
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable

__all__ = ["PositionTable", "block_keys", "place"]
