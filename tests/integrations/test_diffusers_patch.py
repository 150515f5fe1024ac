"""Patched diffusers transformers: images have the same outputs in padded or packed batches of mixed sizes as alone."""

from __future__ import annotations

import copy
import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.transformers import transformer_flux2
from diffusers_models import MODELS, Flux2, Model, Wan, WanFromImages, joined
from diffusers_ranks import run
from tolerance import FREQUENCY, assert_within, gamma, rounding
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mmpos import Grid, InvalidInputError, SegmentTable, Text, UnsupportedError, place
from mmpos.integrations.diffusers import pack_latents, patch, unpack_latents, unpatch
from mmpos.integrations.diffusers.anatomy import ANATOMIES, NOT_PATCHED
from mmpos.integrations.diffusers.classes import TRANSFORMERS
from mmpos.integrations.diffusers.rows import IMAGE, TEXT, Streams
from mmpos.integrations.patches import Attribute, Patch
from mmpos.rotary import Rotary

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = sorted(MODELS)
THREE = (0, 1, 2)


def build(name: str) -> tuple[Model, Any]:
    model = MODELS[name]()
    return model, model.transformer()


@contextmanager
def perturbed_rotations(transformer: Any, error: float) -> Iterator[None]:
    """Add or subtract ``error`` at random to the transformer's own cos and sin."""
    rope = getattr(transformer, ANATOMIES[type(transformer).__name__].rope or "pos_embed")

    def perturbed(x: object) -> object:
        floating = isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
        return x + error * (2 * torch.randint(0, 2, x.shape) - 1) if floating else x  # type: ignore[attr-defined, operator]

    def after(module: object, args: object, output: object) -> object:
        return tuple(map(perturbed, output)) if isinstance(output, tuple) else perturbed(output)

    hook = rope.register_forward_hook(after)
    yield
    hook.remove()


def bounds(model: Model, transformer: Any) -> list[float]:
    """Bound the rounding error of each image alone, including that of the class's own angles."""

    def run() -> list[Tensor]:
        return [model.alone(transformer, i) for i in THREE]

    rotary, ids, alone = model.settings().rotary, model.positions(THREE).dense(dtype="float64"), run()
    error = gamma(FREQUENCY) * float(abs(ids).max() * rotary.inv_freq_array.max())
    by_weights, by_angles = rounding(run, transformer.parameters()), [0.0] * 3
    for _ in range(4):
        with perturbed_rotations(transformer, error):
            changes = [float((one - other).abs().max()) for one, other in zip(run(), alone, strict=True)]
        by_angles = [max(pair) for pair in zip(by_angles, changes, strict=True)]
    return [one + 2 * other for one, other in zip(by_weights, by_angles, strict=True)]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_outputs_for_mixed_sizes_equal_those_of_each_image_alone(name: str) -> None:
    model, transformer = build(name)
    alone, bound = [model.alone(transformer, i) for i in THREE], bounds(model, transformer)
    patch(transformer)
    assert all(torch.equal(model.alone(transformer, i), alone[i]) for i in THREE)
    for i in THREE:
        (single,) = model.call(transformer, [i], False, model.positions([i]))
        assert_within(single, alone[i], bound[i])
    for batch in (False, True):
        together = model.call(transformer, THREE, batch, model.positions(THREE))
        for i in THREE:
            assert_within(together[i], alone[i], bound[i])
    assert all(torch.equal(model.alone(transformer, i), alone[i]) for i in THREE)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_other_positions_change_the_output(name: str) -> None:
    model, transformer = build(name)
    patch(transformer)
    right = model.call(transformer, THREE, False, model.positions(THREE))
    bound = rounding(lambda: model.call(transformer, THREE, False, model.positions(THREE)), transformer.parameters())
    documents = [model.document(i) for i in THREE]
    swapped = [
        [Grid(part.width, part.height, frames=part.frames) if isinstance(part, Grid) else part for part in document]
        for document in documents
    ]
    wrong = model.call(transformer, THREE, False, model.settings().place(swapped))
    for one, other, off in zip(right, wrong, bound, strict=True):
        assert (one - other).abs().max() > off


