"""The commands of conformance: run cases through any program, print them, and answer them as mmpos does."""

from __future__ import annotations

import json
import shlex
import sys
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from mmpos.cli import report
from mmpos.cli.commands import group
from mmpos.cli.options import read_part
from mmpos.errors import InvalidInputError, MmposError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.schemes import SCHEMES, Scheme
from mmpos.segments.kinds import Segment
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted
from mmpos.support.program import DIFFERENT, STDIN

if TYPE_CHECKING:
    from mmpos.analysis.conformance import Outcome
    from mmpos.rotary import Rotary

conformance = group("conformance", "Check the ids and rotations of any program, by cases from independent sources.")

Patterns = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PATTERN...]", help="Cases by name, such as 'rope-tie/*'.", show_default="all"),
]


@conformance.command(
    "run",
    help="Ask a program case by case: one JSON object a line on its standard input, one a line on its output.\n\n"
    "Prints a line for each case that differs, and a summary. "
    f"Exit codes: 0 the same, {DIFFERENT} different, nothing compared, or declined in spite of --require-all.",
)
def run_cases(
    command: Annotated[str, typer.Option(metavar="PROGRAM", help="The program and its arguments, in one word.")],
    patterns: Patterns = None,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="For each answer.")] = 60.0,
    tolerance: Annotated[
        float, typer.Option(help="How far cos and sin may be from the truth, which is stored to 1e-10.")
    ] = 1e-5,
    id_tolerance: Annotated[float, typer.Option(help="How far ids may be that are written as floats.")] = 0.0,
    require_all: Annotated[bool, typer.Option("--require-all", help="Let no case be declined.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask a program case by case."""
    from mmpos.analysis.conformance import Tolerances, load_cases, run

    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidInputError(f"--command: got {command!r} ({error}), want a program and its arguments") from None
    tolerances = Tolerances(tolerance, id_tolerance)
    cases = load_cases(patterns or ())
    result = run(words, cases, time_limit=time_limit, tolerances=tolerances, require_all=require_all)
    typer.echo(_json(result) if as_json else _text(result))
    if not result.passed:
        raise typer.Exit(DIFFERENT)


@conformance.command()
def cases(
    patterns: Patterns = None,
    want: Annotated[bool, typer.Option("--want", help="Also what the answer should be.")] = False,
) -> None:
    """Print cases as a program is asked them, one JSON object a line."""
    from mmpos.analysis.conformance import load_cases

    for case in load_cases(patterns or ()):
        typer.echo(_line({**case.request, "want": case.want} if want else case.request))


@conformance.command()
def answer() -> None:
    """Answer cases from standard input as mmpos does: a program to try run with."""
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answered = {"case": request["case"], **Asked(request).answer()}
        except MmposError:
            raise
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            got = repr(line if len(line) <= 60 else f"{line[:57]}...")
            raise InvalidInputError(f"{STDIN}: got {got}, want a line of mmpos conformance cases") from None
        typer.echo(_line(answered))


class Asked:
    """One request, with its batch placed."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request, self.documents = request, request["documents"]
        if "scheme" in request:
            self.settings = None
            segments = SegmentTable.from_documents([list(map(_part, each["segments"])) for each in self.documents])
            starts = [each["start"] for each in self.documents]
            self.positions = place(segments, _scheme(request["scheme"]), starts if len(set(starts)) > 1 else starts[0])
        else:
            from mmpos.integrations.models import from_hf_config

            self.settings = from_hf_config(request["config"], layer_type=request.get("layer_type"))
            self.positions = self.settings.place(self._segments())

    def answer(self) -> dict[str, Any]:
        """Give the fields that answer what is asked."""
        asked, positions = self.request, self.positions
        match asked["ask"]:
            case "prefill":
                return _going_on(positions)
            case "chunk":
                return {"position_ids": _ids(positions.slice(asked["start"], asked["stop"]))}
            case "decode":
                return {"position_ids": _ids(positions.decode(asked["steps"]))}
            case "draft":
                return {"position_ids": _ids(positions.window([0], [asked["start"]], [asked["length"]]))}
            case "pruned":
                return _going_on(positions.keep(np.isin(np.arange(positions.num_tokens), asked["keep"])))
            case "packed":
                return {"position_ids": _ids(positions), "cu_seqlens": positions.cu_seqlens.tolist()}
            case "padded":
                return self._padded(positions.pad(asked["length"], asked["side"]))
            case "rotation":
                tokens = asked["tokens"]
                return self._rotation(positions.take(tokens, [token + 1 for token in tokens]))
        return {"unsupported": f"ask: got {asked['ask']!r}"}

    @property
    def rotary(self) -> Rotary:
        """The rotation that is asked for."""
        from mmpos.rotary import Rotary

        if self.settings is None:
            return Rotary(axes=self.positions.axes, **self.request["rotary"])
        second = self.settings.second_rotary
        return second if second is not None and self.request.get("channel") else self.settings.rotary

    def _segments(self) -> SegmentTable:
        assert self.settings is not None
        told = {name: [value for each in self.documents for value in each.get(name, ())] for name in _FLAT}
        return self.settings.segments(
            told["input_ids"],
            told["image_grid_thw"] or None,
            told["video_grid_thw"] or None,
            cu_seqlens=np.cumsum([0, *(len(each["input_ids"]) for each in self.documents)]),
            seconds_per_frame=[Fraction(value) for value in told["seconds_per_grid"]] or None,
            audio_lengths=told["audio_lengths"] or None,
        )

    def _padded(self, table: PositionTable) -> dict[str, Any]:
        batch, length = len(self.documents), self.request["length"]
        ids = [[axis[d * length : (d + 1) * length] for d in range(batch)] for axis in _ids(table)]
        return {"position_ids": ids, "attention_mask": table.per_token(~table.is_padding).reshape(batch, -1).tolist()}

    def _rotation(self, table: PositionTable) -> dict[str, Any]:
        from mmpos.rotary import cos_sin

        turned = {
            name: values.reshape(table.num_tokens, -1).tolist()
            for name, values in zip(("cos", "sin"), cos_sin(self.rotary, table), strict=True)
        }
        return {"pair_axis": self.rotary.pair_axis.tolist(), **turned}


_FLAT = ("input_ids", "image_grid_thw", "video_grid_thw", "seconds_per_grid", "audio_lengths")


def _part(part: dict[str, Any]) -> Segment:
    """Read a part, whose times are fractions as text, and whose clips call their audio by another name."""
    told = {"audio" if name == "audio_tokens" else name: value for name, value in part.items()}
    if "seconds_per_frame" in told:
        told["seconds_per_frame"] = Fraction(told["seconds_per_frame"])
    return read_part("segments", told)


def _scheme(told: dict[str, Any]) -> Scheme:
    parameters = {
        name: Fraction(value) if isinstance(value, str) and "/" in value else value
        for name, value in told["parameters"].items()
    }
    return SCHEMES[told["name"]](**parameters)


def _going_on(positions: PositionTable) -> dict[str, Any]:
    """Give the ids of the one document, and how it goes on where it does."""
    answered: dict[str, Any] = {"position_ids": _ids(positions)}
    if positions.resumable.all():
        answered["next_position"], answered["delta"] = positions.next_positions.item(), positions.deltas.item()
    return answered


def _ids(positions: PositionTable) -> list[list[int | str]]:
    return [
        [value.numerator if value.denominator == 1 else str(value) for value in axis]
        for axis in zip(*report.exact(positions), strict=True)
    ]


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _text(result: Outcome) -> str:
    """Write findings a line each, then reasons for what was declined, by case where none may be, and the summary."""
    lines = [str(finding) for finding in result.findings]
    if result.require_all:
        lines += [f"{case}: unsupported: {reason}" for case, reason in result.unsupported.items()]
    else:
        lines += [f"unsupported: {reason}" for reason in sorted(set(result.unsupported.values()))]
    if result.not_asked:
        lines.append("gave up: the program failed too often in a row")
    counts = {
        "the same": result.same,
        "different": len(result.findings),
        "unsupported": len(result.unsupported),
        "not asked": result.not_asked,
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "the same")
    return "\n".join([*lines, f"{counted(sum(counts.values()), 'case')}: {told}."])


def _json(result: Outcome) -> str:
    return report.json_lines(
        {
            "passed": result.passed,
            "same": result.same,
            "findings": [vars(finding) for finding in result.findings],
            "unsupported": result.unsupported,
            "not_asked": result.not_asked,
        }
    )
