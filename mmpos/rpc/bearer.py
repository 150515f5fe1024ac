"""What both sides know of bearer tokens: how one is written, kept and sent, and where that needs no encryption."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from ipaddress import ip_address

AUTHORIZATION = "authorization"
"""Metadata in which a token travels, as "Bearer TOKEN"."""

TOKEN_CHARACTERS = "a-z, A-Z, 0-9 and -._~+/, and = at its end"
"""As errors say it."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
_SCHEME = "bearer "


def is_token(text: str) -> bool:
    """Whether the text has the alphabet of tokens (RFC 6750, section 2.1), which is TOKEN_CHARACTERS."""
    return _TOKEN.fullmatch(text) is not None


def file_version(found: os.stat_result) -> tuple[int, int, int, int]:
    """What changes with a file of tokens.

    By the inode, too: a secret of Kubernetes changes as its symbolic link does, perhaps to a file of the same age.
    """
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def put_token(token: str) -> tuple[str, str]:
    """The pair of metadata that carries a token."""
    return AUTHORIZATION, f"Bearer {token}"


def get_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token of a call; None if there is none, or more than one."""
    values = [value for key, value in metadata if key == AUTHORIZATION]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].lower().startswith(_SCHEME):
        return None
    return values[0][len(_SCHEME) :].strip(" ")


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host, or to who listens there, stays on this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
