"""Plans: every example once, packs that fit, ranks that finish together, equally weighted labels, and index files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import planned_ranks
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published_corpora import CORPORA, corpus
from pyarrow import parquet
from rank_processes import run_ranks

from mmpos import Grid, InvalidInputError, SequenceBuilder
from mmpos.__main__ import main
from mmpos.data import (
    MMC4,
    Cost,
    Example,
    Headers,
    Pack,
    PackedCollator,
    PlannedPack,
    PlannedPacks,
    Preprocess,
    SequenceShard,
    SequenceWriter,
    TrainingPlan,
    first_fit_decreasing,
    plan,
    read_headers,
    shards,
    write_index,
    write_sequences,
)

LINEAR = Cost(1, 0, 0, 0)


def planned(headers: Headers, **settings: object) -> TrainingPlan:
    result = plan(headers, **settings)  # type: ignore[arg-type]
    check(result, headers)
    return result


def check(result: TrainingPlan, headers: Headers) -> None:
    """Check a plan: each example once, packs that fit, complete steps that can be resumed, and correct sums."""
    assert sorted(result.members.tolist()) == list(range(len(headers)))
    assert result.num_packs % (result.ranks * result.microbatches) == 0
    packs = [result.members[a:b] for a, b in itertools.pairwise(result.pack_offsets.tolist())]
    assert min(map(len, packs)) >= 1
    assert [headers.tokens[pack].sum() for pack in packs] == result.tokens.tolist()
    assert [headers.labels[pack].sum() for pack in packs] == result.labels.tolist()
    assert result.tokens.max() <= result.max_tokens
    assert result.member_tokens.tolist() == headers.tokens[result.members].tolist()
    whole, rest = ([[pack.tolist() for pack in step] for step in result.packs(0, start=start)] for start in (0, 1))
    assert (len(whole), rest) == (result.num_steps, whole[1:])


def test_expensive_examples_are_assigned_first_to_the_cheapest_packs() -> None:
    result = planned(Headers([5, 4, 3, 3, 1], [5, 4, 3, 3, 1]), max_tokens=8, ranks=2, cost=LINEAR)
    # Round 1: 5 → A, 4 → B. Round 2: 3 → B (4), 3 → A (5). Round 3: 1 → B (7). Both cost 8.
    assert sorted(sorted(pack.tolist()) for rank in (0, 1) for step in result.packs(rank) for pack in step) == [
        [0, 3],
        [1, 2, 4],
    ]
    assert result.costs.tolist() == [8, 8]
    assert (result.fill, result.straggling(), result.num_steps) == (1.0, 1.0, 1)


@given(
    st.lists(st.integers(1, 40), min_size=8, max_size=120),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(8, 64),
    st.integers(0, 5),
)
@settings(deadline=None, max_examples=60)
def test_every_example_is_planned_once_and_fits(
    tokens: list[int], ranks: int, microbatches: int, window: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    images = random.integers(0, 3, len(tokens))
    headers = Headers(tokens, random.integers(0, np.array(tokens) + 1), random.integers(1, 50, images.sum()), images)
    arguments = {"max_tokens": 200, "ranks": ranks, "microbatches": microbatches, "window": window, "seed": seed}
    result = planned(headers, **arguments)
    again = plan(headers, **arguments)  # type: ignore[arg-type]
    assert result.members.tolist() == again.members.tolist()
    assert result.weights.mean() == pytest.approx(1 if headers.labels.any() else 0)


def test_a_stream_is_planned_window_by_window() -> None:
    headers = corpus("OBELICS", 1000)
    arguments = {"max_tokens": 8192, "ranks": 4}
    whole = planned(headers, window=250, **arguments)
    first = planned(headers[:250], **arguments)
    assert whole.members[:250].tolist() == first.members.tolist()


@pytest.mark.parametrize("name", CORPORA)
def test_planned_ranks_finish_together_unlike_ranks_packed_by_token_count(name: str) -> None:
    headers = corpus(name, 40_000)
    costs = Cost().of(headers)
    for ranks, planned_bound, token_bound in ((8, 1.02, 1.04), (64, 1.03, 1.06)):
        result = planned(headers, max_tokens=8192, ranks=ranks)
        by_tokens = first_fit_decreasing(headers.tokens, 8192)
        packs = np.array([costs[pack].sum() for pack in by_tokens])[: len(by_tokens) // ranks * ranks]
        shuffled = np.random.default_rng(0).permutation(packs).reshape(-1, ranks)
        straggling = shuffled.max(axis=1).sum() / shuffled.mean(axis=1).sum()
        assert result.straggling() < planned_bound < token_bound < straggling
        assert result.fill > 0.8


@pytest.mark.parametrize("seed", range(20))
def test_small_plans_are_near_optimal(seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(1, 100, 8)
    result = planned(Headers(tokens, tokens), max_tokens=1000, ranks=3, cost=LINEAR)
    best = min(np.bincount(hands, tokens, 3).max() for hands in itertools.product(range(3), repeat=8))
    assert result.num_steps == 1
    assert result.rank_costs().max() <= best * 4 / 3  # the bound for scheduling the longest processing time first


def test_a_pipeline_waits_for_the_slowest_microbatch() -> None:
    result = planned(Headers([4, 4, 3, 1], [1] * 4), max_tokens=4, ranks=1, microbatches=4, cost=LINEAR)
    assert result.rank_costs().tolist() == [[12.0]]
    assert result.rank_costs(pipeline=3).tolist() == [[20.0]]


def test_packs_without_images_are_marked_if_another_rank_has_an_image() -> None:
    result = planned(Headers([4, 4, 4, 4], [1] * 4, [9], [1, 0, 0, 0]), max_tokens=4, ranks=2, cost=LINEAR)
    assert result.needs_image.sum() == 1
    (marked,) = np.flatnonzero(result.needs_image)
    assert result.images[marked] == 0
    assert result.images[marked ^ 1] == 1


def test_a_dummy_is_appended_to_a_pack_that_needs_an_image_and_is_not_trained_on() -> None:
    builder = SequenceBuilder()
    text, image = (
        Example(name, sequence, sequence.input_ids)
        for name, sequence in (("text", builder.build(["text"])), ("image", builder.build(["x", Grid(1, 1)])))
    )
    pack = Pack((text,), 8)
    assert PlannedPack(pack, 1.0, False).with_dummy(image) is pack
    padded = PlannedPack(pack, 1.0, True).with_dummy(image)
    assert [example.key for example in padded.examples] == ["text", "image"]
    assert (padded.examples[0].labels.tolist(), padded.examples[1].labels.tolist()) == (
        text.labels.tolist(),
        [-100] * 4,
    )
    with pytest.raises(InvalidInputError, match="dummy: got an example without an image"):
        PlannedPack(pack, 1.0, True).with_dummy(text)


def test_the_mean_of_weighted_losses_is_the_mean_over_all_labels() -> None:
    headers = corpus("OBELICS", 500)
    result = planned(headers, max_tokens=8192, ranks=4, microbatches=2)
    losses = np.random.default_rng(1).random(len(headers)) * headers.labels  # summed over each example's labels
    pack_losses = np.add.reduceat(losses[result.members], result.pack_offsets[:-1])
    means = np.divide(pack_losses, result.labels, where=result.labels > 0, out=np.zeros(result.num_packs))
    assert (result.weights * means).mean() == pytest.approx(losses.sum() / headers.labels.sum())


@pytest.mark.slow
def test_the_weighted_loss_and_gradient_of_four_ranks_match_those_of_the_documents(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    one = shard(tmp_path / "a.parquet", random.integers(12, 90, 60).tolist(), slice(3))
    headers, shard_of, row = read_headers([one])
    result = planned(headers, max_tokens=160, ranks=4, microbatches=2)
    assert result.labels.min() < result.labels.max() / 2, "the corpus has uneven labels"
    write_index(tmp_path / "index.parquet", result, [one.source], shard_of, row)
    run_ranks(planned_ranks.run, 4, tmp_path)
    model = planned_ranks.model()
    alone = [planned_ranks.losses(model, PackedCollator()([example])) for example in one.examples()]
    assert [losses.numel() for losses in alone] == headers.labels.tolist()
    want = torch.cat(alone).mean()
    want.backward()
    loss, gradient = torch.load(tmp_path / "result")
    assert loss == pytest.approx(want.item(), rel=1e-6)
    torch.testing.assert_close(gradient, model[0].weight.grad, rtol=1e-5, atol=1e-8)


def test_costs_from_a_config_match_those_counted_by_hand() -> None:
    text = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    text |= {"intermediate_size": 18944, "vocab_size": 152064}
    vision = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "hidden_act": "silu"}
    vision["fullatt_block_indexes"] = [7, 15, 23, 31]
    cost = Cost.from_hf_config({"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision})
    attention, mlp = 3584 * 128 * (2 * 28 + 2 * 4), 3 * 3584 * 18944
    assert cost.language_linear == 2 * (28 * (attention + mlp) + 152064 * 3584)
    assert cost.language_quadratic == 2 * 28 * 28 * 128
    assert cost.vision_linear == 2 * 32 * (4 * 1280**2 + 3 * 1280 * 3420)
    assert cost.vision_quadratic == 4 * 4 * 1280


def planning(
    tokens: Sequence[int] = (2, 3), labels: Sequence[int] | None = None, patches: Sequence[int] = (), **arguments: Any
) -> Callable[[], TrainingPlan]:
    """Return a function that plans examples of these sizes."""
    options = {"max_tokens": 8, "ranks": 1, **arguments}
    return lambda: plan(Headers(tokens, [0] * len(tokens) if labels is None else labels, patches), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (planning([0]), "tokens[0]: got 0, want >= 1"),
        (planning(labels=[1, 9]), "labels[1]: got 9, want at most 3, the tokens of the example"),
        (planning(patches=[4]), "images: got a sum of 0, want 1 as in patches"),
        (planning(max_tokens=2), "headers.tokens[1]: got 3, want <= 2"),
        (planning(ranks=0), "ranks: got 0, want >= 1"),
        (
            planning(ranks=2, microbatches=2),
            "headers: got 2 examples to plan together, want at least 4, one for each of the 4 packs of a step, "
            "or fewer ranks or microbatches",
        ),
        (
            planning([2, 3, 2, 3], ranks=3, window=2),
            "headers: got 2 examples to plan together, want at least 3, one for each of the 3 packs of a step, "
            "or fewer ranks or microbatches, or a larger window",
        ),
        (planning([2**53, 2**53]), "tokens: got a sum of 1.80144e+16, want at most 9.0072e+15"),
        (
            planning(cost=Cost(1.5e308)),
            "cost: got a sum of inf over the examples, want a finite one; use smaller units",
        ),
        (planning(cost=3), "cost: got int, want a Cost, as returned by Cost.from_hf_config"),
        (lambda: plan(3, max_tokens=8, ranks=1), "headers: got int, want a Headers, as returned by Headers.of"),  # type: ignore[arg-type]
        (lambda: Headers([1, 2], [0, 0])[::2], "headers[…]: got slice(None, None, 2), want a slice without a step"),
        (lambda: Cost(0), "Cost.language_linear: got 0.0, want > 0; every token costs something"),
        (lambda: Cost(1, -1), "Cost.language_quadratic: got -1, want a finite number >= 0"),
        (lambda: Cost.from_hf_config({"hidden_size": 8}), "config.num_hidden_layers: got none, want an integer"),
        (
            lambda: read_headers(["path"]),  # type: ignore[list-item]
            "shards[0]: got str, want a SequenceShard, as returned by SequenceShard(path)",
        ),
        (
            lambda: write_index("a", None, [], [], []),  # type: ignore[arg-type]
            "plan: got NoneType, want a TrainingPlan, as returned by mmpos.data.plan",
        ),
    ],
)
def test_invalid_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        call()
    assert str(error.value) == message


def shard(path: Path, sizes: list[int], trained: slice = slice(None)) -> SequenceShard:
    """Write examples of these sizes, each with an image of 2×3 tokens; train on only a slice of every other one."""
    builder = SequenceBuilder()
    with SequenceWriter(path) as writer:
        for i, size in enumerate(sizes):
            sequence = builder.build(["x" * (size - 8), Grid(2, 3)])
            labels = np.full(size, -100)
            kept = trained if i % 2 else slice(None)
            labels[kept] = np.where(sequence.token_type_ids == 0, sequence.input_ids, -100)[kept]
            writer.write(Example(f"{path.stem}-{i}", sequence, labels))
    return SequenceShard(path)


def test_each_rank_reads_its_examples_through_the_index(tmp_path: Path) -> None:
    shards = [shard(tmp_path / "a.parquet", [10, 12, 14, 20]), shard(tmp_path / "b.parquet", [16, 9, 30])]
    headers, shard_of, row = read_headers(shards)
    assert headers.tokens.tolist() == [10, 12, 14, 20, 16, 9, 30]
    assert headers.labels.tolist() == [3, 5, 7, 13, 9, 2, 23]
    assert headers.patches.tolist() == [24] * 7
    assert (
        Headers.of([example for one in shards for example in one.examples()]).labels.tolist() == headers.labels.tolist()
    )
    assert (shard_of.tolist(), row.tolist()) == ([0, 0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 0, 1, 2])
    result = planned(headers, max_tokens=32, ranks=2)
    index = tmp_path / "index.parquet"
    write_index(index, result, [one.source for one in shards], shard_of, row)
    keys = [f"a-{i}" for i in range(4)] + [f"b-{i}" for i in range(3)]
    for rank in (0, 1):
        packs = PlannedPacks(index, rank)
        got = [[[example.key for example in one.pack.examples] for one in step] for step in packs]
        assert got == [[[keys[i] for i in pack] for pack in step] for step in result.packs(rank)]
    table = parquet.read_table(index)
    weights = dict(zip(table["row"].to_pylist(), table["weight"].to_pylist(), strict=True))
    assert set(weights.values()) <= set(result.weights.tolist())
    with pytest.raises(InvalidInputError, match=r"state.ranks: got 3, want 2"):
        packs.load_state_dict({"step": 0, "ranks": 3, "microbatches": 1})
    shard(tmp_path / "b.parquet", [17, 10, 31])
    with pytest.raises(InvalidInputError, match="the shard has changed"):
        [list(PlannedPacks(index, rank)) for rank in (0, 1)]


def test_an_index_made_with_relative_paths_is_right_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = shard(Path("a.parquet"), [20, 20])
    headers, shard_of, row = read_headers([one])
    write_index("index.parquet", planned(headers, max_tokens=20, ranks=2), [one.source], shard_of, row)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    keys = [one.pack.examples[0].key for rank in (0, 1) for (one,) in PlannedPacks("../index.parquet", rank)]
    assert sorted(keys) == ["a-0", "a-1"]


def test_a_parquet_file_without_an_index_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(
        InvalidInputError, match="got a Parquet file without an index, want the index of a plan, version 1"
    ):
        PlannedPacks(path, 0)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write an index of a.parquet with two steps for two ranks, in groups of one row."""
    monkeypatch.setattr("mmpos.data.planner.index._GROUP_ROWS", 1)
    one = shard(tmp_path / "a.parquet", [20, 20, 20, 20])
    headers, shard_of, row = read_headers([one])
    write_index(tmp_path / "index.parquet", planned(headers, max_tokens=20, ranks=2), [one.source], shard_of, row)
    return tmp_path / "index.parquet"


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("step", 7, "got no examples in microbatch 0 of step 0 and rank 0, want one or more; the index has changed"),
        ("offset", 3, "got offset 3 in step 0 and rank 0, want 0; the index has changed"),
        ("row", 9, r"got row 9 of .*a.parquet, want one of its 4 rows; the shard has changed"),
    ],
)
def test_an_edited_index_is_refused(written: Path, column: str, value: int, message: str) -> None:
    table = parquet.read_table(written)
    i = table.schema.get_field_index(column)
    field = table.schema.field(i)
    parquet.write_table(table.set_column(i, field, pa.array([value] * 4, field.type)), written)
    with pytest.raises(InvalidInputError, match=message):
        list(PlannedPacks(written, 0))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (b"{", r"got the index b'{', want the index of a plan, version 1"),
        (b'{"version": 1}', "ranks: got None, want an integer"),
    ],
)
def test_an_index_with_edited_metadata_is_refused(written: Path, facts: bytes, message: str) -> None:
    parquet.write_table(parquet.read_table(written).replace_schema_metadata({b"mmpos.plan": facts}), written)
    with pytest.raises(InvalidInputError, match=message):
        PlannedPacks(written, 0)


