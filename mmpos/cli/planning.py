"""The command that plans training: ready sequences in, an index of balanced packs and a report out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from mmpos.cli import report
from mmpos.cli.commands import group
from mmpos.cli.options import flat
from mmpos.errors import InvalidInputError
from mmpos.support.checks import counted
from mmpos.support.program import console

if TYPE_CHECKING:
    from mmpos.data import Headers, SequenceShard, TrainingPlan

data = group("data", "Plan the packs of a training run, and measure what they cost.")


@dataclass(frozen=True)
class RunFlags:
    """The options that describe the training run."""

    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in a pack.")] = 8192
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1
    microbatches: Annotated[int, typer.Option(min=1, help="Packs of a rank in a step.")] = 1
    pipeline: Annotated[int, typer.Option(min=1, help="Stages of a pipeline, for the report.")] = 1
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Model whose config.json says what tokens and patches cost.",
            show_default="a 7B model",
        ),
    ] = None
    cost: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Costs of mmpos data calibrate, in place of --config.")
    ] = None
    patches_per_token: Annotated[int, typer.Option(min=1, help="Patches that are merged to one token.")] = 4


@dataclass(frozen=True)
class PlanFlags:
    """The options that say how packs are shared out."""

    tolerance: Annotated[
        float, typer.Option(min=0, help="How much more than another a pack of a step may cost, for even labels.")
    ] = 0.02
    window: Annotated[int, typer.Option(min=1, help="Examples that are planned together, in their order.")] = 2**16
    seed: Annotated[int, typer.Option(min=0, help="Of the order of steps.")] = 0


@data.command("plan")
@flat
def plan_packs(
    inputs: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Folders or files of mmpos preprocess.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The index, a .parquet.")],
    run: RunFlags,
    flags: PlanFlags,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture of the steps, .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Plan balanced packs of ready sequences, and write the index that PlannedPacks reads.

    No pixel is read: sizes come from the columns of the files.
    """
    from mmpos.analysis.plot import plot_balance
    from mmpos.analysis.plot.canvas import picture_path
    from mmpos.data import Cost, plan, read_headers, write_index

    picture_path(plot)  # before the work
    if run.cost is not None and run.config is not None:
        raise InvalidInputError("--cost: got --config beside it, want one of them")
    cost = Cost.read(run.cost) if run.cost else Cost.from_hf_config(run.config) if run.config else Cost()
    files = _ready_shards(inputs)
    with report.progress_bar("files") as bar:
        headers, shard, row = read_headers(_each(files, bar), patches_per_token=run.patches_per_token)
    made = plan(
        headers,
        max_tokens=run.max_tokens,
        ranks=run.ranks,
        microbatches=run.microbatches,
        cost=cost,
        tolerance=flags.tolerance,
        window=flags.window,
        seed=flags.seed,
    )
    write_index(output, made, [file.source for file in files], shard, row)
    _report(headers, made, cost.of(headers), run)
    typer.echo(output)
    if plot is not None:
        plot_balance(made.rank_costs(run.pipeline), made.labels_per_step, plot)
        typer.echo(plot)


@data.command("calibrate")
def calibrate_model(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Model whose config.json is measured.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The costs, a .json.")],
    tokens: Annotated[str, typer.Option(help="Sizes of texts, with commas.")] = "256,512,1024,2048,4096",
    patches: Annotated[
        str, typer.Option(help="Sizes of images, with commas, before patches are merged; not used for a model of text.")
    ] = "256,576,1024,2304,4096",
    repeats: Annotated[int, typer.Option(min=1, help="How often each size is timed, in turn.")] = 7,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "float32",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Measure this many layers and twice as many, and extrapolate.")
    ] = None,
) -> None:
    """Measure what tokens and patches cost to train, on a model with random weights, for mmpos data plan --cost."""
    from mmpos.cli.calibration import measure

    sizes = {"tokens": _sizes("--tokens", tokens), "patches": _sizes("--patches", patches)}
    with report.progress_bar("steps") as bar:
        made = measure(folder, layers, device=device, dtype=dtype, repeats=repeats, progress=bar, **sizes)
    about = (
        {} if layers is None else {"extrapolated": f"from {layers} and {2 * layers} layers; times are of the latter"}
    )
    made.write(output, model=str(folder), device=device, dtype=dtype, **about)
    table = report.new_table("tokens", "patches", "milliseconds", "spread", right=("tokens", "patches", "milliseconds"))
    columns = (made.tokens, made.patches, made.seconds, made.spread)
    for length, size, seconds, spread in zip(*(column.tolist() for column in columns), strict=True):
        table.add_row(f"{length:,}", f"{size:,}", f"{seconds * 1e3:.3f}", f"{spread:.1%}")
    report.show(console(), table)
    for each in fields(made.cost):
        typer.echo(f"{each.name} {getattr(made.cost, each.name):.3g} seconds")
    typer.echo(f"overhead {made.overhead:.3g} seconds; the fit is within {made.residual:.1%} of the medians")
    typer.echo(output)


