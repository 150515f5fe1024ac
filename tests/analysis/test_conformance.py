"""The conformance vectors: mmpos agrees with every case, a reader without mmpos agrees, and the schema holds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from mmpos import SegmentTable, place
from mmpos.cli.options import read_part
from mmpos.integrations.models import MODEL_TYPES, from_hf_config
from mmpos.positions.table import PositionTable
from mmpos.rotary import Rotary
from mmpos.schemes import SCHEMES, LatentScheme
from mmpos.segments.kinds import Segment

ROOT = Path(__file__).parents[2]
READER = ROOT / "tests" / "foreign" / "conformance" / "reader.py"
VECTORS = ROOT / "tests" / "golden" / "conformance"
SCHEMA = json.loads((VECTORS / "schema.json").read_bytes())
ASKED = {"prefill", "chunk", "decode", "draft", "pruned", "padded", "packed", "rotation"}

Json = dict[str, Any]
FILES = sorted(path.relative_to(VECTORS).as_posix() for path in VECTORS.glob("*/*.jsonl"))


def lines(path: str) -> list[Json]:
    return [json.loads(line) for line in (VECTORS / path).read_text(encoding="utf-8").splitlines()]


GROUPS = [group for path in FILES for group in lines(path)]


class Placed:
    """The documents of a line, or one of them, placed by mmpos."""

    def __init__(self, group: Json, document: int | None) -> None:
        self.documents = group["documents"] if document is None else [group["documents"][document]]
        if "scheme" in group:
            self.settings = None
            segments = SegmentTable.from_documents([list(map(_part, one["segments"])) for one in self.documents])
            starts = [one["start"] for one in self.documents]
            scheme = SCHEMES[group["scheme"]["name"]](**_exact(group["scheme"]["parameters"]))
            self.positions = place(segments, scheme, starts if len(set(starts)) > 1 else starts[0])
        else:
            self.settings = from_hf_config(group["config"], layer_type=group.get("layer_type"))
            inputs = {name: [value for one in self.documents for value in one.get(name, ())] for name in _INPUTS}
            segments = self.settings.segments(
                inputs["input_ids"],
                inputs["image_grid_thw"] or None,
                inputs["video_grid_thw"] or None,
                cu_seqlens=np.cumsum([0, *(len(one["input_ids"]) for one in self.documents)]),
                seconds_per_frame=[Fraction(value) for value in inputs["seconds_per_grid"]] or None,
                audio_lengths=inputs["audio_lengths"] or None,
            )
            self.positions = self.settings.place(segments)

    def answer(self, case: Json) -> Json:
        """Answer a case that is not about a rotation."""
        positions = self.positions
        match case["ask"]:
            case "prefill":
                return _continued(positions)
            case "chunk":
                return {"position_ids": _ids(positions.slice(case["start"], case["stop"]))}
            case "decode":
                return {"position_ids": _ids(positions.decode(case["steps"]))}
            case "draft":
                return {"position_ids": _ids(positions.window([0], [case["start"]], [case["length"]]))}
            case "pruned":
                return _continued(positions.keep(np.isin(np.arange(positions.num_tokens), case["keep"])))
            case "packed":
                return {"position_ids": _ids(positions), "cu_seqlens": positions.cu_seqlens.tolist()}
        assert case["ask"] == "padded"
        table, batch = positions.pad(case["length"], case["side"]), len(self.documents)
        ids = [[row.tolist() for row in np.array(axis, dtype=object).reshape(batch, -1)] for axis in _ids(table)]
        return {"position_ids": ids, "attention_mask": table.per_token(~table.is_padding).reshape(batch, -1).tolist()}

    def rotary(self, case: Json) -> Rotary:
        """Return the rotation that a case is about."""
        if self.settings is None:
            return Rotary(axes=self.positions.axes, **case["rotary"])
        second = self.settings.second_rotary
        return second if second is not None and case.get("channel") else self.settings.rotary


_INPUTS = ("input_ids", "image_grid_thw", "video_grid_thw", "seconds_per_grid", "audio_lengths")


def _exact(options: Json) -> Json:
    """Replace fractions in text with numbers."""
    return {
        name: Fraction(value) if isinstance(value, str) and "/" in value else value for name, value in options.items()
    }


def _part(part: Json) -> Segment:
    """Read a part, whose fields are those of the command line's files, but with ``audio_tokens`` in a clip."""
    return read_part("part", {name.replace("audio_tokens", "audio"): value for name, value in _exact(part).items()})


