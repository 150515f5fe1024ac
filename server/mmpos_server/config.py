"""Read server settings from a TOML file, check them field by field, and build the model profiles."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from mmpos.errors import InvalidInputError, MmposError, UnsupportedError
from mmpos.images import ImageProcessor
from mmpos.integrations.models import ModelSettings, from_hf_config
from mmpos.rotary import Rotary
from mmpos.schemes import NOT_AFFINE, RATIONAL_PARAMETERS, SCHEMES, Scheme, get_scheme
from mmpos.schemes.imported import build_scheme, import_scheme
from mmpos.sequence.builder import Markers, SequenceBuilder
from mmpos.sequence.tokenizers import ByteTokenizer
from mmpos.support.cached import cached_property
from mmpos.support.checks import integer, naming
from mmpos.support.extras import needed_for

__all__ = ["Limits", "Profile", "Profiles", "ServerConfig", "load"]


_MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits for one request, checked before the work begins; the fields are those of the message Limits."""

    request_bytes: int = 16 * _MIB
    message_bytes: int = 4 * _MIB
    response_bytes: int = 64 * _MIB
    documents: int = 4096
    segments: int = 262_144
    tokens: int = 16_777_216
    images: int = 4096
    pixels: int = 1_000_000_000


# The bounds of the numbers in a settings file. With the largest request_bytes, callers can make a process hold 2.7 GiB:
# docs/service-deploy.md, "Memory".
_BOUNDS = {
    "request_bytes": (1024, 64 * _MIB),
    "streams_per_connection": (1, 1024),
    "overload_ms": (1, 60_000),
    "log_sample": (0, 2**31 - 1),
}

_SOURCE_PIXELS = 16_000_000
"""Default of max_source_pixels: a thread that decodes an image of this size takes 300 MiB."""

