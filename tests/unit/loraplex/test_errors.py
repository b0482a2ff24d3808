from __future__ import annotations

import re

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from loraplex import errors

ALL = sorted(errors.BY_REASON.items())


@pytest.mark.parametrize(("reason", "cls"), ALL, ids=[reason for reason, _ in ALL])
def test_every_error_survives_the_wire_with_class_message_and_facts(reason, cls):
    error = cls("what happened; what to do", retry_after_s=1.5, field="rank", limit=64)
    back = errors.from_status(errors.to_status(error))
    assert type(back) is cls
    assert (back.message, back.reason, back.retry_after_s) == ("what happened; what to do", reason, 1.5)
    assert back.metadata == {"field": "rank", "limit": "64"}
    assert back.field == "rank"


def tree() -> list[type[errors.LoraplexError]]:
    """The classes of the module; services derive private ones that never leave them."""
    return [cls for cls in errors._subclasses(errors.LoraplexError) if cls.__module__ == errors.__name__]


def test_every_class_has_a_reason_of_its_own():
    classes = tree()
    assert len({cls.reason for cls in classes}) == len(classes)
    assert all(re.fullmatch(r"[A-Z]+(_[A-Z]+)*", cls.reason) for cls in classes)


def test_the_docstring_shows_the_tree_as_it_is():
    drawn = re.findall(r"^\s*[│├└─\s]*([A-Z]\w+)\s+([A-Z_]+)\s+([A-Z_]+)$", errors.__doc__ or "", re.MULTILINE)
    actual = {(cls.__name__, cls.code.name, cls.reason) for cls in tree()}
    assert set(drawn) == actual


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.NOT_FOUND, errors.NotFound),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.ResourceExhausted),
        (grpc.StatusCode.DATA_LOSS, errors.LoraplexError),
    ],
)
def test_a_foreign_status_becomes_the_most_general_class_of_its_code(code, cls):
    error = errors.from_status(status_pb2.Status(code=code.value[0], message="foreign"))
    assert type(error) is cls
    assert (error.message, error.metadata) == ("foreign", {})


def test_details_of_another_domain_and_unknown_details_are_ignored():
    status = status_pb2.Status(code=grpc.StatusCode.NOT_FOUND.value[0], message="m")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="MODEL_NOT_FOUND", domain="elsewhere.example"))
    status.details.append(any_pb2.Any(type_url="type.googleapis.com/no.such.Type", value=b"\xff"))
    assert type(errors.from_status(status)) is errors.NotFound


def test_a_reason_of_a_newer_version_falls_back_to_its_code():
    status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="m")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="BRAND_NEW", domain=errors.DOMAIN))
    assert type(errors.from_status(status)) is errors.Unavailable


def test_without_retry_information_there_is_no_retry_detail():
    status = errors.to_status(errors.QueueFull("full"))
    assert len(status.details) == 1
    assert errors.from_status(status).retry_after_s is None


@pytest.mark.parametrize("text", ["x" * 100_000, "\N{GRINNING FACE}" * 50_000])
def test_no_error_outgrows_the_trailers_it_travels_in(text):
    status = errors.to_status(errors.InvalidParameter(f"role is {text}", field=text))
    assert status.ByteSize() < 2048
    error = errors.from_status(status)
    assert type(error) is errors.InvalidParameter
    assert error.message.startswith("role is ")
    assert error.message.endswith("...")
