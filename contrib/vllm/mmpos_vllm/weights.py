"""Permute the weights of q and k into the order of an engine's sections and back, and install the cos/sin cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypedDict, TypeGuard, Unpack, overload

import numpy as np
import torch
from torch import Tensor, nn

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary import Rotary
from mmpos_vllm.checks import boolean
from mmpos_vllm.sections import BLOCK, IntArray, Sections, qk_channels

__all__ = ["install_cache", "permute_qk"]

Weights = Mapping[str, Tensor]
NamedWeights = Iterable[tuple[str, Tensor]]

PROJECTION = re.compile(
    r"(?P<layer>(?:.*\.)?)(?P<role>[qk](?=_proj)|(?:q|k|query|key)(?=_(?:layer)?norm))_"
    r"(?P<part>proj|(?:layer)?norm)\.(?P<leaf>.+)"
)
TOWER = re.compile(r"(^|[._])(visual|vision|vit|image|video|audio|encoder|talker|code2wav)")
LEAF = re.compile(
    r"(base_layer\.)?(weight|bias|weight_scale|lora_B(\.[^.]+)?\.(weight|bias)|lora_magnitude_vector(\..+)?)"
)
OUTPUT = re.compile(r"(?P<layer>(?:.*\.)?)o_proj\.weight")
UNCHANGED = re.compile(r"lora_A\..+|lora_embedding_A.*")
QUERY_OR_KEY = re.compile(
    r"(^|[._])(w?(q|k|qk|kq|qkv)|(q|k)(ln|norm)|(ln|norm)(q|k)|quer(y|ies)|keys?)\d*([._]|$)", re.I
)
"""Names of tensors that may hold channels of q or k."""
OTHERS = re.compile(
    r"(v|o|c|g|out|output|gate)_\w+|wo|dense|gate|proj|sinks?|rotary_emb|attn_sub_norm|inner_attn_ln", re.I
)
"""Parts of Transformers' attention modules, other than q_proj and k_proj, that hold no channels of q and k."""


class _Options(TypedDict, total=False):
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
    norms: str | None = None,
    leave: str | None = None,
    inverse: bool = False,
) -> dict[str, Tensor] | Iterator[tuple[str, Tensor]]:
    """Sort the channels of q and k in a checkpoint by the axis that rotates them, as ``Sections`` requires.

    Within each head, this sorts the rows of q_proj and k_proj together with their biases, the weights of the norms of q
    and k (q_norm, q_layernorm, query_layernorm and the same for k), per-row scales, and LoRA's B. Other tensors that
    may hold channels of q or k, judging by their names (such as qkv_proj) or because they are next to q_proj and not a
    known part of attention, are refused unless ``norms`` or ``leave`` matches them. All other tensors, and those of
    vision, audio and video towers, which have other rotations, are passed through unchanged. A checkpoint does not show
    whether it is sorted, so permute it once and save the result under another name.

    Args:
        weights: mapping from names to tensors, or (name, tensor) pairs as engines load them; a whole model or adapter.
        rotary: rotation of the trained model; it defines head_dim, pairing and allocation.
        norms: regular expression for the names of additional norms or scales over channels of q or k, which are then
            sorted as well.
        leave: regular expression for the names of tensors that are passed through unchanged.
        inverse: whether to undo an earlier ``permute_qk``, bit for bit.

    Returns:
        A dict for a mapping, else an iterator of pairs that processes one tensor at a time; changed tensors are new.

    Raises:
        InvalidInputError: there are no weights of q and k, or weights of only one of them; rows do not form whole
            heads; or a tensor with an unknown name may hold channels of q or k.
        UnsupportedError: rows of weights are packed or scaled in blocks (permute before quantising), or q_proj contains
            gates and so has two rows per column of o_proj (Qwen3-Next, Qwen3.5).
    """
    channels = qk_channels(rotary)
    channels = np.argsort(channels) if boolean("inverse", inverse) else channels
    permutation = _Permutation(channels, _pattern("norms", norms), _pattern("leave", leave))
    source: object = weights
    if isinstance(source, str | bytes) or not isinstance(source, Iterable):
        raise InvalidInputError(f"weights: got {type(weights).__name__}, want a mapping, or (name, tensor) pairs")
    return dict(permutation.pairs(weights.items())) if isinstance(weights, Mapping) else permutation.pairs(weights)


