"""Positions and rotations for Megatron and TransformerEngine: angles in their layout, one table for all ranks.

Shapes used throughout:
    angles   (seq, batch, 1, rotary_dim) float32 "sbhd", or (tokens, 1, 1, rotary_dim) "thd"
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError('mmpos.megatron needs torch: pip install "mmpos[all]"') from error

from mmpos.megatron.angles import rotary_pos_emb
from mmpos.megatron.broadcast import broadcast_table
from mmpos.megatron.embedding import MultimodalRotaryEmbedding

__all__ = ["MultimodalRotaryEmbedding", "broadcast_table", "rotary_pos_emb"]
