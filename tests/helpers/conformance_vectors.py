"""The vectors of mmpos.analysis.conformance, computed by the oracle and Transformers' own functions, never by mmpos.

``make vectors`` rewrites them and their manifest in mmpos/analysis/conformance/vectors. Settings that mmpos reads from
configs only select the inputs: the token ids of a row.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mpmath
import torch
import transformers
from hf_classes import FIELDS, ROTATION_FIELDS, rotations
from layouts import padded
from layouts_by_hand import LAYOUTS, NEXT, numbers
from model_configs import LAYER_TYPES, TEXT, config_of, settings_of
from mpmath import mp
from oracle import CASES, Case, place_document
from rope_batches import (
    AUDIO,
    IMAGE,
    SOUND,
    SOUND_END,
    VIDEO,
    VISION,
    VISION_END,
    audio_tokens,
    method_of,
    with_settings,
)
from rotary_oracle import frequencies, pair_axes
from test_models_neomme import document_image, processor_positions
from test_models_omni import processor_order
from test_models_peers import kinds_of, tokens_of

from mmpos import Grid, Text
from mmpos.integrations.models import MODEL_TYPES
from mmpos.schemes import SCHEMES, get_scheme
from mmpos.schemes.base import changed_parameters
from mmpos.segments import Audio, Clip, Thumbnail, Tile
from mmpos.segments.kinds import Segment

VECTORS = Path(__file__).parents[2] / "mmpos" / "analysis" / "conformance" / "vectors"

Json = dict[str, Any]
Rows = list[list[Any]]
"""Ids of one document, (axes, tokens)."""
Documents = Sequence[tuple[int, list[Segment]]]
"""Starts and documents of a scheme."""

SIDES = ("left", "right")
GAP = 1
"""Padding of the longest row."""


# Documents: a batch's contents and its true ids.


@dataclass(frozen=True)
class Batch:
    """Documents in the form read by a program under test, and their true positions.

    Args:
        documents: JSON objects in the request.
        ids: ids of each document on its own.
        nexts: the position after each document; None if there is none.
        starts: the first id of each document.
        together: ids of each document as part of the batch, by padding side, if a model computes them.
    """

    documents: list[Json]
    ids: list[Rows]
    nexts: list[int | None]
    starts: list[int]
    together: Mapping[str, list[Rows]] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        return [len(rows[0]) for rows in self.ids]

    def at(self, d: int, tokens: Iterable[int]) -> Rows:
        """Return the ids of some tokens of a document; tokens past its end continue as text from its next position."""
        length, following = self.lengths[d], self.nexts[d]
        return [[row[i] if i < length else (following or 0) + i - length for i in tokens] for row in self.ids[d]]

    def continuation(self, d: int, tokens: int) -> Json:
        """Return the next position, and the delta after ``tokens`` tokens of a document are kept."""
        following = self.nexts[d]
        return {} if following is None else {"next_position": following, "delta": following - self.starts[d] - tokens}

    def questions(self, cut: int) -> list[Json]:
        """Build every question about positions; the first chunk ends before token ``cut``."""
        cases: list[Json] = []
        for d, length in enumerate(self.lengths):
            whole = {"position_ids": self.at(d, range(length)), **self.continuation(d, length)}
            cases.append({"ask": "prefill", "document": d, "want": whole})
        length = self.lengths[0]
        for start, stop in ((0, cut), (cut, length)):
            want = {"position_ids": self.at(0, range(start, stop))}
            cases.append({"ask": "chunk", "document": 0, "start": start, "stop": stop, "want": want})
        if self.nexts[0] is not None:
            tokens = range(length, length + 3)
            cases.append({"ask": "decode", "document": 0, "steps": 3, "want": {"position_ids": self.at(0, tokens)}})
            window = range(length - 2, length + 4)
            want = {"position_ids": self.at(0, window)}
            cases.append({"ask": "draft", "document": 0, "start": window.start, "length": len(window), "want": want})
        kept = [i for i in range(length) if i % 3 != 1]
        want = {"position_ids": self.at(0, kept), **self.continuation(0, len(kept))}
        cases.append({"ask": "pruned", "document": 0, "keep": kept, "want": want})
        return [*cases, *self._padded(max(self.lengths) + GAP), self._packed()]

    def _padded(self, width: int) -> list[Json]:
        cases = []
        for side in SIDES:
            rows, mask, batch = [], [], self.together.get(side, self.ids)
            for length in self.lengths:
                gap = width - length
                rows.append((gap, 0) if side == "left" else (0, gap))
                mask.append([0] * rows[-1][0] + [1] * length + [0] * rows[-1][1])
            axes = range(len(self.ids[0]))
            ids = [
                [[None] * left + own[a] + [None] * right for own, (left, right) in zip(batch, rows, strict=True)]
                for a in axes
            ]
            want = {"position_ids": ids, "attention_mask": mask}
            cases.append({"ask": "padded", "side": side, "length": width, "want": want})
        return cases

    def _packed(self) -> Json:
        batch = self.together.get("right", self.ids)
        ids = [[value for rows in batch for value in rows[a]] for a in range(len(self.ids[0]))]
        bounds = [sum(self.lengths[:d]) for d in range(len(self.ids) + 1)]
        return {"ask": "packed", "want": {"position_ids": ids, "cu_seqlens": bounds}}


# Schemes, computed by the oracle.

DOCUMENTS = (
    (7, [Text(3), Grid(2, 3), Text(2), Grid(4, 2), Text(1)]),
    (0, [Text(1), Grid(3, 1), Text(4)]),
    (2, [Grid(2, 2), Text(2), Grid(2, 4)]),
)
"""Starts and documents: text around two images, an image of one column, images at both ends."""

VIDEOS = (
    (0, [Text(2), Grid(2, 2, frames=3, seconds_per_frame=Fraction(1, 3)), Text(3)]),
    (5, [Grid(2, 4, frames=2, seconds_per_frame=Fraction(5, 2)), Text(1)]),
)
SEPARATED = ((0, [Text(2), Grid(2, 3, row_separator=True), Text(2)]), (1, [Text(3)]))
"""Images with a token at the end of each row."""
CROPS: Documents = (
    (3, [Text(2), Thumbnail(3, 2), *[Tile(2, 3), Tile(2, 3, tokens_after=1)] * 2, Text(1), Thumbnail(1, 2), Text(2)]),
    (0, [Thumbnail(2, 4), Tile(2, 4), Tile(2, 4, tokens_after=2)]),
)
"""Thumbnails with two rows of two tiles, without tiles, and with one row."""
APART: Documents = (
    (0, [Text(3), Grid(2, 3), Text(3), Audio(15), Text(2)]),
    (0, [Text(2), Grid(1, 2, frames=3, seconds_per_frame=Fraction(1, 2)), Text(3)]),
)
CLIPS: Documents = (
    (4, [Text(2), Clip(1, 2, frames=3, audio=15, seconds_per_frame=Fraction(1, 2)), Text(2), Audio(3), Text(1)]),
    (0, [Text(2), Grid(2, 3), Text(2)]),
)
"""Images, audio and a silent video; a video merged with its sound."""
ENCODER = ((0, [Grid(4, 6)]), (0, [Grid(2, 2), Grid(2, 4)]))

SCHEME_ROTARIES: Mapping[int, Json] = {
    1: {"head_dim": 16, "theta": 10000.0, "allocation": "interleaved"},
    2: {"head_dim": 16, "theta": 10000.0, "allocation": "interleaved"},
    3: {"head_dim": 24, "theta": 1000000.0, "allocation": "sections", "mrope_section": [2, 5, 5]},
    4: {"head_dim": 16, "theta": 10000.0, "allocation": "split"},
}
"""A rotation for each number of axes."""
MORE_ROTARIES: Mapping[str, Sequence[Json]] = {
    "rope-tie": (
        {"head_dim": 16, "theta": 10000.0, "allocation": "split"},
        {"head_dim": 16, "theta": 500.0, "allocation": "axial"},
        {"head_dim": 16, "theta": 10000.0, "allocation": "pixtral"},
        {"head_dim": 16, "rotary_dim": 8, "theta": 10000.0, "allocation": "interleaved"},
        {"head_dim": 12, "theta": 10000.0, "allocation": [1, 1, 0, 1, 0, 0]},
    ),
    "mrope": ({"head_dim": 24, "theta": 5e5, "allocation": "mrope-interleaved", "mrope_section": [4, 4, 4]},),
}
"""Every further allocation, once."""


def segment(part: Segment) -> Json:
    match part:
        case Text() | Audio():
            return {type(part).__name__.lower(): part.length}
        case Thumbnail() | Tile():
            after = {"tokens_after": part.tokens_after} if part.tokens_after else {}
            return {type(part).__name__.lower(): [part.height, part.width], **after}
        case Clip():
            written: Json = {"clip": [part.frames, part.height, part.width], "audio_tokens": part.audio}
        case Grid():
            written = {"grid": [part.frames, part.height, part.width]}
            if part.row_separator:
                written["row_separator"] = True
    if part.seconds_per_frame is not None:
        written["seconds_per_frame"] = part.seconds_per_frame
    return written


def document_of_parts(start: int, parts: Iterable[Segment]) -> Json:
    return {"start": start, "segments": [segment(part) for part in parts]}


def scheme_batch(case: Case, documents: Iterable[tuple[int, list[Any]]]) -> Batch:
    placed = [(start if case.resumable else 7, parts) for start, parts in documents]  # without a cursor, all start at 7
    truths = [place_document(parts, case.name, start, **case.params) for start, parts in placed]
    return Batch(
        [document_of_parts(start, parts) for start, parts in placed],
        [[list(row) for row in zip(*truth.ids, strict=True)] for truth in truths],
        [truth.next_position for truth in truths],
        [start for start, _ in placed],
    )


def model_batch(documents: Documents, tokens: Tokens, index: Index) -> Batch:
    """Place documents with the model that uses the scheme, each after a text whose length is the document's start."""
    batch = query([tokens([*([Text(start)] if start else []), *parts]) for start, parts in documents], index)
    starts = [start for start, _ in documents]
    ids = [[axis[start:] for axis in rows] for rows, start in zip(batch.ids, starts, strict=True)]
    return Batch([document_of_parts(*document) for document in documents], ids, batch.nexts, starts)


