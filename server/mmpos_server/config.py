"""Read server settings from a TOML file, check them field by field, and build the model profiles."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from mmpos.errors import InvalidInputError, MmposError, UnsupportedError
from mmpos.images import ImageProcessor
from mmpos.integrations.models import ModelSettings, from_hf_config
from mmpos.rotary import Rotary
from mmpos.rpc.positions import parameters
from mmpos.schemes import RATIONAL_PARAMETERS, Scheme, get_scheme
from mmpos.sequence.builder import Markers, SequenceBuilder
from mmpos.sequence.tokenizers import ByteTokenizer
from mmpos.support.extras import needed_for

__all__ = [
    "ClientLimits",
    "Concurrency",
    "Limits",
    "Profile",
    "ProfileSettings",
    "Profiles",
    "ServerConfig",
    "load",
]


_MIB = 2**20


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Limits(_Settings):
    """Limits for one request, checked before the work begins; the fields are those of the message Limits."""

    request_bytes: int = Field(default=32 * _MIB, ge=1024, le=2**31 - 1)
    message_bytes: int = Field(default=4 * _MIB, ge=1024, le=2**31 - 1)
    response_bytes: int = Field(default=64 * _MIB, ge=1024, le=2**31 - 1)
    documents: int = Field(default=4096, ge=1)
    segments: int = Field(default=262_144, ge=1)
    tokens: int = Field(default=16_777_216, ge=1)
    images: int = Field(default=4096, ge=1)
    pixels: int = Field(default=1_000_000_000, ge=1)


class Concurrency(_Settings):
    """Limits for concurrent work, including waiting calls; further calls are refused at once, but stream items wait.

    Args:
        max_in_flight: maximum number of calls of any kind.
        max_in_flight_images: maximum number of calls that decode images.
        image_threads: number of threads that decode images; 0 starts one per core.
        max_in_flight_bytes: maximum total bytes of requests and of unread answers.
        max_streams: maximum number of open streams.
        max_connections: maximum number of open connections; the server closes further ones immediately.
    """

    max_in_flight: int = Field(default=256, ge=1, le=65_536)
    max_in_flight_images: int = Field(default=64, ge=1)
    image_threads: int = Field(default=0, ge=0, le=1024)
    max_in_flight_bytes: int = Field(default=1024 * _MIB, ge=1024)
    max_streams: int = Field(default=128, ge=1, le=65_536)
    max_connections: int = Field(default=1000, ge=1, le=2**31 - 1)


class ClientLimits(_Settings):
    """Limits for one client; each process counts separately.

    Args:
        max_share: largest share of max_in_flight, max_in_flight_images, max_in_flight_bytes and max_streams, but at
            least one call.
    """

    max_share: float = Field(default=0.5, gt=0, le=1)


class ProfileSettings(_Settings):
    """Settings for one model.

    Args:
        model: folder of a Transformers model, relative to the settings file, from which the other settings are read
            unless they are given here; values in `images` replace only those of the same name. Without a model, the
            settings have the defaults below.
        scheme: name of the scheme, or a table with its name and parameters.
        tokenizer: "bytes", or the path of a tokenizer.json, relative to the settings file.
        markers: arguments of Markers; "" stands for None, since TOML has no null.
        images: arguments of ImageProcessor; the default backend is "pillow".
        rotary: arguments of Rotary; without them, the profile has no rotation.
    """

    model: str | None = None
    scheme: str | dict[str, Any] = "rope-tie"
    tokenizer: str = "bytes"
    markers: dict[str, Any] = Field(default_factory=dict)
    images: dict[str, Any] = Field(default_factory=dict)
    rotary: dict[str, Any] | None = None


class ServerConfig(_Settings):
    """Settings of a server, except its addresses; the first profile is the default."""

    limits: Limits = Limits()
    concurrency: Concurrency = Concurrency()
    clients: ClientLimits = ClientLimits()
    profiles: dict[str, ProfileSettings]
    _path: Path | None = PrivateAttr(default=None)

    @field_validator("profiles")
    @classmethod
    def _check_profiles(cls, profiles: dict[str, ProfileSettings]) -> dict[str, ProfileSettings]:
        if not profiles or "" in profiles:
            raise ValueError("at least one profile, each with a name")
        return profiles

    @classmethod
    def read(cls, text: str, path: Path | None = None) -> Self:
        """Parse settings from TOML; a text without profiles gets the profiles from the embedded file.

        Args:
            text: content of the file.
            path: path of the file, for messages and relative paths; None means the embedded file.

        Raises:
            InvalidInputError: a setting is wrong; the message names the file and the field.
        """
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidInputError(f"{_name(path)}: want valid TOML ({error})") from None
        if path is not None:
            values.setdefault("profiles", tomllib.loads(_embedded())["profiles"])
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            raise InvalidInputError(f"{_name(path)}: {_first(error)}") from None
        config._path = path
        return config

    @property
    def folder(self) -> Path:
        """Folder to which paths are relative: the folder of the file, or the working directory."""
        return Path() if self._path is None else self._path.parent

    @property
    def name(self) -> str:
        """Name of the file in messages."""
        return _name(self._path)


def load(path: Path | str | None = None) -> ServerConfig:
    """Load the settings from a file; None loads the embedded file.

    Raises:
        InvalidInputError: the file or a setting is wrong; the message names the file, field and value.
    """
    if path is None:
        return ServerConfig.read(_embedded())
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{path}: got {error.strerror}, want a file that can be read") from None
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path}: got bytes that are not UTF-8 ({error}), want TOML") from None
    return ServerConfig.read(text, path)


def _embedded() -> str:
    return (resources.files("mmpos_server") / "default.toml").read_text(encoding="utf-8")


def _name(path: Path | None) -> str:
    return "default.toml" if path is None else str(path)


def _first(error: ValidationError) -> str:
    """Format the first error as ``field: got X, want Y``."""
    first = error.errors(include_url=False)[0]
    kind, got, context = first["type"], first["input"], first.get("ctx", {})
    # pydantic adds the members of a union to the location, but they do not occur in the file.
    location = [part for part in first["loc"] if part not in ("str", "int", "dict[str,any]")]
    field = ".".join(map(str, location))
    if kind == "extra_forbidden":
        return f"{field}: got an unknown field, want one of {', '.join(_known(location[:-1]))}"
    if kind == "missing":
        return f"{field}: got none, want a value"
    want = {
        "greater_than_equal": f">= {context.get('ge')}",
        "greater_than": f"> {context.get('gt')}",
        "less_than_equal": f"<= {context.get('le')}",
        "value_error": str(context.get("error")),
        "model_type": "a table",
        "dict_type": "a table",
    }.get(kind, first["msg"].removeprefix("Input should be ").removeprefix("a valid "))
    return f"{field}: got {_shown(got)}, want {want}"


def _known(location: list[int | str]) -> list[str]:
    """Return the fields that the table at a location in the file may have."""
    if not location:
        return list(ServerConfig.model_fields)
    if location[0] == "profiles":
        return list(ProfileSettings.model_fields)
    table: Any = ServerConfig.model_fields[str(location[0])].annotation
    return list(table.model_fields)


def _shown(value: object) -> str:
    text = "a table" if isinstance(value, Mapping) and value else repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


T = TypeVar("T")


@dataclass(frozen=True)
class Profile:
    """The objects that serve one model.

    Args:
        name: name of the profile in requests.
        builder: builder of sequences, with the profile's scheme and markers.
        rotary: rotation of the model, or None.
    """

    name: str
    builder: SequenceBuilder
    rotary: Rotary | None = None


class Profiles:
    """A server's profiles, in the order of its settings file.

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
        """Build all profiles in a server's settings.

        Raises:
            InvalidInputError: a setting is wrong; the message names the file and the field.
            ImportError: a profile needs a package that is not installed; the message names the pip command.
        """
        return cls(_profile(name, settings, config) for name, settings in config.profiles.items())

    def __iter__(self) -> Iterator[Profile]:
        return iter(self._profiles.values())

    def get(self, name: str | None) -> Profile:
        """Return the profile of this name, or the default for None.

        Raises:
            InvalidInputError: no profile has this name.
        """
        if name is None:
            return self.default
        if name not in self._profiles:
            raise InvalidInputError(f"profile: got {name!r}, want one of {', '.join(map(repr, self._profiles))}")
        return self._profiles[name]


