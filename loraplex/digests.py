"""What a digest is everywhere in Loraplex: a lower-case hex SHA-256, of bytes or of facts as canonical JSON."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Final

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Tell whether `text` is a lower-case hex SHA-256."""
    return bool(_DIGEST.fullmatch(text))


def canonical_json(facts: Any) -> bytes:
    """Return facts as JSON that is the same for equal facts: keys sorted, no spaces, ASCII only."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def digest_of(facts: Any) -> str:
    """Return the digest of facts."""
    return hashlib.sha256(canonical_json(facts)).hexdigest()
