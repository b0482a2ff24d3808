"""What an engine leaves in the machine's network when it ends: rules, chains, a policy, bridges; and taking it back.

Docker's engine removes none of it. It is told apart by what was there before: what others had made stays, and what an
earlier engine left too. Knows nothing of engines.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_FAMILIES: Final = ("iptables", "ip6tables")
_FORWARDING: Final = Path("/proc/sys/net/ipv4/ip_forward")
_UNTOUCHED: Final = "ACCEPT"
"""The policy of a chain in a table that nobody has used yet, which may not be listed."""
_COMMAND_S: Final = 30.0


@dataclass(slots=True)
class Table:
    """One table: policies by chain ("-" where a chain has none, as those that somebody made), and rules in order."""

    chains: dict[str, str] = field(default_factory=dict)
    rules: list[str] = field(default_factory=list)


def parse_tables(saved: str) -> dict[str, Table]:
    """Return the tables that iptables-save printed."""
    tables: dict[str, Table] = {}
    table = Table()
    for line in saved.splitlines():
        if line.startswith("*"):
            table = tables.setdefault(line[1:].strip(), Table())
        elif line.startswith(":"):
            name, policy = line[1:].split()[:2]
            table.chains[name] = policy
        elif line.startswith("-A "):
            table.rules.append(line)
    return tables


def undoing(before: Mapping[str, Table], after: Mapping[str, Table]) -> list[list[str]]:
    """Return the arguments of the iptables commands, in order, that take back what `after` has beyond `before`.

    Rules in chains that were there go one by one, then the chains that were not, and policies become what they were.
    """
    commands = []
    for name, now in after.items():
        then = before.get(name, Table())
        made = [chain for chain, policy in now.chains.items() if policy == "-" and chain not in then.chains]
        known = Counter(then.rules)
        for rule in now.rules:
            words = shlex.split(rule)
            if known[rule]:
                known[rule] -= 1
            elif words[1] not in made:
                commands.append(["-t", name, "-D", *words[1:]])
        commands += [["-t", name, "-F", chain] for chain in made]
        commands += [["-t", name, "-X", chain] for chain in made]
        commands += [
            ["-t", name, "-P", chain, then.chains.get(chain, _UNTOUCHED)]
            for chain, policy in now.chains.items()
            if policy not in ("-", then.chains.get(chain, _UNTOUCHED))
        ]
    return commands


@contextmanager
def network_left_as_found() -> Iterator[None]:
    """Take back what appears in the machine's network while the block runs, however it ends."""
    tables = {family: _tables(family) for family in _FAMILIES}
    bridges, forwarding = _bridges(), _forwarding()
    try:
        yield
    finally:
        for family, before in tables.items():
            for command in undoing(before, _tables(family)):
                _run(family, "-w", *command)
        for bridge in sorted(_bridges() - bridges):
            _run("ip", "link", "delete", bridge)
        if forwarding == "0" and _forwarding() == "1":
            _FORWARDING.write_text("0\n")


def _tables(family: str) -> dict[str, Table]:
    return parse_tables(_run(f"{family}-save"))


def _bridges() -> set[str]:
    """Return the names of the bridges that are there."""
    lines = _run("ip", "-o", "link", "show", "type", "bridge").splitlines()
    return {line.split(":")[1].strip().partition("@")[0] for line in lines}


def _forwarding() -> str:
    return _FORWARDING.read_text().strip() if _FORWARDING.exists() else ""


def _run(command: str, *words: str) -> str:
    """Return what a command printed; nothing where it is not installed or fails, and then its words are shown."""
    if shutil.which(command) is None:
        return ""
    try:
        done = subprocess.run([command, *words], capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"{command} {' '.join(words)} hangs", flush=True)
        return ""
    if done.returncode != 0:
        print(f"{command} {' '.join(words)}: {done.stderr.strip()}", flush=True)
        return ""
    return done.stdout
