"""Markdown extension that turns the examples in the pages and docstrings of mmpos into code blocks."""

import re
from collections.abc import Iterator

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

FENCE = re.compile(r" *(?:```+|~~~+)")


class Examples(Preprocessor):
    """Fence doctests, and remove `no-run` from the fences of pages."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the lines in the form that pymdownx.superfences expects."""
        return list(self._fenced(lines))

    @staticmethod
    def _fenced(lines: list[str]) -> Iterator[str]:
        inside = doctest = False
        for line in lines:
            if not doctest and FENCE.match(line):
                inside = not inside
            if doctest and not line.strip():
                yield "```"
                doctest = False
            elif not inside and not doctest and line.startswith(">>> "):
                yield "```pycon"
                doctest = True
            yield re.sub(r"^(```\w+) no-run$", r"\1", line)
        if doctest:
            yield "```"


class ExamplesExtension(Extension):
    """Extension that registers Examples before the fences are parsed."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Add the preprocessor."""
        md.preprocessors.register(Examples(md), "examples", 40)
