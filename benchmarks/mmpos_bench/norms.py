"""Norm and rotation of q and k as cases: in one launch, one after the other, and by peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from mmpos.rotary import apply_rotary
from mmpos_bench.cases import Case, Contestant, Options, Role
from mmpos_bench.layers import Layer, Pair

__all__ = ["normalised"]

_EPS, _WEIGHT_SEED = 1e-6, 7

Turn = Callable[[Tensor, Tensor], Pair]

_PEERS = (("torch.compile, norm too", "compiled_norm"), ("Liger, norm too", "liger_norm"))


def normalised(group: str, name: str, layer: Layer, options: Options) -> Case:
    """Into new tensors, with a norm of each head before the rotation, against copies in new tensors."""
    generator = torch.Generator(layer.device).manual_seed(_WEIGHT_SEED)
    drawn = torch.rand(2, layer.shape.head_dim, generator=generator, device=layer.device) + 0.5
    weights = drawn.to(layer.dtype).unbind()

    def limit() -> Pair:
        return layer.q.clone(), layer.k.clone()

    def prove(turn: Turn, rounded: bool) -> None:
        before = [_norm(x.double(), w.double()) for x, w in zip((layer.q, layer.k), weights, strict=True)]
        layer.judge(turn(layer.q.clone(), layer.k.clone()), (before[0], before[1]), rounded=rounded)

    contestants = [
        Contestant(who, partial(turn, layer.q, layer.k), role, partial(prove, turn, rounded))
        for who, turn, role, rounded in _ways(layer, (weights[0], weights[1]), options)
    ]
    return Case(group, name, (Contestant("copy into new tensors", limit, Role.LIMIT), *contestants), layer.work)


def _ways(layer: Layer, weights: Pair, options: Options) -> Iterator[tuple[str, Turn, Role, bool]]:
    """Names, calls, roles, and whether they round between norm and rotation."""

    def at_once(q: Tensor, k: Tensor) -> Pair:
        found = apply_rotary(
            q, k, layer.table, layer.rotary, q_norm_weight=weights[0], k_norm_weight=weights[1], norm_eps=_EPS
        )
        assert found[1] is not None
        return found[0], found[1]

    def apart(q: Tensor, k: Tensor) -> Pair:
        found = apply_rotary(_norm(q, weights[0]), _norm(k, weights[1]), layer.table, layer.rotary)
        assert found[1] is not None
        return found[0], found[1]

    yield "mmpos, at once", at_once, Role.OURS, False
    yield "torch's norm, then mmpos", apart, Role.PEER, True
    for who, adapter in _PEERS:
        peer = options.peers.get(who, adapter)
        if peer is not None:
            yield who, peer.norm_rotate(layer, weights, _EPS), Role.PEER, True


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:], weight, _EPS)
