"""Weights of q and k in the order of an engine's sections and back, and the cos/sin cache of a loaded model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol, TypedDict, TypeGuard, Unpack, overload

import numpy as np
import torch
from torch import Tensor, nn

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.sections.layout import BLOCK, Sections, qk_channels
from mmpos.rotary.config import Rotary
from mmpos.support.checks import IntArray, boolean, integer, one_of

__all__ = ["install_cache", "permute_qk"]

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
QUERY_OR_KEY = re.compile(
    r"(^|[._])(w?(q|k|qk|kq|qkv)|(q|k)(ln|norm)|(ln|norm)(q|k)|quer(y|ies)|keys?)\d*([._]|$)", re.I
)
"""Names of what may hold channels of q or k, under whatever name."""
OTHERS = re.compile(
    r"(v|o|c|g|out|output|gate)_\w+|wo|dense|gate|proj|sinks?|rotary_emb|attn_sub_norm|inner_attn_ln", re.I
)
"""Parts of attention beside q_proj and k_proj without channels of q and k, in models of Transformers."""


class _Options(TypedDict, total=False):
    num_heads: int | None
    num_kv_heads: int | None
    fused: Fused
    names: str | None
    norms: str | None
    leave: str | None
    inverse: bool


@overload
def permute_qk(weights: Weights, rotary: Rotary, **options: Unpack[_Options]) -> dict[str, Tensor]: ...


@overload
def permute_qk(weights: NamedWeights, rotary: Rotary, **options: Unpack[_Options]) -> Iterator[tuple[str, Tensor]]: ...


def permute_qk(
    weights: Weights | NamedWeights,
    rotary: Rotary,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    fused: Fused = "stacked",
    names: str | None = None,
    norms: str | None = None,
    leave: str | None = None,
    inverse: bool = False,
) -> dict[str, Tensor] | Iterator[tuple[str, Tensor]]:
    """Sort the channels of q and k in a checkpoint by the axis that rotates them, as ``Sections`` needs it.

    Rows of q_proj, k_proj and of the q and k in qkv_proj are sorted inside each head, with their biases, the weights
    of q and k norms (q_norm, q_layernorm, query_layernorm and those of k), per-row scales, and LoRA's B. What else
    could hold channels of q or k is refused until ``norms`` or ``leave`` says what it is: by its name, or since it lies
    beside q_proj and is no known part of attention. All other tensors are passed on as they are. A
    checkpoint does not show whether it is sorted: do this once, and save the result under another name.

    Args:
        weights: name to tensor, or (name, tensor) pairs as engines load them; the whole model, or a whole adapter.
        rotary: the rotation that the model was trained with; it says head_dim, pairing and allocation.
        num_heads: heads of q; needed for qkv_proj only.
        num_kv_heads: heads of k and v; likewise.
        fused: rows of qkv_proj: "stacked" q, k, v, or "grouped": of each kv head its q heads, k, v (HunyuanImage-3.0).
        names: regular expression that a name must contain; None takes all names but those of towers for vision,
            audio or video, whose rotations are their own.
        norms: regular expression for names of further norms or scales of the channels of q or k, which are sorted, too.
        leave: regular expression for names to pass on as they are, whatever they look like.
        inverse: give back the checkpoint that ``permute_qk`` came from, bit for bit.

    Returns:
        a dict for a mapping, else an iterator of pairs, one tensor at a time; tensors that change are new.

    Raises:
        InvalidInputError: no weight of q and k among the names, or q without k, or rows that are not whole heads; a
            tensor that may hold channels of q or k under a name that is not known.
        UnsupportedError: weights whose rows are packed or scaled in blocks; permute before quantising. Gates among the
            rows of q_proj (Qwen3-Next, Qwen3.5), seen by an o_proj of half as many columns.
    """
    channels = qk_channels(rotary)
    channels = np.argsort(channels) if boolean("inverse", inverse) else channels
    patterns = (_pattern(name, pattern) for name, pattern in (("names", names), ("norms", norms), ("leave", leave)))
    turn = _Turn(channels, _turns(num_heads, num_kv_heads, fused), *patterns)
    source: object = weights
    if isinstance(source, str | bytes) or not isinstance(source, Iterable):
        raise InvalidInputError(f"weights: got {type(weights).__name__}, want a mapping, or (name, tensor) pairs")
    return dict(turn.pairs(weights.items())) if isinstance(weights, Mapping) else turn.pairs(weights)


@dataclass(frozen=True)
class _Turn:
    """One pass over a checkpoint.

    Args:
        channels: (head_dim,) old channel at each new one of a head.
        turns: (heads,) 1 for those of a fused qkv that are sorted; None without their numbers.
        names: pattern of the names that are sorted; None is all but towers.
        norms: names of further norms.
        leave: names of what is passed on.
    """

    channels: IntArray
    turns: IntArray | None
    names: re.Pattern[str] | None
    norms: re.Pattern[str] | None
    leave: re.Pattern[str] | None

    def pairs(self, weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        seen = _Seen()
        for name, tensor in weights:
            match = PROJECTION.fullmatch(name)
            if not self._wanted(name):
                yield name, tensor
            elif self.norms is not None and self.norms.search(name):
                seen.counterparts[name] = name
                yield name, self._turned(name, tensor, "weight", "norm", norm=True)
            elif match is None:
                self._look_at(name, tensor, seen)
                yield name, tensor
            else:
                role = match["role"] or match["norm"][0]
                # An adapter may be of q alone.
                counterpart = _counterpart(match) if match["leaf"] == "weight" and role != "qkv" else name
                turned = self._turned(name, tensor, match["leaf"], role, norm=match["norm"] is not None)
                seen.counterparts[name] = counterpart
                seen.rows[name] = len(turned) if turned.dim() else 1
                seen.blocks.add(match["layer"])
                yield name, turned
        seen.check()

    def _look_at(self, name: str, tensor: Tensor, seen: _Seen) -> None:
        """Note a tensor that is passed on, or refuse it if its name says that it is of q or k."""
        if output := OUTPUT.fullmatch(name):
            seen.outputs[f"{output['layer']}q_proj.weight"] = tensor.shape[-1]
        shape = tuple(getattr(tensor, "shape", ()))  # a state_dict may hold other things
        if any(size and size % self.channels.size == 0 for size in shape):
            if QUERY_OR_KEY.search(name):
                raise _unknown(name, shape)
            seen.others[name] = shape

    def _wanted(self, name: str) -> bool:
        if self.leave is not None and self.leave.search(name):
            return False
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


@dataclass(frozen=True)
class _Seen:
    """Facts of a pass over a checkpoint that only its end can judge.

    Args:
        counterparts: of every tensor of q and k, the name of the one that must be there, too.
        rows: of every tensor of q and k.
        blocks: names of the modules that hold them, which end in a dot.
        outputs: columns of o_proj, by the name of the q_proj beside it.
        others: shapes of tensors that were passed on and have whole heads of channels.
    """

    counterparts: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    blocks: set[str] = field(default_factory=set)
    outputs: dict[str, int] = field(default_factory=dict)
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def check(self) -> None:
        if not self.counterparts:
            raise InvalidInputError(
                "weights: got no q_proj, k_proj or qkv_proj of a language model, want at least one; see names"
            )
        for name, other in self.counterparts.items():
            if other not in self.counterparts:
                raise InvalidInputError(f"weights: got {name} alone, want {other} too")
        for name, columns in self.outputs.items():  # gates lie beside q in q_proj, and belong to the channels of v
            if self.rows.get(name) == 2 * columns:
                raise UnsupportedError(
                    f"{name}: got {2 * columns} rows beside {columns} columns of o_proj, want no gates"
                )
        for name, shape in self.others.items():
            parts = name.split(".")
            for i, part in enumerate(parts):
                if f"{'.'.join(parts[:i])}{'.' * bool(i)}" in self.blocks and not OTHERS.fullmatch(part):
                    raise _unknown(name, shape)


def _counterpart(match: re.Match[str]) -> str:
    """Return the name of k beside that of q, or of q beside that of k."""
    other = {"q": "k", "k": "q", "query": "key", "key": "query"}
    which, rest = match["part"].split("_", 1)
    return f"{match['layer']}{other[which]}_{rest}.{match['leaf']}"


def _unknown(name: str, shape: tuple[int, ...]) -> InvalidInputError:
    return InvalidInputError(
        f"{name}: got {shape}, which may hold channels of q or k under a name that is not known, want norms= to sort "
        "it as a norm is sorted, or leave= if its channels are no rotated ones"
    )


def _turns(num_heads: int | None, num_kv_heads: int | None, fused: str) -> IntArray | None:
    """Return (heads,) 1 for the heads of q and k in a fused qkv, 0 for those of v."""
    one_of("fused", fused, ("stacked", "grouped"))
    if num_heads is None and num_kv_heads is None:
        return None
    kv = integer("num_kv_heads", num_kv_heads, minimum=1)
    q = integer("num_heads", num_heads, minimum=kv)
    if q % kv:
        raise InvalidInputError(f"num_heads: got {q}, want a multiple of num_kv_heads {kv}")
    stacked = [1] * (q + kv) + [0] * kv
    return np.array(stacked if fused == "stacked" else ([1] * (q // kv + 1) + [0]) * kv, np.int64)


def _pattern(name: str, pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except (TypeError, re.error) as error:
        raise InvalidInputError(f"{name}: got {pattern!r}, want a regular expression ({error})") from None


def install_cache(model: nn.Module, sections: Sections) -> int:
    """Replace the cos/sin cache of every M-RoPE module of a model, in place, in its dtype and on its device.

    Engines fill their caches in the natural order of frequencies, with float32 angles. SGLang also appends rows to a
    cache that is too short for its context; those of these modules are exact as well, attention factor included.

    Args:
        model: anything that holds modules with ``cos_sin_cache`` and ``mrope_section``, as vLLM and SGLang name them.
        sections: the layout to install; each module's sizes, pairing and sections are compared with it.

    Returns:
        how many modules were changed.

    Raises:
        InvalidInputError: no such module, or one that does not fit.
    """
    modules = [module for module in model.modules() if _is_rotary(module)]
    if not modules:
        raise InvalidInputError("model: got no module with cos_sin_cache and mrope_section, want at least one")
    for module in modules:
        _check(module, sections)
    made: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    for module in modules:
        where = (module.cos_sin_cache.dtype, module.cos_sin_cache.device)
        if where not in made:
            made[where] = sections.cos_sin_cache(*where)
        module.cos_sin_cache = made[where]
        module._ensure_cos_sin_cache_length = partial(_grow, module, sections)
    return len(modules)


class _EngineRotary(Protocol):
    """Part of an engine's module of M-RoPE that is used here."""

    cos_sin_cache: Tensor
    _ensure_cos_sin_cache_length: Callable[[int], None]


