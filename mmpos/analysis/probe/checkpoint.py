"""Checkpoints in which all tokens and all image patches have the same hidden state in every layer.

The keys that an engine caches from such a checkpoint differ only in their rotation, so ordinary requests show the
position of every token. The recipe, for a small Transformers model:

- all rows of an embedding are the same vector of signs, and so is every output of the projector for images and clips;
- attention, experts and other mixers add zero to the hidden states, which remain that vector, bit for bit;
- weights before q and k are random multiples of 1/64: their sums are exact in any order, so all kernels agree.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.probe import adapters
from mmpos.errors import InvalidInputError, MmposError, UnsupportedError
from mmpos.support.extras import needed_for
from mmpos.support.files import local_path

if TYPE_CHECKING:
    from torch import Tensor, nn

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

LAYERS = {"depth", "encoder_layers", "layers", "n_layers", "num_hidden_layers", "num_layers"}
HEADS = {"attention_heads", "encoder_attention_heads", "num_attention_heads", "num_heads"}
HIDDEN = {"d_model", "embed_dim", "hidden_size", "out_hidden_size", "output_dim", "projector_output_dim"}
HIDDEN |= {"projector_input_dim", "text_hidden_size"}
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("encoder_ffn_dim", "ffn_dim", "intermediate_size", "intermediate_size_mlp", "mlp_dim"), 128),
    **dict.fromkeys(("alignment_intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 128),
    **dict.fromkeys(("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_k", "moe_topk", "num_experts_per_tok"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
}
"""Upper limits on sizes that do not affect keys."""

NULS = ("\u0100", "\u0100")
"""The only merge of the vocabulary, of two zero bytes, which no prompt contains; llama.cpp requires at least one."""

ADDS = re.compile(r"\b(o_proj|out_proj|wo|c_proj|down_proj|dense|dense_4h_to_h|fc2|w2)(_bias|\.weight|\.bias)?$")
"""Names of the parameters of output projections, which a layer adds to the hidden states."""


@dataclass(frozen=True)
class Family:
    """Special tokens of related model types.

    Args:
        types: a pattern that matches the beginning of the types' names.
        image: the text that stands for an image in a prompt.
        video: the text that stands for a video in a prompt; empty if videos are not supported.
        tokens: the text of each token, by tokenizer attribute. The config stores the token's id in the field with the
            same name and the suffix ``_id`` or ``_index``.
        relative: the text of tokens that have no id in the config, and how far each id is from the image token's in
            released models.
        aliases: further attribute names for entries of ``tokens``.
    """

    types: str
    image: str
    video: str
    tokens: Mapping[str, str]
    relative: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


FAMILIES = (
    Family(
        "qwen",
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|vision_start|><|video_pad|><|vision_end|>",
        {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "audio_token": "<|audio_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    ),
    Family(
        "glm",
        "<|begin_of_image|><|image|><|end_of_image|>",
        "<|begin_of_video|><|video|><|end_of_video|>",
        {
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "image_start_token": "<|begin_of_image|>",
            "image_end_token": "<|end_of_image|>",
            "video_start_token": "<|begin_of_video|>",
            "video_end_token": "<|end_of_video|>",
        },
    ),
    Family(
        "ernie",
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        "",
        {
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "video_token": "<|VIDEO_PLACEHOLDER|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
            "video_start_token": "<|VIDEO_START|>",
            "video_end_token": "<|VIDEO_END|>",
        },
    ),
    Family(
        "paddleocr",
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        "",
        {
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "vision_start_token": "<|IMAGE_START|>",
            "vision_end_token": "<|IMAGE_END|>",
        },
    ),
    Family(
        "hunyuan",
        "<im_start><image><im_end>",
        "",
        {"image_token": "<image>", "im_start": "<im_start>", "im_end": "<im_end>", "im_newline": "<im_newline>"},
        aliases={"image_start_token": "im_start", "image_end_token": "im_end"},
    ),
    Family(
        "gemma3",
        "<start_of_image>",
        "",
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    Family(
        "mistral3",
        "[IMG]",
        "",
        {"image_token": "[IMG]"},
        {"image_break_token": ("[IMG_BREAK]", 2), "image_end_token": ("[IMG_END]", 3)},
    ),
    Family(
        "internvl",
        "<IMG_CONTEXT>",
        "",
        {"image_token": "<IMG_CONTEXT>"},
        {"start_image_token": ("<img>", -2), "end_image_token": ("</img>", -1), "video_token": ("<video>", 8)},
        {"context_image_token": "image_token"},
    ),
    Family(
        "idefics3|smolvlm",
        "<image>",
        "",
        {"image_token": "<image>"},
        {
            "fake_image_token": ("<fake_token_around_image>", -1),
            "global_image_token": ("<global-img>", -38),
            **{f"row_{n // 6}_{n % 6}": (f"<row_{n // 6 + 1}_col_{n % 6 + 1}>", n - 37) for n in range(36)},
        },
    ),
    Family("", "<image>", "<video>", {"image_token": "<image>", "video_token": "<video>"}),
)
"""Families; the first that matches a model type is used."""

PROCESSORS = {"glm_ocr": "glm46v", "glm4v_moe": "glm4v", "qwen3_vl_moe": "qwen3_vl"}
"""Model types that use the processor of another type, which Transformers does not record."""


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
    folder = local_path("folder", folder)
    with needed_for("write_checkpoint", extra="hf"):
        import torch
        import transformers  # noqa: F401
    values, source = _read(config)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(f"folder: got {folder}, which contains files, want a new or empty folder")
    model_type = values["model_type"]
    family = next(family for family in FAMILIES if re.match(family.types, model_type))
    with _quiet(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        try:
            model = _small_model(values)
            processor = _processor(model.config, family)
            _equalise(model)
            inputs = _inputs(model, processor, family)
            _project(model, inputs)
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
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    kinds: Any = CONFIG_MAPPING
    model_type = values["model_type"]
    if model_type not in kinds:
        raise UnsupportedError(f"config.model_type: got {model_type!r}, want a model type of Transformers")
    auto: Any = (
        AutoModelForMultimodalLM if model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES else AutoModelForCausalLM
    )
    full = kinds[model_type].from_dict({name: value for name, value in values.items() if name != "quantization_config"})
    text = full.get_text_config(decoder=True)
    if getattr(text, "rope_parameters", None) is None:
        raise UnsupportedError(f"config.model_type: got {model_type!r} without rotary embeddings, want one with them")
    own = getattr(text, "head_dim", None)
    head_dim = own or text.hidden_size // text.num_attention_heads
    derived = _heads(text.to_dict())[0] * head_dim
    for width in (64, derived) if own else (derived,):  # some classes ignore head_dim and divide the width by heads
        small = _shrink(full.to_dict(), width)
        if "multimodal_projector_bias" in small:
            small["multimodal_projector_bias"] = True  # with a bias, the projector can ignore its input
        config = kinds[model_type].from_dict(small)
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
        **({"head_dim": width // 2} if encoder else {}),
    }
    small: dict[str, Any] = {}
    for name, value in full.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = _shrink(value, width, re.match("vision|audio", name) is not None)
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


def _project(model: Any, inputs: Mapping[str, Any]) -> None:
    """Set the weights of encoders and projectors so that they return the embedding vector for any input."""
    import torch
    from torch import nn

    with torch.no_grad():
        vector = model.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.int64))[0, 0]
    text = {id(module) for module in model.get_decoder().modules()} | {id(model.get_output_embeddings())}
    outside = [(name, module) for name, module in model.named_modules() if id(module) not in text]
    hooks = []
    for name, module in outside:
        if isinstance(module, nn.LayerNorm) and "bias" in dict(module.named_parameters()):
            module.weight.data.zero_()
            module.bias.data.fill_(64)  # an RMSNorm after it returns exactly 1, despite its epsilon
        elif isinstance(module, nn.Linear) and module.out_features == len(vector):
            if "bias" not in dict(module.named_parameters()):
                hooks.append(module.register_forward_pre_hook(lambda linear, args: _spread(linear, args[0], vector)))
            else:
                module.weight.data.zero_()
                module.bias.data = torch.zeros_like(vector) if "deepstack" in name else vector.clone()
        for part, parameter in module.named_parameters(recurse=False):
            if part == "mm_input_projection_weight":  # after an RMSNorm
                parameter.data.zero_()[0] = vector
            elif part.startswith(("image_", "view_")) and parameter.shape[-1] == len(vector):  # separator tokens
                parameter.data = vector.expand_as(parameter).clone()
    if hooks:
        try:
            with torch.no_grad():
                model(**inputs)
        finally:
            for hook in hooks:
                hook.remove()


def _spread(linear: nn.Linear, inputs: Tensor, vector: Tensor) -> None:
    """Set the weights of a layer without bias so that it maps equal input rows to the vector."""
    row, size = inputs.flatten(0, -2)[0], vector.abs().max()
    at = int((row.abs() * (row * (size / row) == size)).argmax())  # the largest channel that divides without rounding
    if bool((inputs == row).all()) and float(row[at]) != 0:
        linear.weight.data.zero_()
        linear.weight.data[:, at] = vector / row[at]


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

    If q, k and v are computed in one product, the key at id 0, divided by the attention factor, is returned.
    """
    decoder = deepcopy(model.get_decoder()).float()
    try:
        layers = adapters.transformers(decoder, {"input_ids": inputs["input_ids"][:, :2]})
    except UnsupportedError:  # a kind of attention that is not recorded
        return {}
    factor = getattr(getattr(decoder, "rotary_emb", None), "attention_scaling", np.nan)
    keys = {str(k.layer): k.keys[0, 0] / factor if k.reference is None else k.reference for k in layers}
    return {number: key for number, key in keys.items() if np.isfinite(key).all()}