@pytest.mark.parametrize("name", NAMES)
def test_unpatch_leaves_nothing_behind(name: str) -> None:
    model, transformer = build(name)
    before = [(type(module), sorted(vars(module))) for module in transformer.modules()]
    processors = [type(module.processor) for module in transformer.modules() if hasattr(module, "processor")]
    patch(transformer)
    twin = copy.deepcopy(transformer)
    for one in (transformer, twin):
        assert unpatch(one) is one
        assert [(type(module), sorted(vars(module))) for module in one.modules()] == before
        assert [type(module.processor) for module in one.modules() if hasattr(module, "processor")] == processors
        for module in one.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        with pytest.raises(InvalidInputError, match=r"transformer: got an unpatched \w+"):
            unpatch(one)
        with pytest.raises(TypeError, match="positions"):
            model.call(one, THREE, False, model.positions(THREE))


@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing_does_not_change_the_gradients(name: str) -> None:
    model, transformer = build(name)
    patch(transformer)
    transformer.train()
    gradients = []
    for checkpoints in (False, True):
        if checkpoints:
            transformer.enable_gradient_checkpointing()
        transformer.zero_grad()
        squares = [x.square().mean() for x in model.call(transformer, THREE, False, model.positions(THREE))]
        torch.stack(squares).sum().backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in transformer.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Flux2Transformer2DModel", "LTXVideoTransformer3DModel", "WanTransformer3DModel"])
@torch.no_grad()
def test_compiled_transformers_have_the_same_output(name: str) -> None:
    model, transformer = build(name)
    patch(transformer)
    want = model.call(transformer, THREE, False, model.positions(THREE))
    compiled = torch.compile(transformer, backend="eager")
    for _ in range(2):
        assert all(map(torch.equal, model.call(compiled, THREE, False, model.positions(THREE)), want))
    torch._dynamo.reset()
    transformer.compile_repeated_blocks(backend="eager")
    assert all(map(torch.equal, model.call(transformer, THREE, False, model.positions(THREE)), want))


