"""Checkpoints in which all tokens and all image patches have the same hidden state in every layer.

The keys that an engine caches from such a checkpoint differ only in their rotation, so ordinary requests show the
position of every token. The recipe, for a small Transformers model:

- all rows of an embedding are the same vector of signs, and so is every output of the projector for images and clips;
- attention, experts and other mixers add zero to the hidden states, which remain that vector, bit for bit;
- weights before q and k are random multiples of 1/64: their sums are exact in any order, so all kernels agree.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, MmposError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["write_checkpoint"]

REFERENCE = "reference.npz"
"""Name of the file that holds the keys before their rotation."""

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files next to a config.json that replace the generated ones."""

LAYERS = {"depth", "num_hidden_layers", "num_layers"}
HEADS = {"num_attention_heads", "num_heads"}
HIDDEN = {"embed_dim", "hidden_size", "out_hidden_size"}
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    "num_experts_per_tok": 2,
}
"""Upper limits on sizes that do not affect keys."""

CACHES = ("cache", "past_key_values")
"""Names of the cache in the output of a model; the first is used since Transformers 5.24."""

NULS = ("\u0100", "\u0100")
"""The only merge of the vocabulary, of two zero bytes, which no prompt contains; llama.cpp requires at least one."""

ADDS = re.compile(r"\b(o_proj|out_proj|wo|c_proj|down_proj|dense|dense_4h_to_h|fc2|w2)(_bias|\.weight|\.bias)?$")
"""Names of the parameters of output projections, which a layer adds to the hidden states."""


PROCESSORS: Mapping[str, tuple[str, str, str]] = {
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        ("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"),
    ),
}
"""Transformers' classes of the processor, and of its parts for images and videos, by multimodal model type."""

TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
"""The text of special tokens, by tokenizer attribute; the config stores a token's id in the field with the suffix
``_id``.
"""

IMAGE, VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
"""Texts that stand for an image and a video in a prompt."""

TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    f"{{% if part.type in ('image', 'image_url') %}}{IMAGE}"
    f"{{% elif part.type in ('video', 'video_url') %}}{VIDEO}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
"""The chat template: texts in order, with placeholders for images and videos."""