def _ids(positions: PositionTable) -> list[list[Fraction]]:
    numerators, denominators = positions.rationals()
    return [list(map(Fraction, axis, denominators.tolist())) for axis in numerators.tolist()]


def _continued(positions: PositionTable) -> Json:
    fields: Json = {"position_ids": _ids(positions)}
    if positions.resumable.all():
        fields |= {"next_position": positions.next_positions.item(), "delta": positions.deltas.item()}
    return fields


def agrees(got: Any, want: Any) -> bool:
    """Return whether an answer equals the stored one, in which null stands for any value."""
    if isinstance(want, list):
        return len(got) == len(want) and all(map(agrees, got, want))
    return want is None or got == (Fraction(want) if isinstance(want, str) else want)


@pytest.mark.parametrize("path", FILES)
def test_mmpos_agrees_with_every_case(path: str) -> None:
    for group in lines(path):
        for number, case in enumerate(group["cases"]):
            placed, want = Placed(group, case.get("document")), case["want"]
            if case["ask"] != "rotation":
                answer = placed.answer(case)
                wrong = {name for name in want if not agrees(answer[name], want[name])}
                assert (group["group"], number, wrong) == (group["group"], number, set())
                continue
            rotary = placed.rotary(case)
            positions = placed.positions.take(case["tokens"], [token + 1 for token in case["tokens"]])
            assert agrees(rotary.pair_axis.tolist(), want["pair_axis"]), group["group"]
            angles = rotary.pair_ids(positions.dense(dtype=np.float64)).T * rotary.inv_freq_array
            for name, function in (("cos", np.cos), ("sin", np.sin)):
                values = rotary.attention_factor * function(angles)
                np.testing.assert_allclose(values, want[name], rtol=0, atol=1e-10, err_msg=group["group"])


def test_every_scheme_and_model_type_has_cases_of_every_kind() -> None:
    kinds: dict[str, set[str]] = {}
    for group in GROUPS:
        kinds.setdefault(group["group"].split("/")[0], set()).update(case["ask"] for case in group["cases"])
    assert kinds.keys() == SCHEMES.keys() | MODEL_TYPES.keys()
    endless = {"rows", "grid-2d", "neomme", *(name for name in SCHEMES if issubclass(SCHEMES[name], LatentScheme))}
    missing = {name: ASKED - covered for name, covered in kinds.items() if covered != ASKED}
    assert missing == {name: {"decode", "draft"} for name in endless}  # these have no next position


def test_lines_conform_to_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for group in GROUPS:
        jsonschema.Draft202012Validator(SCHEMA).validate(group)


@pytest.mark.parametrize(
    ("field", "value"), [("ask", "everything"), ("steps", -1), ("want", {}), ("want", {"cos": [["a"]]}), ("more", 1)]
)
def test_the_schema_refuses_an_invalid_line(field: str, value: object) -> None:
    (line,) = lines("schemes/flatten.jsonl")[:1]
    line["cases"][0][field] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(line, SCHEMA)


@pytest.mark.parametrize("page", ["README.md", "docs/conformance.md", "CHANGELOG.md"])
def test_pages_state_the_number_of_cases(page: str) -> None:
    assert f" {sum(len(group['cases']) for group in GROUPS):,} cases" in (ROOT / page).read_text(encoding="utf-8")


def test_a_reader_of_59_lines_agrees_without_mmpos_and_refuses_a_damaged_file(tmp_path: Path) -> None:
    manifest = json.loads((VECTORS / "manifest.json").read_bytes())
    assert (manifest["format"], [*manifest["files"]]) == (1, FILES)  # the reader verifies the checksum of every file
    assert len(READER.read_text(encoding="utf-8").splitlines()) == 59
    command: list[str | Path] = [sys.executable, "-I", READER]
    done = subprocess.run([*command, VECTORS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("53 the same, 0 different\n", "")
    path = shutil.copytree(VECTORS, tmp_path / "vectors") / "schemes/mrope.jsonl"
    path.write_text(path.read_text().replace("[[7,8,9,10,", "[[7,8,9,11,", 1))
    refused = subprocess.run([*command, tmp_path / "vectors"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "schemes/mrope.jsonl: the checksum differs" in refused.stderr
