"""HOST:PORT as people write it, with IPv6 addresses in brackets."""

from __future__ import annotations


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port, which is not 0. Raises ValueError, saying what is wrong with the text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"{text!r} is not HOST:PORT with a port from 1 to 65535, for example 127.0.0.1:50050")
    if any(character.isspace() or character in ",/" for character in host):
        raise ValueError(f"{text!r} is not HOST:PORT: its host has a space, a comma or a slash")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, as [::1]:50050")
    return host, int(port)
