"""The conformance commands: test any program with cases, print cases, and answer them with mmpos."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
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

conformance = group("conformance", "Check the ids and rotations of any program with cases from independent sources.")

Patterns = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PATTERN...]", help="Patterns of case names, such as 'rope-tie/*'.", show_default="all"),
]


@conformance.command(
    "run",
    help="Test a program case by case: it reads one JSON object per line from standard input, and writes one per "
    "line.\n\nPrints a line for each case that differs, and a summary. "
    f"Exit codes: 0 the same; {DIFFERENT} different, nothing compared, or a case declined with --require-all.",
)
def run_cases(
    command: Annotated[str, typer.Option(metavar="PROGRAM", help="The program and its arguments, as one string.")],
    patterns: Patterns = None,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit for each answer.")] = 60.0,
    tolerance: Annotated[
        float, typer.Option(help="Largest allowed error of cos and sin, which are stored to 1e-10.")
    ] = 1e-5,
    id_tolerance: Annotated[float, typer.Option(help="Largest allowed error of ids that are written as floats.")] = 0.0,
    require_all: Annotated[bool, typer.Option("--require-all", help="Fail if a case is declined.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Test a program case by case."""
    from mmpos.analysis.conformance import Tolerances, load_cases, run

    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise InvalidInputError(f"--command: got {command!r} ({error}), want a program and its arguments") from None
    tolerances = Tolerances(tolerance, id_tolerance)
    cases = load_cases(patterns or ())
    result = run(arguments, cases, time_limit=time_limit, tolerances=tolerances, require_all=require_all)
    typer.echo(_json(result) if as_json else _text(result))
    if not result.passed:
        raise typer.Exit(DIFFERENT)


@conformance.command()
def cases(
    patterns: Patterns = None,
    want: Annotated[bool, typer.Option("--want", help="Include the expected answers.")] = False,
) -> None:
    """Print cases as they are sent to a program, one JSON object per line."""
    from mmpos.analysis.conformance import load_cases

    for case in load_cases(patterns or ()):
        typer.echo(_line({**case.request, "want": case.want} if want else case.request))


@conformance.command()
def answer() -> None:
    """Answer cases from standard input with mmpos, as a sample program for trying out [bold]run[/bold]."""
    for line in sys.stdin:
        try:
            request = json.loads(line)
            response = {"case": request["case"], **PlacedRequest(request).answer()}
        except MmposError:
            raise
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            got = repr(line if len(line) <= 60 else f"{line[:57]}...")
            raise InvalidInputError(f"{STDIN}: got {got}, want a line of mmpos conformance cases") from None
        typer.echo(_line(response))