def oracle_rotation(rotary: Json, ids: Rows) -> Json:
    """Return the pair axes, cos and sin that the rotation oracle computes for ids."""
    plain = {"rotary_dim": rotary["head_dim"], "mrope_section": None, "axes_dim": None, "scaling": None}
    fields: Any = SimpleNamespace(**plain | rotary, axes=len(ids), inv_freq=None)
    return rotation(pair_axes(fields), frequencies(fields), ids)


def scheme_groups() -> dict[str, list[Json]]:
    files: dict[str, list[Json]] = {}
    for case in CASES:
        batches: list[Any] = [DOCUMENTS if case.text else ENCODER]
        batches += [VIDEOS] if case.frames and case.text else []
        batches += [SEPARATED] if case.separators else []
        groups = files.setdefault(case.name, [])
        for documents in batches:
            batch = scheme_batch(case, documents)
            cases = batch.questions(cut=5)
            if documents is batches[0]:
                more = () if case.params else MORE_ROTARIES.get(case.name, ())
                for rotary in (SCHEME_ROTARIES[len(batch.ids[0])], *more):
                    tokens = [4, batch.lengths[0] - 1]
                    want = oracle_rotation(rotary, batch.at(0, tokens))
                    cases.append({"ask": "rotation", "document": 0, "tokens": tokens, "rotary": rotary, "want": want})
            scheme = {"name": case.name, "parameters": case.params}
            name = f"{case.name}/{len(groups)}"
            groups.append({"group": name, "scheme": scheme, "documents": batch.documents, "cases": cases})
    for name, batch in (
        ("mrope-canvas", model_batch(CROPS, minicpm_tokens, minicpm_index)),
        ("tmrope", model_batch(CLIPS, omni_tokens("qwen2_5_omni"), omni_index("qwen2_5_omni"))),
        ("tmrope-qwen3", model_batch(CLIPS, omni_tokens("qwen3_omni_moe"), omni_index("qwen3_omni_moe"))),
    ):
        scheme, groups = {"name": name, "parameters": {}}, files[name]
        questions = {"documents": batch.documents, "cases": batch.questions(cut=5)}
        groups.append({"group": f"{name}/{len(groups)}", "scheme": scheme, **questions})
    return files | layout_groups()


