"""Requests from the explorer's page: a document or input_ids, schemes, a token and a pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmpos.errors import InvalidInputError
from mmpos.integrations.models import from_hf_config
from mmpos.schemes import Scheme
from mmpos.segments import SegmentTable
from mmpos_explore.documents import Document, choose, make_scheme, parts_of, read_part, read_spec, spec_of
from mmpos_explore.view import Explored, code_of, view

_DOCUMENT = ("spec", "parts", "input_ids")
_NAMES = (*_DOCUMENT, "config", "image_grid_thw", "video_grid_thw", "schemes", "token", "pair")


@dataclass(frozen=True)
class Explorer:
    """The explorer, which answers requests from the page.

    Args:
        own: schemes from the command line, by name, in addition to those of mmpos. The page itself cannot name classes
            to import.
    """

    own: Mapping[str, Scheme] = field(default_factory=dict)

    def answer(self, request: Any, every_token: bool = False) -> dict[str, object]:
        """Compute the contents of the page.

        Args:
            request: an object with one document: ``spec`` ("3,2x3,2"), ``parts`` ([{"text": 3}, {"grid": [2, 3]},
                {"picture": [height, width]}], with pixels for a picture), or ``input_ids`` with ``config``, the
                contents of a config.json, and grids if there are images. Also ``schemes``, 1 to 3 names, and the
                selected ``token`` and ``pair``.
            every_token: whether to explain every token, not only the selected one.

        Returns:
            The result of ``view``, with the document as ``parts`` and ``spec``, which are None for input_ids.

        Raises:
            InvalidInputError, LimitExceededError: the request is invalid; the error names the field.
            UnsupportedError: mmpos does not support the scheme or the model.
        """
        if not isinstance(request, Mapping):
            raise InvalidInputError(f"request: got {type(request).__name__}, want an object")
        for name in request.keys() - set(_NAMES):
            raise InvalidInputError(f"request: got {name!r}, want {', '.join(_NAMES)}")
        kind = choose(request, _DOCUMENT)
        schemes: Sequence[Scheme] = [self._scheme(name) for name in _list("schemes", request.get("schemes", []))]
        document: Document | None = None
        if kind == "input_ids":
            explored, own = _tokenised(request)
            schemes = schemes or [own]
        else:
            document = _spec(request["spec"]) if kind == "spec" else _parts(request["parts"])
            explored = Explored(SegmentTable.from_documents([document]), code_of(document))
        tokens = explored.segments.num_tokens
        token = request.get("token", 0)
        if isinstance(token, int):
            token = min(token, tokens - 1)  # the document may have become shorter
        explained = range(tokens) if every_token else [token]
        shown = view(explored, schemes or [make_scheme("rope-tie")], token, request.get("pair", 0), explained)
        if document is None:
            return shown | {"parts": None, "spec": None}
        return shown | {"parts": parts_of(document), "spec": spec_of(document)}

    def _scheme(self, name: Any) -> Scheme:
        if not isinstance(name, str):
            raise InvalidInputError(f"schemes: got {name!r}, want a name")
        return self.own[name] if name in self.own else make_scheme(name, own=False)


def _spec(spec: Any) -> Document:
    if not isinstance(spec, str):
        raise InvalidInputError(f"spec: got {type(spec).__name__}, want text such as 3,2x3,2")
    return read_spec(spec)


def _parts(parts: Any) -> Document:
    return [segment for i, part in enumerate(_list("parts", parts)) for segment in read_part(f"parts[{i}]", part)]


def _tokenised(request: Mapping[str, Any]) -> tuple[Explored, Scheme]:
    """Read input_ids with a model's config, and return the document and the scheme of the model."""
    config = request.get("config")
    if not isinstance(config, Mapping):  # given a path, from_hf_config would read the file
        raise InvalidInputError(f"config: got {type(config).__name__}, want the contents of a config.json")
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


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidInputError(f"{name}: got {type(value).__name__}, want a list")
    return value