class PlacedRequest:
    """A request with its placed batch."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request, self.documents = request, request["documents"]
        if "scheme" in request:
            self.settings = None
            documents = [list(map(_part, document["segments"])) for document in self.documents]
            segments = SegmentTable.from_documents(documents)
            starts = [document["start"] for document in self.documents]
            self.positions = place(segments, _scheme(request["scheme"]), starts if len(set(starts)) > 1 else starts[0])
        else:
            from mmpos.integrations.models import from_hf_config

            self.settings = from_hf_config(request["config"], layer_type=request.get("layer_type"))
            self.positions = self.settings.place(self._segments())

    def answer(self) -> dict[str, Any]:
        """Return the fields of the answer."""
        request, positions = self.request, self.positions
        match request["ask"]:
            case "prefill":
                return _continued(positions)
            case "chunk":
                return {"position_ids": _ids(positions.slice(request["start"], request["stop"]))}
            case "decode":
                return {"position_ids": _ids(positions.decode(request["steps"]))}
            case "draft":
                return {"position_ids": _ids(positions.window([0], [request["start"]], [request["length"]]))}
            case "pruned":
                return _continued(positions.keep(np.isin(np.arange(positions.num_tokens), request["keep"])))
            case "packed":
                return {"position_ids": _ids(positions), "cu_seqlens": positions.cu_seqlens.tolist()}
            case "padded":
                return self._padded(positions.pad(request["length"], request["side"]))
            case "rotation":
                tokens = request["tokens"]
                return self._rotation(positions.take(tokens, [token + 1 for token in tokens]))
        return {"unsupported": f"ask: got {request['ask']!r}"}

    @property
    def rotary(self) -> Rotary:
        """The rotation of the request."""
        from mmpos.rotary import Rotary

        if self.settings is None:
            return Rotary(axes=self.positions.axes, **self.request["rotary"])
        second = self.settings.second_rotary
        return second if second is not None and self.request.get("channel") else self.settings.rotary

    def _segments(self) -> SegmentTable:
        assert self.settings is not None
        inputs = {name: [value for document in self.documents for value in document.get(name, ())] for name in _FLAT}
        return self.settings.segments(
            inputs["input_ids"],
            inputs["image_grid_thw"] or None,
            inputs["video_grid_thw"] or None,
            cu_seqlens=np.cumsum([0, *(len(document["input_ids"]) for document in self.documents)]),
            seconds_per_frame=[Fraction(value) for value in inputs["seconds_per_grid"]] or None,
            audio_lengths=inputs["audio_lengths"] or None,
        )

    def _padded(self, table: PositionTable) -> dict[str, Any]:
        batch, length = len(self.documents), self.request["length"]
        ids = [[axis[d * length : (d + 1) * length] for d in range(batch)] for axis in _ids(table)]
        return {"position_ids": ids, "attention_mask": table.per_token(~table.is_padding).reshape(batch, -1).tolist()}

    def _rotation(self, table: PositionTable) -> dict[str, Any]:
        from mmpos.rotary import cos_sin

        rotations = {
            name: values.reshape(table.num_tokens, -1).tolist()
            for name, values in zip(("cos", "sin"), cos_sin(self.rotary, table), strict=True)
        }
        return {"pair_axis": self.rotary.pair_axis.tolist(), **rotations}


_FLAT = ("input_ids", "image_grid_thw", "video_grid_thw", "seconds_per_grid", "audio_lengths")


def _part(part: dict[str, Any]) -> Segment:
    """Read a part; requests write times as fractions in text, and the audio of clips as audio_tokens."""
    renamed = {"audio" if name == "audio_tokens" else name: value for name, value in part.items()}
    if "seconds_per_frame" in renamed:
        renamed["seconds_per_frame"] = Fraction(renamed["seconds_per_frame"])
    return read_part("segments", renamed)


def _scheme(scheme: dict[str, Any]) -> Scheme:
    parameters = {
        name: Fraction(value) if isinstance(value, str) and "/" in value else value
        for name, value in scheme["parameters"].items()
    }
    return SCHEMES[scheme["name"]](**parameters)


def _continued(positions: PositionTable) -> dict[str, Any]:
    """Return the ids of a single document, with its next position and delta if they exist."""
    fields: dict[str, Any] = {"position_ids": _ids(positions)}
    if positions.resumable.all():
        fields["next_position"], fields["delta"] = positions.next_positions.item(), positions.deltas.item()
    return fields


def _ids(positions: PositionTable) -> list[list[int | str]]:
    return [
        [value.numerator if value.denominator == 1 else str(value) for value in axis]
        for axis in zip(*report.exact(positions), strict=True)
    ]


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _text(result: Outcome) -> str:
    """Format the mismatches, the reasons for declined cases (by case if none may be declined), and the summary."""
    lines = [str(finding) for finding in result.findings]
    if result.require_all:
        lines += [f"{case}: unsupported: {reason}" for case, reason in result.unsupported.items()]
    else:
        lines += [f"unsupported: {reason}" for reason in sorted(set(result.unsupported.values()))]
    if result.not_asked:
        lines.append("abandoned: the program gave no answer several times in a row")
    counts = {
        "the same": result.same,
        "different": len(result.findings),
        "unsupported": len(result.unsupported),
        "not asked": result.not_asked,
    }
    summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "the same")
    return "\n".join([*lines, f"{counted(sum(counts.values()), 'case')}: {summary}."])


def _json(result: Outcome) -> str:
    fields = asdict(result)
    del fields["require_all"]
    return report.json_lines({"passed": result.passed, **fields})
