"""The calls that build sequences, from one document or from many."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmpos.client.calls import Ask, Call, Errors, Method, trusting
from mmpos.client.options import Options
from mmpos.errors import InvalidInputError, MmposError, ServiceError
from mmpos.rpc.errors import get_error
from mmpos.rpc.positions import put_scheme
from mmpos.rpc.sequences import Sent, get_sequence, put_parts
from mmpos.rpc.v1 import sequences_pb2
from mmpos.sequence.video import part_offsets
from mmpos.support.checks import boolean, integer, naming, one_of

if TYPE_CHECKING:
    from mmpos.client.shared_memory import Lease
    from mmpos.schemes import Scheme
    from mmpos.sequence.builder import InterleavedSequence

Built = list["InterleavedSequence | MmposError"]

BUILD = Method(
    "/mmpos.rpc.v1.SequenceService/Build",
    sequences_pb2.BuildRequest,
    sequences_pb2.BuildResponse,
    "/mmpos.rpc.v1.SequenceService/StreamBuild",
    sequences_pb2.StreamBuildRequest,
    sequences_pb2.StreamBuildResponse,
    "sequences",
)


def build(
    options: Options,
    parts: Sequence[Any],
    *,
    scheme: str | Scheme | None = None,
    start: int = 0,
    patches: bool = True,
) -> Call[InterleavedSequence]:
    """The sequence of these parts, as ``SequenceBuilder.build`` gives it with the settings of the profile.

    Args:
        parts: text, token ids, Grid, ImageSize, Video, and images as SequenceBuilder takes them. A path travels as the
            bytes of its file; a Pillow image, an array or a tensor as its upright pixels, without loss.
        scheme: a name from mmpos.SCHEMES or a scheme object; None: that of the profile.
        start: id of the first token.
        patches: whether pixels are wanted; without them nothing is decoded.

    Returns:
        A new InterleavedSequence, its image hashes those of the call in process.

    Raises:
        MmposError: what ``SequenceBuilder.build`` raises; LimitExceededError also for a limit of the server.
        ServiceError: no answer.
    """
    settings = BuildSettings.checked(options, "raise", scheme, start, patches)
    return BUILD.call(settings.ask_one(parts))


def build_batch(
    options: Options,
    documents: Sequence[Sequence[Any]],
    errors: Errors = "raise",
    *,
    scheme: str | Scheme | None = None,
    start: int = 0,
    patches: bool = True,
) -> Call[Built]:
    """The sequences of several documents in one call.

    Args:
        documents: the parts of each, as for ``build``.
        errors: "raise" raises the first error, which names ``documents[d].parts[i]``; "return" puts each error where
            its sequence would be.
        scheme: as for ``build``.
        start: id of the first token of every document.
        patches: as for ``build``.

    Returns:
        One entry per document.

    Raises:
        MmposError: as for ``build``; with errors="return" only what is wrong with the whole call.
        ServiceError: no answer.
    """
    return BUILD.call(BuildSettings.checked(options, errors, scheme, start, patches).ask(documents))


@dataclass(frozen=True)
class BuildSettings:
    """How documents are built; makes what asks for them."""

    profile: str | None
    errors: Errors
    scheme: str | Scheme | None
    start: int
    patches: bool
    memory: Lease | None = None

    @classmethod
    def checked(
        cls, options: Options, errors: Errors, scheme: str | Scheme | None, start: int, patches: bool
    ) -> BuildSettings:
        """The settings, or what is wrong with them."""
        one_of("errors", errors, ("raise", "return"))
        start = integer("start", start, minimum=-(2**63), maximum=2**63 - 1)
        return cls(options.profile, errors, scheme, start, boolean("patches", patches), options.memory)

    def ask_one(self, parts: Sequence[Any]) -> Ask[InterleavedSequence]:
        """What asks for one document."""

        def ask(message: Any) -> Callable[[Any], InterleavedSequence]:
            self._put(message)
            sent = put_parts(message.documents.add(), parts, self.memory)
            if sent.error is not None and not sent.names:
                raise sent.error
            self._share(message)

            def decode(answer: Any) -> InterleavedSequence:
                (found,) = _results(answer, 1)
                return _one(found, sent, self.memory)

            return decode

        return ask

    def ask(self, documents: Sequence[Sequence[Any]]) -> Ask[Built]:
        """What asks for several documents."""
        if not isinstance(documents, list | tuple):
            raise InvalidInputError(f"documents: got {type(documents).__name__}, want a list of lists of parts")

        def ask(message: Any) -> Callable[[Any], Built]:
            self._put(message)
            put: list[Sent] = []
            for parts in documents:
                put.append(put_parts(message.documents.add(), parts, self.memory))
                if put[-1].error is not None and self.errors == "raise":
                    break  # those before it may have errors of their own, and the first is raised
            self._share(message)

            def decode(answer: Any) -> Built:
                found = zip(_results(answer, len(put)), put, strict=True)
                return [self._outcome(f"documents[{d}]", *pair) for d, pair in enumerate(found)]

            return decode

        return ask

    def _put(self, message: Any) -> None:
        if self.profile is not None:
            message.profile = self.profile
        if self.scheme is not None:
            put_scheme(message.scheme, self.scheme)
        message.start, message.patches = self.start, self.patches

    def _share(self, message: Any) -> None:
        """Have the answer put into what shared memory the documents have left."""
        if self.memory is not None and self.patches:
            self.memory.answer(message)

    def _outcome(self, name: str, found: Any, sent: Sent) -> InterleavedSequence | MmposError:
        try:
            with naming(name, joint="."):
                return _one(found, sent, self.memory)
        except MmposError as error:
            if self.errors == "raise":
                raise
            return error


def _results(answer: Any, count: int) -> Any:
    if len(answer.results) != count:
        raise ServiceError(f"answer: got {len(answer.results)} results, want {count}")
    return answer.results


def _one(found: Any, sent: Sent, memory: Lease | None) -> InterleavedSequence:
    """The sequence of one document, or its first error raised, both in terms of the parts given."""
    if found.WhichOneof("outcome") == "error":
        error = get_error(found.error)
        of_part = _of_given(error, sent.names)
        raise of_part or sent.error or error
    if sent.error is not None:
        raise sent.error
    with trusting():
        sequence = get_sequence("sequence", found.sequence, sent.hashes, memory)
        offsets, want = sequence.part_offsets, len(sent.given) + 1
        if offsets.size != want:
            raise InvalidInputError(f"sequence.part_offsets: got {offsets.size}, want {want}")
        return replace(sequence, part_offsets=part_offsets(offsets, sent.given))


def _of_given(error: MmposError, names: list[str]) -> MmposError | None:
    """The error of a part sent, if it is one, with the name of what was given: a server sees parts of a Video."""
    part = re.match(r"parts\[(\d+)\]", str(error))
    if part is None or int(part[1]) >= len(names):
        return None
    return type(error)(names[int(part[1])] + str(error)[part.end() :])
