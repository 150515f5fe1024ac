"""How the turns of a conversation become text: what stands before and after each, and which of it is trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from mmpos.data.documents import Piece
from mmpos.data.formats.fields import Field, check_option
from mmpos.errors import InvalidInputError

__all__ = ["ChatTemplate", "Turn"]


@dataclass(frozen=True)
class Turn:
    """What stands around a turn.

    Args:
        before: text before its content; never trained on.
        after: text after it, which ends the turn; of the assistant's turns it is trained on.
    """

    before: str
    after: str

    def __post_init__(self) -> None:
        check_option("Turn.before", self.before, str)
        check_option("Turn.after", self.after, str)


@dataclass(frozen=True)
class ChatTemplate:
    r"""What stands around the turns of each role. The default is plain text, as any tokenizer can encode it.

    A tokenizer that makes special tokens of their names makes them of the names in a template, too, for instance
    ``ChatTemplate(user=Turn("<|im_start|>user\n", "<|im_end|>\n"), …)``; and of those in the text of a record.

    Args:
        system: of the instructions in front; None refuses the role, here and below.
        developer: of the instructions of a developer, as newer models call them.
        user: of what a person says.
        assistant: of what the model says; only these turns are trained on.
        tool: of what a tool answers.
    """

    system: Turn | None = Turn("System:\n", "\n\n")
    developer: Turn | None = Turn("System:\n", "\n\n")
    user: Turn | None = Turn("User:\n", "\n\n")
    assistant: Turn | None = Turn("Assistant:\n", "\n\n")
    tool: Turn | None = Turn("Tool:\n", "\n\n")

    def __post_init__(self) -> None:
        for role in fields(self):
            turn = getattr(self, role.name)
            if not isinstance(turn, Turn | None):
                raise InvalidInputError(f"{role.name}: got {type(turn).__name__}, want a Turn or None")

    def turn(self, role: Field) -> tuple[str, Turn]:
        """The role and what stands around its turns.

        Raises:
            RecordError: the template has no such role.
        """
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        turns = {name: turn for name, turn in known.items() if turn is not None}
        if not isinstance(role.value, str) or role.value not in turns:
            raise role.error(f"one of {', '.join(turns)}")
        return role.value, turns[role.value]

    def pieces(self, role: Field, parts: Iterable[Any]) -> list[Piece]:
        """The pieces of a turn.

        Args:
            role: who speaks.
            parts: the texts and images that are said.
        """
        name, turn = self.turn(role)
        train = name == "assistant"
        return [Piece(turn.before, train=False), *(Piece(part, train) for part in parts), Piece(turn.after, train)]
