"""A request of the explorer's page: a document or tokenised ids, schemes, a token and a pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmpos.cli.explore.view import Explored, code_of, view
from mmpos.cli.options import Document, make_scheme, read_part, read_spec, to_json
from mmpos.errors import InvalidInputError
from mmpos.images import ImageProcessor
from mmpos.schemes import Scheme
from mmpos.segments.kinds import Text
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import integer

_DOCUMENT = ("spec", "parts", "input_ids")
_NAMES = (*_DOCUMENT, "config", "image_grid_thw", "video_grid_thw", "schemes", "token", "pair")


@dataclass(frozen=True)
class Explorer:
    """What answers the page.

    Args:
        own: schemes of the command line beside those of mmpos, by the words that name them. The page itself may not
            name a class to import.
    """

    own: Mapping[str, Scheme] = field(default_factory=dict)

    def answer(self, request: Any, every_token: bool = False) -> dict[str, object]:
        """Compute what the page shows.

        Args:
            request: an object with one of ``spec`` ("3,2x3,2"), ``parts`` ([{"text": 3}, {"grid": [2, 3]},
                {"picture": [height, width]}], the last in pixels) and ``input_ids``, which come with ``config``, the
                content of a config.json, and with grids if they hold images; ``schemes``, words that name 1 to 3;
                ``token`` and ``pair``, the ones that are selected.
            every_token: whether each token is explained, and not only the selected one.

        Returns:
            the object of ``view``, with the document as ``parts`` and ``spec``, which are None for input_ids.

        Raises:
            InvalidInputError, LimitExceededError: naming what of the request cannot be used.
            UnsupportedError: a scheme or model that mmpos does not compute.
        """
        if not isinstance(request, Mapping):
            raise InvalidInputError(f"request: got {type(request).__name__}, want an object")
        for name in request.keys() - set(_NAMES):
            raise InvalidInputError(f"request: got {name!r}, want {', '.join(_NAMES)}")
        given = [name for name in _DOCUMENT if request.get(name) is not None]
        if len(given) != 1:
            raise InvalidInputError(
                f"request: got {' and '.join(given) or 'no document'}, want one of {', '.join(_DOCUMENT)}"
            )
        schemes: Sequence[Scheme] = [self._scheme(words) for words in _list("schemes", request.get("schemes", []))]
        document: Document | None = None
        if given == ["input_ids"]:
            explored, own = _tokenised(request)
            schemes = schemes or [own]
        else:
            document = _spec(request["spec"]) if given == ["spec"] else _parts(request["parts"])
            explored = Explored(SegmentTable.from_documents([document]), code_of(document))
        numbers = {name: integer(name, request[name]) for name in ("token", "pair") if name in request}
        numbers["token"] = min(numbers.get("token", 0), explored.segments.num_tokens - 1)  # of a document that shrank
        named = range(explored.segments.num_tokens) if every_token else None
        shown = view(explored, schemes or [make_scheme("rope-tie")], sentences=named, **numbers)
        written = None if document is None else to_json([document])[0]
        return shown | {"parts": written, "spec": None if written is None else _words(written)}

    def _scheme(self, words: Any) -> Scheme:
        if isinstance(words, str) and words in self.own:
            return self.own[words]
        if not isinstance(words, str) or ":" in words:
            raise InvalidInputError(
                f"schemes: got {words!r}, want the name of a scheme of mmpos or of the command line"
            )
        return make_scheme(words)


def _spec(words: Any) -> Document:
    if not isinstance(words, str):
        raise InvalidInputError(f"spec: got {type(words).__name__}, want text such as 3,2x3,2")
    return read_spec(words)


def _parts(parts: Any) -> Document:
    return [segment for i, part in enumerate(_list("parts", parts)) for segment in _part(f"parts[{i}]", part)]


def _part(name: str, part: Any) -> Document:
    """Read a part; a picture becomes a marker, its patches and a marker."""
    match part:
        case {"picture": [height, width], **rest} if not rest:
            sides = integer(f"{name}.picture[0]", height, minimum=1), integer(f"{name}.picture[1]", width, minimum=1)
            return [Text(1), ImageProcessor(backend="pillow").grid(*sides), Text(1)]
    return [read_part(name, part)]


def _tokenised(request: Mapping[str, Any]) -> tuple[Explored, Scheme]:
    """Make the table of input_ids by a model's config, with the scheme of the model."""
    from mmpos.integrations.models import from_hf_config

    config = request.get("config")
    if not isinstance(config, Mapping):  # never a path, which from_hf_config would read
        raise InvalidInputError(f"config: got {type(config).__name__}, want the content of a config.json")
    settings = from_hf_config(config)
    grids = {name: request[name] for name in ("image_grid_thw", "video_grid_thw") if request.get(name) is not None}
    segments = settings.segments(request["input_ids"], **grids)
    if segments.num_documents != 1:
        raise InvalidInputError(f"input_ids: got {segments.num_documents} documents, want 1")
    arguments = "".join(f", {name}={value!r}" for name, value in grids.items())
    code = (
        'settings = mmpos.from_hf_config("config.json")\n'
        f"input_ids = {request['input_ids']!r}\nsegments = settings.segments(input_ids{arguments})"
    )
    return Explored(segments, code, settings.start), settings.scheme


def _words(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """Write a document as a spec; None where a spec cannot say it."""
    pieces = []
    for part in parts:
        match part:
            case {"text": length, **rest} if not rest:
                pieces.append(str(length))
            case {"grid": sides, **rest} if not rest:
                pieces.append("x".join(map(str, sides)))
            case _:
                return None
    return ",".join(pieces)


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidInputError(f"{name}: got {type(value).__name__}, want a list")
    return value