def _processor(config: Any, family: Family) -> Any:
    """Build the processor of a model, or its tokenizer if the model does not accept images."""
    import transformers
    from transformers.models.auto import (
        feature_extraction_auto,
        image_processing_auto,
        processing_auto,
        video_processing_auto,
    )

    def class_in(module: Any, kind: str) -> Any:
        """Return the name of a class; if there are several, the one that uses torchvision."""
        name = getattr(module, f"{kind}_MAPPING_NAMES").get(model_type)
        return name.get("torchvision") if isinstance(name, Mapping) else name

    tokenizer = _tokenizer(config, family)
    model_type = PROCESSORS.get(config.model_type, config.model_type)
    name = class_in(processing_auto, "PROCESSOR")
    multimodal = getattr(config, "thinker_config", config)
    vision = getattr(multimodal, "vision_config", None)
    if name is None or vision is None:
        tokenizer.chat_template = _template(family)
        return tokenizer
    classes = {
        "image_processor": class_in(image_processing_auto, "IMAGE_PROCESSOR"),
        "video_processor": class_in(video_processing_auto, "VIDEO_PROCESSOR"),
        "feature_extractor": class_in(feature_extraction_auto, "FEATURE_EXTRACTOR"),
    }
    merge, scale = getattr(vision, "spatial_merge_size", None), getattr(multimodal, "scale_factor", None)
    patch, size = (
        value[0] if isinstance(value := getattr(vision, name, None), list | tuple) else value or 0
        for name in ("patch_size", "image_size")
    )
    fixed = size and merge is None and vision.model_type != "pixtral"
    square = {"height": size, "width": size} if fixed else None
    known = {
        "patch_size": patch,
        "temporal_patch_size": getattr(vision, "temporal_patch_size", None),
        "merge_size": merge,
        "spatial_merge_size": getattr(multimodal, "spatial_merge_size", None),
        "size": square,
        "crop_size": square,
        "num_image_tokens": (size // patch) ** 2 if square else None,
        "image_grid_pinpoints": getattr(multimodal, "image_grid_pinpoints", None),
        "draw_on_frames": False,  # drawing requires a font
        "vision_feature_select_strategy": getattr(multimodal, "vision_feature_select_strategy", None),
        "num_additional_image_tokens": 1 if vision.model_type == "clip_vision_model" else None,
        "image_seq_length": getattr(multimodal, "image_seq_length", getattr(multimodal, "mm_tokens_per_image", None)),
        "image_seq_len": (size // patch // scale) ** 2 if scale else None,
    }
    kind = getattr(transformers, name)
    wanted = kind.get_attributes()
    parts = {part: _build(getattr(transformers, cls), known) for part, cls in classes.items() if cls and part in wanted}
    return _build(kind, known, tokenizer=tokenizer, chat_template=_template(family), **parts)


def _build(kind: type[Any], known: Mapping[str, Any], **arguments: Any) -> Any:
    """Construct an object, passing the known arguments that its class accepts and that are not None."""
    accepted = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {}) if "kwargs" not in name}
    accepted |= set(inspect.signature(kind.__init__).parameters) | {name for name in dir(kind) if name[0] != "_"}
    return kind(**arguments, **{name: value for name, value in known.items() if value is not None and name in accepted})


