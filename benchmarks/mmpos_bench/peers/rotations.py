"""Rotations from other projects: one function per project imports the project and returns an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmpos_bench.layers import EPS, Layer, Pair

Rotate = Callable[[Tensor, Tensor], Pair]
Make = Callable[[Layer], Rotate]
"""Function of a layer that returns a rotation of q and k by the cos and sin of the layer."""


@dataclass(frozen=True)
class PeerRotation:
    """Rotations that another project supports."""

    fresh: Make | None = None  # into new tensors
    inplace: Make | None = None  # in place
    training: Make | None = None  # with a backward pass; None means fresh
    most: int = 1 << 62  # maximum number of tokens; larger inputs would take too long


def formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Rotate q and k with the formula used in model code, which makes four passes over q and four over k.

    q and k are (batch, seq, heads, head_dim); cos and sin are (batch, seq, head_dim).
    """
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    half = q.shape[-1] // 2
    rotated_q = torch.cat((-q[..., half:], q[..., :half]), dim=-1)
    rotated_k = torch.cat((-k[..., half:], k[..., :half]), dim=-1)
    return q * cos + rotated_q * sin, k * cos + rotated_k * sin


def by_formula(layer: Layer) -> Rotate:
    """Rotate with the eager formula."""
    cos, sin = layer.tables
    return lambda q, k: formula(q, k, cos, sin)


def load_compiled() -> PeerRotation:
    """Load torch.compile if it works on this machine."""
    _need_compiler()

    def rotate(layer: Layer) -> Rotate:
        cos, sin = layer.tables
        return _compiled(lambda q, k: formula(q, k, cos, sin))

    return PeerRotation(rotate, most=32768)


def load_transformers() -> PeerRotation:
    """Load the functions that Transformers' Qwen2-VL uses in the language model and in the vision encoder."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb, apply_rotary_pos_emb_vision

    def rotate(layer: Layer) -> Rotate:
        cos, sin = layer.tables
        if not layer.shape.axes_dim:
            return lambda q, k: apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)

        def encoder(q: Tensor, k: Tensor) -> Pair:  # no batch dimension, computed in float32
            rotated: Any = apply_rotary_pos_emb_vision(q[0], k[0], cos[0], sin[0])
            return rotated[0][None], rotated[1][None]

        return encoder

    return PeerRotation(rotate, most=32768)


def load_liger() -> PeerRotation:
    """Load Liger's kernel, which rotates q and k in place, even in training."""
    _need_gpu()
    from liger_kernel.ops.rope import LigerRopeFunction

    def rotate(layer: Layer) -> Rotate:
        cos, sin = layer.tables

        def call(q: Tensor, k: Tensor) -> Pair:  # expects bhsd views of bshd memory
            rotated: Any = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)

        return call

    return PeerRotation(inplace=rotate, training=rotate)


def load_flash_attention() -> PeerRotation:
    """Load flash-attention's kernel, which takes cos and sin per pair and is launched separately for q and k."""
    _need_gpu()
    from flash_attn.layers.rotary import apply_rotary_emb

    def rotate(layer: Layer, inplace: bool) -> Rotate:
        half = layer.shape.head_dim // 2
        cos, sin = (table[0, :, :half].contiguous() for table in layer.tables)
        rotate_one: Any = partial(apply_rotary_emb, cos=cos, sin=sin, inplace=inplace)
        return lambda q, k: (rotate_one(q), rotate_one(k))

    return PeerRotation(partial(rotate, inplace=False), partial(rotate, inplace=True))


def load_flashinfer() -> PeerRotation:
    """Load flashinfer's kernel, with a float32 cache of cos and sin that has one row per token."""
    _need_gpu()
    from flashinfer.rope import apply_rope_with_cos_sin_cache, apply_rope_with_cos_sin_cache_inplace

    def rotate(layer: Layer, inplace: bool) -> Rotate:
        cache = torch.cat((layer.angles.cos(), layer.angles.sin()), dim=-1).float()
        rows = torch.arange(layer.tokens, device=layer.device)
        options = {"positions": rows, "head_size": layer.shape.head_dim, "cos_sin_cache": cache, "is_neox": True}

        def call(q: Tensor, k: Tensor) -> Pair:
            flat = {"query": q.view(layer.tokens, -1), "key": k.view(layer.tokens, -1)}
            if inplace:
                apply_rope_with_cos_sin_cache_inplace(**flat, **options)
                return q, k
            rotated: Any = apply_rope_with_cos_sin_cache(**flat, **options)
            return rotated[0].view_as(q), rotated[1].view_as(k)

        return call

    return PeerRotation(partial(rotate, inplace=False), partial(rotate, inplace=True))


def by_diffusers(layer: Layer) -> Rotate:
    """Normalise with diffusers' attention module for FLUX.1, then rotate with its function and float32 phases."""
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.transformers.transformer_flux import FluxAttention

    attention: Any = FluxAttention(1, heads=layer.shape.q_heads, dim_head=layer.shape.head_dim, eps=EPS)
    norms = attention.norm_q, attention.norm_k
    for norm, weight in zip(norms, layer.weights, strict=True):
        norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    tables = [layer.of_channels(table).float() for table in (layer.angles.cos(), layer.angles.sin())]

    def norm_and_rotate(q: Tensor, k: Tensor) -> Pair:
        q, k = (apply_rotary_emb(norm(x), tables, sequence_dim=1) for norm, x in zip(norms, (q, k), strict=True))
        return q, k

    return norm_and_rotate


def compiled_diffusers(layer: Layer) -> Rotate:
    """Compile ``by_diffusers``."""
    return _compiled(by_diffusers(layer))


def _compiled(function: Rotate) -> Rotate:
    _need_compiler()
    torch.compiler.reset()  # functions compiled for other shapes count towards a limit
    return torch.compile(function, dynamic=False)


def _need_compiler() -> None:
    """Raise an error if torch cannot compile; on a CPU, compiling requires a C++ compiler."""
    torch.compile(torch.neg)(torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu"))


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise ImportError("its kernel requires a GPU")  # checked first, because the import takes seconds


ROTATIONS: Mapping[str, Callable[[], PeerRotation]] = {
    "eager formula": lambda: PeerRotation(by_formula, most=8192),
    "torch.compile": load_compiled,
    "Transformers": load_transformers,
    "Liger": load_liger,
    "flash-attention": load_flash_attention,
    "flashinfer": load_flashinfer,
}

DIFFUSERS: Mapping[str, Make] = {"diffusers": by_diffusers, "diffusers, compiled": compiled_diffusers}
"""Norm and rotation of diffusers."""
