"""The command that serves the explorer on this machine, or writes it as one self-contained file."""

from __future__ import annotations

import asyncio
import json
import webbrowser
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from aiohttp import web
from plotly.offline import get_plotlyjs

from mmpos.errors import InvalidInputError, MmposError
from mmpos.schemes import SCHEMES
from mmpos_explore.documents import make_scheme, parts_of, read_spec
from mmpos_explore.request import Explorer

_HOST = "127.0.0.1"
_LARGEST_REQUEST = 2**20  # bytes, enough for the input_ids of MAX_TOKENS tokens and a config.json

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_STARTING_SPEC = "8,4x6,6,5x3,4"


app = typer.Typer()


@app.command()
def explore(
    document: Annotated[
        str,
        typer.Argument(
            metavar="SPEC",
            help="The initial document: 3,2x3,2 is 3 text tokens, an image of 2 rows and 3 columns of patches, and 2 "
            "text tokens; 4x2x3@1/2 is a video of 4 frames in 2 seconds.",
        ),
    ] = _STARTING_SPEC,
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            "--scheme",
            "-s",
            metavar="NAME[,PARAMETER=VALUE...]",
            help="A scheme of mmpos or your own package.module:Class. Repeat to show up to three side by side.",
            show_default="rope-tie and mrope",
        ),
    ] = None,
    token: Annotated[int, typer.Option(min=0, help="Index of the token that is selected at first.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.html", help="Write a self-contained file; serve nothing."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 chooses a free port.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
) -> None:
    """Explore the ids of a document in the browser."""
    names = scheme or ["rope-tie", "mrope"]
    explorer = Explorer({name: make_scheme(name) for name in names})
    begin = {"parts": parts_of(read_spec(document)), "schemes": names, "token": token}
    if output is not None:
        write_page(explorer, begin, output)
        typer.echo(f"wrote {output}")
        return
    explorer.answer(begin)  # errors belong in the terminal, before a browser opens
    asyncio.run(_serve(make_app(explorer, begin), port, browser))


def write_page(explorer: Explorer, begin: dict[str, Any], path: Path) -> None:
    """Write the page as one file, with the answer to its first request, its style and all scripts.

    Args:
        explorer: the explorer that computes the answer.
        begin: the first request.
        path: path of the file, ending in .html.
    """
    if path.suffix != ".html":
        raise InvalidInputError(f"--output: got {str(path)!r}, want a file ending in .html")
    page = _page(explorer, begin, answer=explorer.answer(begin, every_token=True))
    page = page.replace('<link rel="stylesheet" href="explorer.css">', f"<style>\n{_asset('explorer.css')}</style>")
    head, _, tail = page.rpartition("</body>")
    for name in ("plotly.js", "explorer.js"):  # goes at the end of the body, since inline scripts ignore defer
        head = head.replace(f'<script src="{name}" defer></script>\n', "", 1) + f"<script>\n{_asset(name)}\n</script>\n"
    path.write_text(f"{head}</body>{tail}", encoding="utf-8")


def _asset(name: str) -> str:
    if name == "plotly.js":
        return get_plotlyjs()
    return (resources.files(__package__) / "page" / name).read_text("utf-8")


def _page(explorer: Explorer, begin: dict[str, Any], answer: dict[str, object] | None = None) -> str:
    """Insert the first request, the names of schemes and, for a self-contained file, the answer into the page."""
    names = [*dict.fromkeys([*explorer.own, *SCHEMES])]
    state = json.dumps({"request": begin, "schemes": names, "answer": answer})
    return _asset("explorer.html").replace(
        "{{state}}", state.replace("<", "\\u003c")
    )  # text must not be able to end the script


def make_app(explorer: Explorer, begin: dict[str, Any]) -> web.Application:
    """Create the web application: the page, its style and scripts, and the answers to its requests.

    Args:
        explorer: the explorer that computes the answers.
        begin: the first request of the page.
    """

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        # Prevent other sites from reading answers through a name that resolves to this machine (DNS rebinding).
        if request.url.host not in (_HOST, "localhost"):
            raise web.HTTPForbidden(text=f"the explorer answers only at {_HOST}")
        response = await handler(request)
        response.headers.update(_HEADERS)
        return response

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=_page(explorer, begin), content_type="text/html")

    async def asset(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.Response(text=_asset(name), content_type="text/css" if name.endswith(".css") else "text/javascript")

    async def view(request: web.Request) -> web.Response:
        if request.content_type != "application/json":  # a form on another site cannot send this type
            raise web.HTTPUnsupportedMediaType(text="want application/json")
        try:
            answer = await asyncio.to_thread(explorer.answer, json.loads(await request.read()))
        except (MmposError, ValueError, RecursionError) as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response(answer)

    application = web.Application(middlewares=[guard], client_max_size=_LARGEST_REQUEST)
    application.router.add_get("/", page)
    application.router.add_get("/{name:explorer\\.css|explorer\\.js|plotly\\.js}", asset)
    application.router.add_post("/view", view)
    return application


async def _serve(application: web.Application, port: int, browser: bool) -> None:
    """Serve the page until the program is interrupted."""
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, _HOST, port)
    try:
        await site.start()
    except OSError as error:
        raise InvalidInputError(f"--port: got {port} ({error.strerror}), want a free port") from error
    try:
        address = f"http://{_HOST}:{runner.addresses[0][1]}/"
        typer.echo(f"Explorer at {address} (press Ctrl+C to stop)")
        if browser:
            webbrowser.open(address)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
