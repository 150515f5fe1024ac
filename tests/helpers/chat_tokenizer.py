"""A small Transformers tokenizer with special tokens for images and chats, and a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from tokenizers.processors import TemplateProcessing

OURS = ("[IMG]", "[/IMG]", "[PATCH]", "[ROW]")
QWENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}[PATCH]{% elif c.type == 'text' %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ c.text }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ c.text }}{% endif %}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def _trained(images: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    special = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", *images]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(name, special=True) for name in special],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["What is this? A cat looks at you, and a cup of coffee stands before it."], trainer)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return str(tokenizer.to_str())


def chat_tokenizer(images: Sequence[str] = OURS, **changes: Any) -> Any:
    """Build a new tokenizer: tokens 0 to 4 are <s>, </s>, <pad>, <|user|>, <|assistant|>; the image tokens follow."""
    import transformers

    kind: Any = transformers.PreTrainedTokenizerFast
    options = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "padding_side": "right", **changes}
    return kind(tokenizer_object=Tokenizer.from_str(_trained(tuple(images))), **options)