def _profile(name: str, settings: ProfileSettings, config: ServerConfig) -> Profile:
    where, chosen = f"{config.name}: profiles.{name}", settings.model_fields_set
    model, file = None, settings.tokenizer
    if settings.model is not None:
        folder = config.folder / settings.model
        model = _named(f"{where}.model", lambda: _model(folder))
        file = file if "tokenizer" in chosen else f"{settings.model}/tokenizer.json"
    tokenizer = _named(f"{where}.tokenizer", lambda: _tokenizer(file, config.folder))
    images = _named(f"{where}.images", lambda: _images(settings.images, model))
    scheme = _named(
        f"{where}.scheme",
        lambda: _scheme(settings.scheme) if model is None or "scheme" in chosen else model.scheme,
    )
    markers = _named(
        f"{where}.markers",
        lambda: _markers(settings.markers) if model is None or "markers" in chosen else model.markers,
    )
    builder = _named(where, lambda: SequenceBuilder(tokenizer, images=images, scheme=scheme, markers=markers))
    rotary = None if model is None else model.rotary
    if settings.rotary is not None:
        values = settings.rotary
        rotary = _named(f"{where}.rotary", lambda: Rotary.from_dict(values))
    return Profile(name, builder, rotary)


def _model(folder: Path) -> ModelSettings:
    """Read the settings of a model from its folder."""
    if not folder.is_dir():
        raise InvalidInputError(f"got {str(folder)!r}, want the folder of a model")
    model = from_hf_config(folder)
    if model.start or model.second_rotary is not None:
        raise UnsupportedError(f"got {model.model_type!r}, want a model with one rotation whose first id is 0")
    return model