def layout_groups() -> dict[str, list[Json]]:
    """Build layouts for generation models, with ids written by hand."""
    files: dict[str, list[Json]] = {}
    for case, (layout, parts, axes) in LAYOUTS.items():
        scheme = get_scheme(layout)
        if scheme.name not in SCHEMES:
            continue
        batch = Batch([document_of_parts(0, parts)], [[numbers(line) for line in axes]], [NEXT.get(case)], [0])
        groups = files.setdefault(scheme.name, [])
        scheme_json = {"name": scheme.name, "parameters": changed_parameters(scheme)}
        cases = batch.questions(cut=batch.lengths[0] // 2)
        if not groups:
            by_angle = sorted(range(batch.lengths[0]), key=lambda i: sum(abs(row[i]) for row in batch.ids[0]))
            tokens, rotary = sorted(by_angle[-2:]), SCHEME_ROTARIES[len(axes)]
            want = oracle_rotation(rotary, batch.at(0, tokens))
            cases.append({"ask": "rotation", "document": 0, "tokens": tokens, "rotary": rotary, "want": want})
        group = f"{scheme.name}/{len(groups)}"
        groups.append({"group": group, "scheme": scheme_json, "documents": batch.documents, "cases": cases})
    return files


# Rotations.


def rotation(axes: Sequence[int], omegas: Sequence[Any], ids: Rows, factor: Any = 1) -> Json:
    """Return each pair's axis, None if unrotated, and (tokens, pairs) cos and sin computed with 60 digits."""
    table: dict[str, list[list[float]]] = {"cos": [], "sin": []}
    with mpmath.workdps(60):
        for token in range(len(ids[0])):
            values = [Fraction(ids[max(a, 0)][token]) for a in axes]
            angles = [mp.mpf(v.numerator) / v.denominator * omega for v, omega in zip(values, omegas, strict=True)]
            for name, function in (("cos", mp.cos), ("sin", mp.sin)):
                table[name].append([round(float(factor * function(angle)), 10) + 0.0 for angle in angles])
    return {"pair_axis": [a if a >= 0 and omega else None for a, omega in zip(axes, omegas, strict=True)], **table}


def formula_frequencies(text: Any, layer_type: str | None, pairs: int) -> tuple[list[Any], Any]:
    """Return the pairs' frequencies for the config's rope type, and the factor applied to cos and sin."""
    parameters = text.rope_parameters[layer_type] if layer_type else text.rope_parameters
    dim, theta = 2 * pairs, mp.mpf(parameters["rope_theta"])
    if "alpha" in parameters:  # NTK, for a length that is never exceeded
        theta *= mp.mpf(parameters["alpha"]) ** (mp.mpf(dim) / (dim - 2))
    plain = [theta ** (-mp.mpf(2 * j) / dim) for j in range(pairs)]
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind == "proportional":
        turning = int(parameters["partial_rotary_factor"] * dim) // 2
        return [omega * (j < turning) for j, omega in enumerate(plain)], 1
    if kind not in ("yarn", "llama3"):
        return plain, 1
    original = parameters["original_max_position_embeddings"]
    if kind == "llama3":  # a pair keeps its frequency by the number of turns that it makes in the original length
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        kept = [min(max((original * o / (2 * mp.pi) - low) / (high - low), mp.mpf(0)), mp.mpf(1)) for o in plain]
        return [o * k + o / parameters["factor"] * (1 - k) for o, k in zip(plain, kept, strict=True)], 1
    bounds = [
        dim * mp.log(original / (parameters[name] * 2 * mp.pi)) / (2 * mp.log(theta))
        for name in ("beta_fast", "beta_slow")
    ]
    low, high = (mp.floor(bounds[0]), mp.ceil(bounds[1])) if parameters.get("truncate", True) else bounds
    shares = [min(max((j - low) / (high - low), mp.mpf(0)), mp.mpf(1)) for j in range(pairs)]
    scaled = [omega / parameters["factor"] * s + omega * (1 - s) for omega, s in zip(plain, shares, strict=True)]
    # mscale and mscale_all_dim cancel out where both are set; otherwise the paper's factor applies.
    return scaled, 1 if "mscale" in parameters else mp.mpf("0.1") * mp.log(parameters["factor"]) + 1


def model_rotations(config: Any, layer_type: str | None, ids: Rows) -> list[Json]:
    """Return the rotation of ids by Transformers' own module, and another if second channels of pairs use other axes.

    The axis of each pair is observed, and the module's float32 frequencies must confirm the formula.
    """
    if isinstance(config, dict):  # HunyuanImage-3.0 is not in Transformers
        rotary = {"head_dim": config["attention_head_dim"], "theta": config["rope_theta"], "allocation": "interleaved"}
        return [oracle_rotation(rotary, ids)]
    text = text_of(config)
    module = rotations()[type(text)](text)
    prefix = f"{layer_type}_" if layer_type else ""
    observed = getattr(module, f"{prefix}inv_freq").double().tolist()
    factor = getattr(module, f"{prefix}attention_scaling", 1.0)
    omegas, own_factor = formula_frequencies(text, layer_type, len(observed))
    driven = [[0] * len(omegas)]
    if len(ids) > 1:
        driven, observed = driven_by(module, len(ids), layer_type)
    for ours, other in zip([*omegas, own_factor], [*observed, factor], strict=True):
        if abs(float(ours) - other) > 1e-5 * abs(other):
            raise ValueError(f"{type(text).__name__}: got {float(ours)} by formula, {other} in Transformers")
    return [rotation(axes, omegas, ids, own_factor) for axes in driven]


def driven_by(module: Any, axes: int, layer_type: str | None) -> tuple[list[list[int]], list[float]]:
    """Observe a module's rotation by rotating every channel by one id on one axis at a time.

    Returns:
        The axes of all pairs' first channels, those of the second channels if they differ, and the frequencies.
    """
    apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
    options = {"layer_type": layer_type} if layer_type else {}
    channels = 2 * len(getattr(module, f"{layer_type}_inv_freq" if layer_type else "inv_freq"))
    turning = torch.eye(channels)[None, None]
    ids = torch.eye(axes, dtype=torch.int64)[:, :, None, None].expand(-1, -1, 1, channels)
    moved = torch.stack(
        [apply(turning, turning, *module(torch.zeros(1), axis_ids, **options))[0][0, 0] for axis_ids in ids]
    )
    sines = (moved * (1 - torch.eye(channels))).abs()  # (axes, from, to)
    axis = sines.amax(dim=1).argmax(dim=0).tolist()
    partner = sines.sum(dim=0).argmax(dim=0).tolist()
    firsts = [c for c in range(channels) if c < partner[c]]
    driven = [[axis[c] for c in firsts], [axis[partner[c]] for c in firsts]]
    angles = sines.amax(dim=(0, 1)).double().asin().tolist()
    return driven if driven[0] != driven[1] else driven[:1], [angles[c] for c in firsts]


# Models, computed by Transformers' own get_rope_index.

PARTS = ("text_config", "vision_config", "thinker_config", "vlm_config", "dit_config")
ESSENTIAL = {
    *(*FIELDS, *ROTATION_FIELDS, *PARTS, "model_type", "rope_parameters", "rope_theta"),
    *("partial_rotary_factor", "image_token_index", "video_token_index", "attention_head_dim", "downsample_mode"),
    *("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id"),
}
"""Fields of a config.json that affect positions."""

STILLS: list[list[Any]] = [[3, (1, 4, 6), 2, (1, 2, 2), 4], [(1, 6, 4), 7]]
FILMS: list[list[Any]] = [[2, (2, 4, 4), 3, (1, 4, 8), 1], [4, (4, 2, 6), 3], [6]]
"""Batches of documents of text lengths and (frames, height, width) before merging; one frame is an image."""


def essentials(config: Any) -> Json:
    """Return the fields of a config that affect positions."""
    fields = config if isinstance(config, dict) else json.loads(config.to_json_string(use_diff=False))
    return {
        key: essentials(value) if key in PARTS else value
        for key, value in fields.items()
        if key in ESSENTIAL and value is not None
    }


def text_of(config: Any) -> Any:
    """Return the language model's config."""
    for name in ("thinker_config", "vlm_config"):
        config = getattr(config, name, config)
    return config.get_text_config()


def number(value: float) -> int | Fraction:
    return int(value) if value == int(value) else Fraction(value)


Tokens = Callable[[list[Segment]], Json]
"""Encode the document of a scheme as a document of a model."""
Index = Callable[[list[Json], str, int], tuple[Any, Sequence[float]]]
"""Return (axes, batch, width) ids, padded on a side to a width, and the delta of each document."""


def query(documents: list[Json], index: Index) -> Batch:
    """Build a batch from the ids that a function returns."""
    lengths = [len(document["input_ids"]) for document in documents]

    def rows_of(chosen: slice, side: str, width: int) -> tuple[list[Rows], Sequence[float]]:
        placed, deltas = index(documents[chosen], side, width)
        owns = [slice(width - length, width) if side == "left" else slice(length) for length in lengths[chosen]]
        return [[list(map(number, axis[d][own])) for axis in placed.tolist()] for d, own in enumerate(owns)], deltas

    ids, nexts = [], []
    for d, length in enumerate(lengths):
        (alone,), (delta,) = rows_of(slice(d, d + 1), "right", length)
        following = Fraction(delta) + length
        ids.append(alone)
        nexts.append(int(following) if following.denominator == 1 else None)
    together = {side: rows_of(slice(None), side, max(lengths) + GAP)[0] for side in SIDES}
    return Batch(documents, ids, nexts, [0] * len(documents), together)


def inputs(documents: list[Json], side: str, width: int) -> tuple[list[list[int]], Any, Any, list[Any]]:
    """Return rows of input_ids, the padded rows, their mask, and the grids of all images and videos."""
    rows = [document["input_ids"] for document in documents]
    mask = filled([[1] * len(row) for row in rows], side, width)
    return rows, filled(rows, side, width), mask, [tensor(every(documents, name)) for name in GRIDS]


def filled(rows: list[list[int]], side: str, width: int) -> Any:
    """Pad rows to this width."""
    return padded([*rows, [0] * width], side)[:-1]


GRIDS = ("image_grid_thw", "video_grid_thw")


def every(documents: list[Json], name: str) -> list[Any]:
    return [value for document in documents for value in document.get(name, [])]


def tensor(values: Any) -> Any:
    return torch.tensor(values) if len(values) else None


def document_of(row: list[int], images: list[Any], videos: list[Any]) -> Json:
    """Encode the input of one document, omitting empty lists of grids."""
    grids = {
        name: [list(grid) for grid in listed] for name, listed in zip(GRIDS, (images, videos), strict=True) if listed
    }
    return {"input_ids": row, **grids}


def vision_language(model: str) -> list[Batch]:
    """Build a batch of images and a batch of videos with a get_rope_index that takes mm_token_type_ids."""
    settings = settings_of(model)
    method = method_of(model, config_of(model))

    def index(documents: list[Json], side: str, width: int) -> tuple[Any, Any]:
        rows, ids, mask, grids = inputs(documents, side, width)
        kinds = filled(kinds_of(settings, rows), side, width)
        ids, delta = method(ids, kinds, *grids, attention_mask=mask)
        return ids, delta[:, 0].tolist()

    layouts = [[tokens_of(settings, [document]) for document in layout] for layout in (STILLS, FILMS)]
    return [query([document_of(rows[0], *grids) for rows, *grids in layout], index) for layout in layouts]


def hunyuan_vl(model: str) -> list[Batch]:
    """Build a batch of images whose rows each end with a token, with one more token before and after each image.

    Transformers counts the images over the whole batch.
    """
    config = config_of(model)
    begin, patch, end = config.im_start_id, config.image_token_id, config.im_end_id
    method = method_of(model, config)

    def image(height: int, width: int) -> list[int]:
        return [begin, *[patch] * (height * (width + 1) + 2), end]

    def index(documents: list[Json], side: str, width: int) -> tuple[Any, Any]:
        _, ids, mask, (images, _) = inputs(documents, side, width)
        positions, delta = method(ids, (ids == patch).long(), images, attention_mask=mask)
        return positions, delta[:, 0].tolist()

    first = [TEXT, TEXT, *image(2, 3), TEXT, *image(1, 2), TEXT]
    documents = [document_of(first, [(1, 4, 6), (1, 2, 4)], []), document_of([TEXT, *image(3, 1)], [(1, 6, 2)], [])]
    return [query(documents, index)]


def glm_image(model: str) -> list[Batch]:
    """Build a batch of prompts with images; no image is generated."""
    config = config_of(model)
    begin, patch, end = config.image_start_token_id, config.image_token_id, config.image_end_token_id
    method = method_of(model, config)

    def index(documents: list[Json], side: str, width: int) -> tuple[Any, Any]:
        _, ids, mask, (images, _) = inputs(documents, side, width)
        counts = torch.tensor([len(document["image_grid_thw"]) for document in documents])
        positions, _ = method(ids, images, counts, mask)
        return positions, [int((positions[:, d] * m).max()) + 1 - int(m.sum()) for d, m in enumerate(mask)]

    first = [TEXT, TEXT, begin, *[patch] * 6, end, TEXT, begin, *[patch] * 2, end, TEXT]
    second = [begin, *[patch] * 4, end, TEXT]
    return [query([document_of(first, [(1, 2, 3), (1, 1, 2)], []), document_of(second, [(1, 4, 1)], [])], index)]


def hunyuan_image(model: str) -> list[Batch]:
    """Build a batch with the oracle's floored rope-tie-v2; test_models.py contains the model's ids, written by hand."""
    patch = config_of(model)["image_token_id"]
    batch = [
        document_of([*[TEXT] * 3, *[patch] * 6, *[TEXT] * 2, *[patch] * 4, TEXT], [(1, 2, 3), (1, 4, 1)], []),
        document_of([*[TEXT] * 2, *[patch] * 2, TEXT], [(1, 1, 2)], []),
    ]
    parts: list[list[Text | Grid]] = [
        [Text(3), Grid(2, 3), Text(2), Grid(4, 1), Text(1)],
        [Text(2), Grid(1, 2), Text(1)],
    ]
    truths = [place_document(document, "rope-tie-v2", rounding="floor") for document in parts]
    ids = [[list(map(int, axis)) for axis in zip(*truth.ids, strict=True)] for truth in truths]
    return [Batch(batch, ids, [truth.next_position for truth in truths], [0, 0])]


def omni_index(model: str) -> Index:
    method = method_of(model, with_settings(model)[0].thinker_config)

    def index(documents: list[Json], side: str, width: int) -> tuple[Any, Any]:
        _, ids, mask, grids = inputs(documents, side, width)
        positions, delta = method(
            ids,
            *grids,
            attention_mask=mask,
            use_audio_in_video=any(document.get("use_audio_in_video") for document in documents),
            audio_seqlens=tensor(every(documents, "audio_feature_lengths")),
            second_per_grids=tensor([float(Fraction(value)) for value in every(documents, "seconds_per_grid")]),
        )
        return positions, delta[:, 0].tolist()

    return index


def omni_tokens(model: str) -> Tokens:
    """Encode documents with markers at the ends of text, and clips merged as by the model's processor."""
    marks = {Audio: (SOUND, SOUND_END), Grid: (VISION, VISION_END)}

    def tokens(parts: list[Segment]) -> Json:
        document: Json = {"input_ids": []}
        row = document["input_ids"]

        def append(**values: Any) -> None:
            for name, value in values.items():
                document.setdefault(name, []).append(value)

        def append_audio(tokens: int) -> None:
            frames = next(frames for frames in count(1) if audio_tokens(model, frames) == tokens)
            append(audio_lengths=tokens, audio_feature_lengths=frames)

        for n, part in enumerate(parts):
            before, after = (type(parts[i]) if 0 <= i < len(parts) else None for i in (n - 1, n + 1))
            thw = [part.extents[0], 2 * part.extents[1], 2 * part.extents[2]]
            match part:
                case Text(length):
                    row += [TEXT] * length
                    if before in marks:
                        row[-length] = marks[before][1]
                    if after in marks:
                        row[-1] = marks[after][0]
                case Audio(length):
                    row += [AUDIO] * length
                    append_audio(length)
                case Clip():
                    patches, seconds = part.height * part.width, part.seconds_per_frame or Fraction(1)
                    order = processor_order(model, part.frames, patches, part.audio, seconds)
                    merged = [{1: VIDEO, 3: AUDIO}[kind] for kind in order[2:-2]]
                    row += [VISION, SOUND, *merged, SOUND_END, VISION_END]
                    append_audio(part.audio)
                    append(video_grid_thw=thw, seconds_per_grid=seconds)
                    document["use_audio_in_video"] = True
                case Grid(frames=1):
                    row += [IMAGE] * (part.height * part.width)
                    append(image_grid_thw=thw)
                case Grid():
                    row += [VIDEO] * (part.frames * part.height * part.width)
                    append(video_grid_thw=thw, seconds_per_grid=part.seconds_per_frame)
        return document

    return tokens


def omni(model: str) -> list[Batch]:
    """Build a batch of images, audio and a silent video, and a batch of videos merged with their sound."""
    whole = model.removesuffix("_thinker")
    tokens = omni_tokens(whole)
    return [query([tokens(parts) for _, parts in batch], omni_index(whole)) for batch in (APART, CLIPS)]


def minicpm_tokens(parts: list[Segment], film: bool = False) -> Json:
    """Encode thumbnails and tiles, which merge 4×4 patches; in a film, they are frames."""
    config = config_of("minicpmv4_7")
    patch = config.video_token_id if film else config.image_token_id
    row: list[int] = []
    grids = []
    for part in parts:
        match part:
            case Text(length):
                row += [TEXT] * length
            case Thumbnail(height, width, after) | Tile(height, width, after):
                kind = "image" if isinstance(part, Thumbnail) else "slice"
                start, end = (getattr(config, f"{kind}_{name}_id") for name in ("start", "end"))
                row += [start, *[patch] * (height * width), end, *[config.newline_id] * after]
                grids.append((1, 4 * height, 4 * width))
    return document_of(row, [], grids) if film else document_of(row, grids, [])


def minicpm_index(documents: list[Json], side: str, width: int) -> tuple[Any, Any]:
    config = config_of("minicpmv4_7")
    method = method_of("minicpmv4_7", config)
    _, ids, mask, grids = inputs(documents, side, width)
    types = (ids == config.image_token_id).long() + 2 * (ids == config.video_token_id)
    sizes = [None if grid_thw is None else grid_thw[:, 1:] for grid_thw in grids]
    positions, delta = method(ids, types, *sizes, attention_mask=mask)
    return positions, delta[:, 0].tolist()


def minicpm(model: str) -> list[Batch]:
    """Build a batch of tiled images, and a batch of videos whose frames are thumbnails."""
    images = [minicpm_tokens(parts) for _, parts in CROPS]
    frames: list[Segment] = [Text(2), *[Thumbnail(1, 2)] * 3, Text(2), Thumbnail(2, 1), Tile(3, 2), Text(1)]
    film = [minicpm_tokens(frames, film=True), minicpm_tokens([Thumbnail(2, 2), Text(3)])]
    return [query(images, minicpm_index), query(film, minicpm_index)]


def one_axis(model: str) -> list[Batch]:
    """Assign consecutive ids to all tokens, including placeholders; test_models_logits.py compares the logits."""
    image, first = settings_of(model).placeholders.image, FIRST.get(model, 0)
    patch = TEXT if image is None else image
    rows = [[TEXT, TEXT, *[patch] * 6, TEXT, TEXT, *[patch] * 2, TEXT], [TEXT, *[patch] * 4, TEXT]]
    ids = [[list(range(first, first + len(row)))] for row in rows]
    return [Batch([{"input_ids": row} for row in rows], ids, [first + len(row) for row in rows], [first] * 2)]


FIRST = {"paligemma": 1}
"""The first id, if it is not 0: "Paligemma positions are 1-indexed" in Transformers."""


def neomme(model: str) -> list[Batch]:
    """Build a batch of one image and one text with the model's own processor; no token can follow an image."""
    config = config_of(model)
    grid = (2, 3)
    rows = [document_image(config, *grid), [TEXT + 4] * 5]
    ids = processor_positions(config, rows, [grid])
    own = [[axis[d][: len(row)] for axis in ids.tolist()] for d, row in enumerate(rows)]
    documents = [document_of(rows[0], [(1, *grid)], []), document_of(rows[1], [], [])]
    return [Batch(documents, own, [None, len(rows[1])], [0, 0])]


OTHERS: Mapping[str, Callable[[str], list[Batch]]] = {
    "neomme": neomme,
    "hunyuan_vl": hunyuan_vl,
    "glm_image": glm_image,
    "hunyuan_image_3_moe": hunyuan_image,
    "minicpmv4_7": minicpm,
    **dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker"), omni),
}


def released_config(model: str) -> Any:
    """Return the config with released values where its class has a different time unit, no marker or no sections."""
    config = config_of(model)
    inner = getattr(config, "thinker_config", config)
    if not isinstance(config, dict):
        text = text_of(config)
        section = getattr(rotations()[type(text)](text), "mrope_section", None)
        if section is not None and "rope_theta" in text.rope_parameters:
            text.rope_parameters["mrope_section"] = list(section)
    if OTHERS.get(model) is omni:
        inner.vision_start_token_id = VISION
    if model.startswith("qwen3_omni_moe"):
        inner.position_id_per_seconds = 13
    return config


def model_groups() -> dict[str, list[Json]]:
    files: dict[str, list[Json]] = {}
    for model in MODEL_TYPES:
        scheme = settings_of(model).scheme
        batches = OTHERS.get(model, vision_language if scheme.axes > 1 else one_axis)(model)
        config, layer_type = released_config(model), LAYER_TYPES.get(model)
        groups = files.setdefault(model if scheme.axes > 1 else "one_axis", [])
        for n, batch in enumerate(batches):
            cases = batch.questions(cut=6)
            if n == 0:
                tokens = [6, batch.lengths[0] - 1]
                want = model_rotations(config, layer_type, batch.at(0, tokens))
                for channel, rotation_ in enumerate(want):
                    which = {"channel": channel} if len(want) > 1 else {}
                    cases.append({"ask": "rotation", "document": 0, "tokens": tokens, **which, "want": rotation_})
            group = {"group": f"{model}/{n}", "config": essentials(config)}
            layer = {} if layer_type is None else {"layer_type": layer_type}
            groups.append({**group, **layer, "documents": batch.documents, "cases": cases})
    return files


def whole_fractions(value: Any) -> Any:
    """Replace fractions with integers or text such as 9/2, recursively."""
    if isinstance(value, dict):
        return {key: whole_fractions(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [whole_fractions(item) for item in value]
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else str(value)
    return value


def files() -> dict[str, bytes]:
    """Encode all vector files except the schema, and return them by path."""
    logging.disable(logging.CRITICAL)
    folders = {"schemes": scheme_groups(), "models": model_groups()}
    written = {
        f"{folder}/{name}.jsonl": "".join(
            json.dumps(whole_fractions(group), separators=(",", ":"), ensure_ascii=False) + "\n" for group in groups
        ).encode()
        for folder, named in folders.items()
        for name, groups in named.items()
    }
    manifest = {
        "format": 1,
        "transformers": transformers.__version__,
        "files": {path: hashlib.sha256(data).hexdigest() for path, data in sorted(written.items())},
    }
    return {**written, "manifest.json": (json.dumps(manifest, indent=1) + "\n").encode()}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else VECTORS
    contents = files()
    for old in folder.glob("*/*.jsonl"):
        old.unlink()
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