def write_checkpoint(config: str | Path | Mapping[str, Any], folder: str | Path) -> Path:
    """Write a small checkpoint of an architecture in which all tokens have the same hidden state in every layer.

    It has two layers (or one of each type) and two heads, or two groups of two if heads share keys; head_dim, rotary
    settings, vocabulary and token ids are those of the config. Tokenizer and preprocessor files next to config.json are
    copied; without them, the checkpoint gets a byte-level tokenizer with the special tokens at their ids, and the
    default preprocessor of Transformers. Before it is saved, the model runs on a prompt, with an image if it accepts
    images, and all its hidden states are compared. ``reference.npz`` holds, for each layer number, the (kv_heads,
    head_dim) float32 key of every token before its rotation.

    Args:
        config: path of config.json or of its folder, or the contents of config.json as a mapping.
        folder: path of a new or empty folder to write to.

    Returns:
        The folder.

    Raises:
        InvalidInputError: config cannot be read; folder contains files or is a URL.
        UnsupportedError: Transformers does not support the model type, or the hidden states of its tokens would differ.
        ImportError: Transformers is not installed.
        OSError: the folder cannot be written; the error names it.
    """
    import torch

    if re.match(r"\w+:/", str(folder)):  # pathlib would write to a folder of this name
        raise InvalidInputError(f"folder: got {str(folder)!r}, want a path on this machine, not a URL")
    folder = Path(folder)
    values, source = _read(config)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(f"folder: got {folder}, which contains files, want a new or empty folder")
    model_type = values["model_type"]
    with _quiet(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        try:
            model = _small_model(values)
            processor = _processor(model.config)
            _equalise(model)
            _project(model)
            inputs = _inputs(model, processor)
            _verify(model, inputs)
            references = _references(model, inputs)
        except (MmposError, ImportError):
            raise
        except Exception as error:  # Transformers raises exceptions of any type
            reason = f"the small model does not run ({type(error).__name__}: {error})"
            raise UnsupportedError(f"config.model_type {model_type!r}: {reason}") from error
        _save(folder, model, processor, references)
    if source is not None:
        _copy_files(source, folder)
    return folder


def _save(folder: Path, model: Any, processor: Any, references: Mapping[str, npt.NDArray[np.float32]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if references:
        np.savez(folder / REFERENCE, **references)  # type: ignore[arg-type]  # no key is named allow_pickle
    for path in folder.glob("*.safetensors"):  # only their owner may read them, but servers run as other users
        path.chmod((folder / "config.json").stat().st_mode)
    processor.save_pretrained(folder)
    if hasattr(processor, "image_processor"):
        processor.image_processor.save_pretrained(folder)  # engines read preprocessor_config.json


def _copy_files(source: Path, folder: Path) -> None:
    """Replace the generated tokenizer and preprocessor files with those of a model."""
    names = {name for name in FILES if (source / name).is_file()}
    for name in names:
        shutil.copyfile(source / name, folder / name)
    if "preprocessor_config.json" in names and "processor_config.json" not in names:
        (folder / "processor_config.json").unlink(missing_ok=True)  # this file would override preprocessor_config.json


def _read(config: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Read a config, and return it with its folder, if it has one."""
    if isinstance(config, Mapping):
        values, source = dict(config), None
    else:
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            values, source = json.loads(path.read_bytes()), path.parent
        except OSError as error:
            raise InvalidInputError(f"config: got {path} ({error.strerror}), want a config.json") from None
        except ValueError as error:
            raise InvalidInputError(f"config: got {path}, which is not valid JSON ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InvalidInputError("config requires model_type, as in the config.json of a model")
    return values, source


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Transformers' progress bar and its warnings about small sizes, which are intended."""
    from transformers.utils import logging as progress

    level, bar = logging.root.manager.disable, progress.is_progress_bar_enabled()
    logging.disable(logging.CRITICAL)
    progress.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        if bar:
            progress.enable_progress_bar()


def _small_model(values: Mapping[str, Any]) -> Any:
    """Build the small model, with random weights in the dtype of its config."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM

    kinds: Any = CONFIG_MAPPING
    model_type = values["model_type"]
    if model_type not in kinds:
        raise UnsupportedError(f"config.model_type: got {model_type!r}, want a model type of Transformers")
    full = kinds[model_type].from_dict({name: value for name, value in values.items() if name != "quantization_config"})
    auto: Any = AutoModelForMultimodalLM if model_type in PROCESSORS else AutoModelForCausalLM
    if hasattr(full, "vision_config") and model_type not in PROCESSORS:
        want = f"a text model or one of {', '.join(PROCESSORS)}"
        raise UnsupportedError(f"config.model_type: got {model_type!r}, want {want}")
    text = full.get_text_config(decoder=True)
    if getattr(text, "rope_parameters", None) is None:
        raise UnsupportedError(f"config.model_type: got {model_type!r} without rotary embeddings, want one with them")
    own = getattr(text, "head_dim", None)
    head_dim = own or text.hidden_size // text.num_attention_heads
    derived = _heads(text.to_dict())[0] * head_dim
    for width in (64, derived) if own else (derived,):  # some classes ignore head_dim and divide the width by heads
        config = kinds[model_type].from_dict(_shrink(full.to_dict(), width))
        dtype = config.dtype or config.get_text_config(decoder=True).dtype or torch.bfloat16
        try:
            model = auto.from_config(config, dtype=dtype).eval()
        except ValueError as error:
            raise UnsupportedError(f"config.model_type: got {model_type!r}, want a language model ({error})") from None
        if all(getattr(module, "head_dim", head_dim) == head_dim for module in model.get_decoder().modules()):
            break
    return model


def _heads(full: Mapping[str, Any]) -> tuple[int, int]:
    """Return a small number of heads, in groups of two if they share keys, and at most two kv_heads."""
    heads, kv_heads = full.get("num_attention_heads"), full.get("num_key_value_heads")
    return (2 * min(kv_heads, 2), min(kv_heads, 2)) if isinstance(kv_heads, int) and kv_heads != heads else (2, 2)


def _shrink(full: Mapping[str, Any], width: int, encoder: bool = False) -> dict[str, Any]:
    """Reduce the sizes that do not affect keys, in a config and its sub-configs."""
    layers = next((full[name] for name in LAYERS if isinstance(full.get(name), int)), 0)
    types = full.get("layer_types") or []
    kept = sorted({kind: types.index(kind) for kind in types}.values())
    few = 3 if encoder else 2  # llama.cpp's converter treats the parts of a projector, 0 and 2, as layer numbers
    kept = kept if len(kept) > 1 else list(range(min(layers, few)))
    heads, kv_heads = _heads(full)
    numbers: dict[str, int] = {
        **dict.fromkeys(LAYERS, len(kept)),
        **dict.fromkeys(HEADS, heads),
        **dict.fromkeys(HIDDEN, width),
        "num_key_value_heads": kv_heads,
    }
    small: dict[str, Any] = {}
    for name, value in full.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = _shrink(value, width, name == "vision_config")
        elif isinstance(value, list) and name.endswith("indexes"):
            small[name] = [max(len(kept) - 1, 0)]  # list only the last layer, so that both kinds of layers remain
        elif isinstance(value, list) and len(value) == layers and layers > 2:
            small[name] = [value[layer] for layer in kept]
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = numbers.get(name, min(value, SIZES.get(name, value)))
        else:
            small[name] = value
    return small


def _grid(tensor: Tensor, around: float = 0.0) -> None:
    """Fill a tensor with random values, each ``around`` plus a multiple of 1/64 between −1/8 and 1/8."""
    import torch

    tensor.data = (torch.randint(-8, 9, tensor.shape) / 64 + around).to(tensor.dtype)


def _equalise(model: Any) -> None:
    """Set the weights of the language model so that all tokens keep the same hidden state."""
    import torch
    from torch import nn

    text = model.get_decoder()
    for module in text.modules():
        if isinstance(module, nn.Linear):
            for parameter in module.parameters(recurse=False):
                _grid(parameter)
        elif isinstance(module, nn.Embedding):
            row = torch.ones(module.embedding_dim)
            row[torch.randperm(len(row))[: len(row) // 2]] = -1  # half of them are −1: mean 0, mean square 1
            module.weight.data = row.to(module.weight.dtype).expand_as(module.weight).contiguous()
        elif "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
            _grid(module.weight, float(module.weight.flatten()[0]))
    for name, parameter in text.named_parameters():
        if ADDS.search(name):
            parameter.data.zero_()


def _project(model: Any) -> None:
    """Set the weights of the encoder and its projectors so that they return the embedding vector for any input."""
    import torch
    from torch import nn

    with torch.no_grad():
        vector = model.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.int64))[0, 0]
    text = {id(module) for module in model.get_decoder().modules()} | {id(model.get_output_embeddings())}
    for name, module in model.named_modules():
        if id(module) not in text and isinstance(module, nn.Linear) and module.out_features == len(vector):
            module.weight.data.zero_()
            if module.bias is not None:
                module.bias.data = torch.zeros_like(vector) if "deepstack" in name else vector.clone()


def _verify(model: Any, inputs: Mapping[str, Any]) -> None:
    """Run the model on inputs, and raise an error unless all tokens have the same hidden state in every layer."""
    import torch

    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    for layer, state in enumerate(states):
        different = (state != state[:, :1]).any(dim=-1)[0].nonzero().flatten().tolist()
        if different:
            where = "its embeddings" if layer == 0 else f"layer {layer - 1}"
            reason = f"the hidden state of token {different[0]} differs after {where}, want one for all tokens"
            raise UnsupportedError(f"config.model_type {model.config.model_type!r}: {reason}")


def _references(model: Any, inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    """Return each layer's key before its rotation, by layer number; in float32, since engines may run in float32.

    It is the key at id 0, divided by the attention factor. Layers without keys have none, such as linear attention.
    """
    import torch

    decoder = deepcopy(model.get_decoder()).float()
    with torch.no_grad():
        output = decoder(input_ids=inputs["input_ids"][:, :1], use_cache=True)
    cached = next(output[name] for name in CACHES if name in output)
    types = getattr(decoder.config, "layer_types", None)
    keys: dict[str, npt.NDArray[np.float32]] = {}
    for number, layer in enumerate(cached.layers):
        key = getattr(layer, "keys", None)
        if key is not None:
            names = "attention_scaling", f"{types[number] if types else ''}_attention_scaling"
            factor = next(getattr(decoder.rotary_emb, name) for name in names if hasattr(decoder.rotary_emb, name))
            keys[str(number)] = key[0, :, 0].numpy() / np.float32(factor)
    return keys


def _processor(config: Any) -> Any:
    """Build the processor of a model, or its tokenizer if the model does not accept images."""
    import transformers

    tokenizer = _tokenizer(config)
    if config.model_type not in PROCESSORS:
        tokenizer.chat_template = TEMPLATE
        return tokenizer
    kind, image, video = (getattr(transformers, name) for name in PROCESSORS[config.model_type])
    vision = config.vision_config
    sizes = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    parts = {"image_processor": image(**sizes), "video_processor": video(**sizes)}
    return kind(tokenizer=tokenizer, chat_template=TEMPLATE, **parts)


def _tokenizer(config: Any) -> Any:
    """Build a byte-level tokenizer, with special tokens at the ids of a config and a name for every other id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text = config.get_text_config(decoder=True)
    special: dict[str, tuple[str, int]] = {}
    for attribute, word in TOKENS.items():
        token = getattr(config, f"{attribute}_id", None)
        if isinstance(token, int) and token >= text.vocab_size:
            raise InvalidInputError(f"config.{attribute}_id: got {token}, want < {text.vocab_size}, the vocab_size")
        if isinstance(token, int):
            special[attribute] = word, token
    for role in ("bos", "eos", "pad"):
        token = getattr(text, f"{role}_token_id", None)
        token = token[0] if isinstance(token, list) else token
        if isinstance(token, int) and 0 <= token < text.vocab_size:
            special[f"{role}_token"] = next((w for w, t in special.values() if t == token), f"<{role}>"), token
    words = {token: word for word, token in special.values()}
    free = (token for token in range(text.vocab_size) if token not in words)
    # Qwen2Tokenizer, the class of qwen2 in Transformers, adds <|endoftext|> if it is missing.
    spare = [*pre_tokenizers.ByteLevel.alphabet(), NULS[0] + NULS[1], "<|endoftext|>"]
    names = words | dict(zip(free, spare, strict=False))
    names |= {token: f"<unused{token}>" for token in range(text.vocab_size) if token not in names}
    if "pad_token" not in special:
        special["pad_token"] = names[text.vocab_size - 1], text.vocab_size - 1
    merges = [NULS] if NULS[0] + NULS[1] in names.values() else []
    tokenizer = Tokenizer(models.BPE(vocab={name: token for token, name in names.items()}, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words.values()])
    roles = {role: word for role, (word, _) in special.items() if role in ("bos_token", "eos_token", "pad_token")}
    extra = {name: word for name, (word, _) in special.items() if name not in roles}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=extra, **roles)


def _inputs(model: Any, processor: Any) -> dict[str, Any]:
    """Prepare the prompt for checking the hidden states: text, and two images if the model accepts images."""
    if not hasattr(processor, "image_processor"):
        return dict(processor("A small bird, 3 times.", return_tensors="pt"))
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, shape, np.uint8) for shape in ((120, 200, 3), (80, 90, 3))]
    inputs = processor(images=images, text=[f"A {IMAGE} and{IMAGE}."], return_tensors="pt")
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
