"""Reports come back as they were stored, and those of older registries are read."""

from __future__ import annotations

import json

from common.adapter_format.load_facts import BY_WEIGHTS, LoadFacts
from registry.reports import PackingReport, decode_report, encode_report

FACTS = LoadFacts(12, 3, ("lm_head.base_layer.weight",), ("DoRA",), BY_WEIGHTS, "a base")
REPORT = PackingReport("int8", {"none": 9, "int8": 5}, (("up", 0.5), ("down", 0.1)), {"none": 0.0, "int4": 0.07}, FACTS)


def test_a_report_comes_back_as_it_was_stored():
    assert decode_report(encode_report(REPORT)) == REPORT
    assert decode_report("") is None


def test_a_report_of_an_older_registry_has_no_facts():
    payload = '{"format":"int8","sizes":{"none":9,"int8":5},"errors":[["up",0.5],["down",0.1]]}'
    assert decode_report(payload) == PackingReport("int8", REPORT.sizes, REPORT.errors)


def test_a_report_of_a_newer_registry_is_read():
    fields = json.loads(encode_report(REPORT))
    fields["facts"]["of_next_year"] = 1
    assert decode_report(json.dumps(fields | {"more": 2})) == REPORT


def test_errors_are_told_by_format_and_nothing_has_none():
    assert REPORT.mean_errors == {"none": 0.0, "int8": 0.3, "int4": 0.07}
    assert PackingReport("none", {}, ()).mean_error == 0