@pytest.mark.slow
def test_context_parallel_ranks_have_the_same_output_as_one_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run, args=(rank, tmp_path)) for rank in (0, 1)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    for rank in "01":
        shares = json.loads((tmp_path / rank).read_text())
        assert shares.pop("ring") == (
            "positions: got padding or packed documents with ring attention, want one whole document per row, or "
            "ulysses_degree only"
        )
        assert shares.pop("ltx") == (
            "positions: got packed documents with context parallelism, want one document per row, because diffusers "
            "splits the texts of packed documents"
        )
        assert len(shares) == 8
        assert max(shares.values()) <= 1, shares


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
    arguments = {"timestep": model.timestep, "guidance": model.guidance}

    def rotated(table: Any, texts: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        calls.clear()
        with torch.no_grad():
            transformer(hidden_states=images[None], encoder_hidden_states=texts[None], positions=table, **arguments)
        return calls[0]

    whole = rotated(positions, text, image)
    bound = rounding(lambda: rotated(positions, text, image), transformer.parameters())
    for layout in ("contiguous", "zigzag"):
        for rank in range(2):
            index = torch.from_numpy(positions.shard_indices(rank, 2, layout))
            texts, images = text[index[index < 5]], image[index[index >= 5] - 5]
            part = rotated(positions.shard(rank, 2, layout), texts, images)
            assert_within(list(part), [x[index] for x in whole], bound)


@torch.no_grad()
def test_cross_attention_to_images_stays_within_the_document() -> None:
    model = WanFromImages()
    transformer = model.transformer()
    alone, bound = [model.alone(transformer, i) for i in THREE], bounds(model, transformer)
    patch(transformer)
    for batch in (False, True):
        for i, one in enumerate(model.call(transformer, THREE, batch, model.positions(THREE))):
            assert_within(one, alone[i], bound[i])


@pytest.mark.parametrize("name", ["LTXVideoTransformer3DModel", "WanTransformer3DModel"])
@torch.no_grad()
def test_documents_in_a_packed_row_may_have_separate_timesteps(name: str) -> None:
    model, transformer = build(name)
    times = torch.tensor([0.2, 0.5, 0.9])

    def alone(i: int) -> Tensor:
        model.timestep = times[i : i + 1]
        return model.alone(transformer, i)

    want = [alone(i) for i in THREE]
    bound = rounding(lambda: [alone(i) for i in THREE], transformer.parameters())
    patch(transformer)
    positions = model.positions(THREE)
    tokens = torch.from_numpy(positions.lengths)
    for model.timestep in (times, times.repeat_interleave(tokens)[None]):
        for one, other, off in zip(model.call(transformer, THREE, False, positions), want, bound, strict=True):
            assert_within(one, other, off)


@torch.no_grad()
def test_z_image_rotates_mixed_sizes_without_a_patch() -> None:
    config = {"dim": 48, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 24}
    transformer = diffusers.ZImageTransformer2DModel(in_channels=4, axes_dims=[8, 8, 8], **config).eval()
    for parameter in transformer.parameters():
        nn.init.normal_(parameter, std=0.2)
    images = [torch.randn(4, 1, 2 * h, 2 * w) for h, w in ((4, 6), (3, 5), (8, 2))]
    texts = [torch.randn(n, 24) for n in (5, 40, 7)]
    together = transformer(images, torch.tensor([0.5]), texts).sample

    def alone(i: int) -> Tensor:
        return transformer([images[i]], torch.tensor([0.5]), [texts[i]]).sample[0]

    for i in THREE:
        (bound,) = rounding(lambda i=i: alone(i), transformer.parameters())  # type: ignore[misc]
        assert_within(together[i], alone(i), bound)
    with pytest.raises(UnsupportedError, match=r"^transformer: got ZImageTransformer2DModel, which needs no patch: "):
        patch(transformer, Rotary(24))


def wrong(change: Callable[[Flux2, dict[str, Any]], None]) -> Callable[[], None]:
    """Return a call to Flux2 with changed arguments."""

    def call() -> None:
        model = Flux2()
        transformer = patch(model.transformer())
        arguments = {
            "hidden_states": joined(model.images, False),
            "encoder_hidden_states": joined(model.texts, False),
            "timestep": model.timestep,
            "guidance": model.guidance,
            "positions": model.positions(THREE),
        }
        change(model, arguments)
        transformer(**arguments)

    return call


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.zeros(4, 9)}, "positions: got Tensor, want a PositionTable"),
        (
            {"joint_attention_kwargs": {"attention_mask": torch.ones(1, 98)}},
            "joint_attention_kwargs must not have an attention_mask if positions are passed: positions define the mask",
        ),
        (
            {"img_ids": torch.zeros(9, 4)},
            "img_ids cannot be combined with positions, which replace it",
        ),
        (
            {"positions": place(SegmentTable.from_documents([[Text(5), Grid(4, 6)]]), "flux")},
            "positions: got 3 axes, want 4 as in rotary",
        ),
        (
            {"hidden_states": torch.randn(1, 9, 16)},
            "hidden_states: got 9 tokens per row, want 83 as in row 0 of positions",
        ),
        (
            {"encoder_hidden_states": torch.randn(1, 16, 24)},
            "encoder_hidden_states: got 16 tokens per row, want 15 as in row 0 of positions",
        ),
        (
            {"hidden_states": torch.randn(2, 83, 16), "encoder_hidden_states": torch.randn(2, 15, 24)},
            "positions: got 3 documents for 2 rows, want one per row, or all in one row",
        ),
        (
            {"hidden_states": torch.randn(3, 44, 16), "encoder_hidden_states": torch.randn(3, 6, 24)},
            "encoder_hidden_states: got 6 tokens per row, want 7 as in row 2 of positions",
        ),
        (
            {"timestep": torch.ones(3)},
            "timestep: got 3, want 1, one per row; documents with different values need separate rows",
        ),
    ],
    ids=range(9),
)
def test_arguments_that_contradict_positions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        wrong(lambda model, arguments: arguments.update(change))()
    assert str(error.value) == message


