"""What an engine left in the network is taken back, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.engine_traces import parse_tables, undoing

TREE = Path(__file__).resolve().parents[3]
BEFORE = """# Generated
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [12:840]
:MINE - [0:0]
-A INPUT -j MINE
-A MINE -p tcp -m comment --comment "ours, kept" -j ACCEPT
COMMIT
"""
AFTER = """*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [99:12]
:MINE - [0:0]
:DOCKER - [0:0]
:DOCKER-USER - [0:0]
-A INPUT -j MINE
-A FORWARD -j DOCKER-USER
-A FORWARD -o docker0 -m comment --comment "to it" -j DOCKER
-A MINE -p tcp -m comment --comment "ours, kept" -j ACCEPT
-A MINE -j RETURN
-A MINE -j RETURN
-A DOCKER-USER -j DOCKER
COMMIT
*nat
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
COMMIT
"""


def test_only_what_was_not_there_is_taken_back_rules_before_the_chains_they_name():
    assert undoing(parse_tables(BEFORE), parse_tables(AFTER)) == [
        ["-t", "filter", "-D", "FORWARD", "-j", "DOCKER-USER"],
        ["-t", "filter", "-D", "FORWARD", "-o", "docker0", "-m", "comment", "--comment", "to it", "-j", "DOCKER"],
        ["-t", "filter", "-D", "MINE", "-j", "RETURN"],
        ["-t", "filter", "-D", "MINE", "-j", "RETURN"],
        ["-t", "filter", "-F", "DOCKER"],
        ["-t", "filter", "-F", "DOCKER-USER"],
        ["-t", "filter", "-X", "DOCKER"],
        ["-t", "filter", "-X", "DOCKER-USER"],
        ["-t", "filter", "-P", "FORWARD", "ACCEPT"],
        ["-t", "nat", "-D", "POSTROUTING", "-s", "172.17.0.0/16", "!", "-o", "docker0", "-j", "MASQUERADE"],
        ["-t", "nat", "-F", "DOCKER"],
        ["-t", "nat", "-X", "DOCKER"],
    ]


def test_a_policy_of_a_table_that_nobody_had_used_is_taken_back_too():
    assert ["-t", "filter", "-P", "FORWARD", "ACCEPT"] in undoing({}, parse_tables(AFTER))


def test_what_others_took_away_meanwhile_is_not_brought_back():
    assert undoing(parse_tables(AFTER), parse_tables(AFTER)) == []
    assert undoing(parse_tables(AFTER), {}) == []
    assert undoing(parse_tables(AFTER), parse_tables(BEFORE)) == [["-t", "filter", "-P", "FORWARD", "DROP"]]


_MAKES = """
import subprocess
from tools.engine_traces import network_left_as_found

def run(*words): subprocess.run(words, check=True)
def state():
    saved = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    rules = [line.partition(" [")[0] for line in saved.splitlines() if line[:1] in "*:-"]
    return rules, [line.split(":")[1] for line in links.splitlines()]

run("iptables", "-N", "MINE"); run("iptables", "-A", "INPUT", "-j", "MINE"); run("iptables", "-t", "nat", "-N", "OLD")
before = state()
try:
    with network_left_as_found():
        run("iptables", "-N", "DOCKER"); run("iptables", "-N", "DOCKER-2"); run("iptables", "-P", "FORWARD", "DROP")
        run("iptables", "-A", "FORWARD", "-m", "comment", "--comment", "with spaces", "-j", "DOCKER")
        run("iptables", "-A", "DOCKER", "-j", "DOCKER-2"); run("iptables", "-A", "MINE", "-j", "DOCKER-2")
        run("iptables", "-t", "nat", "-A", "POSTROUTING", "-s", "172.17.0.0/16", "-j", "MASQUERADE")
        run("ip", "link", "add", "bridge-made", "type", "bridge")
        assert state() != before
        raise KeyboardInterrupt
except KeyboardInterrupt:
    pass
assert state() == before, (before, state())
print("as found")
"""


def test_a_real_network_is_as_it_was_found():
    needed = ("unshare", "iptables", "iptables-save", "ip")
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in needed):
        pytest.skip(f"needs root and {', '.join(needed)}")
    alone = ["unshare", "--net"]  # a network of its own: the machine's is left alone
    probe = subprocess.run(
        [*alone, "iptables", "-t", "nat", "-N", "PROBE"], capture_output=True, text=True, check=False
    )
    if probe.returncode != 0:
        pytest.skip(f"no network of one's own can be had here: {probe.stderr.strip()}")
    done = subprocess.run(
        [*alone, sys.executable, "-c", _MAKES], cwd=TREE, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("as found\n", 0), done.stderr
