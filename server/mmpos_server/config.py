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
from mmpos.rpc.schemes import parameters
from mmpos.schemes import Scheme, get_scheme
from mmpos.sequence.builder import Markers, SequenceBuilder
from mmpos.sequence.tokenizers import ByteTokenizer
from mmpos.support.extras import needed_for

__all__ = [
    "ClientLimits",
    "Concurrency",
    "Connections",
    "Http",
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
    """Most that one request may ask for, refused before work is done; the fields of message Limits."""

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
    """Most that may be queued or running at once; calls beyond are refused at once, items of a stream wait.

    Args:
        max_pending: calls of a method that may come in the same moment; more are cancelled by the transport.
        max_at_work: calls of a method that have come and are not done; further ones are cancelled by the transport.
        max_wait: calls that a call may wait for, before there is a thread for it.
        max_wait_overloaded: calls that it may wait for within a second of a refusal by the same threads.
        max_in_flight: cheap calls.
        max_in_flight_images: calls that decode images.
        max_in_flight_heavy: calls that decode images in processes of their own.
        max_in_flight_rotary: calls that rotate.
        max_in_flight_bytes: bytes of the requests of all these calls, and those in shared memory that they name.
        max_streams: open streams.
        stream_window: items of one stream that are read and not yet answered.
        stream_bytes: bytes of these items and of their answers; a stream that holds so many reads no further.
        max_unsent_bytes: bytes of answers, but those of streams, that clients have not taken yet.
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
    """How many connections there may be, and how long what keeps them open may take.

    Args:
        max_connections: most at once; further ones are closed at once.
        receive_seconds: from the begin of a call until its request, or the first item of its stream, is here.
        send_seconds: from an answer until its client has taken it; then the connection is closed.
        stream_idle_seconds: without an item of a stream, or with an answer of it that is not taken.
        idle_seconds: without a call.
        age_seconds: of a connection, after which its client is asked for a new one.
        grace_seconds: after that, for the calls that it has.
    """

    max_connections: int = Field(default=1000, ge=1, le=2**31 - 1)
    receive_seconds: float = Field(default=30.0, gt=0, le=1e6)
    send_seconds: float = Field(default=120.0, gt=0, le=1e6)
    stream_idle_seconds: float = Field(default=600.0, gt=0, le=1e6)
    idle_seconds: float = Field(default=600.0, gt=0, le=1e6)
    age_seconds: float = Field(default=3600.0, gt=0, le=1e6)
    grace_seconds: float = Field(default=600.0, gt=0, le=1e6)


class ClientLimits(_Settings):
    """Most that one client may have queued or running at once, and ask for in a second; 0 is no limit of its own.

    Calls beyond are refused at once, items of a stream wait. Each process counts by itself. The defaults are half of
    what there is for all.

    Args:
        max_in_flight: calls of any kind, until their answers are taken.
        max_share: of the places of calls that decode images, of those that do so in processes of their own, and of
            those that rotate; one place of each at least.
        max_in_flight_bytes: bytes of the requests of these calls, and those in shared memory that they name; and, of
            an address, those of requests that are on their way.
        max_unsent_bytes: bytes of answers, but those of streams, that the client has not taken yet.
        max_streams: open streams.
        max_watches: open streams of health and of reflection.
        max_connections: of an address; newer ones are closed.
        requests_per_second: calls and items of streams, on average.
        burst: most of them at once after a pause; 0 is those of one second.
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


class Http(_Settings):
    """How the port for HTTP treats connections, where there is one.

    Args:
        max_connections: open ones; beyond, one that is idle makes room, or the new one is closed.
        idle_seconds: how long one may be idle, or take to send the head of a request.
        receive_seconds: how long a body may take to come.
        send_seconds: how long an answer may take to be read.
    """

    max_connections: int = Field(default=1024, ge=1)
    idle_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    receive_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    send_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)


class Pools(_Settings):
    """Threads per kind of work, so that one kind never waits for another.

    Args:
        place: for positions that are too large to be computed between two requests.
        image: for decoding; 0 is one per core.
        heavy: processes for images that may take a core more than half a second or so, which are ended with their call.
        heavy_seconds: of a processor, most that such a process may take for one image.
        rotary: for rotations.
    """

    place: int = Field(default=2, ge=1, le=1024)
    image: int = Field(default=0, ge=0, le=1024)
    heavy: int = Field(default=2, ge=1, le=1024)
    heavy_seconds: int = Field(default=20, ge=1)
    rotary: int = Field(default=1, ge=1, le=1024)


class MarkerSettings(_Settings):
    """The special tokens of images, by name or by id; TOML has no null, so "" says that there is none."""

    begin: str | int | None = "[IMG]"
    end: str | int | None = "[/IMG]"
    patch: str | int = "[PATCH]"
    row: str | int | None = None
    last_row: str | int | None = None

    @field_validator("begin", "end", "row", "last_row")
    @classmethod
    def _none(cls, marker: str | int | None) -> str | int | None:
        return None if marker == "" else marker


class ImageSettings(_Settings):
    """Arguments of ImageProcessor; None is its own default, and for backend: torchvision where it is installed."""

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
    max_decode_bytes: int | None = None
    max_aspect_ratio: int | None = None


class ProfileSettings(_Settings):
    """The settings of one model.

    Args:
        scheme: its name, or a table of name and parameters.
        tokenizer: "bytes", or the path of a tokenizer.json, relative to the file that names it.
        markers: the special tokens of images.
        images: how images become patches.
        rotary: arguments of Rotary; left out, the profile has no rotation.
    """

    scheme: str | dict[str, Any] = "rope-tie"
    tokenizer: str = "bytes"
    markers: MarkerSettings = MarkerSettings()
    images: ImageSettings = ImageSettings()
    rotary: dict[str, Any] | None = None


class ServerConfig(_Settings):
    """Everything a server is told but where it listens; the first profile is the default one."""

    limits: Limits = Limits()
    concurrency: Concurrency = Concurrency()
    connections: Connections = Connections()
    clients: ClientLimits = ClientLimits()
    http: Http = Http()
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
        """The settings of a TOML text; without profiles, those of the embedded file.

        Args:
            text: what the file holds.
            path: where it lies, for messages and relative paths; None is the embedded file.

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
        """Where relative paths start: the file's folder, or the working directory."""
        return Path() if self._path is None else self._path.parent

    @property
    def name(self) -> str:
        """What messages call the file."""
        return _name(self._path)


def load(path: Path | str | None = None) -> ServerConfig:
    """The settings of a file, or with None those of the embedded one.

    Raises:
        InvalidInputError: naming file and field, what came and what was wanted.
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
    """The first mistake as ``field: got X, want Y``."""
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
    """Fields of the table at this place of the file."""
    model: Any = ServerConfig
    for part in location:
        inner = ProfileSettings if model is dict else model.model_fields[part].annotation
        model = dict if part == "profiles" else inner
    return list(model.model_fields)


def _shown(value: Any) -> str:
    text = "a table" if isinstance(value, Mapping) and value else repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


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
