"""Profiles: the settings of models, made into the objects that serve them before the server listens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mmpos.errors import InvalidInputError, MmposError
from mmpos.images import ImageProcessor
from mmpos.rotary import Rotary
from mmpos.rpc.positions import parameters
from mmpos.schemes import Scheme, get_scheme
from mmpos.sequence.builder import Markers, SequenceBuilder
from mmpos.sequence.tokenizers import ByteTokenizer
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    from mmpos_server.config import ImageSettings, ProfileSettings, ServerConfig

__all__ = ["Profile", "Profiles"]

T = TypeVar("T")


@dataclass(frozen=True)
class Profile:
    """The settings of one model.

    Args:
        name: what requests call it.
        builder: from parts to sequences; its scheme and markers are the profile's.
        rotary: the model's rotation, if it has one.
    """

    name: str
    builder: SequenceBuilder
    rotary: Rotary | None = None


class Profiles:
    """The profiles of a server, in the order of its file.

    Args:
        profiles: at least one; the first is the default.
    """

    def __init__(self, profiles: Iterable[Profile]) -> None:
        self._profiles = {profile.name: profile for profile in profiles}
        if not self._profiles:
            raise InvalidInputError("profiles: got none, want at least one")
        self.default = next(iter(self))

    @classmethod
    def from_config(cls, config: ServerConfig) -> Profiles:
        """All profiles of a server's settings.

        Raises:
            InvalidInputError: naming file and field.
            ImportError: a profile needs a package that is not installed; the message has the command.
        """
        return cls(_profile(name, settings, config) for name, settings in config.profiles.items())

    def __iter__(self) -> Iterator[Profile]:
        return iter(self._profiles.values())

    def __len__(self) -> int:
        return len(self._profiles)

    def get(self, name: str | None) -> Profile:
        """The profile of this name; None is the default.

        Raises:
            InvalidInputError: there is none of this name.
        """
        if name is None:
            return self.default
        if name not in self._profiles:
            raise InvalidInputError(f"profile: got {name!r}, want one of {', '.join(map(repr, self._profiles))}")
        return self._profiles[name]


def _profile(name: str, settings: ProfileSettings, config: ServerConfig) -> Profile:
    where = f"{config.name}: profiles.{name}"
    tokenizer = _named(f"{where}.tokenizer", lambda: _tokenizer(settings.tokenizer, config.folder))
    images = _named(f"{where}.images", lambda: _images(settings.images))
    scheme = _named(f"{where}.scheme", lambda: _scheme(settings.scheme))
    markers = Markers(**settings.markers.model_dump())
    builder = _named(where, lambda: SequenceBuilder(tokenizer, images=images, scheme=scheme, markers=markers))
    rotary = None
    if settings.rotary is not None:
        values = settings.rotary
        rotary = _named(f"{where}.rotary", lambda: Rotary.from_dict(values))
    return Profile(name, builder, rotary)


def _named(name: str, make: Callable[[], T]) -> T:
    """What make gives; its errors get the name of the setting in front."""
    try:
        return make()
    except MmposError as error:
        said = str(error).removeprefix("Rotary.from_dict: ").removeprefix(f"{name.rpartition('.')[2]}: ")
        joint = "." if _begins_with_a_field(said) else ": "
        raise InvalidInputError(f"{name}{joint}{said}") from error
    except ImportError as error:
        raise ImportError(f"{name}: {error}", name=error.name) from error


def _begins_with_a_field(message: str) -> bool:
    head, colon, _ = message.partition(": got ")
    return bool(colon) and head.replace(".", "").isidentifier()


def _tokenizer(setting: str, folder: Path) -> Any:
    if setting == "bytes":
        return ByteTokenizer()
    with needed_for(repr(setting), extra="tokenizers"):
        from tokenizers import Tokenizer
    path = folder / setting
    if not path.is_file():
        raise InvalidInputError(f'got {setting!r}, want "bytes" or the path of a tokenizer.json')
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception over a broken file
        raise InvalidInputError(f"got {setting!r}, want a tokenizer.json ({error})") from None


def _images(settings: ImageSettings) -> ImageProcessor:
    given = settings.model_dump(exclude_none=True)
    given.setdefault("backend", "torchvision" if find_spec("torchvision") else "pillow")
    processor = ImageProcessor(**given)
    # The backend takes seconds to import: now, and not while the first client waits.
    processor.process(np.zeros((processor.patch_size, processor.patch_size, 3), np.uint8))
    return processor


def _scheme(setting: str | Mapping[str, Any]) -> Scheme:
    if isinstance(setting, str):
        setting = {"name": setting}
    scheme = type(get_scheme(setting.get("name", "")))
    given = {key: value for key, value in setting.items() if key != "name"}
    for key in given.keys() - set(parameters(scheme)):
        raise InvalidInputError(f"{key}: got a value, want none: {scheme.name!r} has no {key}")
    if isinstance(given.get("tokens_per_second"), str | float):
        given["tokens_per_second"] = _rational("tokens_per_second", given["tokens_per_second"])
    return scheme(**given)


def _rational(name: str, value: str | float) -> Fraction:
    """TOML has no fractions: "25/2" or 12.5."""
    try:
        return Fraction(value)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise InvalidInputError(f'{name}: got {value!r}, want a number or a fraction such as "25/2"') from None
