"""Rotations of other projects: a function for each imports it, and gives what drives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmpos.rotary import apply_rotary
from mmpos_bench.layers import EPS, Layer, Pair

Rotate = Callable[[Tensor, Tensor], Pair]
Make = Callable[[Layer], Rotate]
"""Gives what turns the q and k of a layer by the cos and sin that it has."""


@dataclass(frozen=True)
class PeerRotation:
    """The ways in which a project rotates."""

    fresh: Make | None = None  # into new tensors
    inplace: Make | None = None  # in the tensors that come
    training: Make | None = None  # for a backward pass; None is as fresh
    most: int = 1 << 62  # tokens beyond which it would take all the time


def formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Turn q and k (batch, seq, heads, head_dim) by cos and sin (batch, seq, head_dim), as models do it layer by layer:
    four passes over q, and four over k.
    """
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    half = q.shape[-1] // 2
    turned_q = torch.cat((-q[..., half:], q[..., :half]), dim=-1)
    turned_k = torch.cat((-k[..., half:], k[..., :half]), dim=-1)
    return q * cos + turned_q * sin, k * cos + turned_k * sin


def by_formula(layer: Layer) -> Rotate:
    """Rotate by the formula as it stands."""
    cos, sin = layer.tables
    return lambda q, k: formula(q, k, cos, sin)


def load_compiled() -> PeerRotation:
    """Load torch.compile, if it can compile here."""
    _need_compiler()

    def rotate(layer: Layer) -> Rotate:
        cos, sin = layer.tables
        return _compiled(lambda q, k: formula(q, k, cos, sin))

    return PeerRotation(rotate, most=32768)


def load_transformers() -> PeerRotation:
    """Load the functions of Transformers' Qwen2-VL, for its language model and for its vision encoder."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb, apply_rotary_pos_emb_vision

    def rotate(layer: Layer) -> Rotate:
        cos, sin = layer.tables
        if not layer.shape.axes_dim:
            return lambda q, k: apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)

        def encoder(q: Tensor, k: Tensor) -> Pair:  # has no batch, and computes in float32
            turned: Any = apply_rotary_pos_emb_vision(q[0], k[0], cos[0], sin[0])
            return turned[0][None], turned[1][None]

        return encoder

    return PeerRotation(rotate, most=32768)


def load_liger() -> PeerRotation:
    """Load Liger's kernel, which writes into the q and k that it is given, also in training."""
    _need_gpu()
    from liger_kernel.ops.rope import LigerRopeFunction

    def rotate(layer: Layer) -> Rotate:
        cos, sin = layer.tables

        def call(q: Tensor, k: Tensor) -> Pair:  # it takes heads before tokens, in memory that has tokens first
            turned: Any = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            return turned[0].transpose(1, 2), turned[1].transpose(1, 2)

        return call

    return PeerRotation(inplace=rotate, training=rotate)


def load_flash_attention() -> PeerRotation:
    """Load flash-attention's kernel, which is given half of cos and sin: a launch for q and one for k."""
    _need_gpu()
    from flash_attn.layers.rotary import apply_rotary_emb

    def rotate(layer: Layer, inplace: bool) -> Rotate:
        half = layer.shape.head_dim // 2
        cos, sin = (table[0, :, :half].contiguous() for table in layer.tables)
        turn: Any = partial(apply_rotary_emb, cos=cos, sin=sin, inplace=inplace)
        return lambda q, k: (turn(q), turn(k))

    return PeerRotation(partial(rotate, inplace=False), partial(rotate, inplace=True))


def load_flashinfer() -> PeerRotation:
    """Load flashinfer's kernel, which is given a cache of cos and sin in float32 with a row for every token."""
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
            turned: Any = apply_rope_with_cos_sin_cache(**flat, **options)
            return turned[0].view_as(q), turned[1].view_as(k)

        return call

    return PeerRotation(partial(rotate, inplace=False), partial(rotate, inplace=True))


def compiled_norm(layer: Layer) -> Rotate:
    """Normalise and rotate by torch's norm and the formula, compiled together, if torch can compile here."""
    cos, sin = layer.tables

    def both(q: Tensor, k: Tensor) -> Pair:
        return formula(*layer.normed((q, k)), cos, sin)

    return _compiled(both)


def by_diffusers(layer: Layer) -> Rotate:
    """Normalise by the modules of an attention of diffusers, FLUX.1's or Wan's, and rotate by its function, which is
    given cos and sin in float32. Wan's own function lies inside its processor, and takes as many steps.
    """
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.transformers.transformer_flux import FluxAttention
    from diffusers.models.transformers.transformer_wan import WanAttention

    shape = layer.shape
    attention: Any = (WanAttention if shape.joint_norm else FluxAttention)(
        1, heads=shape.q_heads, dim_head=shape.head_dim, eps=EPS
    )
    norms = attention.norm_q, attention.norm_k
    for norm, weight in zip(norms, layer.weights, strict=True):
        norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    tables = [layer.of_channels(table).float() for table in (layer.angles.cos(), layer.angles.sin())]

    def both(q: Tensor, k: Tensor) -> Pair:
        wide = (x.flatten(2) if shape.joint_norm else x for x in (q, k))
        normed = (norm(x).unflatten(-1, (-1, shape.head_dim)) for norm, x in zip(norms, wide, strict=True))
        q, k = (apply_rotary_emb(x.view_as(q), tables, sequence_dim=1) for x in normed)
        return q, k

    return both


def compiled_diffusers(layer: Layer) -> Rotate:
    """The same, compiled, if torch can compile here."""
    return _compiled(by_diffusers(layer))


def compiled_norm_alone(layer: Layer) -> Rotate:
    """Normalise by torch's norm, compiled, and rotate its results in place by mmpos: a compiled model has it so."""
    norm = _compiled(lambda q, k: layer.normed((q, k)))

    def both(q: Tensor, k: Tensor) -> Pair:
        turned: Any = apply_rotary(*norm(q, k), layer.table, layer.rotary, inplace=True, implementation=layer.how)
        return turned

    return both


def _compiled(both: Rotate) -> Rotate:
    _need_compiler()
    torch.compiler.reset()  # what was compiled for other shapes would count against a limit
    return torch.compile(both, dynamic=False)


def _need_compiler() -> None:
    """Fail where torch cannot compile: for a GPU it needs no compiler of C++."""
    torch.compile(torch.neg)(torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu"))


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise ImportError("its kernel needs a GPU")  # before seconds are spent on importing it


ROTATIONS: Mapping[str, Callable[[], PeerRotation]] = {
    "eager formula": lambda: PeerRotation(by_formula, most=8192),
    "torch.compile": load_compiled,
    "Transformers": load_transformers,
    "Liger": load_liger,
    "flash-attention": load_flash_attention,
    "flashinfer": load_flashinfer,
}

NORMS: Mapping[str, Make] = {"torch.compile, norm too": compiled_norm}
"""Ways of plain torch that also normalise."""

COMPILED_THEN_OURS: Mapping[str, Make] = {"norm compiled, then mmpos": compiled_norm_alone}
"""A way of ours that compiles."""

DIFFUSERS: Mapping[str, Make] = {"diffusers": by_diffusers, "diffusers, compiled": compiled_diffusers}
"""Ways of diffusers, which normalise and rotate."""