def _named(name: str, make: Callable[[], T]) -> T:
    """Call ``make`` and prefix its errors with the name of the setting."""
    try:
        return make()
    except MmposError as error:
        message = str(error).removeprefix("Rotary.from_dict: ").removeprefix(f"{name.rpartition('.')[2]}: ")
        joint = "." if _begins_with_a_field(message) else ": "
        raise InvalidInputError(f"{name}{joint}{message}") from error
    except ImportError as error:
        raise ImportError(f"{name}: {error}", name=error.name) from error


def _begins_with_a_field(message: str) -> bool:
    head, _, rest = message.partition(": ")
    return rest.startswith(("got ", "scheme ")) and head.replace(".", "").isidentifier()


def _tokenizer(setting: str, folder: Path) -> object:
    if setting == "bytes":
        return ByteTokenizer()
    with needed_for(repr(setting), extra="tokenizers"):
        from tokenizers import Tokenizer
    path = folder / setting
    if not path.is_file():
        want = f'want "bytes" or the path of a tokenizer.json; there is no file {path.resolve()}'
        raise InvalidInputError(f"got {setting!r}, {want}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # for a malformed file, the library raises a bare Exception
        raise InvalidInputError(f"got {setting!r}, want a tokenizer.json ({error})") from None


def _markers(settings: Mapping[str, Any]) -> Markers:
    _check_names(Markers, settings)
    arguments: dict[str, Any] = {name: None if marker == "" else marker for name, marker in settings.items()}
    return Markers(**arguments)


def _images(settings: Mapping[str, Any], model: ModelSettings | None) -> ImageProcessor:
    _check_names(ImageProcessor, settings)
    # Use Pillow by default: the first use of torchvision imports torch, which takes seconds and 600 MiB.
    processor = (ImageProcessor if model is None else model.image_processor)(**{"backend": "pillow", **settings})
    # Import the backend now, not while the first client waits.
    processor.process(np.zeros((processor.patch_size, processor.patch_size, 3), np.uint8))
    return processor


def _check_names(kind: type, settings: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(kind)]
    for name in settings.keys() - set(known):
        raise InvalidInputError(f"{name}: got an unknown field, want one of {', '.join(known)}")


def _scheme(setting: str | Mapping[str, Any]) -> Scheme:
    if isinstance(setting, str):
        setting = {"name": setting}
    scheme = type(get_scheme(setting.get("name", "")))
    arguments = {key: value for key, value in setting.items() if key != "name"}
    for key in arguments.keys() - set(parameters(scheme)):
        raise InvalidInputError(f"{key}: scheme {scheme.name!r} has no such parameter")
    for key in arguments.keys() & RATIONAL_PARAMETERS:
        if isinstance(arguments[key], str | float):
            arguments[key] = _rational(key, arguments[key])
    return scheme(**arguments)


def _rational(name: str, value: str | float) -> Fraction:
    """Parse a number, or a fraction such as "25/2", for which TOML has no type."""
    try:
        return Fraction(value)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise InvalidInputError(f'{name}: got {value!r}, want a number or a fraction such as "25/2"') from None