def test_a_flipped_bit_never_changes_packs_silently(written: Path) -> None:
    intact, random = written.read_bytes(), np.random.default_rng(0)

    def read() -> list[object]:
        steps = list(PlannedPacks(written, 1))
        return [(one.weight, one.needs_image, [example.key for example in one.pack.examples]) for (one,) in steps]

    want = read()
    for offset in random.integers(4, len(intact) - 8, 60).tolist():
        broken = bytearray(intact)
        broken[offset] ^= 1 << int(random.integers(8))
        written.write_bytes(broken)
        try:
            got = read()
        except (InvalidInputError, FileNotFoundError):
            continue
        assert got == want


def test_every_iteration_begins_at_the_first_step_except_the_one_after_a_loaded_state(written: Path) -> None:
    packs, last = PlannedPacks(written, 0), {"step": 2, "ranks": 2, "microbatches": 1}

    def keys() -> list[str]:
        return [one.pack.examples[0].key for (one,) in packs]

    first = keys()
    assert (len(packs), len(first), keys(), keys(), packs.state_dict()) == (2, 2, first, first, last)
    stopped = iter(packs)
    next(stopped)
    middle = packs.state_dict()
    assert (keys(), len([*stopped])) == (first, 1)  # a new iteration does not disturb the one before it
    for state, rest in ((middle, first[1:]), (last, [])):
        packs.load_state_dict(state)
        assert packs.state_dict() == state
        assert (keys(), keys()) == (rest, first)


