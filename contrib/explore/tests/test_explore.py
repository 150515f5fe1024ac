"""The explorer: answers contain what mmpos computes, and the page asks for one document at a time."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mmpos_explore
import numpy as np
import pytest
import typer
from aiohttp import ClientSession, web
from mmpos_explore import Explorer, make_app, write_page
from mmpos_explore.command import app
from mmpos_explore.documents import make_scheme, read_spec

from mmpos import SegmentTable, place
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.schemes import RopeTieV2

SCRIPT = Path(mmpos_explore.__file__).parent / "page/explorer.js"

DOCUMENTS = [  # spec, schemes
    ("5", ["rope-tie"]),
    ("2x3", ["rope-tie", "mrope"]),
    ("3,2x3,2", ["rope-tie", "rope-tie-v2", "flatten"]),
    ("1,1x1,1", ["rope-tie-fractional"]),
    ("4,3x5,4,5x3", ["mrope", "mrope-qwen2.5", "mrope-qwen3"]),
    ("2,4x2x3@3/2,2", ["mrope", "mrope-qwen2.5"]),
    ("7,7x7", ["v2pe,stride=16", "v2pe"]),
    ("3,2x2,3,2x2,3", ["vrope", "xd-rope"]),
    ("512,32x32,64", ["rope-tie-lcm"]),
    ("2,6x4", ["flux", "qwen-image", "lumina2"]),
    ("10,1x9,10", ["naive-2d", "rows"]),
    ("1,3x2x2,1,2x5,1", ["videorope", "mrope"]),
]


@pytest.mark.parametrize(("spec", "schemes"), DOCUMENTS)
def test_the_answer_contains_the_ids_of_each_scheme_and_python_code_that_computes_them(
    spec: str, schemes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answer: Any = Explorer().answer({"spec": spec, "schemes": schemes}, every_token=True)
    for name, shown in zip(schemes, answer["schemes"], strict=True):
        ids = _ids(spec, name)
        assert shown["ids"] == ids.tolist()
        assert len(shown["sentences"]) == answer["tokens"] == ids.shape[1]
        exec(shown["python"], {})
        assert capsys.readouterr().out == f"{ids}\n"


def test_schemes_with_one_axis_use_the_rotation_of_text() -> None:
    answer: Any = Explorer().answer({"spec": "4", "schemes": ["flatten"], "token": 1, "pair": 0})
    (shown,) = answer["schemes"]
    assert shown["pair"] == {"index": 0, "axis": "id", "inv_freq": 1.0, "phases": [0.0, 1.0, 2.0, 3.0]}
    frequencies = 10000.0 ** (-np.arange(64) / 64)
    want = [np.cos((1 - i) * frequencies).mean() for i in range(4)]
    assert shown["scores"] == pytest.approx(want, abs=1e-6)


def test_a_picture_becomes_patches_between_markers() -> None:
    answer: Any = Explorer().answer({"parts": [{"text": 2}, {"picture": [64, 96]}], "schemes": ["rope-tie"]})
    assert answer["parts"] == [{"text": 2}, {"text": 1}, {"grid": [2, 3]}, {"text": 1}]
    assert answer["spec"] == "2,1,2x3,1"


def test_input_ids_are_read_with_the_model_config() -> None:
    config = {
        "model_type": "qwen2_vl", "vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4, "image_token_id": 9,
        "video_token_id": 8, "vision_start_token_id": 6, "vision_end_token_id": 7,
        "vision_config": {
            "spatial_merge_size": 2, "patch_size": 14, "temporal_patch_size": 2, "embed_dim": 32, "num_heads": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    request = {"input_ids": [1, 6, 9, 9, 7], "config": config, "image_grid_thw": [[1, 2, 4]], "schemes": []}
    answer: Any = Explorer().answer(request)
    (shown,) = answer["schemes"]
    assert (shown["label"], shown["ids"]) == ("mrope-transformers", [[0, 1, 2, 2, 4], [0, 1, 2, 2, 4], [0, 1, 2, 3, 4]])
    assert (answer["parts"], answer["spec"]) == (None, None)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([], "request: got list, want an object"),
        ({}, "request: got no document, want one of spec, parts, input_ids"),
        ({"spec": "3", "parts": []}, "request: got spec and parts, want one of"),
        ({"spec": "3", "size": 1}, "request: got 'size', want spec,"),
        ({"spec": 3}, "spec: got int, want text such as 3,2x3,2"),
        ({"spec": "3,x"}, "SPEC '3,x', part 2: got 'x'"),
        ({"parts": [{"picture": [0, 4]}]}, "got 0, want >= 1"),
        ({"spec": "3", "schemes": ["os:system"]}, "scheme: got 'os:system', want one of rope-tie,"),
        ({"spec": "3", "schemes": ["v2pe,width=3"]}, "scheme: got 'v2pe,width=3' ("),
        ({"spec": "3", "schemes": ["v2pe,16"]}, "scheme: got '16', want PARAMETER=VALUE"),
        ({"spec": "3", "token": "1"}, "token: got '1', want an integer from 0 to 2"),
        ({"spec": "3", "schemes": ["flatten"] * 4}, "schemes: got 4, want 1 to 3"),
        ({"spec": "3", "pair": 64}, "pair: got 64, want"),
        ({"input_ids": [1], "config": "/etc"}, "config: got str, want the contents of a config.json"),
    ],
)
def test_an_invalid_request_is_refused(request_: object, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Explorer().answer(request_)
    assert message in str(caught.value)


def test_a_document_too_long_for_a_page_is_refused() -> None:
    with pytest.raises(LimitExceededError, match="document: got 4097 tokens, want at most 4096"):
        Explorer().answer({"spec": "4097"})


def test_the_command_line_accepts_user_defined_scheme_classes() -> None:
    own = RopeTieV2(axes=3)
    answer: Any = Explorer({"mine:Own": own}).answer({"spec": "2,2x2", "schemes": ["mine:Own"]})
    assert answer["schemes"][0]["ids"] == _ids("2,2x2", own).tolist()


def test_only_requests_from_the_page_on_this_machine_are_answered() -> None:
    async def statuses() -> list[int]:
        async with _served() as address, ClientSession() as session:
            request = {"spec": "3", "schemes": ["flatten"]}
            got = []
            for headers in ({}, {"Host": "attacker.example"}, {"Content-Type": "text/plain"}):
                async with session.post(
                    f"{address}view", data=json.dumps(request), headers={"Content-Type": "application/json"} | headers
                ) as response:
                    got.append(response.status)
            async with session.post(f"{address}view", json={"spec": "x"}) as response:
                assert "SPEC 'x', part 1" in (await response.json())["error"]
                got.append(response.status)
            async with session.get(f"{address}../command.py") as response:
                got.append(response.status)
            return got

    assert asyncio.run(statuses()) == [200, 403, 415, 400, 404]


def test_a_written_file_is_self_contained(tmp_path: Path) -> None:
    path = tmp_path / "ids.html"
    command = typer.main.get_command(app)
    command.main(["3,2x3,2", "-s", "rope-tie", "-o", str(path)], standalone_mode=False)
    text = path.read_text("utf-8")
    assert text.endswith("</body>\n</html>\n")
    markup = re.sub(r"(<script\b[^>]*>).*?</script>", r"\1", text, flags=re.DOTALL)
    assert markup.count("<script") >= 3
    assert re.findall(r"\b(?:src|href)\s*=\s*\S+|url\(|@import", markup) == ['href="data:,">']
    with pytest.raises(InvalidInputError, match=r"--output: got '.*ids.txt', want a file ending in .html"):
        command.main(["-o", str(tmp_path / "ids.txt")], standalone_mode=False)


def test_text_in_a_request_cannot_end_the_script(tmp_path: Path) -> None:
    path, name = tmp_path / "ids.html", "a</script>&<b>"
    write_page(Explorer({name: RopeTieV2()}), {"spec": "3", "schemes": [name]}, path)
    (state,) = re.findall(r'<script type="application/json" id="state">(.*?)</script>', path.read_text("utf-8"))
    assert json.loads(state)["request"] == {"spec": "3", "schemes": [name]}


HARNESS = """
{
const [script, state, replies] = JSON.parse(process.argv[1]);
const sent = [];
const stub = new Proxy(function () {}, {
  get: (_, key) => (key === Symbol.toPrimitive ? () => "" : key === Symbol.iterator ? function* () {} : stub),
  set: () => true, apply: () => stub, construct: () => stub,
});
const page = { getElementById: (id) => (id === "state" ? { textContent: state } : stub) };
globalThis.document = new Proxy(page, { get: (target, key) => target[key] ?? stub });
Object.assign(globalThis, { getComputedStyle: () => stub, matchMedia: () => stub, Plotly: stub });
globalThis.fetch = async (_, { body }) => (sent.push(JSON.parse(body)), { json: async () => replies[sent.length - 1] });
require("vm").runInThisContext(script + `;draw = () => {};globalThis.run = async () => {
  await ask({ ...ofParts(null), spec: "3,2x3,2" }); await ask({ token: 4 });
  await ask(ofParts([{ text: 2 }])); await ask({ ...ofParts(null), spec: "9" }); await ask({ pair: 1 });
}`);
setTimeout(() => run().then(() => console.log(JSON.stringify(sent))), 0);
}
"""
"""A program that runs the page's script without a browser, and prints the requests that it sends."""


