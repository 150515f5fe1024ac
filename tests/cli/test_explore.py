"""The explorer: its page shows the values that mmpos computes, including in a real browser."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
from aiohttp import ClientSession, web

from mmpos import place
from mmpos.cli import app
from mmpos.cli.explore.command import make_app, write_page
from mmpos.cli.explore.request import Explorer
from mmpos.cli.options import make_scheme, read_spec
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.schemes import RopeTieV2
from mmpos.segments.table import SegmentTable

DOCUMENTS = [  # spec, schemes
    ("5", ["rope-tie"]),
    ("2x3", ["rope-tie", "mrope"]),
    ("3,2x3,2", ["rope-tie", "rope-tie-v2", "flatten"]),
    ("1,1x1,1", ["rope-tie-fractional"]),
    ("4,3x5,4,5x3", ["mrope", "mrope-qwen2.5", "mrope-qwen3"]),
    ("2,4x2x3,2", ["mrope", "mrope-qwen2.5"]),
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
        ({"parts": [{"picture": [0, 4]}]}, "parts[0].picture[0]: got 0, want >= 1"),
        ({"spec": "3", "schemes": ["os:system"]}, "schemes: got 'os:system', want the name of a scheme"),
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
    app(args=["explore", "3,2x3,2", "-s", "rope-tie", "-o", str(path)], prog_name="mmpos", standalone_mode=False)
    text = path.read_text("utf-8")
    assert text.endswith("</body>\n</html>\n")
    markup = re.sub(r"(<script\b[^>]*>).*?</script>", r"\1", text, flags=re.DOTALL)
    assert markup.count("<script") >= 3
    assert re.findall(r"\b(?:src|href)\s*=\s*\S+|url\(|@import", markup) == ['href="data:,">']
    with pytest.raises(InvalidInputError, match=r"--output: got '.*ids.txt', want a file ending in .html"):
        app(args=["explore", "-o", str(tmp_path / "ids.txt")], prog_name="mmpos", standalone_mode=False)


def test_text_in_a_request_cannot_end_the_script(tmp_path: Path) -> None:
    path, name = tmp_path / "ids.html", "a</script>&<b>"
    write_page(Explorer({name: RopeTieV2()}), {"spec": "3", "schemes": [name]}, path)
    (state,) = re.findall(r'<script type="application/json" id="state">(.*?)</script>', path.read_text("utf-8"))
    assert json.loads(state)["request"] == {"spec": "3", "schemes": [name]}


no_browser = pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium is installed: no page was opened")

_SHOWN = """[...document.querySelectorAll(".panel")].map((panel) => [
    panel.querySelector("h2").textContent,
    [...panel.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent)),
])"""


@pytest.mark.slow
@no_browser
def test_the_page_shows_the_ids_of_twelve_documents(tmp_path: Path) -> None:
    async def steps(page: browser.Page) -> None:
        async with _served() as address:
            await page.open(address)
            await page.until("document.querySelectorAll('.panel').length")
            await page.evaluate("document.querySelector('input[value=ids]').click()")
            for spec, schemes in DOCUMENTS:
                await page.evaluate(f"ask({{...ofParts(null), spec: {spec!r}, schemes: {json.dumps(schemes)}}})")
                shown = await page.evaluate(_SHOWN)
                assert len(shown) == len(schemes)
                for (_, rows), name in zip(shown, schemes, strict=True):
                    ids = place(SegmentTable.from_documents([read_spec(spec)]), make_scheme(name))
                    numerators, denominators = ids.rationals()
                    got = np.array([[_number(cell) for cell in row] for row in rows])
                    assert (got[:, 0] == np.arange(ids.num_tokens)).all()
                    assert (got[:, 1:] == (numerators / denominators).T).all()
            assert page.errors == []

    browser.run(tmp_path, steps)


@pytest.mark.slow
@no_browser
def test_the_page_responds_to_keys_and_drags_at_every_width(tmp_path: Path) -> None:
    async def steps(page: browser.Page) -> None:
        async with _served() as address:
            for width in (400, 1400):
                for dark in (False, True):
                    await page.open(address, width=width, dark=dark)
                    await page.until("document.querySelectorAll('.panel').length")
                    assert await page.evaluate("document.documentElement.scrollWidth") <= width
                    for view in ("plane", "maps", "phases", "scores", "python"):
                        await page.evaluate(f"document.querySelector('input[value={view}]').click()")
            await page.evaluate("document.getElementById('token').focus()")
            await page.press_right()
            await page.until("document.getElementById('sentences').textContent.includes('token 1 ')")
            before = await page.evaluate("answer.tokens")
            grip = "document.querySelector('.grip').getBoundingClientRect()"
            corner = await page.evaluate(f"(({{right, bottom}}) => [right - 4, bottom - 4])({grip})")
            await _drag(page, corner, (16, 8))
            await page.until(f"answer.tokens > {before} && answer.parts[1].grid.join() === '3,5'")
            assert await page.evaluate("document.getElementById('spec').value") == "3,3x5,2"
            assert page.errors == []

    browser.run(tmp_path, steps)


@pytest.mark.slow
@no_browser
def test_a_written_file_opens_without_a_server(tmp_path: Path) -> None:
    path = tmp_path / "ids.html"
    app(args=["explore", "3,2x3,2", "-s", "rope-tie", "-o", str(path)], prog_name="mmpos", standalone_mode=False)

    async def steps(page: browser.Page) -> None:
        await page.open(path.as_uri(), width=400)
        await page.until("document.querySelectorAll('.panel').length")
        await page.evaluate("document.querySelector('input[value=ids]').click()")
        ((_, rows),) = await page.evaluate(_SHOWN)
        assert [[int(cell) for cell in row[1:]] for row in rows] == _ids("3,2x3,2", "rope-tie").T.tolist()
        await page.evaluate("select(4)")
        assert "row 0, column 1" in await page.evaluate("document.getElementById('sentences').textContent")
        assert await page.evaluate("performance.getEntriesByType('resource').map(each => each.name)") == []
        assert page.errors == []

    browser.run(tmp_path / "profile", steps)


@pytest.mark.slow
@no_browser
def test_a_narrow_page_shows_the_spec_the_legend_and_full_titles(tmp_path: Path) -> None:
    path, spec = tmp_path / "ids.html", "1,4x6,6,5x3,2,2x2x2,4"
    app(
        args=["explore", spec, "-s", "mrope", "--token", "50", "-o", str(path)],
        prog_name="mmpos",
        standalone_mode=False,
    )

    async def steps(page: browser.Page) -> None:
        await page.open(path.as_uri(), width=400)
        await page.until("document.querySelectorAll('.panel').length")
        assert await page.evaluate("$('summary').textContent") == f"{spec}: 60 tokens, 2 images, 1 video"
        entries = "[...$('legend').children].map((entry) => [entry.textContent, entry.children.length])"
        assert await page.evaluate(entries) == [["text", 1], ["images", 2], ["video", 1]]
        for view in ("scores", "phases", "maps"):
            await page.evaluate(f"document.querySelector('input[value={view}]').click()")
            await page.until("document.querySelector('.gtitle')")
            title = "document.querySelector('.gtitle').getBoundingClientRect()"
            panel = "document.querySelector('.panel').getBoundingClientRect()"
            assert await page.evaluate(f"{panel}.left < {title}.left && {title}.right < {panel}.right")
            assert await page.evaluate("$('legend').hidden") == (view == "maps")
        assert page.errors == []

    browser.run(tmp_path / "profile", steps)


async def _drag(page: browser.Page, start: list[float], by: tuple[float, float]) -> None:
    """Press the mouse button, move the pointer and release the button."""
    x, y = start
    common = {"button": "left", "buttons": 1, "clickCount": 1}
    await page.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **common)
    for k in (1, 2):
        await page.call(
            "Input.dispatchMouseEvent", type="mouseMoved", x=x + by[0] * k / 2, y=y + by[1] * k / 2, **common
        )
    await page.call("Input.dispatchMouseEvent", type="mouseReleased", x=x + by[0], y=y + by[1], **common)


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


def _number(text: str) -> float:
    numerator, _, denominator = text.partition("/")
    return int(numerator) / int(denominator or 1)
