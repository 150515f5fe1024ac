"""SGLang's functions compute ids equal to windows of the table for random batches; skipped if SGLang is not installed.

The functions are extracted from SGLang's source files, because importing its modules requires GPU kernels.
"""

import ast
import importlib.util
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mmpos
from mmpos import Grid, SegmentTable, Text
from mmpos.integrations.sglang import mrope_positions

SPEC = importlib.util.find_spec("sglang")
pytestmark = pytest.mark.skipif(SPEC is None, reason="needs sglang")
ON_POLICY = SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))
DEPTHS = [0, 1, 1, 2, 3]


def function(file: str, name: str) -> Callable[..., Any]:
    """Compile one function or method from SGLang's source."""
    assert SPEC is not None
    assert SPEC.origin is not None
    path = Path(SPEC.origin).parent / "srt" / file
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    (node,) = (node for node in functions if node.name == name)
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    names: dict[str, Any] = {"torch": torch, "get_exec": lambda: ON_POLICY}
    exec(compile(ast.fix_missing_locations(ast.Module([future, node], [])), str(path), "exec"), names)
    compiled: Callable[..., Any] = names[name]
    return compiled


def batch(seed: int) -> tuple[list[list[Text | Grid]], random.Random]:
    """Return up to four random prompts of text and images that end in text."""
    rng = random.Random(seed)

    def prompt() -> list[Text | Grid]:
        images = (Grid(rng.randint(1, 5), rng.randint(1, 5)) for _ in range(rng.randint(0, 4)))
        return [*(part for image in images for part in (Text(rng.randint(1, 6)), image)), Text(rng.randint(1, 6))]

    return [prompt() for _ in range(rng.randint(1, 4))], rng


def inputs(document: list[Text | Grid]) -> SimpleNamespace:
    """Return the positions of a request under the names that SGLang uses."""
    prompt, delta = mrope_positions(mmpos.place(SegmentTable.from_documents([document])))
    return SimpleNamespace(mrope_positions=prompt, mrope_position_delta=delta, mrope_position_delta_repeated_cache=None)


def forward(name: str, requests: list[SimpleNamespace], lengths: list[int], **scheduled: object) -> Tensor:
    """Return the ids that SGLang's ForwardBatch computes for a step."""
    ids = SimpleNamespace(seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths))
    reqs = [SimpleNamespace(session=None)] * len(requests)
    step = SimpleNamespace(multimodal_inputs=requests, reqs=reqs, **scheduled)
    function("model_executor/forward_batch_info.py", name)(ids, SimpleNamespace(device="cpu"), step)
    positions: Tensor = ids.mrope_positions
    return positions


def windows(table: mmpos.PositionTable, documents: Sequence[int], starts: list[int], lengths: list[int]) -> Tensor:
    """Return the three rows of ids of windows of a table with two axes."""
    return torch.from_numpy(table.window(documents, starts, lengths).dense(dtype=np.int64, axes=(0, 0, 1)))


@pytest.mark.parametrize("seed", range(25))
def test_sglangs_steps_equal_windows_of_the_table(seed: int) -> None:
    documents, rng = batch(seed)
    table = mmpos.place(SegmentTable.from_documents(documents))
    requests = [inputs(document) for document in documents]
    lengths, rows = table.lengths.tolist(), range(len(documents))

    prefix = [rng.randrange(length) for length in lengths]
    extend = [rng.randint(1, length - start) for length, start in zip(lengths, prefix, strict=True)]
    stops = [start + count for start, count in zip(prefix, extend, strict=True)]
    chunks = forward("_compute_mrope_positions_extend", requests, stops, extend_lens=extend, prefix_lens=prefix)
    assert torch.equal(chunks, windows(table, rows, prefix, extend))

    longer = [length + rng.randint(1, 9) for length in lengths]
    last = [length - 1 for length in longer]
    decoded = forward("_compute_mrope_positions_decode", requests, longer)
    assert torch.equal(decoded, windows(table, rows, last, [1] * len(last)))

    tree = SimpleNamespace(positions=torch.tensor([start + depth for start in last for depth in DEPTHS]))
    drafts = forward("compute_spec_mrope_positions", requests, longer, spec_info=tree)
    want = [
        windows(table, [d] * len(DEPTHS), [start + depth for depth in DEPTHS], [1] * len(DEPTHS))
        for d, start in enumerate(last)
    ]
    assert torch.equal(drafts, torch.cat(want, dim=1))

    extended = function("managers/mm_utils.py", "extend_mrope_positions_for_retracted_request")
    for d, length in enumerate(longer):
        resumed = extended(requests[d].mrope_positions, length - lengths[d])
        assert torch.equal(resumed, windows(table, [d], [0], [length]))
