"""Server settings from a TOML file, checked field by field, and the model profiles built from them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from mmpos.errors import InvalidInputError, MmposError
from mmpos.images import ImageProcessor
from mmpos.rotary import Rotary
from mmpos.rpc.positions import parameters
from mmpos.schemes import Scheme, get_scheme
from mmpos.sequence.builder import Markers, SequenceBuilder
from mmpos.sequence.tokenizers import ByteTokenizer
from mmpos.support.extras import needed_for

__all__ = [
    "ClientLimits",
    "Concurrency",
    "Connections",
    "ImageSettings",
    "Limits",
    "Pools",
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
    """Limits of one request, checked before work is done; the fields of message Limits."""

    request_bytes: int = Field(default=32 * _MIB, ge=1024, le=2**31 - 1)
    response_bytes: int = Field(default=64 * _MIB, ge=1024, le=2**31 - 1)
    documents: int = Field(default=4096, ge=1)
    segments: int = Field(default=262_144, ge=1)
    tokens: int = Field(default=16_777_216, ge=1)
    images: int = Field(default=4096, ge=1)
    pixels: int = Field(default=1_000_000_000, ge=1)
    views: int = Field(default=16, ge=1)
    shared_bytes: int = Field(default=1024 * _MIB, ge=1024)


class Concurrency(_Settings):
    """Limits of what is queued or running at once; further calls are refused at once, items of a stream wait.

    Args:
        max_pending: calls of a method that may arrive at the same moment; the transport cancels further ones.
        max_at_work: calls of a method that have arrived and are not done; the transport cancels further ones.
        max_wait: calls that a call may wait for before it gets a thread.
        max_wait_overloaded: the same within a second of a refusal by the same threads.
        max_in_flight: cheap calls.
        max_in_flight_images: calls that decode images.
        max_in_flight_heavy: calls that decode images of more than 16 megapixels.
        max_in_flight_rotary: calls that rotate.
        max_in_flight_bytes: bytes of the requests of all these calls, and those in shared memory that they name.
        max_streams: open streams.
        stream_window: items of one stream that are read and not yet answered.
        stream_bytes: bytes of these items and of their answers; a stream that holds so many stops reading.
        max_unsent_bytes: bytes of answers, except those of streams, that clients have not read yet.
        max_watches: open streams of health and of reflection.
    """

    max_pending: int = Field(default=64, ge=1, le=4096)
    max_at_work: int = Field(default=256, ge=1)
    max_wait: int = Field(default=64, ge=1)
    max_wait_overloaded: int = Field(default=1, ge=1)
    max_in_flight: int = Field(default=1024, ge=1)
    max_in_flight_images: int = Field(default=64, ge=1)
    max_in_flight_heavy: int = Field(default=16, ge=1)
    max_in_flight_rotary: int = Field(default=16, ge=1)
    max_in_flight_bytes: int = Field(default=1024 * _MIB, ge=1024)
    max_streams: int = Field(default=256, ge=1)
    stream_window: int = Field(default=16, ge=1)
    stream_bytes: int = Field(default=32 * _MIB, ge=1)
    max_unsent_bytes: int = Field(default=512 * _MIB, ge=1024)
    max_watches: int = Field(default=1024, ge=1)


class Connections(_Settings):
    """Limits of the number of connections, and of the time that keeps them open.

    Args:
        max_connections: connections at once; further ones are closed at once.
        receive_seconds: from the start of a call until its request, or the first item of its stream, has arrived.
        send_seconds: from an answer until its client has read it; then the connection is closed.
        stream_idle_seconds: time of a stream without an item, or with an answer that is not read.
        idle_seconds: time of a connection without a call.
        age_seconds: age of a connection at which its client is asked for a new one.
        grace_seconds: time after that for the calls of the connection.
    """

    max_connections: int = Field(default=1000, ge=1, le=2**31 - 1)
    receive_seconds: float = Field(default=30.0, gt=0, le=1e6)
    send_seconds: float = Field(default=120.0, gt=0, le=1e6)
    stream_idle_seconds: float = Field(default=600.0, gt=0, le=1e6)
    idle_seconds: float = Field(default=600.0, gt=0, le=1e6)
    age_seconds: float = Field(default=3600.0, gt=0, le=1e6)
    grace_seconds: float = Field(default=600.0, gt=0, le=1e6)


class ClientLimits(_Settings):
    """Limits of one client, at once and per second; 0 is no limit of its own.

    Further calls are refused at once, items of a stream wait. Each process counts by itself. The defaults are half of
    the limits for all clients together.

    Args:
        max_in_flight: calls of any kind, until their answers are read.
        max_share: share of max_in_flight_images, max_in_flight_heavy and max_in_flight_rotary; at least one call of
            each.
        max_in_flight_bytes: bytes of the requests of these calls, and those in shared memory that they name; and, per
            address, those of incomplete requests.
        max_unsent_bytes: bytes of answers, except those of streams, that the client has not read yet.
        max_streams: open streams.
        max_watches: open streams of health and of reflection.
        max_connections: connections of one address; newer ones are closed.
        requests_per_second: calls and items of streams, on average.
        burst: most of these at once after a pause; 0 is those of one second.
    """

    max_in_flight: int = Field(default=512, ge=0)
    max_share: float = Field(default=0.5, ge=0, le=1)
    max_in_flight_bytes: int = Field(default=512 * _MIB, ge=0)
    max_unsent_bytes: int = Field(default=256 * _MIB, ge=0)
    max_streams: int = Field(default=128, ge=0)
    max_watches: int = Field(default=512, ge=0)
    max_connections: int = Field(default=500, ge=0)
    requests_per_second: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    burst: int = Field(default=0, ge=0)


class Pools(_Settings):
    """Number of threads for each kind of work, so that one kind never waits for another.

    Args:
        place: threads for positions that are too large for the event loop.
        image: threads that decode images; 0 is one per core.
        heavy: threads that decode images of more than 16 megapixels, each of which may take much memory.
        rotary: threads for rotations.
    """

    place: int = Field(default=2, ge=1, le=1024)
    image: int = Field(default=0, ge=0, le=1024)
    heavy: int = Field(default=2, ge=1, le=1024)
    rotary: int = Field(default=1, ge=1, le=1024)


class MarkerSettings(_Settings):
    """Special tokens of images and audio, by name or by id; "" is no token, since TOML has no null."""

    begin: str | int | None = "[IMG]"
    end: str | int | None = "[/IMG]"
    patch: str | int = "[PATCH]"
    row: str | int | None = None
    last_row: str | int | None = None
    video: str | int | None = None
    audio: str | int | None = None
    audio_begin: str | int | None = None
    audio_end: str | int | None = None

    @field_validator("begin", "end", "row", "last_row", "video", "audio", "audio_begin", "audio_end")
    @classmethod
    def _none(cls, marker: str | int | None) -> str | int | None:
        return None if marker == "" else marker


class ImageSettings(_Settings):
    """Arguments of ImageProcessor; None is its default, and torchvision as backend where it is installed."""

    backend: str | None = None
    patch_size: int | None = None
    spatial_merge_size: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_tokens: int | None = None
    order: str | None = None
    dtype: str | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    background: list[int] | None = None
    max_source_pixels: int | None = None
    max_aspect_ratio: int | None = None
    small_images: str | None = None


class ProfileSettings(_Settings):
    """Settings of one model.

    Args:
        scheme: name of the scheme, or a table of name and parameters.
        tokenizer: "bytes", or the path of a tokenizer.json, relative to the file that names it.
        markers: special tokens of images and audio.
        images: settings of the image processor.
        rotary: arguments of Rotary; left out, the profile has no rotation.
    """

    scheme: str | dict[str, Any] = "rope-tie"
    tokenizer: str = "bytes"
    markers: MarkerSettings = MarkerSettings()
    images: ImageSettings = ImageSettings()
    rotary: dict[str, Any] | None = None


class ServerConfig(_Settings):
    """Settings of a server, except its addresses; the first profile is the default."""

    limits: Limits = Limits()
    concurrency: Concurrency = Concurrency()
    connections: Connections = Connections()
    clients: ClientLimits = ClientLimits()
    pools: Pools = Pools()
    profiles: dict[str, ProfileSettings]
    _path: Path | None = PrivateAttr(default=None)

    @field_validator("profiles")
    @classmethod
    def _some(cls, profiles: dict[str, ProfileSettings]) -> dict[str, ProfileSettings]:
        if not profiles or "" in profiles:
            raise ValueError("at least one profile, each with a name")
        return profiles

    @classmethod
    def read(cls, text: str, path: Path | None = None) -> Self:
        """Parse the settings of a TOML text; without profiles it gets those of the embedded file.

        Args:
            text: content of the file.
            path: path of the file, for messages and relative paths; None is the embedded file.

        Raises:
            InvalidInputError: naming file and field.
        """
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidInputError(f"{_name(path)}: got broken TOML ({error}), want TOML") from None
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
        """Folder of relative paths: that of the file, or the working directory."""
        return Path() if self._path is None else self._path.parent

    @property
    def name(self) -> str:
        """Name of the file in messages."""
        return _name(self._path)


def load(path: Path | str | None = None) -> ServerConfig:
    """Load the settings of a file, or with None those of the embedded file.

    Raises:
        InvalidInputError: naming file and field, the value and the wanted one.
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
    # The members of a union are part of pydantic's location, not of the file.
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
    """Return the fields of the table at a location of the file."""
    model: Any = ServerConfig
    for part in location:
        inner = ProfileSettings if model is dict else model.model_fields[part].annotation
        model = dict if part == "profiles" else inner
    return list(model.model_fields)


