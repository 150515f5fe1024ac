"""Norm, rotation and the write of k and v to a paged cache: in one call, and by separate operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from mmpos.rotary import apply_rotary, rotate_and_store
from mmpos_bench.cases import Case, Contestant, Options, Role
from mmpos_bench.layers import Layer
from mmpos_bench.proofs import holds

__all__ = ["stored"]

_EPS = 1e-6
_BLOCK = 16  # slots in a block of the cache


class _Step:
    """One layer of a server's step: q, k and v of all tokens, and a cache whose blocks are dealt out anew."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.q, self.k, self.v = layer.q, layer.k, layer.random(1)[1]
        heads, dim, blocks = layer.shape.k_heads, layer.shape.head_dim, -(-layer.tokens // _BLOCK)
        both = torch.zeros(2, blocks, _BLOCK, heads, dim, dtype=layer.dtype, device=layer.device)
        self.keys, self.values = both.unbind(0)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
        slots = (order[:, None] * _BLOCK + torch.arange(_BLOCK)).flatten()[: layer.tokens]
        self.slots = slots.to(layer.device)
        self.places = self.slots // _BLOCK, self.slots % _BLOCK
        generator = torch.Generator(layer.device).manual_seed(2)
        weights = torch.rand(2, dim, generator=generator, device=layer.device).to(layer.dtype)
        self.q_weight, self.k_weight = weights.unbind(0)

    def in_one_call(self) -> Tensor:
        """The norms, the rotation and the store together."""
        return rotate_and_store(
            self.q, self.k, self.v, self.layer.table, self.layer.rotary, self.keys, self.values, self.slots,
            q_norm_weight=self.q_weight, k_norm_weight=self.k_weight, norm_eps=_EPS,
        )[0]  # fmt: skip

    def with_the_norm(self) -> Tensor:
        """Norms and rotation together, and then the store."""
        q, k = apply_rotary(
            self.q, self.k, self.layer.table, self.layer.rotary,
            q_norm_weight=self.q_weight, k_norm_weight=self.k_weight, norm_eps=_EPS,
        )  # fmt: skip
        assert k is not None
        return self._store(q, k)

    def separately(self) -> Tensor:
        """Each operation by itself, each rounded."""
        q = rms_norm(self.q, self.q_weight.shape, self.q_weight, _EPS)
        k = rms_norm(self.k, self.k_weight.shape, self.k_weight, _EPS)
        q, turned = apply_rotary(q, k, self.layer.table, self.layer.rotary)
        assert turned is not None
        return self._store(q, turned)

    def copied(self) -> None:
        """The same bytes in and out."""
        self.q.clone()
        for x, cache in ((self.k, self.keys), (self.v, self.values)):
            cache.flatten(0, 1)[: self.layer.tokens].copy_(x[0])

    def prove(self, call: Callable[[], Tensor], rounded: bool) -> None:
        """q is right, and what the cache holds, as the formula in float64 has it."""
        self.keys.zero_()
        self.values.zero_()
        q = call()
        before = tuple(
            rms_norm(x.double(), w.shape, w.double(), _EPS)
            for x, w in ((self.q, self.q_weight), (self.k, self.k_weight))
        )
        self.layer.judge((q, self.keys[self.places][None]), (before[0], before[1]), rounded=rounded)
        holds(torch.equal(self.values[self.places], self.v[0]), "other values in the cache", "v")

    def _store(self, q: Tensor, k: Tensor) -> Tensor:
        self.keys[self.places] = k[0]
        self.values[self.places] = self.v[0]
        return q


def stored(group: str, name: str, layer: Layer, options: Options) -> Case:
    """Everything between the projection and attention, against a copy of the same bytes."""
    step = _Step(layer)
    ways = (
        ("mmpos, one call", step.in_one_call, Role.OURS, False),
        ("norm and rotation, then store", step.with_the_norm, Role.PEER, False),
        ("separate operations", step.separately, Role.PEER, True),
    )
    contestants = [
        Contestant("copy", step.copied, Role.LIMIT),
        *(Contestant(who, call, role, partial(step.prove, call, rounded)) for who, call, role, rounded in ways),
    ]
    moved = 2 * (step.q.nbytes + step.k.nbytes + step.v.nbytes)
    return Case(group, name, tuple(contestants), layer.work | {"bytes": moved})
