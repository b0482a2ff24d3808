from __future__ import annotations

import json

from loraplex.cli.log_tail import last_progress, readable, tail


def test_json_lines_become_readable_and_plain_lines_stay():
    line = json.dumps({"port": 50051, "event": "rpc.failed", "level": "error", "timestamp": "t", "service": "registry"})
    assert readable(line) == "rpc.failed port=50051"
    assert readable("registry: --port: Input should be an integer ") == "registry: --port: Input should be an integer"
    assert readable("17") == "17"


def test_an_exception_is_told_by_type_and_message():
    structured = {"event": "start", "exception": [{"exc_type": "OSError", "exc_value": "no room", "frames": []}]}
    assert readable(json.dumps(structured)) == "start: OSError: no room"
    assert readable(json.dumps({"event": "start", "exception": "Traceback\n  …\nOSError: no room"})) == (
        "start: OSError: no room"
    )


def test_only_the_end_is_read(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {number}\n\n" for number in range(100_000)))
    assert tail(log, 2) == ["line 99998", "line 99999"]


def test_no_log_is_no_lines(tmp_path):
    assert tail(tmp_path / "absent.log") == []


def test_the_last_progress_of_this_start_is_found(tmp_path):
    log = tmp_path / "x.log"
    log.write_text('{"event": "compiling", "progress": "of the start before"}\n')
    begin = log.stat().st_size
    assert last_progress(log, begin) == last_progress(tmp_path / "absent.log", 0) == ""
    with log.open("a") as more:
        more.write('plain\n{"event": "compiling", "progress": "one"}\n{"event": "compiling", "progress": "two"}\n')
        more.write('{"event": "connected"}\n17\n{"progress": 3}\n{"event": "cut o')
    assert last_progress(log, begin) == "two"