def _shown(value: object) -> str:
    text = "a table" if isinstance(value, Mapping) and value else repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


T = TypeVar("T")


@dataclass(frozen=True)
class Profile:
    """Objects that serve one model.

    Args:
        name: name of the profile in requests.
        builder: builder of sequences, with the scheme and markers of the profile.
        rotary: rotation of the model, if the profile has one.
    """

    name: str
    builder: SequenceBuilder
    rotary: Rotary | None = None


class Profiles:
    """Profiles of a server, in the order of its file.

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
        """Build all profiles of the settings of a server.

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
        """Return the profile of this name; None is the default.

        Raises:
            InvalidInputError: no profile has this name.
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
    """Call make; its errors get the name of the setting in front."""
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


def _tokenizer(setting: str, folder: Path) -> object:
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
    arguments = settings.model_dump(exclude_none=True)
    arguments.setdefault("backend", "torchvision" if find_spec("torchvision") else "pillow")
    processor = ImageProcessor(**arguments)
    # The import of the backend takes seconds: now, and not while the first client waits.
    processor.process(np.zeros((processor.patch_size, processor.patch_size, 3), np.uint8))
    return processor


def _scheme(setting: str | Mapping[str, Any]) -> Scheme:
    if isinstance(setting, str):
        setting = {"name": setting}
    scheme = type(get_scheme(setting.get("name", "")))
    arguments = {key: value for key, value in setting.items() if key != "name"}
    for key in arguments.keys() - set(parameters(scheme)):
        raise InvalidInputError(f"{key}: got a value, want none: {scheme.name!r} has no {key}")
    if isinstance(arguments.get("tokens_per_second"), str | float):
        arguments["tokens_per_second"] = _rational("tokens_per_second", arguments["tokens_per_second"])
    return scheme(**arguments)


def _rational(name: str, value: str | float) -> Fraction:
    """Parse a fraction such as "25/2" or 12.5, which TOML does not have."""
    try:
        return Fraction(value)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise InvalidInputError(f'{name}: got {value!r}, want a number or a fraction such as "25/2"') from None
