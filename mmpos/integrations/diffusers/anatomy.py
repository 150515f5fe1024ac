"""Anatomy of the transformers that ``patch`` knows: where they turn q and k, and what positions replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.diffusers.latents import patch_sides
from mmpos.integrations.diffusers.rows import IMAGE, TEXT, Streams
from mmpos.support.checks import IntArray

__all__ = ["ANATOMIES", "NOT_PATCHED", "TransformerAnatomy", "anatomy_of"]

Arguments = dict[str, Any]
Order = tuple[str, ...]


def _later_rows(streams: Streams, order: Order, tokens: IntArray, *_: Any) -> None:
    """Make rows once rope has seen the tokens of all streams, one by one; blocks get them by joint_attention_kwargs."""
    streams.arrived.append(tokens)
    if len(streams.arrived) == len(order):
        streams.later.append(streams.rows(order, np.sort(np.concatenate(streams.arrived))))


def _lumina_rows(streams: Streams, order: Order, tokens: IntArray, rope: Any, hidden_states: Tensor, *_: Any) -> object:
    """Cut latents into patches as Lumina 2 does beside its rotations, and say how long texts and rows are."""
    batch, channels, height, width = hidden_states.shape
    side = rope.patch_size
    patches = hidden_states.view(batch, channels, height // side, side, width // side, side)
    patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    text, image, rows = (streams.rows(one) for one in ((TEXT,), (IMAGE,), order))
    return patches, text, image, rows, [tokens.size - patches.shape[1]] * batch, [tokens.size] * batch


@dataclass(frozen=True)
class TransformerAnatomy:
    """Parts of a class of transformers that positions go through.

    Args:
        blocks: names of its lists of blocks, in which attentions lie.
        processors: names of the classes of processors there that turn q and k right before they attend.
        order: streams of the joint attention, in its order; a text that is not among them is in cross-attention.
        rope: name of the module whose output blocks get as rotation.
        gives: streams that rope makes rotations of, in the order of its outputs; none where it gets ids of tokens.
        shape: of the numbers of tokens that it gives or gets, as the transformer's plan of context parallelism has it.
        replaces: arguments of the forward that positions replace.
        patches: whether hidden_states are latents, which the transformer cuts into patches.
        times: whether every token may have a timestep of its own.
        text: name of the argument that brings texts.
        text_module: name of the module through which texts go document by document before they join a row, or "".
        rows: makes what blocks get in place of rope's output, or leaves that by None; None for the rows of ``order``.
        unlike: field of the config and the value with which a transformer is another one.
    """

    blocks: tuple[str, ...]
    processors: frozenset[str]
    order: Order
    rope: str
    gives: Order = ()
    shape: tuple[int, ...] = (-1, 1)
    replaces: tuple[str, ...] = ()
    patches: bool = False
    times: bool = False
    text: str = TEXT
    text_module: str = ""
    rows: Callable[..., object] | None = None
    unlike: tuple[str, object] | None = None

    def attentions(self, transformer: nn.Module) -> list[Any]:
        """List the modules of blocks that have a processor."""
        lists: list[nn.ModuleList] = [getattr(transformer, name) for name in self.blocks]
        return [module for blocks in lists for module in blocks.modules() if hasattr(module, "processor")]

    def turning(self, transformer: nn.Module) -> int:
        """Count the attentions that turn: all but those of cross-attention, one beside each."""
        return len(self.attentions(transformer)) // (1 if TEXT in self.order else 2)

    def numbers(self, streams: Streams, *args: Tensor) -> tuple[Tensor, ...]:
        """Make what rope gives until its rows are known: the numbers of the tokens that it has rotations of."""
        if not self.gives:
            return (args[0][:, :1],) * 2
        numbers = streams.numbers(self.order)
        return tuple(numbers[name].reshape(self.shape) for name in self.gives)

    def streams(self, transformer: Any, positions: Any, rotaries: Any, arguments: Arguments) -> Streams:
        """Lay out positions for the tokens among arguments."""
        for name in (IMAGE, self.text):
            if not isinstance(arguments.get(name), Tensor):
                raise InvalidInputError(f"{name}: got {type(arguments.get(name)).__name__}, want a tensor")
        image, text = arguments[IMAGE], arguments[self.text]
        length = image.shape[1]
        if self.patches:
            sides = patch_sides(transformer.config)[-(image.dim() - 2) :]
            length = prod(n // side for n, side in zip(image.shape[2:], sides, strict=True))
        lengths: dict[str, int | None] = {IMAGE: length}
        packed = image.shape[0] < positions.num_documents
        if TEXT in self.order:
            lengths[TEXT] = None if self.text_module and packed else text.shape[1]
        apart = packed and (TEXT not in self.order or bool(self.text_module))
        if apart and text.shape[0] != positions.num_documents:
            got, want = f"{text.shape[0]} rows", f"{positions.num_documents}, one for each document of positions"
            raise InvalidInputError(f"{self.text}: got {got}, want {want}")
        mask = arguments.get("encoder_attention_mask") if apart and TEXT not in self.order else None
        return Streams(positions, rotaries, image.shape[0], lengths, mask, image.device)

    def instead(self, streams: Streams, arguments: Arguments) -> Arguments:
        """Make the arguments that the forward wants in place of those that positions replace; no token depends on them.

        Raises:
            InvalidInputError: one of these is among the arguments.
        """
        for name in self.replaces:
            if arguments.get(name) is not None:
                raise InvalidInputError(f"{name}: got one beside positions, want None: positions say where tokens are")
        for name in ("joint_attention_kwargs", "attention_kwargs"):
            if "attention_mask" in (arguments.get(name) or {}):
                raise InvalidInputError(
                    f"{name}: got an attention_mask beside positions, want none: they say who sees whom"
                )
        made = self._timesteps(streams, arguments)
        numbers, text = streams.numbers(self.order), arguments[self.text]
        for name, stream in (("img_ids", IMAGE), ("txt_ids", TEXT)):
            if name in self.replaces:
                made[name] = numbers[stream].reshape(self.shape)
        if "img_shapes" in self.replaces:
            made["img_shapes"] = []
        if "text_lens" in self.replaces:
            made["text_lens"] = torch.zeros(streams.batch, dtype=torch.int64, device=text.device)
        if TEXT not in self.order and streams.packed and "encoder_attention_mask" in arguments:
            made["encoder_attention_mask"] = None  # streams have it
        elif "encoder_attention_mask" in self.replaces:
            made["encoder_attention_mask"] = torch.ones(streams.batch, numbers[TEXT].numel(), device=text.device)
        return made

    def _timesteps(self, streams: Streams, arguments: Arguments) -> Arguments:
        """Give every token of a packed row the timestep of its document, where the transformer takes these."""
        for name in ("timestep", "guidance", "pooled_projections"):
            value = arguments.get(name)
            if not isinstance(value, Tensor) or not value.dim() or value.shape[0] in (1, streams.batch):
                continue
            count, documents = value.shape[0], streams.positions.num_documents
            if name == "timestep" and self.times and value.dim() == 1 and count == documents:
                return {name: value[torch.from_numpy(streams.image_documents).to(value.device)]}
            want = f"{streams.batch}, one for each row; documents with their own have a row each"
            raise InvalidInputError(f"{name}: got {count}, want {want}")
        return {}


_BOTH = ("transformer_blocks", "single_transformer_blocks")


def _like_flux(processor: str, *replaces: str) -> TransformerAnatomy:
    """Name the parts of a transformer built like FLUX.1."""
    ids = ("img_ids", "txt_ids", *replaces)
    return TransformerAnatomy(_BOTH, frozenset({processor}), (TEXT, IMAGE), "pos_embed", replaces=ids)


def _like_wan(*blocks: str) -> TransformerAnatomy:
    """Name the parts of a transformer built like Wan."""
    return TransformerAnatomy(
        ("blocks", *blocks),
        frozenset({"WanAttnProcessor"}),
        (IMAGE,),
        "rope",
        gives=(IMAGE, IMAGE),
        shape=(1, -1, 1, 1),
        patches=True,
        times=not blocks,
    )


ANATOMIES: Mapping[str, TransformerAnatomy] = MappingProxyType(
    {
        "BriaTransformer2DModel": _like_flux("BriaAttnProcessor"),
        "ChromaTransformer2DModel": _like_flux("FluxAttnProcessor", "attention_mask"),
        "ChronoEditTransformer3DModel": _like_wan(),
        "ErnieImageTransformer2DModel": TransformerAnatomy(
            ("layers",),
            frozenset({"ErnieImageSingleStreamAttnProcessor"}),
            (IMAGE, TEXT),
            "pos_embed",
            gives=(IMAGE, TEXT),
            replaces=("text_lens",),
            patches=True,
            text="text_bth",
        ),
        "Flux2Transformer2DModel": TransformerAnatomy(
            _BOTH,
            frozenset({"Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"}),
            (TEXT, IMAGE),
            "pos_embed",
            shape=(1, -1, 1),
            replaces=("img_ids", "txt_ids", "kv_cache", "kv_cache_mode"),
            rows=_later_rows,
        ),
        "FluxTransformer2DModel": _like_flux("FluxAttnProcessor"),
        "HunyuanVideoTransformer3DModel": TransformerAnatomy(
            _BOTH,
            frozenset({"HunyuanVideoAttnProcessor2_0"}),
            (IMAGE, TEXT),
            "rope",
            gives=(IMAGE, TEXT),
            replaces=("encoder_attention_mask",),
            patches=True,
            text_module="context_embedder",
            unlike=("image_condition_type", "token_replace"),
        ),
        "LTXVideoTransformer3DModel": TransformerAnatomy(
            ("transformer_blocks",),
            frozenset({"LTXVideoAttnProcessor"}),
            (IMAGE,),
            "rope",
            gives=(IMAGE, IMAGE),
            shape=(1, -1, 1),
            replaces=("num_frames", "height", "width", "rope_interpolation_scale", "video_coords"),
            times=True,
        ),
        "LongCatImageTransformer2DModel": _like_flux("LongCatImageAttnProcessor"),
        "Lumina2Transformer2DModel": TransformerAnatomy(
            ("context_refiner", "noise_refiner", "layers"),
            frozenset({"Lumina2AttnProcessor2_0"}),
            (TEXT, IMAGE),
            "rope_embedder",
            gives=(TEXT, IMAGE),
            replaces=("encoder_attention_mask",),
            patches=True,
            rows=_lumina_rows,
        ),
        "OvisImageTransformer2DModel": _like_flux("OvisImageAttnProcessor"),
        "QwenImageTransformer2DModel": TransformerAnatomy(
            ("transformer_blocks",),
            frozenset({"QwenDoubleStreamAttnProcessor2_0"}),
            (TEXT, IMAGE),
            "pos_embed",
            gives=(IMAGE, TEXT),
            replaces=("img_shapes", "encoder_hidden_states_mask"),
            unlike=("zero_cond_t", True),
        ),
        "WanTransformer3DModel": _like_wan(),
        "WanVACETransformer3DModel": _like_wan("vace_blocks"),
    }
)
"""Classes of transformers that ``patch`` takes."""

NOT_PATCHED: Mapping[str, str] = MappingProxyType(
    {"ZImageTransformer2DModel": "it takes lists of images of any sizes, and turns each by its own positions"}
)
"""Classes that need no patch, with the reason."""


def anatomy_of(transformer: Any) -> TransformerAnatomy:
    """Find the anatomy of a transformer.

    Raises:
        UnsupportedError: its class, a processor or a field of its config is another than those that are known.
    """
    name = type(transformer).__name__
    if name in NOT_PATCHED:
        raise UnsupportedError(f"transformer: got {name}, want another: {NOT_PATCHED[name]}")
    if name not in ANATOMIES:
        raise UnsupportedError(f"transformer: got {name}, want one of {', '.join(sorted(ANATOMIES))}")
    anatomy = ANATOMIES[name]
    if anatomy.unlike is not None:
        field, value = anatomy.unlike
        if transformer.config.get(field) == value:
            raise UnsupportedError(f"config.{field}: got {value!r}, want another: some tokens have a timestep apart")
    for attention in anatomy.attentions(transformer):
        processor = type(attention.processor).__name__
        if processor not in anatomy.processors:
            raise UnsupportedError(f"processor: got {processor}, want {' or '.join(sorted(anatomy.processors))}")
    return anatomy
