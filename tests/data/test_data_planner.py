"""Plans: every example once, packs that fit, ranks that finish together, equally weighted labels, and index files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_corpora import CORPORA, corpus
from pyarrow import parquet
from refusals import assert_refused

from mmpos import Grid, InvalidInputError, SequenceBuilder
from mmpos.__main__ import main
from mmpos.data import MMC4, Pack, Preprocess, SequenceShard, SequenceWriter, shards, write_sequences
from mmpos.data.packing import best_fit_decreasing
from mmpos.data.planner.index import PlannedPack, PlannedPacks, read_headers, write_index
from mmpos.data.planner.plan import Cost, Headers, TrainingPlan, plan
from mmpos_bench.data import labelled

LINEAR = Cost(1, 0, 0, 0)


def planned(headers: Headers, **settings: object) -> TrainingPlan:
    """Plan, and check: each example once, packs that fit, complete steps, and correct sums."""
    result = plan(headers, **settings)  # type: ignore[arg-type]
    steps = [step for rank in range(result.ranks) for step in result.packs(rank)]
    assert {len(step) for step in steps} == {result.microbatches}
    assert len(steps) == result.num_steps * result.ranks
    packs = [pack.tolist() for step in steps for pack in step]
    assert sorted(i for pack in packs for i in pack) == list(range(len(headers)))
    assert min(map(len, packs)) >= 1
    assert max(headers.tokens[pack].sum() for pack in packs) <= result.max_tokens
    first = result.packs(0)[0]  # pack number (step·ranks + rank)·microbatches + microbatch
    assert [headers.labels[pack].sum() for pack in first] == result.sums(headers.labels)[: len(first)].tolist()
    return result


def test_expensive_examples_are_assigned_first_to_the_cheapest_packs() -> None:
    headers = Headers([5, 4, 3, 3, 1], [5, 4, 3, 3, 1])
    result = planned(headers, max_tokens=8, ranks=2, cost=LINEAR)
    # Round 1: 5 → A, 4 → B. Round 2: 3 → B (4), 3 → A (5). Round 3: 1 → B (7). Both cost 8.
    packs = [pack.tolist() for rank in (0, 1) for (pack,) in result.packs(rank)]
    assert sorted(packs) == [[0, 3], [1, 2, 4]]
    assert result.sums(result.costs).tolist() == [8, 8]
    assert (result.fill, result.straggling, result.num_steps) == (1.0, 1.0, 1)
    assert repr(result) == "TrainingPlan(1 step of 2 ranks with 1 microbatch, fill=1.000, straggling=1.0000)"


@given(
    st.lists(st.integers(1, 40), min_size=8, max_size=120),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(8, 64),
    st.integers(0, 5),
)
@settings(deadline=None, max_examples=60)
def test_each_example_is_planned_once(tokens: list[int], ranks: int, microbatches: int, window: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    images = random.integers(0, 3, len(tokens))
    headers = Headers(tokens, random.integers(0, np.array(tokens) + 1), random.integers(1, 50, images.sum()), images)
    arguments = {"max_tokens": 200, "ranks": ranks, "microbatches": microbatches, "window": window, "seed": seed}
    result = planned(headers, **arguments)
    again = plan(headers, **arguments)  # type: ignore[arg-type]
    assert result.pack_of.tolist() == again.pack_of.tolist()
    assert result.weights.mean() == pytest.approx(1 if headers.labels.any() else 0)


def test_examples_are_planned_window_by_window_and_a_remainder_joins_the_last() -> None:
    headers, settings = Headers([1] * 31, [0] * 31), {"max_tokens": 2, "ranks": 1, "window": 8}
    packs, other = ([pack.tolist() for (pack,) in planned(headers, **settings, seed=i).packs(0)] for i in (0, 1))
    windows = [sorted({i // 8 for i in pack}) for pack in packs]
    assert windows[:8] == [[0]] * 4 + [[1]] * 4
    assert sorted(windows[8:]) == [[2]] + [[2, 3]] * 7
    assert other != packs


@pytest.mark.parametrize("name", CORPORA)
def test_planned_ranks_finish_together_unlike_ranks_packed_by_token_count(name: str) -> None:
    headers = corpus(name, 40_000)
    costs = Cost().of(headers)
    by_tokens = np.array([costs[pack].sum() for pack in best_fit_decreasing(headers.tokens, 8192)])
    for ranks, planned_bound, token_bound in ((8, 1.02, 1.04), (64, 1.03, 1.06)):
        result = planned(headers, max_tokens=8192, ranks=ranks)
        steps = np.random.default_rng(0).permutation(by_tokens[: by_tokens.size // ranks * ranks]).reshape(-1, ranks)
        straggling = steps.max(axis=1).sum() / steps.mean(axis=1).sum()
        assert result.straggling < planned_bound < token_bound < straggling
        assert result.fill > 0.8


def test_the_microbatches_of_a_step_are_dealt_to_ranks_of_equal_cost() -> None:
    sizes = [9, 7, 6, 5, 4, 1]
    result = planned(Headers(sizes, [0] * 6), max_tokens=9, ranks=2, microbatches=3, cost=LINEAR)
    # Rounds: 9 → A, 7 → B; 6 → B (7), 5 → A (9); 4 → B (13), 1 → A (14). A has 15, and B has 17.
    dealt = sorted(sorted(sizes[int(pack[0])] for pack in result.packs(rank)[0]) for rank in (0, 1))
    assert dealt == [[1, 5, 9], [4, 6, 7]]
    assert result.straggling == 17 / 16


def test_packs_without_images_are_marked_if_another_rank_has_an_image() -> None:
    result = planned(Headers([4, 4, 4, 4], [1] * 4, [9], [1, 0, 0, 0]), max_tokens=4, ranks=2, cost=LINEAR)
    (marked,) = np.flatnonzero(result.needs_image)
    assert result.sums(result.headers.images)[[marked, marked ^ 1]].tolist() == [0, 1]


def test_a_dummy_is_appended_to_a_pack_that_needs_an_image_and_is_not_trained_on() -> None:
    text, image = labelled("text", ["text"]), labelled("image", ["x", Grid(1, 1)])
    pack = Pack((text,), 8)
    assert PlannedPack(pack, 1.0, False).with_dummy(image) is pack
    padded = PlannedPack(pack, 1.0, True).with_dummy(image)
    labels = [(example.key, example.labels.tolist()) for example in padded.examples]
    assert labels == [("text", text.labels.tolist()), ("image", [-100] * 4)]
    assert_refused("dummy: got an example without an image", lambda: PlannedPack(pack, 1.0, True).with_dummy(text))


def test_the_mean_of_weighted_losses_is_the_mean_over_all_labels() -> None:
    headers = corpus("OBELICS", 500)
    result = planned(headers, max_tokens=8192, ranks=4, microbatches=2)
    losses = np.random.default_rng(1).random(len(headers)) * headers.labels  # summed over each example's labels
    labels = result.sums(headers.labels)
    means = np.divide(result.sums(losses), labels, where=labels > 0, out=np.zeros(labels.size))
    assert (result.weights * means).mean() == pytest.approx(losses.sum() / headers.labels.sum())


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
    experts = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 3}
    experts |= {"num_experts_per_tok": 5, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 11}
    gated = Cost.from_hf_config({"text_config": experts})
    assert gated.language_linear == 2 * 2 * (8 * 3 * (2 * 2 + 2 * 2) + 3 * 8 * (5 * 7 + 11))
    assert (gated.vision_linear, gated.vision_quadratic) == (0, 0)
    plain = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_act": "gelu"}
    ratio = {"thinker_config": {"text_config": plain | {"mlp_ratio": 3}}}
    assert Cost.from_hf_config(plain | {"intermediate_size": 5}).language_linear == 2 * 2 * (4 * 8 * 8 + 2 * 8 * 5)
    assert Cost.from_hf_config(ratio).language_linear == 2 * 2 * (4 * 8 * 8 + 2 * 8 * 8 * 3)


def test_the_cost_of_an_example_is_that_of_its_tokens_and_of_each_image() -> None:
    headers = Headers([3, 5, 2], [0] * 3, [2, 7, 4], [2, 0, 1])
    costs = Cost(1000, 100, 10, 1).of(headers).tolist()
    assert costs == [3000 + 900 + 90 + 4 + 49, 5000 + 2500, 2000 + 400 + 40 + 16]


def planning(
    tokens: Sequence[int] = (2, 3), labels: Sequence[int] | None = None, patches: Sequence[int] = (), **arguments: Any
) -> Callable[[], TrainingPlan]:
    """Return a function that plans examples of these sizes."""
    options = {"max_tokens": 8, "ranks": 1, **arguments}
    return lambda: plan(Headers(tokens, [0] * len(tokens) if labels is None else labels, patches), **options)


WRONG: Any = 3
FEW = "want at least {0}, one for each of the {0} packs of a step, or fewer ranks or microbatches"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (planning([0]), "tokens[0]: got 0, want >= 1"),
        (planning(labels=[1, 9]), "labels[1]: got 9, want at most 3, the tokens of the example"),
        (planning(patches=[4]), "images: got a sum of 0, want 1 as in patches"),
        (planning(max_tokens=2), "headers.tokens[1]: got 3, want <= 2"),
        (planning(ranks=0), "ranks: got 0, want >= 1"),
        (planning(ranks=2, microbatches=2), f"headers: got 2 examples to plan together, {FEW.format(4)}"),
        (planning([2, 3, 2, 3], ranks=3, window=2),
         f"headers: got 2 examples to plan together, {FEW.format(3)}, or a larger window"),
        (planning([2**53, 2**53]), "tokens: got a sum of 1.80144e+16, want at most 9.0072e+15"),
        (planning(cost=Cost(1.5e308)),
         "cost: got a sum of inf over the examples, want a finite one; use smaller units"),
        (planning(cost=3), "cost: got int, want a Cost, as returned by Cost.from_hf_config"),
        (lambda: plan(WRONG, max_tokens=8, ranks=1), "headers: got int, want a Headers, as returned by read_headers"),
        (planning(max_tokens=2**31), "max_tokens: got 2147483648, want <= 2147483647"),
        (lambda: Cost(0), "Cost.language_linear: got 0.0, want > 0; every token costs something"),
        (lambda: Cost(1, -1), "Cost.language_quadratic: got -1, want a finite number >= 0"),
        (lambda: Cost.from_hf_config({"hidden_size": 8}), "config.num_hidden_layers: got none, want an integer"),
        (lambda: read_headers([WRONG]), "shards[0]: got int, want a SequenceShard, as returned by SequenceShard(path)"),
        (lambda: write_index("a", WRONG, []), "plan: got int, want a TrainingPlan, as returned by mmpos.data.plan"),
        (lambda: write_index("a", planning()(), []), "shards: got 0 examples, want 2 as in the plan"),
    ],
)  # fmt: skip
def test_invalid_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        call()
    assert str(error.value) == message


def shard(path: Path, sizes: list[int]) -> SequenceShard:
    """Write examples of these sizes, each with an image of 2×3 tokens."""
    with SequenceWriter(path) as writer:
        for i, size in enumerate(sizes):
            writer.write(labelled(f"{path.stem}-{i}", ["x" * (size - 8), Grid(2, 3)]))
    return SequenceShard(path)


def test_each_rank_reads_its_examples_through_the_index(tmp_path: Path) -> None:
    shards = [shard(tmp_path / "a.parquet", [10, 12, 14, 20]), shard(tmp_path / "b.parquet", [16, 9, 30])]
    headers = read_headers(shards)
    assert headers.tokens.tolist() == [10, 12, 14, 20, 16, 9, 30]
    assert headers.labels.tolist() == [3, 5, 7, 13, 9, 2, 23]
    assert (headers.patches.tolist(), headers.images.tolist()) == ([24] * 7, [1] * 7)
    result = planned(headers, max_tokens=32, ranks=2)
    index = tmp_path / "index.parquet"
    write_index(index, result, shards)
    keys = [f"a-{i}" for i in range(4)] + [f"b-{i}" for i in range(3)]
    for rank in (0, 1):
        packs = PlannedPacks(index, rank)
        got = [[[example.key for example in one.pack.examples] for one in step] for step in packs]
        assert got == [[[keys[i] for i in pack] for pack in step] for step in result.packs(rank)]
        assert [one.weight for (one,) in packs] == result.weights[rank::2].tolist()
    table = parquet.read_table(index).to_pylist()
    for _, rows in itertools.groupby(table, lambda row: (row["step"], row["rank"])):
        sizes = [(row["offset"], row["tokens"]) for row in rows]
        assert [first for first, _ in sizes] == [sum(size for _, size in sizes[:i]) for i in range(len(sizes))]
    shard(tmp_path / "b.parquet", [17, 10, 31])
    with pytest.raises(InvalidInputError, match="the shard has changed"):
        [list(PlannedPacks(index, rank)) for rank in (0, 1)]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write an index of a.parquet, a path relative to another folder, with two steps for two ranks, in small groups."""
    monkeypatch.setattr("mmpos.data.planner.index._GROUP_ROWS", 1)
    with monkeypatch.context() as there:
        there.chdir(tmp_path)
        one = shard(Path("a.parquet"), [20, 20, 20, 20])
        write_index("index.parquet", planned(read_headers([one]), max_tokens=20, ranks=2), [one])
    return tmp_path / "index.parquet"


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("step", 7, "index.parquet: got 0 microbatches in step 0, want 1; the index has changed"),
        ("row", 9, "index.parquet: .*a.parquet: row: got 9, want <= 3"),
        ("tokens", 9, r"got 20 tokens in .*a.parquet\[\d\], want 9; the shard has changed"),
        (None, {}, r"got another file \(version None\), want the index of a plan, version 1"),
        (None, {b"mmpos.plan": b"{"}, r"got another file \(Expecting .*\), want the index of a plan, version 1"),
        (None, {b"mmpos.plan": b"[]"}, "want the index of a plan, version 1"),
        (None, {b"mmpos.plan": b'{"version": 1}'}, "ranks: got None, want an integer"),
    ],
)
def test_an_edited_index_is_refused(written: Path, column: str | None, value: Any, message: str) -> None:
    table = parquet.read_table(written)
    if column is None:
        table = table.replace_schema_metadata(value)
    else:
        field = table.schema.field(column)
        table = table.set_column(table.schema.get_field_index(column), field, pa.array([value] * 4, field.type))
    parquet.write_table(table, written)
    with pytest.raises(InvalidInputError, match=message):
        list(PlannedPacks(written, 0))


