"""Fields of a Transformers config, object or mapping, with the defaults of its class behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Literal, overload

from mmpos.errors import InvalidInputError
from mmpos.support.checks import integer

__all__ = ["Fields", "class_defaults", "read_field"]


@cache
def class_defaults() -> Mapping[str, Mapping[str, Any]]:
    """The defaults of the config classes of Transformers 5.23 by model type, as far as they are read here.

    ``names`` holds other names of fields, ``parts`` the model types of the configs inside, ``auto_parts`` those that
    hold unless the config inside has a model type, ``part_defaults`` what the configs inside hold unless they say it.
    Model types that rotate have ``rope_theta``, null where their class has none. Made by tests/helpers/hf_classes.py.
    """
    table = json.loads(files(__package__).joinpath("hf_defaults.json").read_text(encoding="utf-8"))
    return MappingProxyType(table)


def read_field(config: Any, name: str) -> Any:
    """A field of an object or a mapping; None where it is not there."""
    try:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    except Exception as error:
        got = f"{type(error).__name__} ({error})"
        raise InvalidInputError(f"{name}: got {got} from the config, want a field that can be read") from error


@dataclass(frozen=True)
class Fields:
    """A config, or a part of one, and what its class sets where a config.json leaves a field out.

    Args:
        name: how messages call it.
        config: an object or a mapping.
        model_type: whose class it is of; "" where nothing says it.
    """

    name: str
    config: Any
    model_type: str

    @classmethod
    def of(cls, config: Any) -> Fields:
        """The fields of a whole config.

        Raises:
            InvalidInputError: the name of a file or of a checkpoint: nothing is read or fetched here.
        """
        if config is None or isinstance(config, str | bytes | PurePath):
            raise InvalidInputError(
                f"config: got {type(config).__name__}, want a config object, or the mapping of a config.json, "
                "json.loads(Path(...).read_text())"
            )
        return cls("config", config, _model_type(config))

    @property
    def defaults(self) -> Mapping[str, Any]:
        """What its class sets; empty for a model type that is not known."""
        return class_defaults().get(self.model_type, {})

    @property
    def parts(self) -> Mapping[str, str]:
        """The configs that its class has inside, and the model type of each unless it says another."""
        return {**self.defaults.get("auto_parts", {}), **self.defaults.get("parts", {})}

    def own(self, *names: str) -> Any:
        """The first of these fields that the config itself sets; None if it sets none."""
        for name in names:
            values = {spelling: read_field(self.config, spelling) for spelling in self._spellings(name)}
            values = {spelling: value for spelling, value in values.items() if value is not None}
            value = next(iter(values.values()), None)
            if len(values) > 1 and any(other != value for other in values.values()):
                got = " and ".join(f"{spelling} {other!r}" for spelling, other in values.items())
                raise InvalidInputError(f"{self.name}.{name}: got {got}, two names of one field, want the same")
            if value is not None:
                return value
        return None

    def get(self, *names: str) -> Any:
        """The first of these fields that is set, by the config or else by its class; a null of the config stays one."""
        value = self.own(*names)
        spellings = [spelling for name in names for spelling in self._spellings(name)]
        if value is not None or any(self._holds(spelling) for spelling in spellings):
            return value
        return next((self.defaults[spelling] for spelling in spellings if spelling in self.defaults), None)

    def size(self, name: str) -> Any:
        """The field, never null where its class has a number: nobody knows what that would mean."""
        value = self.get(name)
        default = next((self.defaults[other] for other in self._spellings(name) if other in self.defaults), None)
        if value is None and default is not None:
            raise InvalidInputError(f"{self.name}.{name}: got null, want a number; left out it is {default}")
        return value

    def part(self, name: str) -> Fields | None:
        """A config inside, if there is one."""
        config = self.own(name)
        if config is None:
            return None
        if isinstance(config, Mapping):
            config = {**self.defaults.get("part_defaults", {}).get(name, {}), **config}
        model = _model_type(config)
        if not model or (isinstance(config, Mapping) and name in self.defaults.get("parts", {})):
            model = self.parts.get(name, model)
        return Fields(f"{self.name}.{name}", config, model)

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

    def missing(self, name: str, want: str) -> InvalidInputError:
        """The error for a field that is not there."""
        return InvalidInputError(f"{self.name}.{name}: got none, want {want}")

    def _spellings(self, name: str) -> list[str]:
        others = self.defaults.get("names", {})
        return [name, others[name]] if name in others else [name]

    def _holds(self, name: str) -> bool:
        return name in self.config if isinstance(self.config, Mapping) else hasattr(self.config, name)


def _model_type(config: Any) -> str:
    model = read_field(config, "model_type")
    return model if isinstance(model, str) else ""
