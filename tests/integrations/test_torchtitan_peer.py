"""torchtitan itself, where it is installed: its rotations with our cache, its models with our module."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_torchtitan import normal, with_gradients
from tolerance import FREQUENCY, assert_within, cos_sin, rotations, rounded, rounding
from torch import Tensor

import mmpos.rotary
from mmpos import Grid, SegmentTable, Text, place
from mmpos.integrations.torchtitan import (
    deliver_positions,
    document_positions,
    rope_cache,
    rotary_from_config,
    table_tensor,
)
from mmpos.rotary import Llama3, Rotary, apply_rotary

pytest.importorskip("torchtitan", reason="torchtitan wants another datasets than the other peers")

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.common.attention import ScaledDotProductAttention, get_document_mask_mod
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.models.llama3 import llama3_configs
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import qwen3_configs
from torchtitan.trainer import Trainer

OVERRIDE = "mmpos.integrations.torchtitan.override.multimodal_rope"
FORMATS = {"half": CosSinRoPE, "adjacent": ComplexRoPE}
MODELS = {"llama3": llama3_configs, "qwen3": qwen3_configs}

PACKED = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(5)], [Grid(4, 4)]]))
HALVES = place(
    SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(7)], [Text(5), Grid(1, 2), Text(9)]]), "rope-tie-v2"
)
TEXT = place(SegmentTable.from_documents([[Text(16)], [Text(16)]]))


def mrope() -> Any:
    """Qwen3.5's class by its file: the package around it asks for kernels of linear attention."""
    import torchtitan

    path = Path(next(iter(torchtitan.__path__))) / "models/qwen3_5/rope.py"
    spec = spec_from_file_location("torchtitan_qwen3_5_rope", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.MRoPE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [PACKED, HALVES], ids=["packed", "halves"])