def _ready_shards(inputs: Sequence[str]) -> list[SequenceShard]:
    """Open folders by their manifests, and other files as they are, in the order of the inputs."""
    from mmpos.data import SequenceShard, sequence_shards, shards
    from mmpos.data.stores import store_path

    listed: dict[str, SequenceShard] = {}
    paths: list[str] = []
    for i, name in enumerate(inputs):
        path = store_path(f"paths[{i}]", name)
        if path.exists() and not path.is_file():
            in_folder = {shard.source: shard for shard in sequence_shards(path)}
            listed |= in_folder
            paths += in_folder
        else:
            paths.append(name)
    return [listed.get(reader.source) or SequenceShard(reader.source) for reader in shards(paths)]


def _each(files: Sequence[SequenceShard], bar: Callable[..., None] | None) -> Iterator[SequenceShard]:
    """Yield the files, and show how many have been read."""
    for done, file in enumerate(files, 1):
        yield file
        if bar is not None:
            bar(done, len(files))


def _sizes(name: str, words: str) -> list[int]:
    """Read sizes between commas."""
    try:
        return [int(word) for word in words.split(",") if word.strip()]
    except ValueError:
        raise InvalidInputError(f"{name}: got {words!r}, want integers with commas between them") from None


def _report(headers: Headers, made: TrainingPlan, costs: np.ndarray, run: RunFlags) -> None:
    """Print what the plan is, and what packs by tokens alone, in random order, would be."""
    labels = made.labels_per_step
    table = report.new_table("", "")
    table.show_header = False
    for name, said in (
        ("examples", f"{len(headers):,}, with {headers.tokens.sum():,} tokens and {headers.labels.sum():,} labels"),
        ("steps", f"{made.num_steps:,} of {counted(run.ranks, 'rank')} and {counted(run.microbatches, 'microbatch')}"),
        ("fill", f"{made.fill:.1%} of packs of {run.max_tokens:,} tokens"),
        ("slowest rank", f"{made.straggling(run.pipeline):.3f} of the mean"),
        ("packed by tokens", f"{_by_tokens(headers, costs, made):.3f} of the mean"),
        ("labels of a step", f"{labels.min():,} to {labels.max():,}, {labels.mean():,.0f} on average"),
        ("dummy images", f"{made.needs_image.sum():,} packs"),
    ):
        table.add_row(name, said)
    report.show(console(), table)


def _by_tokens(headers: Headers, costs: np.ndarray, made: TrainingPlan) -> float:
    """Return how much longer the slowest ranks take where packs are filled by tokens and come in random order."""
    from mmpos.data import first_fit_decreasing

    packs = first_fit_decreasing(headers.tokens, made.max_tokens)
    of_packs = np.random.default_rng(0).permutation([costs[pack].sum() for pack in packs])
    whole = of_packs.size // (made.ranks * made.microbatches)
    if not whole:
        return float("nan")
    ranks = of_packs[: whole * made.ranks * made.microbatches].reshape(whole, made.ranks, -1).sum(axis=2)
    return float(ranks.max(axis=1).sum() / ranks.mean(axis=1).sum())