@dataclass(frozen=True)
class _Permutation:
    """A permutation of the channels of q and k in a checkpoint.

    Args:
        channels: (head_dim,) old channel for each new channel of a head.
        norms: pattern for the names of additional norms.
        leave: pattern for the names to pass through.
    """

    channels: IntArray
    norms: re.Pattern[str] | None
    leave: re.Pattern[str] | None

    def pairs(self, weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        seen = _Seen()
        for name, tensor in weights:
            match = PROJECTION.fullmatch(name)
            if TOWER.search(name) or (self.leave is not None and self.leave.search(name)):
                yield name, tensor
            elif self.norms is not None and self.norms.search(name):
                seen.counterparts[name] = name
                yield name, self._permuted(name, tensor, "weight", norm=True)
            elif match is None:
                self._record(name, tensor, seen)
                yield name, tensor
            else:
                permuted = self._permuted(name, tensor, match["leaf"], norm=match["part"] != "proj")
                # An adapter may change only q.
                seen.counterparts[name] = _counterpart(match) if match["leaf"] == "weight" else name
                seen.rows[name] = len(permuted) if permuted.dim() else 1
                seen.blocks.add(match["layer"])
                yield name, permuted
        seen.check()

    def _record(self, name: str, tensor: Tensor, seen: _Seen) -> None:
        """Record a tensor that is passed through; raise an error if its name belongs to q or k."""
        if output := OUTPUT.fullmatch(name):
            seen.outputs[f"{output['layer']}q_proj.weight"] = tensor.shape[-1]
        shape = tuple(getattr(tensor, "shape", ()))  # a state_dict may hold values that are not tensors
        if any(size and size % self.channels.size == 0 for size in shape):
            if QUERY_OR_KEY.search(name):
                raise _unknown(name, shape)
            seen.others[name] = shape

    def _permuted(self, name: str, tensor: Tensor, leaf: str, norm: bool) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise InvalidInputError(f"{name}: got {type(tensor).__name__}, want a tensor")
        if tensor.numel() == 1 or UNCHANGED.fullmatch(leaf):
            return tensor
        packed = LEAF.fullmatch(leaf) is None or not tensor.is_floating_point()
        if packed or (leaf == "weight_scale" and tensor.shape[1:].numel() > 1):
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise UnsupportedError(f"{name}: got {got}, want weights with a row per channel; permute before quantising")
        rows, head_dim = tensor.shape[-1 if norm else 0], self.channels.size  # norms may have a row per head
        if rows % head_dim:
            raise InvalidInputError(f"{name}: got {rows} rows, want a multiple of head_dim {head_dim}")
        order = self.channels + head_dim * np.arange(rows // head_dim)[:, None]
        index = torch.from_numpy(order.ravel()).to(tensor.device)
        return tensor[..., index] if norm else tensor[index]


@dataclass(frozen=True)
class _Seen:
    """Records of a pass over a checkpoint, which are checked at the end of the pass.

    Args:
        counterparts: name of the tensor that must accompany each tensor of q and k.
        rows: number of rows of each tensor of q and k.
        blocks: names of the modules that hold tensors of q and k, with a trailing dot.
        outputs: number of columns of o_proj, by the name of the q_proj in the same module.
        others: shapes, by name, of the tensors that are passed through although one of their sizes is a multiple of
            head_dim.
    """

    counterparts: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    blocks: set[str] = field(default_factory=set)
    outputs: dict[str, int] = field(default_factory=dict)
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def check(self) -> None:
        if not self.counterparts:
            raise InvalidInputError("weights: got no q_proj or k_proj of a language model, want at least one")
        for name, other in self.counterparts.items():
            if other not in self.counterparts:
                raise InvalidInputError(f"weights: got {name} without {other}, want both")
        for name, columns in self.outputs.items():  # q_proj with gates has two rows per column of o_proj
            if self.rows.get(name) == 2 * columns:
                raise UnsupportedError(
                    f"{name}: got {2 * columns} rows for {columns} columns of o_proj, want no gates in q_proj"
                )
        for name, shape in self.others.items():
            parts = name.split(".")
            for i, part in enumerate(parts):
                if f"{'.'.join(parts[:i])}{'.' * bool(i)}" in self.blocks and not OTHERS.fullmatch(part):
                    raise _unknown(name, shape)


def _counterpart(match: re.Match[str]) -> str:
    """Return the name of the k tensor for a q tensor, or of the q tensor for a k tensor."""
    other = {"q": "k", "k": "q", "query": "key", "key": "query"}
    return f"{match['layer']}{other[match['role']]}_{match['part']}.{match['leaf']}"


def _unknown(name: str, shape: tuple[int, ...]) -> InvalidInputError:
    return InvalidInputError(
        f"{name}: got an unknown tensor of shape {shape}, which may hold channels of q or k; split it if it holds "
        "both, pass norms= to sort it like a norm, or leave= if its channels are not rotated"
    )


def _pattern(name: str, pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except (TypeError, re.error) as error:
        raise InvalidInputError(f"{name}: got {pattern!r}, want a regular expression ({error})") from None


def install_cache(model: nn.Module, sections: Sections) -> int:
    """Replace the cos/sin cache of every M-RoPE module of a model in place, keeping its dtype and device.

    Engines fill their caches in the natural order of frequencies, with float32 angles. SGLang also appends rows to a
    cache that is too short; after this call, appended rows are exact as well and include the attention factor.

    Args:
        model: model that contains modules with ``cos_sin_cache`` and ``mrope_section``, as they are called in vLLM and
            SGLang.
        sections: layout to install; it must match the sizes, pairing and sections of each module.

    Returns:
        The number of changed modules.

    Raises:
        InvalidInputError: there is no such module, or a module does not match sections.
    """
    modules = [module for module in model.modules() if _is_rotary(module)]
    if not modules:
        raise InvalidInputError("model: got no module with cos_sin_cache and mrope_section, want at least one")
    for module in modules:
        _check(module, sections)
    caches: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    for module in modules:
        key = (module.cos_sin_cache.dtype, module.cos_sin_cache.device)
        if key not in caches:
            caches[key] = sections.cos_sin_cache(*key)
        module.cos_sin_cache = caches[key]
        module._ensure_cos_sin_cache_length = partial(_grow, module, sections)
    return len(modules)


class _EngineRotary(Protocol):
    """Attributes of an engine's M-RoPE module that are used here."""

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
        raise InvalidInputError(f"{type(module).__name__}.mrope_interleaved: got True, want False; sections are blocks")
    rows = module.cos_sin_cache.shape[0]
    if rows != sections.max_position:
        raise InvalidInputError(f"max_position: got {sections.max_position}, want {rows}, the rows of cos_sin_cache")


def _grow(module: _EngineRotary, sections: Sections, needed_max_pos: int) -> None:
    """Extend the cache to ids up to ``needed_max_pos``; this replaces SGLang's ``_ensure_cos_sin_cache_length``."""
    cache = module.cos_sin_cache
    if needed_max_pos >= len(cache):
        rows = BLOCK * (needed_max_pos // BLOCK + 1)  # in blocks, because decoding adds one id at a time
        module.cos_sin_cache = replace(sections, max_position=rows).cos_sin_cache(cache.dtype, cache.device)