def test_text_in_positions_is_refused_if_the_model_uses_it_in_cross_attention() -> None:
    model = Wan()
    transformer = patch(model.transformer())
    table = place(SegmentTable.from_documents([[Text(2), Grid(4, 6, frames=2)]]), "mrope")
    with pytest.raises(InvalidInputError, match="positions: got text, want none, because encoder_hidden_states"):
        model.call(transformer, [0], False, table)
    with pytest.raises(InvalidInputError, match="encoder_hidden_states: got 2 rows, want 3, one per document"):
        transformer(
            hidden_states=pack_latents(model.latents, 2),
            timestep=model.timestep,
            encoder_hidden_states=torch.randn(2, 6, 24),
            positions=model.positions(THREE),
        )


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
    with pytest.raises(InvalidInputError, match="rotary: got a Rotary, want None because the channels of a pair"):
        patch(MODELS["ErnieImageTransformer2DModel"]().transformer(), own)
    patch(transformer)
    with torch.no_grad():
        want = model.call(transformer, THREE, False, model.positions(THREE))
        patch(unpatch(transformer), own)
        assert all(map(torch.equal, model.call(transformer, THREE, False, model.positions(THREE)), want))
        patch(unpatch(transformer), replace(own, theta=500.0))
        assert not torch.equal(model.call(transformer, THREE, False, model.positions(THREE))[0], want[0])


def test_a_forward_method_set_on_the_instance_is_not_overwritten() -> None:
    model = Wan()
    transformer = model.transformer()
    transformer.rope.forward = transformer.rope.forward
    with pytest.raises(
        UnsupportedError, match=r"transformer: got WanRotaryPosEmbed\.forward set on the instance, want the method of"
    ):
        patch(transformer)
    del transformer.rope.forward
    patch(transformer)
    patched_forward, transformer.rope.forward = transformer.rope.forward, lambda hidden_states: hidden_states
    with pytest.raises(
        InvalidInputError, match=r"got WanRotaryPosEmbed\.forward that was replaced after patch, want the"
    ):
        unpatch(transformer)
    transformer.rope.forward = patched_forward
    unpatch(transformer)


def test_rows_can_be_moved_to_another_device() -> None:
    model = Flux2()
    lengths = {TEXT: sum(map(len, model.texts)), IMAGE: sum(map(len, model.images))}
    mask = torch.ones(3, 4)
    packed = Streams(model.positions(THREE), [model.settings().rotary], 1, lengths, mask, torch.device("cpu"))
    rows = packed.rows((TEXT, IMAGE))
    assert rows.to("cpu") is rows
    moved = rows.to("meta")
    assert rows.documents is not None
    assert moved.documents is not None
    tensors = [moved.positions.table, moved.text_mask, *moved.documents]
    assert all(x is not None and x.device.type == "meta" for x in tensors)
    assert moved.reached is rows.reached


def test_setting_a_processor_after_patch_makes_the_next_call_raise() -> None:
    model = Flux2()
    transformer = patch(model.transformer())
    transformer.transformer_blocks[0].attn.set_processor(transformer_flux2.Flux2AttnProcessor())
    with pytest.raises(UnsupportedError, match="transformer: got 1 of 2 attentions that did not rotate by positions"):
        model.call(transformer, THREE, False, model.positions(THREE))


def test_a_processor_of_another_patched_transformer_is_refused() -> None:
    first, second = (Flux2().transformer() for _ in range(2))
    second.transformer_blocks[0].attn.set_processor(first.transformer_blocks[0].attn.processor)
    patch(first)
    for _ in range(2):
        with pytest.raises(
            UnsupportedError,
            match=r"^processor: got one shared with another patched transformer, want one that is not shared$",
        ):
            patch(second)
    unpatch(first)
    unpatch(patch(second))


class Other:
    """A class that is assigned to an object."""


