"""Train a complete vision-language model, a random Llama with a linear map from patches, in a minute on one core.

The model learns to describe eight photos, one or two at a time and in order, from crops and mirrored crops. Then it
describes the whole photos, with and without a cache, using local positions and positions from a server.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tiny_vlm_task import CAPTIONS, QUESTION, Photo, Shown, answer_of, chat, load_photos, pairs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import mmpos
from mmpos.client import Client
from mmpos.integrations.hf import MMPosProcessor, patch
from mmpos.rotary import Rotary

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% for block in message.content %}"
    "{% if block.type == 'image' %}[PATCH]{% elif message.role == 'user' %}{{ block.text }}"
    "{% else %}{{ block.text }}<|end|>{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IGNORED = -100
"""Label of tokens that are not trained on."""


def make_processor() -> MMPosProcessor:
    """Create a processor with a tokenizer trained on the captions, images of at most 16 tokens, and RoPE-Tie."""
    special = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "[IMG]", "[/IMG]", "[PATCH]"]
    inner: Any = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens = [AddedToken(name, special=True) for name in special]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=tokens, show_progress=False)
    inner.train_from_iterator([QUESTION, *CAPTIONS.values()], trainer)
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=inner, pad_token="<pad>", eos_token="<|end|>", padding_side="left")
    images = mmpos.ImageProcessor("pillow", order="merged", min_pixels=0, max_tokens=16)
    return MMPosProcessor(tokenizer, images, "rope-tie", chat_template=TEMPLATE)


class TinyVLM(nn.Module):
    """Llama with random weights and a linear map from patches to embeddings."""

    def __init__(self, processor: MMPosProcessor, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(processor.tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=processor.tokenizer.pad_token_id,
            eos_token_id=processor.tokenizer.eos_token_id,
            bos_token_id=None,
        )
        images = processor.images
        values = 3 * (images.patch_size * images.spatial_merge_size) ** 2
        self.pixels = nn.Linear(values, config.hidden_size)
        rotary = Rotary.from_hf_config(config, axes=processor.scheme.axes)
        self.language: Any = patch(LlamaForCausalLM(config), rotary)

    def embed(self, batch: Any) -> Tensor:
        """Return (batch, seq, hidden) embeddings of words, with patch embeddings in place of the placeholders."""
        words: Tensor = self.language.get_input_embeddings()(batch["input_ids"])
        if "patches" not in batch:
            return words
        # With order="merged", the patches of a token are adjacent.
        values = batch["patches"].view(-1, self.pixels.in_features).to(words.dtype)
        features = self.pixels(values / 127.5 - 1)
        return words.masked_scatter(batch["mm_token_type_ids"][..., None] == 1, features)

    def forward(self, batch: Any, labels: Tensor | None = None) -> Any:
        """Run the language model on a batch from the processor."""
        return self.language(
            inputs_embeds=self.embed(batch),
            attention_mask=batch["attention_mask"],
            mm_position_ids=batch["positions"],
            labels=labels,
        )

    @torch.no_grad()
    def answer(self, batch: Any, positions: mmpos.PositionTable | None = None, tokens: int = 40) -> Tensor:
        """Generate an answer for each row greedily with a cache, and return (batch, tokens) ids.

        Args:
            batch: chats without the last answer, padded on the left.
            positions: positions of the batch; None uses those from the processor.
            tokens: maximum number of tokens.
        """
        table = batch["positions"] if positions is None else positions
        mask = batch["attention_mask"]
        generated: Tensor = self.language.generate(
            inputs_embeds=self.embed(batch),
            attention_mask=mask,
            mm_position_ids=table,
            max_new_tokens=tokens,
            do_sample=False,
        )
        return generated

    @torch.no_grad()
    def answer_without_cache(self, batch: Any, tokens: int = 40) -> Tensor:
        """Generate the same answers with a full forward pass per token; finished answers are padded."""
        config, table = self.language.config, batch["positions"]
        embeds, mask = self.embed(batch), batch["attention_mask"]
        rows = np.arange(len(mask))
        answers = torch.empty(len(mask), 0, dtype=torch.int64)
        for _ in range(tokens):
            positions = table.window(rows, 0 * rows, table.lengths + answers.shape[1])
            logits = self.language(inputs_embeds=embeds, attention_mask=mask, mm_position_ids=positions).logits
            ended = (answers == config.eos_token_id).any(1)
            word = logits[:, -1].argmax(-1).where(~ended, config.pad_token_id)[:, None]
            answers = torch.cat([answers, word], 1)
            if (answers == config.eos_token_id).any(1).all():
                break
            embeds = torch.cat([embeds, self.language.get_input_embeddings()(word)], 1)
            mask = torch.cat([mask, torch.ones_like(word)], 1)
        return answers


def ask(processor: MMPosProcessor, chats: Sequence[Shown]) -> Any:
    """Build a batch of questions about photos."""
    return batch_of(processor, [chat(shown) for shown in chats], add_generation_prompt=True)


def batch_of(processor: MMPosProcessor, chats: list[Any], **options: Any) -> Any:
    """Render chats with the template and convert them to a padded batch."""
    call = {"padding": True, "return_tensors": "pt"}
    return processor.apply_chat_template(chats, tokenize=True, return_dict=True, processor_kwargs=call, **options)


def nats(model: TinyVLM, processor: MMPosProcessor, chats: Sequence[Shown]) -> Tensor:
    """Compute the mean loss of an answer over chats, in nats."""
    batch = batch_of(processor, [chat(shown, answered=True) for shown in chats])
    role = batch["input_ids"] == processor.tokenizer.convert_tokens_to_ids("<|assistant|>")
    learned = role.cumsum(1) > role.long()  # the tokens after <|assistant|>, since rows are padded on the left
    per_token: Tensor = model(batch, batch["input_ids"].where(learned, IGNORED)).loss
    return per_token * learned.sum() / len(chats)


def train(model: TinyVLM, processor: MMPosProcessor, photos: Sequence[Photo], steps: int) -> float:
    """Train on equally many crops of each photo; return the mean loss per answer in the last ten steps, in nats."""
    random = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    losses = []
    for _ in range(steps):
        crops = [photo.crop(random) for photo in photos]
        loss = nats(model, processor, [*((crop,) for crop in crops), *pairs(crops, random)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return float(np.mean(losses[-10:]))


def remote_positions(client: Client, processor: MMPosProcessor, batch: Any) -> mmpos.PositionTable:
    """Place the positions of a batch on a server."""
    segments = processor.segments(batch["input_ids"], batch.get("image_grid_thw"), batch["attention_mask"])
    return client.place(segments, processor.scheme, start=processor.start)


def main() -> None:
    """Train the model and print its answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--server", metavar="HOST:PORT", help="also compare with positions from this server")
    arguments = parser.parse_args()
    photos, processor = load_photos(), make_processor()
    model, begin = TinyVLM(processor), time.perf_counter()
    cost = train(model, processor, photos, arguments.steps)
    print(f"{arguments.steps} steps in {time.perf_counter() - begin:.0f} s, {cost:.2f} nats an answer")
    chats = [*((photo,) for photo in photos), *pairs(photos, np.random.default_rng(1))]
    batch = ask(processor, chats)
    answers = model.answer(batch)
    for shown, text in zip(chats, processor.tokenizer.batch_decode(answers, skip_special_tokens=True), strict=True):
        print("right" if text == answer_of(shown) else f"wrong, want {answer_of(shown)!r}:", repr(text))
    print("same without a cache:", torch.equal(answers, model.answer_without_cache(batch)))
    if arguments.server:
        with Client(arguments.server) as client:
            same = torch.equal(answers, model.answer(batch, remote_positions(client, processor, batch)))
        print("same with positions of the server:", same)


if __name__ == "__main__":
    main()
