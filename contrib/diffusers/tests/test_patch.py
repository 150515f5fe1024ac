"""Patched transformers: images have the same outputs in padded or packed batches of mixed sizes as alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.transformers import transformer_flux2
from mmpos_diffusers import patch, unpatch
from mmpos_diffusers.anatomy import ANATOMIES
from mmpos_diffusers.rows import IMAGE, TEXT, Streams
from torch import Tensor, nn

from mmpos import Grid, InvalidInputError, UnsupportedError
from mmpos.integrations.diffusers import pack_latents
from mmpos.rotary import Rotary

from .models import MODELS, Flux2, Model, Wan, joined

THREE = (0, 1, 2)

every_model = pytest.mark.parametrize("name", sorted(MODELS))


@pytest.fixture(autouse=True)
def same_numbers_on_one_thread() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def build(name: str) -> tuple[Model, Any]:
    model = MODELS[name]()
    return model, model.transformer()


def rounding(run: Callable[[], list[Tensor]], model: Model, transformer: Any) -> list[float]:
    """Bound the rounding errors of results: perturb weights, and cos and sin of the class, up or down at random.

    A sum of n products is off by about √n·u, where u is the unit roundoff, and an angle φ in float32 by 25·u·φ.
    """
    parameters, right = list(transformer.parameters()), run()
    kept = [parameter.detach().clone() for parameter in parameters]
    unit = torch.finfo(torch.float32).eps / 2
    share = sqrt(max(side for parameter in parameters for side in parameter.shape)) * unit
    ids, inv_freq = model.positions(THREE).dense(dtype="float64"), model.settings().rotary.inv_freq_array
    off, moves = 25 * unit * float(abs(ids).max() * inv_freq.max()), [0.0] * len(right)

    def turned(module: object, args: object, output: Any) -> object:
        if not isinstance(output, tuple | Tensor):
            return output
        turn = [x + off * (2 * torch.randint(0, 2, x.shape) - 1) for x in output]
        return tuple(turn) if isinstance(output, tuple) else torch.stack(turn)

    hook = getattr(transformer, ANATOMIES[type(transformer).__name__].rope).register_forward_hook(turned)
    for _ in range(8):
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.data.copy_(value * (1 + share * (2 * torch.randint(0, 2, value.shape) - 1)))
        moved = [float((x - y).abs().max()) for x, y in zip(run(), right, strict=True)]
        moves = [max(pair) for pair in zip(moves, moved, strict=True)]
    hook.remove()
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.data.copy_(value)
    return [2 * (move + share * float(x.abs().max())) for move, x in zip(moves, right, strict=True)]


def differences(some: list[Tensor], others: list[Tensor]) -> list[float]:
    return [float((one - other).abs().max()) for one, other in zip(some, others, strict=True)]


def within(some: list[Tensor], others: list[Tensor], bounds: list[float]) -> bool:
    return all(x <= bound for x, bound in zip(differences(some, others), bounds, strict=True))


@every_model
@torch.no_grad()
def test_outputs_for_mixed_sizes_equal_those_of_each_image_alone(name: str) -> None:
    model, transformer = build(name)

    def alone() -> list[Tensor]:
        return [model.alone(transformer, i) for i in THREE]

    want, bounds = alone(), rounding(alone, model, transformer)
    patch(transformer, pipeline=model.pipeline)
    assert all(map(torch.equal, alone(), want))
    single = [model.call(transformer, [i], False, model.positions([i]))[0] for i in THREE]
    assert within(single, want, bounds)
    for batch in (False, True):
        assert within(model.call(transformer, THREE, batch, model.positions(THREE)), want, bounds)
    assert all(map(torch.equal, alone(), want))
    swapped = [
        [replace(part, height=part.width, width=part.height) if isinstance(part, Grid) else part for part in document]
        for document in map(model.document, THREE)
    ]
    wrong = model.call(transformer, THREE, False, model.settings().place(swapped))
    assert all(x > bound for x, bound in zip(differences(wrong, want), bounds, strict=True))


@every_model
def test_unpatch_leaves_nothing_behind(name: str) -> None:
    model, transformer = build(name)

    def state(transformer: Any) -> list[Any]:
        modules = list(transformer.modules())
        hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules]
        processors = [type(module.processor) for module in modules if hasattr(module, "processor")]
        return [[(type(module), sorted(vars(module))) for module in modules], hooks, processors]

    before = state(transformer)
    patch(transformer, pipeline=model.pipeline)
    for one in (transformer, copy.deepcopy(transformer)):
        assert unpatch(one) is one
        assert state(one) == before
        with pytest.raises(InvalidInputError, match=r"transformer: got an unpatched \w+"):
            unpatch(one)
        with pytest.raises(TypeError, match="positions"):
            model.call(one, THREE, False, model.positions(THREE))


@every_model
def test_gradient_checkpointing_does_not_change_the_gradients(name: str) -> None:
    model, transformer = build(name)
    patch(transformer, pipeline=model.pipeline).train()
    gradients = []
    for checkpoints in (False, True):
        if checkpoints:
            transformer.enable_gradient_checkpointing()
        transformer.zero_grad()
        squares = [x.square().mean() for x in model.call(transformer, THREE, False, model.positions(THREE))]
        torch.stack(squares).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in transformer.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(value, gradients[1][name]) for name, value in gradients[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Flux2", "Ltx", "Wan"])
@torch.no_grad()
def test_compiled_transformers_have_the_same_output(name: str) -> None:
    model, transformer = build(name)
    patch(transformer, pipeline=model.pipeline)
    want = model.call(transformer, THREE, False, model.positions(THREE))
    compiled = torch.compile(transformer, backend="eager")
    for _ in range(2):
        assert all(map(torch.equal, model.call(compiled, THREE, False, model.positions(THREE)), want))
    torch._dynamo.reset()
    transformer.compile_repeated_blocks(backend="eager")
    assert all(map(torch.equal, model.call(transformer, THREE, False, model.positions(THREE)), want))


def test_a_rank_that_splits_inputs_itself_rotates_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Flux2()
    transformer = patch(model.transformer())
    calls: list[tuple[Tensor, Tensor]] = []
    attention = transformer_flux2.dispatch_attention_fn

    def recording(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        calls.append((query[0], key[0]))
        return attention(query, key, value, **options)

    monkeypatch.setattr(transformer_flux2, "dispatch_attention_fn", recording)
    positions = model.positions([0]).pad(48)
    text, image = model.texts[0], torch.cat([model.images[0], torch.randn(48 - 5 - 30, 16)])

    @torch.no_grad()
    def rotated(table: Any, texts: Tensor, images: Tensor) -> list[Tensor]:
        calls.clear()
        transformer(images[None], texts[None], model.timestep, guidance=model.guidance, positions=table)
        return list(calls[0])

    whole = rotated(positions, text, image)
    bounds = rounding(lambda: rotated(positions, text, image), model, transformer)
    for layout in ("contiguous", "zigzag"):
        for rank in range(2):
            index = torch.from_numpy(positions.shard_indices(rank, 2, layout))
            texts, images = text[index[index < 5]], image[index[index >= 5] - 5]
            part = rotated(positions.shard(rank, 2, layout), texts, images)
            assert within(part, [x[index] for x in whole], bounds)


@pytest.mark.parametrize("name", ["Ltx", "Wan"])
@torch.no_grad()
def test_documents_in_a_packed_row_may_have_separate_timesteps(name: str) -> None:
    model, transformer = build(name)
    times = torch.tensor([0.2, 0.5, 0.9])

    def alone() -> list[Tensor]:
        outputs = []
        for i in THREE:
            model.timestep = times[i : i + 1]
            outputs.append(model.alone(transformer, i))
        return outputs

    want, bounds, positions = alone(), rounding(alone, model, transformer), model.positions(THREE)
    patch(transformer, pipeline=model.pipeline)
    for model.timestep in (times, times.repeat_interleave(torch.tensor(positions.lengths))[None]):
        assert within(model.call(transformer, THREE, False, positions), want, bounds)


FLUX_TABLE = MODELS["Flux"]().positions([0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.zeros(4, 9)}, "positions: got Tensor, want a PositionTable"),
        ({"positions": FLUX_TABLE}, "positions.scheme: got 'flux', want 'flux2', the transformer's"),
        ({"joint_attention_kwargs": {"attention_mask": 1}}, "joint_attention_kwargs must not have an attention_mask "),
        ({"img_ids": torch.zeros(9, 4)}, "img_ids cannot be combined with positions, which replace it"),
        ({IMAGE: torch.randn(1, 9, 16)}, "hidden_states: got 9 tokens per row, want 83 as in row 0 of positions"),
        ({TEXT: torch.randn(1, 16, 24)}, "encoder_hidden_states: got 16 tokens per row, want 15 as in row 0 of pos"),
        ({IMAGE: torch.randn(2, 83, 16)}, "positions.num_documents: got 3, want 2, one per row, or all in one row"),
        (
            {IMAGE: torch.randn(3, 44, 16), TEXT: torch.randn(3, 6, 24)},
            "encoder_hidden_states: got 6 tokens per row, want 7 as in row 2 of positions",
        ),
        ({"timestep": torch.ones(3)}, "timestep: got 3, want 1, one per row; documents with different values need sep"),
    ],
    ids=range(9),
)
def test_arguments_that_contradict_positions_are_refused(change: dict[str, Any], message: str) -> None:
    model = Flux2()
    transformer = patch(model.transformer())
    arguments = {IMAGE: joined(model.images, False), TEXT: joined(model.texts, False), "timestep": model.timestep}
    arguments |= {"guidance": model.guidance, "positions": model.positions(THREE)}
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}"):
        transformer(**{**arguments, **change})


def test_models_that_use_text_in_cross_attention_want_a_row_of_it_per_document() -> None:
    model = Wan()
    transformer, packed = patch(model.transformer()), pack_latents(model.latents, 2)
    with pytest.raises(InvalidInputError, match="encoder_hidden_states: got 2 rows, want 3, one per document"):
        transformer(packed, model.timestep, torch.randn(2, 6, 24), positions=model.positions(THREE))


@torch.no_grad()
def test_another_rotary_must_match_the_transformers_heads_axes_and_pairs() -> None:
    model = Flux2()
    transformer, own = model.transformer(), model.settings().rotary
    for changed, message in (
        ({"head_dim": 16, "rotary_dim": 16}, "rotary.head_dim: got 16, want 32 as in the transformer"),
        ({"axes": 2}, "rotary.axes: got 2, want 4 as in the transformer"),
        ({"pairing": "half"}, "rotary.pairing: got 'half', want 'adjacent' as in the transformer"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            patch(transformer, replace(own, **changed))
    with pytest.raises(InvalidInputError, match="rotary: got str, want a Rotary"):
        patch(transformer, "flux2")  # type: ignore[arg-type]
    want = model.call(patch(transformer), THREE, False, model.positions(THREE))
    for rotary, same in ((own, True), (replace(own, theta=500.0), False)):
        patch(unpatch(transformer), rotary)
        assert torch.equal(model.call(transformer, THREE, False, model.positions(THREE))[0], want[0]) == same


def test_a_forward_method_set_on_the_instance_is_not_overwritten() -> None:
    transformer = Wan().transformer()
    transformer.rope.forward = transformer.rope.forward
    with pytest.raises(UnsupportedError, match=r"transformer: got WanRotaryPosEmbed\.forward set on the instance"):
        patch(transformer)
    del transformer.rope.forward
    patch(transformer)
    patched_forward, transformer.rope.forward = transformer.rope.forward, lambda hidden_states: hidden_states
    with pytest.raises(InvalidInputError, match=r"got WanRotaryPosEmbed\.forward that was replaced after patch"):
        unpatch(transformer)
    transformer.rope.forward = patched_forward
    unpatch(transformer)


def test_rows_can_be_moved_to_another_device() -> None:
    model = Flux2()
    lengths = {TEXT: sum(map(len, model.texts)), IMAGE: sum(map(len, model.images))}
    arguments = model.settings().rotary, 1, lengths, torch.ones(3, 4), torch.device("cpu")
    rows: Any = Streams(model.positions(THREE), *arguments).rows((TEXT, IMAGE))
    assert rows.to("cpu") is rows
    moved: Any = rows.to("meta")
    tensors = [moved.positions.table, moved.text_mask, *moved.documents]
    assert all(x.device.type == "meta" for x in tensors)
    assert moved.reached is rows.reached
    with pytest.raises(UnsupportedError, match="positions: got diffusers' enable_parallelism, want a rank that splits"):
        rows.attend(torch.add, *[torch.ones(1)] * 3, {"parallel_config": 1})


def test_processors_that_are_shared_or_set_after_patch_are_refused() -> None:
    model = Flux2()
    first, second = (model.transformer() for _ in range(2))
    second.transformer_blocks[0].attn.set_processor(first.transformer_blocks[0].attn.processor)
    patch(first)
    with pytest.raises(UnsupportedError, match="processor: got that of another patched transformer, want one that"):
        patch(second)
    first.transformer_blocks[0].attn.set_processor(transformer_flux2.Flux2AttnProcessor())
    with pytest.raises(UnsupportedError, match="transformer: got 1 of 2 attentions that did not rotate by positions"):
        model.call(first, THREE, False, model.positions(THREE))
    unpatch(first)
    unpatch(patch(second))


def test_unknown_transformers_are_refused_by_name() -> None:
    assert {kind().config["_class_name"] for kind in MODELS.values()} == {*ANATOMIES}
    transformer = Flux2().transformer()
    transformer.transformer_blocks[0].attn.set_processor(transformer_flux2.Flux2KVAttnProcessor())
    qwen = diffusers.QwenImageTransformer2DModel.from_config(MODELS["QwenImage"]().config | {"zero_cond_t": True})
    z_image = type("ZImageTransformer2DModel", (nn.Module,), {})()
    for module, message in (
        (nn.Linear(1, 1), "transformer: got Linear, want one of BriaTransformer2DModel, Chr"),
        ("x", "transformer: got str, want one of BriaTransformer2DModel, Chr"),
        (z_image, "transformer: got ZImageTransformer2DModel, which needs no patch: it accepts lists of images"),
        (transformer, "processor: got Flux2KVAttnProcessor, want Flux2AttnProcessor or Flux2P"),
        (qwen, r"config\.zero_cond_t: got True, which is not supported: timesteps"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            patch(module, Rotary(32))  # type: ignore[type-var]
    with pytest.raises(InvalidInputError, match="pipeline: got None, want one of LTXConditionPipeline, LTXI2V"):
        patch(MODELS["Ltx"]().transformer())
    with pytest.raises(InvalidInputError, match="transformer: got a patched transformer; call unpatch"):
        patch(patch(Flux2().transformer()))


def test_the_page_is_short_and_its_program_prints_the_text_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 500
    ((code, output),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == output