def test_a_flipped_bit_never_changes_packs_silently(written: Path) -> None:
    intact, random = written.read_bytes(), np.random.default_rng(0)

    def read() -> list[object]:
        steps = list(PlannedPacks(written, 1))
        return [(one.weight, one.needs_image, [example.key for example in one.pack.examples]) for (one,) in steps]

    want, metadata = read(), parquet.read_metadata(written)
    # Every byte of the weights of rank 1, which no other check would notice, and any others.
    weight = metadata.row_group(metadata.num_row_groups - 1).column(7)
    first = min(weight.data_page_offset, weight.dictionary_page_offset or weight.data_page_offset)
    offsets = [*range(first, first + weight.total_compressed_size), *random.integers(4, len(intact) - 8, 40).tolist()]
    for offset in offsets:
        broken = bytearray(intact)
        broken[offset] ^= 1 << int(random.integers(8))
        written.write_bytes(broken)
        try:
            got = read()
        except (InvalidInputError, FileNotFoundError):
            continue
        assert got == want


def test_every_iteration_begins_at_the_first_step_and_steps_begins_at_any(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    packs = PlannedPacks(f"{tmp_path.name}/index.parquet", 0)

    def keys(steps: Iterable[list[PlannedPack]]) -> list[str]:
        return [one.pack.examples[0].key for (one,) in steps]

    first = keys(packs)
    assert (len(packs), len(set(first)), keys(packs)) == (2, 2, first)
    stopped = iter(packs)
    next(stopped)
    assert (keys(packs), keys(stopped)) == (first, first[1:])  # a new iteration does not disturb the one before it
    assert [keys(packs.steps(start)) for start in range(3)] == [first, first[1:], []]
    assert_refused("start: got 3, want <= 2", lambda: next(packs.steps(3)))
    assert_refused("rank: got 2, want <= 1", lambda: PlannedPacks(written, 2))
    written.with_name("a.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.parquet"):
        next(iter(PlannedPacks(written, 0)))
    none = written.with_name("none.parquet")
    assert_refused(f"path: got '{none}', want an existing index of a plan", lambda: PlannedPacks(none, 0))


def test_the_command_writes_an_index_and_a_report_or_names_the_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        shard(tmp_path / f"{name}.parquet", [20, 30, 40, 60] * 4)
    index, headers = tmp_path / "index.parquet", Mock(wraps=read_headers)
    monkeypatch.setattr("mmpos.data.read_headers", headers)
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}')
    words = ["data", "plan", f"{tmp_path}/?.parquet", "--config", str(tmp_path), "--patches-per-token", "16"]
    assert main([*words, "-o", str(index), "--ranks", "2", "--max-tokens", "128"]) == 0
    report = capsys.readouterr().out
    assert "32, with 1,200 tokens" in report
    assert "of 2 ranks and 1 microbatch" in report
    assert sum(len(one.pack.examples) for rank in (0, 1) for step in PlannedPacks(index, rank) for one in step) == 32
    assert headers.call_args.kwargs == {"patches_per_token": 16}
    shard(tmp_path / "b.parquet", [40, 136, 200])
    for output, message in (
        (str(index), f"{tmp_path}/b.parquet[1]: got 136 tokens, want <= --max-tokens 100 (key 'b-1')"),
        ("index.csv", "--output: got 'index.csv', want a file ending in .parquet"),
        ("s3://k:s@b/a.parquet", "--output: got a URL with the scheme s3 and credentials"),
    ):
        assert main([*words, "--max-tokens", "100", "-o", output]) == 2
        assert message in capsys.readouterr().err


def test_the_command_plans_the_files_of_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text_list": ["some words"], "image_info": []}\n' * 4)
    ready, preprocess = tmp_path / "ready", Preprocess(MMC4(), SequenceBuilder())
    write_sequences(shards(tmp_path / "a.jsonl"), ready, preprocess)
    shard(ready / "stray.parquet", [20])
    command = ["data", "plan", str(ready), "-o", "memory://plans/index.parquet"]
    assert main(command) == 0
    assert "4, with 40 tokens" in capsys.readouterr().out
    assert len(PlannedPacks(command[-1], 0)) == 1
    (ready / "a.parquet").unlink()
    assert main(command) == 2
    assert f"{ready}/_run.json: got 0 of the files of a.jsonl, want all" in capsys.readouterr().err
