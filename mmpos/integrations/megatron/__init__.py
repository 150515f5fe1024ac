"""Positions and rotations for Megatron and TransformerEngine: angles in their layout, one table for all ranks.

Shapes used throughout:
    angles   (seq, batch, 1, rotary_dim) float32 "sbhd", or (tokens, 1, 1, rotary_dim) "thd"
"""

from mmpos.support.extras import needed_for

with needed_for("mmpos.integrations.megatron", extra="all"):
    from mmpos.integrations.megatron.angles import rotary_pos_emb
    from mmpos.integrations.megatron.broadcast import broadcast_table
    from mmpos.integrations.megatron.embedding import MultimodalRotaryEmbedding

__all__ = ["MultimodalRotaryEmbedding", "broadcast_table", "rotary_pos_emb"]
