"""The fields of a config, object or mapping, read with their full names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

from mmpos.checks import integer
from mmpos.errors import InvalidInputError
from mmpos.rotary.hf_config import read_field

_PARTS = ("_text_model", "_text", "_vision_encoder", "_vision_model", "_vision")


@dataclass(frozen=True)
class Fields:
    """A config, or a part of one.

    Args:
        name: how messages call it.
        config: an object or a mapping.
    """

    name: str
    config: Any

    def get(self, *names: str) -> Any:
        """The first of these fields that is set."""
        for name in names:
            told = read_field(self.config, name)
            if told is not None:
                return told
        return None

    def part(self, name: str) -> Fields | None:
        """A config inside, if there is one."""
        found = self.get(name)
        return None if found is None else Fields(f"{self.name}.{name}", found)

    @overload
    def integer(self, *names: str, needed: Literal[True], minimum: int = 0) -> int: ...

    @overload
    def integer(self, *names: str, needed: bool = False, minimum: int = 0) -> int | None: ...

    def integer(self, *names: str, needed: bool = False, minimum: int = 0) -> int | None:
        """The first of these integers that is set; a pair counts if both are the same."""
        value = self.get(*names)
        if isinstance(value, list | tuple) and value and all(each == value[0] for each in value):
            value = value[0]
        if value is None and needed:
            raise self.missing(names[0], "an integer")
        return None if value is None else integer(f"{self.name}.{names[0]}", value, minimum=minimum)

    def model_type(self) -> str:
        """The model type, as the config has it."""
        value = self.get("model_type")
        if not isinstance(value, str) or not value:
            raise self.missing("model_type", "the name of a model type")
        return value

    def part_type(self) -> str:
        """The model type without _text or _vision."""
        model = self.model_type()
        for suffix in _PARTS:
            model = model.removesuffix(suffix)
        return model

    def missing(self, name: str, want: str) -> InvalidInputError:
        """The error for a field that is not there."""
        return InvalidInputError(
            f"{self.name}.{name}: got none, want {want}; a config.json may leave out what its class sets, "
            "the config object has it"
        )