@pytest.mark.parametrize("pairing", sorted(FORMATS))
def test_torchtitans_rotation_with_our_cache_is_ours(pairing: Any, positions: Any, dtype: torch.dtype) -> None:
    rotary = Rotary(head_dim=16, pairing=pairing)
    q, k = (
        normal(2, positions.num_tokens // 2, 4, 16, dtype=dtype),
        normal(2, positions.num_tokens // 2, 2, 16, dtype=dtype),
    )
    cache = rope_cache(rotary, positions, q.shape[1])

    def ours(q: Tensor, k: Tensor) -> Any:
        q_out, k_out = apply_rotary(q.flatten(0, 1), k.flatten(0, 1), positions, rotary)
        assert k_out is not None
        return q_out.view_as(q), k_out.view_as(k)

    found = with_gradients(lambda q, k: FORMATS[pairing].apply_rotary_emb(q, k, cache), q, k)
    expected = with_gradients(ours, q, k)
    assert_within(found, expected, [rounded(x, rotations(x)) for x in expected])


@pytest.mark.parametrize(
    ("pairing", "scaling"),
    [("adjacent", "llama"), ("adjacent", "none"), ("adjacent", "yarn"), ("half", "none"), ("half", "yarn")],
)
def test_frequencies_of_a_config_are_those_of_torchtitans_cache(pairing: str, scaling: str) -> None:
    config = FORMATS[pairing].Config(
        dim=64, max_seq_len=4096, theta=500000.0, scaling=scaling, original_max_position_embeddings=1024,
        rope_factor=8.0, original_seq_len=512, truncate=pairing == "half",
    )  # fmt: skip
    rotary = rotary_from_config(config, axes=1)
    ids = torch.arange(4096)
    found = mmpos.rotary.cos_sin(rotary, ids[None], layout="torchtitan")
    angles = ids[:, None] * torch.tensor(rotary.inv_freq_array, dtype=torch.float32)
    bound = rotary.attention_factor * cos_sin(angles, FREQUENCY + 4)  # blended, and the product
    bound = bound.repeat(1, 4) if pairing == "half" else sqrt(2) * bound
    assert_within(found, config.build().cache, bound)


def test_the_sections_of_mrope_are_read() -> None:
    config = mrope().Config(dim=32, max_seq_len=64, theta=1e7, mrope_section=[6, 5, 5])
    ids = torch.randint(0, 64, (2, 9, 3), generator=torch.Generator().manual_seed(1))
    rotary = rotary_from_config(config)
    expected = config.build()._reshape_cache(normal(2, 9, 4, 32), ids).squeeze(2)
    found = mmpos.rotary.cos_sin(rotary, ids.permute(2, 0, 1), layout="torchtitan")
    assert_within(found, expected, cos_sin(64.0, FREQUENCY + 1))


def models(name: str, **rotary: object) -> tuple[Any, Any]:
    """A small model as torchtitan has it, and with our module, with the same weights."""
    torch.manual_seed(0)
    stock, config = (MODELS[name]["debugmodel"](attn_backend="flex") for _ in range(2))
    for each in (stock, config):
        each.layers = each.layers[:2]
        for layer in each.layers:  # plain torch, where the others want a GPU or a compiler
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    apply_overrides(OverrideConfig(imports=[(OVERRIDE, rotary)]), config)
    with torch.device("meta"):
        pair = stock.build(), config.build()
    for model in pair:
        model.verify_module_protocol()
        model.to_empty(device="cpu").init_states()
    missing = pair[1].load_state_dict(pair[0].state_dict())
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    return pair


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_with_our_module_gives_the_logits_of_text_and_takes_images_from_the_table(name: str) -> None:
    stock, ours = models(name, axes=2)
    tokens = torch.randint(0, 2000, (2, 16), generator=torch.Generator().manual_seed(2))
    positions = document_positions(TEXT, 16)
    expected = stock(tokens, positions=positions)
    bound = rounding(lambda: stock(tokens, positions=positions), stock.parameters())
    for text in (positions, None, table_tensor(TEXT), table_tensor(TEXT, capacity=9)):
        assert_within(ours(tokens, positions=text), expected, bound)
    images = ours(tokens, positions=table_tensor(HALVES))
    dense = torch.from_numpy(HALVES.dense()).reshape(2, 2, 16).permute(1, 2, 0)
    assert torch.equal(images, ours(tokens, positions=dense))
    assert (images - expected).abs().max() > 1e-3


def test_the_override_reaches_every_layer_of_a_trainers_config_and_keeps_its_checkpoints() -> None:
    config = llama3_debugmodel()
    apply_overrides(OverrideConfig(imports=[(OVERRIDE, {"axes": 3, "allocation": "split"})]), config)
    model = config.model_spec.model
    model.update_from_config(config=config)
    Llama3StateDictAdapter(model, None)._validate_hf_rope_config(ComplexRoPE.Config)
    expected = Rotary(16, 500000.0, 3, "split", pairing="adjacent", scaling=Llama3(8.0, 1.0, 4.0, 8192))
    assert [layer.attention.rope.build().rotary for layer in model.layers] == [expected] * 6
    assert model.max_seq_len == config.training.seq_len


def test_a_trainers_batch_reaches_layers_masks_and_a_loss_in_chunks() -> None:
    _, model = models("llama3", axes=2)
    deliver_positions(model)
    given = torch.randint(0, 2000, (2, 16), generator=torch.Generator().manual_seed(2))
    batch = {"input": given, "positions": document_positions(HALVES, 16), "mm_position_ids": table_tensor(HALVES)}
    trainer = object.__new__(Trainer)  # one that has what this step reads, since a whole one asks for a GPU
    trainer.model_config, trainer.model_parts, trainer.ntokens_seen = model.config, [model], 0
    trainer.parallel_dims = SimpleNamespace(cp_enabled=False)
    trainer.config = SimpleNamespace(parallelism=SimpleNamespace(spmd_backend="partial_dtensor"))
    trainer.train_context = nullcontext
    trainer.loss_fn = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=CrossEntropyLoss.Config()).build()
    trainer.loss_fn.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    tokens, labels, kwargs = trainer.post_dataloading_process(batch, given.roll(-1, 1))
    loss = trainer._forward_backward_body(tokens, labels, torch.tensor(32), kwargs)
    model._skip_lm_head = False

    def whole() -> Tensor:
        logits = model(given, positions=table_tensor(HALVES))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    assert_within(loss, whole(), rounding(whole, model.parameters()))
    assert model.layers["0"].attention.wo.weight.grad.abs().max() > 0


def test_torchtitan_finds_our_documents() -> None:
    document = get_document_mask_mod(document_positions(PACKED, PACKED.num_tokens))
    owner = torch.repeat_interleave(torch.tensor(PACKED.lengths))
    token = torch.arange(PACKED.num_tokens)
    found = document(0, 0, token[:, None], token[None])
    assert torch.equal(found, owner[:, None] == owner[None])
