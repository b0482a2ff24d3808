"""API keys: `lpx_<id>_<secret>`. The id is public, the secret has 256 random bits, and only SHA-256 hashes are kept.

A fast hash is enough: 256 random bits cannot be guessed, however many guesses a second.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Final

_KEY: Final = re.compile(r"lpx_([a-z0-9]{4,32})_[A-Za-z0-9]{43,128}")  # 43 of 62 characters can hold 256 bits
_NO_HASH: Final = "0" * 64
EXAMPLE: Final = "lpx_<id>_<secret>"


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made. `text` is the secret."""

    key_id: str
    text: str = field(repr=False)


def make_key() -> NewKey:
    """Return a fresh key."""
    key_id = secrets.token_hex(6)
    return NewKey(key_id, f"lpx_{key_id}_{secrets.token_hex(32)}")


def id_of(text: str) -> str | None:
    """Return the id in a key, or None for what is not formed like one."""
    found = _KEY.fullmatch(text)
    return found[1] if found else None


def hash_of(text: str) -> str:
    """Return what is stored of a key: lower-case hex SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()


def is_key(text: str, key_sha256: str | None) -> bool:
    """Tell whether `text` is the key with this hash; None is the hash of no key and takes the same time."""
    equal = hmac.compare_digest(hash_of(text), key_sha256 or _NO_HASH)
    return equal and key_sha256 is not None