# The settings of a profile, with their types in TOML; "" in markers stands for None.
_PROFILE: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "scheme": (str, dict),
    "tokenizer": (str,),
    "markers": (dict,),
    "images": (dict,),
    "rotary": (dict,),
}


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server, except its flags; the first profile is the default.

    Args:
        profiles: the table of each profile by name, at least one, as default.toml explains.
        request_bytes: size of the largest request.
        streams_per_connection: maximum number of concurrent calls on a connection; a client's further calls wait.
        overload_ms: the server refuses calls while a call to itself takes longer than this.
        log_sample: one in this number of answered calls is logged; 0 logs none.
        schemes: classes of schemes of your own, as "module:Class", which clients may then name.
        path: the settings file, for messages and relative paths; None means the embedded file.

    Raises:
        InvalidInputError: a number is out of bounds, or a profile has an unknown setting or one of another type.
    """

    profiles: Mapping[str, Mapping[str, Any]]
    request_bytes: int = 16 * _MIB
    streams_per_connection: int = 16
    overload_ms: int = 250
    log_sample: int = 100
    schemes: Sequence[str] = ()
    path: Path | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            integer(name, getattr(self, name), minimum=least, maximum=most)
        _check_type("schemes", self.schemes, (list, tuple))
        for i, scheme in enumerate(self.schemes):
            _check_type(f"schemes[{i}]", scheme, (str,))
        _check_type("profiles", self.profiles, (dict,))
        if not self.profiles or "" in self.profiles:
            raise InvalidInputError("profiles: want at least one, each with a name")
        for profile, table in self.profiles.items():
            _check_type(f"profiles.{profile}", table, (dict,))
            _check_names(_PROFILE, table, f"profiles.{profile}.")
            for name, value in table.items():
                _check_type(f"profiles.{profile}.{name}", value, _PROFILE[name])

    @cached_property
    def limits(self) -> Limits:
        """Limits for one request."""
        return Limits(self.request_bytes, min(Limits.message_bytes, self.request_bytes))

    @property
    def name(self) -> str:
        """Name of the file in messages."""
        return "default.toml" if self.path is None else str(self.path)

    @classmethod
    def read(cls, text: str, path: Path | None = None) -> Self:
        """Parse the content of a file; without profiles, it gets those of the embedded file.

        Raises:
            InvalidInputError: a setting is wrong; the message names the file and the field.
        """
        with naming("default.toml" if path is None else str(path)):
            try:
                values = {"profiles": tomllib.loads(_embedded())["profiles"], **tomllib.loads(text)}
            except tomllib.TOMLDecodeError as error:
                raise InvalidInputError(f"want valid TOML ({error})") from None
            _check_names([*_BOUNDS, "schemes", "profiles"], values)
            return cls(**values, path=path)


def _check_names(known: Iterable[str], values: Mapping[str, object], prefix: str = "") -> None:
    for name in sorted(values.keys() - set(known)):
        raise InvalidInputError(f"{prefix}{name}: got an unknown setting, want one of {', '.join(known)}")


def _check_type(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds):
        want = {str: "text", dict: "a table", list: 'a list of "module:Class"'}
        raise InvalidInputError(
            f"{name}: got {value!r}, want {' or '.join(want[kind] for kind in kinds if kind in want)}"
        )


def load(path: Path | str | None = None) -> ServerConfig:
    """Read the settings from a file; None reads the embedded file.

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
        schemes: the schemes that clients may name.
    """

    def __init__(self, profiles: Iterable[Profile], schemes: Mapping[str, type[Scheme]] = SCHEMES) -> None:
        self._profiles, self.schemes = {profile.name: profile for profile in profiles}, schemes
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
        schemes = _schemes(config)
        return cls((_profile(name, settings, config, schemes) for name, settings in config.profiles.items()), schemes)

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


def _schemes(config: ServerConfig) -> dict[str, type[Scheme]]:
    """Return the schemes of mmpos and those of the settings, by name."""
    schemes = dict(SCHEMES)
    for i, path in enumerate(config.schemes):
        where = f"{config.name}: schemes[{i}]"
        scheme = _named(where, import_scheme, path)
        if scheme.name in schemes or scheme.name in NOT_AFFINE:
            raise InvalidInputError(f"{where}: got {path!r}, but the name {scheme.name!r} is already taken")
        if scheme != type(scheme)():
            raise InvalidInputError(f"{where}: got {path!r}, an object with parameters, want its class")
        schemes[scheme.name] = type(scheme)
    return schemes


def _profile(name: str, table: Mapping[str, Any], config: ServerConfig, schemes: Mapping[str, type[Scheme]]) -> Profile:
    where, folder = f"{config.name}: profiles.{name}", Path() if config.path is None else config.path.parent
    model, file = None, "bytes"
    if "model" in table:
        model, file = _named(f"{where}.model", _model, folder / table["model"]), f"{table['model']}/tokenizer.json"
    tokenizer = _named(f"{where}.tokenizer", _tokenizer, table.get("tokenizer", file), folder)
    images = _named(f"{where}.images", _images, table.get("images", {}), model)
    scheme: str | Scheme = model.scheme if model else "rope-tie"
    if "scheme" in table:
        scheme = _named(f"{where}.scheme", _scheme, table["scheme"], schemes)
    markers = model.markers if model else Markers()
    if "markers" in table:
        markers = _named(f"{where}.markers", _markers, table["markers"])
    builder = _named(where, partial(SequenceBuilder, tokenizer, images=images, scheme=scheme, markers=markers))
    rotary = model.rotary if model else None
    if "rotary" in table:
        rotary = _named(f"{where}.rotary", Rotary.from_dict, table["rotary"])
    return Profile(name, builder, rotary)


def _model(folder: Path) -> ModelSettings:
    """Read the settings of a model from its folder."""
    if not folder.is_dir():
        raise InvalidInputError(f"got {str(folder)!r}, want the folder of a model")
    model = from_hf_config(folder)
    if model.start or model.second_rotary is not None:
        raise UnsupportedError(f"got {model.model_type!r}, want a model with one rotation whose first id is 0")
    return model


def _named(name: str, make: Callable[..., T], *arguments: object) -> T:
    """Call ``make`` and prefix its errors with the name of the setting."""
    try:
        return make(*arguments)
    except MmposError as error:
        message = str(error).removeprefix("Rotary.from_dict: ").removeprefix(f"{name.rpartition('.')[2]}: ")
        head, _, rest = message.partition(": ")
        is_field = rest.startswith("got ") and head.replace(".", "").isidentifier()
        raise InvalidInputError(f"{name}{'.' if is_field else ': '}{message}") from error
    except ImportError as error:
        raise ImportError(f"{name}: {error}", name=error.name) from error


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
    _check_names([field.name for field in fields(Markers)], settings)
    arguments: dict[str, Any] = {name: None if marker == "" else marker for name, marker in settings.items()}
    return Markers(**arguments)


def _images(settings: Mapping[str, Any], model: ModelSettings | None) -> ImageProcessor:
    _check_names([field.name for field in fields(ImageProcessor)], settings)
    # Use Pillow by default: the first use of torchvision imports torch, which takes seconds and 600 MiB.
    defaults = {"backend": "pillow", "max_source_pixels": _SOURCE_PIXELS}
    processor = (ImageProcessor if model is None else model.image_processor)(**{**defaults, **settings})
    # Import the backend now, not while the first client waits.
    processor.process(np.zeros((processor.patch_size, processor.patch_size, 3), np.uint8))
    return processor


def _scheme(setting: str | Mapping[str, Any], schemes: Mapping[str, type[Scheme]]) -> Scheme:
    values: dict[str, Any] = {"name": setting} if isinstance(setting, str) else dict(setting)
    scheme = type(get_scheme(values.pop("name", ""), schemes))
    for key in values.keys() & RATIONAL_PARAMETERS:
        try:  # TOML has no type for a fraction such as "25/2"
            values[key] = Fraction(values[key])
        except (TypeError, ValueError, OverflowError, ZeroDivisionError):
            raise InvalidInputError(f'{key}: got {values[key]!r}, want a number or a fraction such as "25/2"') from None
    return build_scheme(scheme, scheme.name, values)