def test_a_step_with_a_missing_shard_is_not_counted(written: Path) -> None:
    written.with_name("a.parquet").unlink()
    packs = PlannedPacks(written, 0)
    with pytest.raises(FileNotFoundError, match=r"a\.parquet"):
        next(iter(packs))
    assert packs.state_dict()["step"] == 0


def test_the_command_writes_an_index_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        shard(tmp_path / f"{name}.parquet", [20, 30, 40, 60] * 4)
    index = tmp_path / "index.parquet"
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}')
    words = ["data", "plan", f"{tmp_path}/?.parquet", "-o", str(index), "--config", str(tmp_path)]
    assert main([*words, "--ranks", "2", "--max-tokens", "128"]) == 0
    report = capsys.readouterr().out
    assert "32, with 1,200 tokens" in report
    assert "of 2 ranks and 1 microbatch" in report
    assert sum(len(one.pack.examples) for rank in (0, 1) for step in PlannedPacks(index, rank) for one in step) == 32


def test_the_command_plans_the_files_of_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text_list": ["some words"], "image_info": []}\n' * 4)
    ready, index = tmp_path / "ready", tmp_path / "index.parquet"
    preprocess = Preprocess(MMC4(), SequenceBuilder())
    write_sequences(shards(tmp_path / "a.jsonl"), ready, preprocess)
    shard(ready / "stray.parquet", [20])
    command = ["data", "plan", str(ready), "-o", str(index)]
    assert main(command) == 0
    assert "4, with 40 tokens" in capsys.readouterr().out
    (ready / "a.parquet").unlink()
    assert main(command) == 2
    assert f"{ready}/_run.json: got 0 of the files of a.jsonl, want all" in capsys.readouterr().err
