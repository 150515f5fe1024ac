"""The ways to rotate the q and k of a layer as cases: ours, the peers', and the copy that bounds both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from mmpos.rotary import apply_rotary
from mmpos.rotary.apply import Implementation, cos_sin
from mmpos.rotary.device import Positions
from mmpos_bench.cases import Case, Contestant, Options, Role
from mmpos_bench.layers import Layer, Pair

__all__ = ["fresh", "inplace", "with_gradients"]

Rotate = Callable[[Tensor, Tensor], Pair]

_PEERS = (
    ("eager formula", "eager_rotation"),
    ("torch.compile", "compiled_rotation"),
    ("Transformers", "transformers_rotation"),
    ("torchtitan", "torchtitan_rotation"),
    ("Liger", "liger_rotation"),
    ("flash-attention", "flash_rotation"),
    ("flashinfer", "flashinfer_rotation"),
)
_SPOIL = ("Liger",)
"""Peers that write into what they are given, and say they do not."""


def fresh(group: str, name: str, layer: Layer, options: Options) -> Case:
    """Into new tensors, against copies in new tensors."""

    def limit() -> Pair:
        return layer.q.clone(), layer.k.clone()

    contestants = [
        Contestant("copy into new tensors", limit, Role.LIMIT),
        *(_rotation(layer, who, rotate, role) for who, rotate, role in _ours(layer)),
        _phases(layer),
        *(
            _rotation(layer, who, rotate, Role.PEER, rounded=True)
            for who, rotate in _peers(layer, options, "rotate")
            if who not in _SPOIL
        ),
    ]
    return Case(group, name, tuple(contestants), layer.work)


def inplace(group: str, name: str, layer: Layer, options: Options) -> Case:
    """In place, against a copy into tensors that are there."""
    q, k = torch.empty_like(layer.q), torch.empty_like(layer.k)

    def limit() -> None:
        q.copy_(layer.q)
        k.copy_(layer.k)

    contestants = [
        Contestant("copy", limit, Role.LIMIT),
        *(_rotation(layer, who, rotate, role) for who, rotate, role in _ours(layer, inplace=True)),
        *(_rotation(layer, who, rotate, Role.PEER, rounded=True) for who, rotate in _peers(layer, options, "rotate_")),
    ]
    return Case(group, name, tuple(contestants), layer.work)


def with_gradients(group: str, name: str, layer: Layer, options: Options) -> Case:
    """Into new tensors, and then the gradients of q and k, against both copies."""
    gradients = layer.random(1)
    q, k = (x.clone().requires_grad_() for x in (layer.q, layer.k))

    def limit() -> tuple[Tensor, ...]:
        return layer.q.clone(), layer.k.clone(), gradients[0].clone(), gradients[1].clone()

    def contestant(who: str, rotate: Rotate, role: Role, rounded: bool = False) -> Contestant:
        def call(given: Pair = gradients) -> Pair:
            found = torch.autograd.grad(rotate(q, k), (q, k), given)
            return found[0], found[1]

        def prove() -> None:
            with torch.no_grad():
                layer.judge(rotate(layer.q.clone(), layer.k.clone()), (layer.q, layer.k), rounded=rounded)
            # Copies, since some write into the gradients that come, too.
            back = call((gradients[0].clone(), gradients[1].clone()))
            layer.judge(back, gradients, rounded=rounded, backwards=True)

        return Contestant(who, call, role, prove)

    contestants = [
        Contestant("copies into new tensors", limit, Role.LIMIT),
        *(contestant(who, rotate, role) for who, rotate, role in _ours(layer)),
        *(contestant(who, rotate, Role.PEER, rounded=True) for who, rotate in _peers(layer, options, "rotate")),
    ]
    work = layer.work | {"bytes": 2 * layer.work["bytes"]}
    return Case(group, name, tuple(contestants), work)


def _ours(layer: Layer, *, inplace: bool = False) -> Iterator[tuple[str, Rotate, Role]]:
    """From a table and from dense ids, and from a table by the reference in plain torch."""

    def by(positions: Positions, implementation: Implementation, q: Tensor, k: Tensor) -> Pair:
        found = apply_rotary(q, k, positions, layer.rotary, inplace=inplace, implementation=implementation)
        assert found[1] is not None
        return found[0], found[1]

    yield "mmpos, table", partial(by, layer.table, "auto"), Role.OURS
    yield "mmpos, dense ids", partial(by, layer.dense, "auto"), Role.OURS
    yield "mmpos, reference", partial(by, layer.table, "reference"), Role.PART


def _peers(layer: Layer, options: Options, way: str) -> Iterator[tuple[str, Rotate]]:
    """Peers that have such a way, and take such tensors."""
    for who, adapter in _PEERS:
        make = getattr(options.peers.get(who, adapter), way, None)
        rotate = None if make is None else make(layer)
        if rotate is not None:
            yield who, rotate


def _rotation(layer: Layer, name: str, rotate: Rotate, role: Role, *, rounded: bool = False) -> Contestant:
    def prove() -> None:
        layer.judge(rotate(layer.q.clone(), layer.k.clone()), (layer.q, layer.k), rounded=rounded)

    return Contestant(name, partial(rotate, layer.q, layer.k), role, prove)


def _phases(layer: Layer) -> Contestant:
    """cos and sin alone, which peers are given: what a model spends on them once for all its layers."""

    def call() -> Pair:
        cos, sin = cos_sin(layer.rotary, layer.table, "transformers")
        return cos, sin

    def prove() -> None:
        # q of ones and zeros, turned, is cos and sin.
        half = layer.shape.head_dim // 2
        cos, sin = (table[0, :, None, :half] for table in call())
        ones = torch.cat((torch.ones_like(cos), torch.zeros_like(cos)), dim=-1)[None]
        turned = torch.cat((cos, sin), dim=-1)[None]
        layer.judge((turned, turned), (ones, ones))

    return Contestant("cos and sin alone", call, Role.PART, prove)
