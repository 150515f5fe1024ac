"""Usage: reader.py FOLDER. Read the vectors without mmpos, and compare them with the three schemes implemented here."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

AXES = {"flatten": 1, "rope-tie": 2, "mrope": 3}


def place(scheme: str, document: Any) -> tuple[list[Any], int]:
    """Return the (tokens, axes) ids of a document and its next position."""
    ids: list[Any] = []
    cursor = document["start"]
    for part in document["segments"]:
        if "text" in part:
            ids += [[cursor + n] * AXES[scheme] for n in range(part["text"])]
            cursor += part["text"]
            continue
        frames, height, width = part["grid"]
        places = [(t, i, j) for t in range(frames) for i in range(height) for j in range(width)]
        if scheme == "mrope":
            ids += [[cursor + t, cursor + i, cursor + j] for t, i, j in places]
        elif scheme == "flatten":
            ids += [[cursor + n] for n in range(len(places))]
        else:
            ids += [[cursor - 1 + (width + 1) * (i + 1), cursor - 1 + (height + 1) * (j + 1)] for _, i, j in places]
        after = {"mrope": max(part["grid"]), "flatten": len(places), "rope-tie": (width + 1) * (height + 1) - 1}
        cursor += after[scheme]
    return ids, cursor


def answer(scheme: str, placed: list[Any], case: Any) -> Any:
    """Return the ids that answer a case about documents, axis by axis."""
    axes, ask, (ids, following) = range(AXES[scheme]), case["ask"], placed[case.get("document", 0)]
    if ask == "padded":
        gaps = [[[None] * 3] * (case["length"] - len(own)) for own, _ in placed]
        rows = [gap + own if case["side"] == "left" else own + gap for gap, (own, _) in zip(gaps, placed, strict=True)]
        return [[[token[axis] for token in row] for row in rows] for axis in axes]
    start = len(ids) if ask == "decode" else case.get("start", 0)
    stop = {"chunk": case.get("stop"), "prefill": len(ids)}.get(ask, start + case.get("steps", case.get("length", 0)))
    tokens = [(ids + [[following + n] * 3 for n in range(9)])[n] for n in case.get("keep", range(start, stop))]
    tokens = [token for own, _ in placed for token in own] if ask == "packed" else tokens
    return [[token[axis] for token in tokens] for axis in axes]


if __name__ == "__main__":
    folder, counts = Path(sys.argv[1]), {True: 0, False: 0}
    for path, digest in json.loads((folder / "manifest.json").read_bytes())["files"].items():
        if hashlib.sha256(data := (folder / path).read_bytes()).hexdigest() != digest:
            sys.exit(f"{path}: the checksum differs from the manifest")
        for group in map(json.loads, data.decode().splitlines()):
            scheme = group.get("scheme", {"name": None})
            if scheme["name"] in AXES and not scheme["parameters"] and "row_sep" not in str(group["documents"]):
                placed = [place(scheme["name"], document) for document in group["documents"]]
                for case in (case for case in group["cases"] if case["ask"] != "rotation"):
                    counts[answer(scheme["name"], placed, case) == case["want"]["position_ids"]] += 1
    print(f"{counts[True]} the same, {counts[False]} different")