def _template(family: Family) -> str:
    """Return the chat template: texts in order, with placeholders for images and videos."""
    return (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}"
        f"{{% if part.type in ('image', 'image_url') %}}{family.image}"
        f"{{% elif part.type in ('video', 'video_url') %}}{family.video}"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )


def _tokenizer(config: Any, family: Family) -> Any:
    """Build a byte-level tokenizer, with special tokens at the ids of a config and a name for every other id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text = config.get_text_config(decoder=True)
    special: dict[str, tuple[str, int]] = {}
    for attribute, word in family.tokens.items():
        for name in (f"{attribute}_id", f"{attribute}_index"):
            token = getattr(config, name, getattr(text, name, None))
            if isinstance(token, int) and token >= text.vocab_size:
                raise InvalidInputError(f"config.{name}: got {token}, want < {text.vocab_size}, the vocab_size")
            if isinstance(token, int):
                special[attribute] = word, token
    for attribute, (word, offset) in family.relative.items():
        if "image_token" in special and special["image_token"][1] + offset >= 0:
            special[attribute] = word, special["image_token"][1] + offset
    for attribute, other in family.aliases.items():
        special[attribute] = special[other]
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


def _inputs(model: Any, processor: Any, family: Family) -> dict[str, Any]:
    """Prepare the prompt for checking the hidden states: text, and two images if the model accepts images."""
    if not hasattr(processor, "image_processor"):
        return dict(processor("A small bird, 3 times.", return_tensors="pt"))
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, shape, np.uint8) for shape in ((120, 200, 3), (80, 90, 3))]
    inputs = processor(images=images, text=[f"A {family.image} and{family.image}."], return_tensors="pt")
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
