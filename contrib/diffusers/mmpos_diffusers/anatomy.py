"""Anatomy of the transformers that ``patch`` supports: where they rotate q and k, and what the positions replace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos_diffusers.rows import IMAGE, TEXT, Streams

__all__ = ["ANATOMIES", "TransformerAnatomy", "anatomy_of"]

Arguments = dict[str, Any]
Order = tuple[str, ...]


@dataclass(frozen=True)
class TransformerAnatomy:
    """Parts of a transformer class that receive positions.

    Args:
        blocks: names of the block lists that contain the attention modules.
        processors: class names of the attention processors that rotate q and k directly before attention.
        order: streams of the joint attention in token order; if text is not among them, it is used in cross-attention.
        rope: name of the module whose output is passed to the blocks as the rotation.
        replaced: arguments of ``forward`` that positions replace.
        patches: whether hidden_states are latents that the transformer cuts into patches.
        times: whether every token may have a separate timestep.
        text_module: name of the module that processes the text of each document before it joins a row, or "".
        by_kwargs: whether blocks receive the rows in joint_attention_kwargs, because they compute with rope's output.
        unsupported: config field, and the value of that field with which the transformer cannot be patched.
    """

    blocks: tuple[str, ...]
    processors: frozenset[str]
    order: Order
    rope: str
    replaced: tuple[str, ...] = ()
    patches: bool = False
    times: bool = False
    text_module: str = ""
    by_kwargs: bool = False
    unsupported: tuple[str, object] | None = None

    def attentions(self, transformer: nn.Module) -> list[Any]:
        """Return the modules with a processor that the blocks contain."""
        lists: list[nn.ModuleList] = [getattr(transformer, name) for name in self.blocks]
        return [module for blocks in lists for module in blocks.modules() if hasattr(module, "processor")]

    def num_rotating(self, transformer: nn.Module) -> int:
        """Return the number of attentions that rotate: half of them if every block has a cross-attention, else all."""
        return len(self.attentions(transformer)) // (1 if TEXT in self.order else 2)

    def streams(self, transformer: Any, positions: Any, rotary: Any, arguments: Arguments) -> Streams:
        """Assign positions to the tokens in the arguments."""
        for name in (IMAGE, TEXT):
            if not isinstance(arguments.get(name), Tensor):
                raise InvalidInputError(f"{name}: got {type(arguments.get(name)).__name__}, want a tensor")
        image, text = arguments[IMAGE], arguments[TEXT]
        length = image.shape[1]
        if self.patches:
            size, frames = transformer.config["patch_size"], transformer.config.get("patch_size_t") or 1
            length = prod(image.shape[2:]) // prod((frames, size, size) if isinstance(size, int) else size)
        lengths: dict[str, int | None] = {IMAGE: length}
        packed = image.shape[0] < positions.num_documents
        if TEXT in self.order:
            lengths[TEXT] = None if self.text_module and packed else text.shape[1]
        apart = packed and (TEXT not in self.order or bool(self.text_module))
        if apart and text.shape[0] != positions.num_documents:
            got, want = f"{text.shape[0]} rows", f"{positions.num_documents}, one per document of positions"
            raise InvalidInputError(f"{TEXT}: got {got}, want {want}")
        mask = arguments.get("encoder_attention_mask") if apart and TEXT not in self.order else None
        return Streams(positions, rotary, image.shape[0], lengths, mask, image.device)

    def replacements(self, streams: Streams, arguments: Arguments) -> Arguments:
        """Return dummy values for the arguments that positions replace but ``forward`` requires.

        Raises:
            InvalidInputError: an argument that positions replace was passed.
        """
        for name in self.replaced:
            if arguments.get(name) is not None:
                raise InvalidInputError(f"{name} cannot be combined with positions, which replace it")
        for name in ("joint_attention_kwargs", "attention_kwargs"):
            if "attention_mask" in (arguments.get(name) or {}):
                raise InvalidInputError(
                    f"{name} must not have an attention_mask if positions are passed: positions define the mask"
                )
        new, device = self._timesteps(streams, arguments), arguments[TEXT].device
        for name, stream in (("img_ids", IMAGE), ("txt_ids", TEXT)):
            if name in self.replaced:
                new[name] = torch.zeros(streams.documents_of(stream).shape[1], 1)
        if "img_shapes" in self.replaced:
            new["img_shapes"] = []
        if TEXT not in self.order and streams.packed and "encoder_attention_mask" in arguments:
            new["encoder_attention_mask"] = None  # the mask is already in streams
        elif "encoder_attention_mask" in self.replaced:
            new["encoder_attention_mask"] = torch.ones(streams.documents_of(TEXT).shape, device=device)
        return new

    def _timesteps(self, streams: Streams, arguments: Arguments) -> Arguments:
        """Expand timesteps per document to one per token of a packed row, if the transformer supports that."""
        for name in ("timestep", "guidance", "pooled_projections"):
            value = arguments.get(name)
            if not isinstance(value, Tensor) or not value.dim() or value.shape[0] in (1, streams.batch):
                continue
            count, documents = value.shape[0], streams.positions.num_documents
            if name == "timestep" and self.times and value.dim() == 1 and count == documents:
                return {name: value[torch.from_numpy(streams.documents_of(IMAGE)).to(value.device)]}
            want = f"{streams.batch}, one per row; documents with different values need separate rows"
            raise InvalidInputError(f"{name}: got {count}, want {want}")
        return {}


_BOTH = ("transformer_blocks", "single_transformer_blocks")


def _like_flux(processor: str, *replaced: str) -> TransformerAnatomy:
    """Return the anatomy of a transformer built like FLUX.1."""
    ids = ("img_ids", "txt_ids", *replaced)
    return TransformerAnatomy(_BOTH, frozenset({processor}), (TEXT, IMAGE), "pos_embed", replaced=ids)


def _like_wan(*blocks: str) -> TransformerAnatomy:
    """Return the anatomy of a transformer built like Wan."""
    return TransformerAnatomy(
        ("blocks", *blocks), frozenset({"WanAttnProcessor"}), (IMAGE,), "rope", patches=True, times=not blocks
    )


ANATOMIES: Mapping[str, TransformerAnatomy] = MappingProxyType(
    {
        "BriaTransformer2DModel": _like_flux("BriaAttnProcessor"),
        "ChromaTransformer2DModel": _like_flux("FluxAttnProcessor", "attention_mask"),
        "ChronoEditTransformer3DModel": _like_wan(),
        "Flux2Transformer2DModel": TransformerAnatomy(
            _BOTH,
            frozenset({"Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"}),
            (TEXT, IMAGE),
            "pos_embed",
            replaced=("img_ids", "txt_ids", "kv_cache", "kv_cache_mode"),
            by_kwargs=True,
        ),
        "FluxTransformer2DModel": _like_flux("FluxAttnProcessor"),
        "HunyuanVideoTransformer3DModel": TransformerAnatomy(
            _BOTH,
            frozenset({"HunyuanVideoAttnProcessor2_0"}),
            (IMAGE, TEXT),
            "rope",
            replaced=("encoder_attention_mask",),
            patches=True,
            text_module="context_embedder",
            unsupported=("image_condition_type", "token_replace"),
        ),
        "LTXVideoTransformer3DModel": TransformerAnatomy(
            ("transformer_blocks",),
            frozenset({"LTXVideoAttnProcessor"}),
            (IMAGE,),
            "rope",
            replaced=("num_frames", "height", "width", "rope_interpolation_scale", "video_coords"),
            times=True,
        ),
        "LongCatImageTransformer2DModel": _like_flux("LongCatImageAttnProcessor"),
        "OvisImageTransformer2DModel": _like_flux("OvisImageAttnProcessor"),
        "QwenImageTransformer2DModel": TransformerAnatomy(
            ("transformer_blocks",),
            frozenset({"QwenDoubleStreamAttnProcessor2_0"}),
            (TEXT, IMAGE),
            "pos_embed",
            replaced=("img_shapes", "encoder_hidden_states_mask"),
            unsupported=("zero_cond_t", True),
        ),
        "WanTransformer3DModel": _like_wan(),
        "WanVACETransformer3DModel": _like_wan("vace_blocks"),
    }
)
"""Transformer classes that ``patch`` supports."""


def anatomy_of(transformer: Any) -> TransformerAnatomy:
    """Return the anatomy of a transformer.

    Raises:
        UnsupportedError: the transformer's class, one of its processors or one of its config fields is not supported.
    """
    name = type(transformer).__name__
    if name == "ZImageTransformer2DModel":
        reason = "it accepts lists of images of any size and rotates each image by its own positions"
        raise UnsupportedError(f"transformer: got {name}, which needs no patch: {reason}")
    if name not in ANATOMIES:
        raise UnsupportedError(f"transformer: got {name}, want one of {', '.join(sorted(ANATOMIES))}")
    anatomy = ANATOMIES[name]
    if anatomy.unsupported is not None:
        field, value = anatomy.unsupported
        if transformer.config.get(field) == value:
            raise UnsupportedError(f"config.{field}: got {value!r}, which is not supported: timesteps differ by token")
    for attention in anatomy.attentions(transformer):
        processor = type(attention.processor).__name__
        if processor not in anatomy.processors:
            raise UnsupportedError(f"processor: got {processor}, want {' or '.join(sorted(anatomy.processors))}")
    return anatomy