@pytest.mark.parametrize("fails", ["class", "hook"])
def test_a_failed_patch_leaves_nothing_behind(fails: str) -> None:
    module, one = nn.Linear(1, 1), type("One", (), {})()
    before, kind = sorted(vars(module)), type(one)

    def hooks() -> Iterator[RemovableHandle]:
        yield module.register_forward_hook(lambda *_: None)
        raise RuntimeError("no more hooks")

    classes = [(one, Other), *([(object(), Other)] if fails == "class" else [])]
    with pytest.raises(TypeError if fails == "class" else RuntimeError):
        Patch.install("module", module, hooks, [Attribute(module, "forward", module.forward)], classes)
    assert (sorted(vars(module)), type(one), len(module._forward_hooks)) == (before, kind, 0)


def test_unknown_transformers_are_refused_by_name() -> None:
    model, rotary = Flux2(), Rotary(32)
    transformer = model.transformer()
    with pytest.raises(UnsupportedError, match="transformer: got Linear, want one of BriaTransformer2DModel, Chr"):
        patch(nn.Linear(1, 1), rotary)
    transformer.transformer_blocks[0].attn.set_processor(transformer_flux2.Flux2KVAttnProcessor())
    with pytest.raises(
        UnsupportedError, match="processor: got Flux2KVAttnProcessor, want Flux2AttnProcessor or Flux2P"
    ):
        patch(transformer, rotary)
    transformer = patch(model.transformer())
    with pytest.raises(InvalidInputError, match="transformer: got a patched transformer; call unpatch"):
        patch(transformer, rotary)
    qwen = MODELS["QwenImageTransformer2DModel"]
    assert {*ANATOMIES, *NOT_PATCHED} <= {*TRANSFORMERS}
    twice = diffusers.QwenImageTransformer2DModel(**qwen.config, zero_cond_t=True)
    with pytest.raises(UnsupportedError, match=r"config\.zero_cond_t: got True, which is not supported: timesteps"):
        patch(twice, rotary)


@pytest.mark.parametrize("call", [patch, unpatch])
def test_an_argument_that_is_not_a_module_is_refused(call: Any) -> None:
    with pytest.raises(InvalidInputError, match="transformer: got str, want a diffusers transformer"):
        call("x")


def test_latents_of_mixed_sizes_are_packed_and_unpacked() -> None:
    latents = [torch.arange(2 * 4 * 6.0).reshape(2, 4, 6), 100 + torch.arange(2 * 2 * 2.0).reshape(2, 2, 2)]
    packed = pack_latents(latents, 2)
    assert packed.shape == (1, 2, 2, 14)
    assert packed[0, 0].tolist() == [
        [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 100, 101],
        [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23, 102, 103],
    ]
    rows = pack_latents(latents, 2, batch=True)
    assert rows.shape == (2, 2, 2, 12)
    assert not rows[1, :, :, 2:].any()
    videos = [torch.randn(3, 4, 2, 6), torch.randn(3, 2, 4, 3)]
    for inputs, size in ((latents, 2), (videos, (2, 2, 3))):
        for batch in (False, True):
            back = unpack_latents(pack_latents(inputs, size, batch=batch), [x.shape[1:] for x in inputs], size)
            assert all(torch.equal(one, other) for one, other in zip(back, inputs, strict=True))
    for call, message in (
        (lambda: pack_latents([], 2), "latents: got none, want at least one"),
        (lambda: pack_latents([latents[0], videos[0]], 2), r"latents\[1\]: got shape \(3, 4, 2, 6\), want \(channels"),
        (lambda: pack_latents(latents, 4), r"latents\[0\]: got size \(4, 6\), want multiples of the patch \(4, 4\)"),
        (
            lambda: unpack_latents(packed, [(4, 6)], 2),
            r"sizes: got 1 size with 12 columns, want the sizes of the strips in shape \(1, ",
        ),
        (lambda: unpack_latents(packed, [(4, 6, 2)], 2), r"sizes\[0\]: got \(4, 6, 2\), want 2 numbers"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            call()