def test_requests_after_a_typed_document_change_its_parts() -> None:
    begin = {"parts": [{"text": 8}], "schemes": ["rope-tie"], "token": 0}
    text, explorer = {"text": 3}, Explorer()
    image = [text, {"grid": [2, 3]}, {"text": 2}]
    schemes = {"schemes": ["rope-tie"], "token": 0}
    want: list[dict[str, object]] = [
        begin,
        schemes | {"spec": "3,2x3,2"},
        schemes | {"parts": image, "token": 4},
        schemes | {"parts": [{"text": 2}], "token": 4},
        schemes | {"spec": "9", "token": 4},
        schemes | {"parts": [{"text": 9}], "token": 4, "pair": 1},
    ]
    replies = [explorer.answer(request) for request in want]
    state = json.dumps({"request": begin, "schemes": ["rope-tie"], "answer": None})
    arguments = [SCRIPT.read_text("utf-8"), state, replies]
    node = Path(sys.executable).with_name("node")
    done = subprocess.run([node, "-e", HARNESS, json.dumps(arguments)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert json.loads(done.stdout) == want


@asynccontextmanager
async def _served() -> AsyncIterator[str]:
    """Serve the explorer of a small document, and yield the explorer's address."""
    begin = {"parts": [{"text": 3}, {"grid": [2, 3]}, {"text": 2}], "schemes": ["rope-tie", "mrope"], "token": 0}
    runner = web.AppRunner(make_app(Explorer(), begin))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


def _ids(spec: str, scheme: Any) -> np.ndarray[Any, np.dtype[Any]]:
    chosen = make_scheme(scheme) if isinstance(scheme, str) else scheme
    return place(SegmentTable.from_documents([read_spec(spec)]), chosen).dense()
