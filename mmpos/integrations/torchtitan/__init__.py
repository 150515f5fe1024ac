"""Positions and rotations for torchtitan: module, inputs, shards and configs; the override alone imports it.

Shapes used throughout:
    query          (batch, seq, num_heads, head_dim), or (tokens, num_heads, head_dim) where torchtitan folds the batch,
                   as its main branch does; key likewise with num_kv_heads
    seq            tokens of one row of torchtitan's batch, packed with documents or padded; None where it is folded
    table          (1, 1, columns) int64: a PositionTable as one tensor, in a shape that no ids have
"""

from mmpos.support.extras import needed_for

with needed_for("mmpos.integrations.torchtitan", extra="all"):
    from mmpos.integrations.torchtitan.inputs import document_positions, rope_cache, shard, shard_tensors, table_tensor
    from mmpos.integrations.torchtitan.rope import RoPE, deliver_positions, rotary_from_config

__all__ = [
    "RoPE",
    "deliver_positions",
    "document_positions",
    "rope_cache",
    "rotary_from_config",
    "shard",
    "shard_tensors",
    "table_tensor",
]