def _is_rotary(module: object) -> TypeGuard[_EngineRotary]:
    return isinstance(getattr(module, "cos_sin_cache", None), Tensor) and bool(getattr(module, "mrope_section", None))


def _check(module: _EngineRotary, sections: Sections) -> None:
    rotary = sections.rotary
    wanted = {
        "head_size": rotary.head_dim,
        "rotary_dim": rotary.rotary_dim,
        "is_neox_style": sections.is_neox_style,
        "mrope_section": list(sections.mrope_section),
    }
    for name, want in wanted.items():
        got = getattr(module, name, None)
        got = list(got) if isinstance(got, tuple) else got
        if got != want:
            raise InvalidInputError(f"{type(module).__name__}.{name}: got {got}, want {want} as in sections")
    if getattr(module, "mrope_interleaved", False):
        raise InvalidInputError(f"{type(module).__name__}.mrope_interleaved: got True, want False: sections are blocks")
    rows = module.cos_sin_cache.shape[0]
    if rows != sections.max_position:
        raise InvalidInputError(f"max_position: got {sections.max_position}, want {rows}, the rows of cos_sin_cache")


def _grow(module: _EngineRotary, sections: Sections, needed_max_pos: int) -> None:
    """Extend the cache to all ids up to this one, in place of SGLang's ``_ensure_cos_sin_cache_length``."""
    cache = module.cos_sin_cache
    if needed_max_pos >= len(cache):
        rows = BLOCK * (needed_max_pos // BLOCK + 1)  # many at a time, since ids may come one by one
        module.cos_sin_cache = replace(sections, max_position=rows).cos_sin_cache(cache.dtype, cache.device)
