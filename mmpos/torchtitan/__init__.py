"""Positions and rotations for torchtitan: module, inputs, shards and configs; the override alone imports it.

Shapes used throughout:
    query          (batch, seq, num_heads, head_dim); key likewise with num_kv_heads
    seq            tokens of one row of torchtitan's batch, packed with documents or padded
    table          (columns,) int64: a PositionTable as one tensor without a batch dimension
"""

from mmpos.torchtitan.config import rotary_from_config
from mmpos.torchtitan.inputs import document_positions, rope_cache, shard, table_tensor
from mmpos.torchtitan.rope import RoPE

__all__ = ["RoPE", "document_positions", "rope_cache", "rotary_from_config", "shard", "table_tensor"]
