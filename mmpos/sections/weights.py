"""Weights of q and k with the channels of every head in the order of an engine's sections, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor

from mmpos.checks import IntArray, boolean, integer, one_of
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary.config import Rotary
from mmpos.sections.layout import qk_channels

__all__ = ["permute_qk"]

Weights = Mapping[str, Tensor]
NamedWeights = Iterable[tuple[str, Tensor]]
Fused = Literal["stacked", "grouped"]

PROJECTION = re.compile(
    r"(?P<layer>(?:.*\.)?)(?P<part>(?P<role>q|k|qkv)_proj|(?P<norm>q|k|query|key)_(?:layer)?norm)\.(?P<leaf>.+)"
)
TOWER = re.compile(r"(^|[._])(visual|vision|vit|image|video|audio|encoder|talker|code2wav)")
LEAF = re.compile(
    r"(base_layer\.)?(weight|bias|weight_scale|lora_B(\.[^.]+)?\.(weight|bias)|lora_magnitude_vector(\..+)?)"
)
OUTPUT = re.compile(r"(?P<layer>(?:.*\.)?)o_proj\.weight")
UNTURNED = re.compile(r"lora_A\..+|lora_embedding_A.*")


@overload
def permute_qk(
    weights: Weights,
    rotary: Rotary,
    *,
    num_heads: int | None = ...,
    num_kv_heads: int | None = ...,
    fused: Fused = ...,
    names: str | None = ...,
    inverse: bool = ...,
) -> dict[str, Tensor]: ...


@overload
def permute_qk(
    weights: NamedWeights,
    rotary: Rotary,
    *,
    num_heads: int | None = ...,
    num_kv_heads: int | None = ...,
    fused: Fused = ...,
    names: str | None = ...,
    inverse: bool = ...,
) -> Iterator[tuple[str, Tensor]]: ...


def permute_qk(
    weights: Weights | NamedWeights,
    rotary: Rotary,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    fused: Fused = "stacked",
    names: str | None = None,
    inverse: bool = False,
) -> dict[str, Tensor] | Iterator[tuple[str, Tensor]]:
    """A checkpoint with the channels of q and k sorted by the axis that turns them, as ``Sections`` needs it.

    Rows of q_proj, k_proj and of the q and k in qkv_proj are sorted inside each head, with their biases, the weights
    of q and k norms, per-row scales, and LoRA's B. Everything else is passed on as it is. Nothing in a checkpoint can
    tell whether this was done: do it once, and keep what comes out under another name.

    Args:
        weights: name to tensor, or (name, tensor) pairs as engines load them; the whole model, or a whole adapter.
        rotary: the rotation that the model was trained with; it says head_dim, pairing and allocation.
        num_heads: heads of q; needed for qkv_proj only.
        num_kv_heads: heads of k and v; likewise.
        fused: rows of qkv_proj: "stacked" q, k, v, or "grouped": of each kv head its q heads, k, v (HunyuanImage-3.0).
        names: regular expression that a name must contain; None takes all names but those of towers for vision,
            audio or video, whose rotations are their own.
        inverse: give back the checkpoint that ``permute_qk`` came from, bit for bit.

    Returns:
        a dict for a mapping, else an iterator of pairs, one tensor at a time; tensors that change are new.

    Raises:
        InvalidInputError: no weight of q and k among the names, or q without k, or rows that are not whole heads.
        UnsupportedError: weights whose rows are packed or scaled in blocks; permute before quantising. Gates among the
            rows of q_proj (Qwen3-Next, Qwen3.5), seen by an o_proj of half as many columns.
    """
    channels = qk_channels(rotary)
    channels = np.argsort(channels) if boolean("inverse", inverse) else channels
    turn = _Turn.of(channels, num_heads, num_kv_heads, fused, names)
    given: object = weights
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidInputError(f"weights: got {type(weights).__name__}, want a mapping, or (name, tensor) pairs")
    return dict(turn.pairs(weights.items())) if isinstance(weights, Mapping) else turn.pairs(weights)


@dataclass(frozen=True)
class _Turn:
    """One pass over a checkpoint: which channel comes in each place of a head, and which heads of a fused qkv turn."""

    channels: IntArray
    turns: IntArray | None
    names: re.Pattern[str] | None

    @classmethod
    def of(
        cls, channels: IntArray, num_heads: int | None, num_kv_heads: int | None, fused: str, names: str | None
    ) -> _Turn:
        one_of("fused", fused, ("stacked", "grouped"))
        turns = None
        if num_heads is not None or num_kv_heads is not None:
            kv = integer("num_kv_heads", num_kv_heads, minimum=1)
            q = integer("num_heads", num_heads, minimum=kv)
            if q % kv:
                raise InvalidInputError(f"num_heads: got {q}, want a multiple of num_kv_heads {kv}")
            stacked = [1] * (q + kv) + [0] * kv
            turns = np.array(stacked if fused == "stacked" else ([1] * (q // kv + 1) + [0]) * kv, np.int64)
        try:
            return cls(channels, turns, None if names is None else re.compile(names))
        except (TypeError, re.error) as error:
            raise InvalidInputError(f"names: got {names!r}, want a regular expression ({error})") from None

    def pairs(self, weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        counterparts: dict[str, str] = {}
        outputs: dict[str, int] = {}
        rows: dict[str, int] = {}
        for name, tensor in weights:
            found = PROJECTION.fullmatch(name)
            if found is None or not self._wanted(name):
                if output := OUTPUT.fullmatch(name):
                    outputs[f"{output['layer']}q_proj.weight"] = tensor.shape[-1]
                yield name, tensor
                continue
            role = found["role"] or found["norm"][0]
            # An adapter may be of q alone.
            counterparts[name] = _counterpart(found) if found["leaf"] == "weight" and role != "qkv" else name
            turned = self._turned(name, tensor, found["leaf"], role, norm=found["norm"] is not None)
            rows[name] = len(turned) if turned.dim() else 1
            yield name, turned
        _check_seen(counterparts)
        _check_gates(rows, outputs)

    def _wanted(self, name: str) -> bool:
        return TOWER.search(name) is None if self.names is None else self.names.search(name) is not None

    def _turned(self, name: str, tensor: Tensor, leaf: str, role: str, norm: bool) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise InvalidInputError(f"{name}: got {type(tensor).__name__}, want a tensor")
        if tensor.numel() == 1 or UNTURNED.fullmatch(leaf):
            return tensor
        packed = LEAF.fullmatch(leaf) is None or not tensor.is_floating_point()
        if packed or (leaf == "weight_scale" and tensor.shape[1:].numel() > 1):
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise UnsupportedError(f"{name}: got {got}, want weights with a row per channel; permute before quantising")
        along = -1 if norm else 0  # norms may have a row per head
        index = torch.from_numpy(self._rows(name, tensor.shape[along], role)).to(tensor.device)
        return tensor[..., index] if norm else tensor[index]

    def _rows(self, name: str, rows: int, role: str) -> IntArray:
        head_dim = self.channels.size
        heads = rows // head_dim
        if rows % head_dim:
            raise InvalidInputError(f"{name}: got {rows} rows, want a multiple of head_dim {head_dim}")
        order = np.broadcast_to(self.channels, (heads, head_dim))
        if role == "qkv":
            if self.turns is None:
                raise InvalidInputError(f"num_heads: got None, want it and num_kv_heads to tell q, k and v in {name}")
            if heads != self.turns.size:
                raise InvalidInputError(f"{name}: got {rows} rows, want {self.turns.size * head_dim} for q, k and v")
            order = np.where(self.turns[:, None], order, np.arange(head_dim))
        return (order + head_dim * np.arange(heads)[:, None]).ravel()


def _counterpart(found: re.Match[str]) -> str:
    """The name of k beside that of q, or of q beside that of k."""
    other = {"q": "k", "k": "q", "query": "key", "key": "query"}
    which, rest = found["part"].split("_", 1)
    return f"{found['layer']}{other[which]}_{rest}.{found['leaf']}"


def _check_seen(counterparts: Mapping[str, str]) -> None:
    if not counterparts:
        raise InvalidInputError(
            "weights: got no q_proj, k_proj or qkv_proj of a language model, want at least one; see names"
        )
    for name, other in counterparts.items():
        if other not in counterparts:
            raise InvalidInputError(f"weights: got {name} alone, want {other} too")


def _check_gates(rows: Mapping[str, int], outputs: Mapping[str, int]) -> None:
    """Refuse gates, which lie beside q in q_proj and belong to the channels of v."""
    for name, columns in outputs.items():
        if rows.get(name) == 2 * columns:
            raise UnsupportedError(f"{name}: got {2 * columns} rows beside {columns} columns of o_proj, want no gates")
