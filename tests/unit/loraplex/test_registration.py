from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import grpc
import pytest

from loraplex import errors
from loraplex.errors import InvalidName
from loraplex.peft_folder import read_adapter_folder
from loraplex.registration import MAX_TRIES, PART_BYTES, Upload
from loraplex.registry.v1 import adapter_pb2


@pytest.fixture
def folder(tmp_path, tiny_adapter) -> Path:
    return Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))


def test_the_stream_is_header_then_each_file_with_its_data(folder):
    (folder / "README.md").write_text("not uploaded")
    (folder / "adapter_model.safetensors").write_bytes(b"w" * (2 * PART_BYTES + 3))
    sent: list[int] = []
    upload = Upload(read_adapter_folder(folder), "sql", "tiny", sent.append)
    parts = list(upload.parts(upload.offsets(None)))
    assert [part.WhichOneof("part") for part in parts] == [
        "header", "file_header", "data", "file_header", "data", "data", "data",
    ]  # fmt: skip
    assert (parts[0].header.name, parts[0].header.base_id) == ("sql", "tiny")
    weights = parts[3].file_header
    assert (weights.name, weights.size_bytes) == ("adapter_model.safetensors", 2 * PART_BYTES + 3)
    assert weights.sha256 == hashlib.sha256(b"w" * (2 * PART_BYTES + 3)).hexdigest()
    assert [len(part.data) for part in parts[4:]] == [PART_BYTES, PART_BYTES, 3]
    assert sum(sent) == read_adapter_folder(folder).size_bytes


def test_a_name_that_is_no_text_is_refused(folder):
    with pytest.raises(InvalidName):
        Upload(read_adapter_folder(folder), "\udc80")


class Failed(grpc.RpcError):
    """A failed call; `error` is what the registry said, None for gRPC's own words."""

    def __init__(self, code: grpc.StatusCode, error: errors.LoraplexError | None = None) -> None:
        self._code = code
        self._error = error

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "Connection reset"

    def trailing_metadata(self):
        details = errors.to_status(self._error).SerializeToString() if self._error else None
        return (("grpc-status-details-bin", details),) if details else ()


LOST = Failed(grpc.StatusCode.UNAVAILABLE)


@pytest.fixture
def upload(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"w" * (2 * PART_BYTES + 3))
    return Upload(read_adapter_folder(folder), "sql")


def test_a_registry_that_was_never_reached_is_not_waited_for(upload):
    assert upload.pause_s(LOST) is None
    list(upload.parts([0, 0]))
    assert upload.pause_s(LOST)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (LOST, True),
        (Failed(grpc.StatusCode.DEADLINE_EXCEEDED), False),  # the client's own deadline
        (Failed(grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded("the upload stood still")), True),
        (Failed(grpc.StatusCode.FAILED_PRECONDITION, errors.FailedPrecondition("x", field="file_header.offset")), True),
        (Failed(grpc.StatusCode.FAILED_PRECONDITION, errors.FailedPrecondition("no base")), False),
        (Failed(grpc.StatusCode.CANCELLED), False),
        (Failed(grpc.StatusCode.INTERNAL), True),  # what gRPC says of a write into a line that is cut
        (Failed(grpc.StatusCode.INTERNAL, errors.LoraplexError("internal error")), False),
        (Failed(grpc.StatusCode.INVALID_ARGUMENT, errors.CorruptArtifact("damaged")), False),
    ],
)
def test_only_what_may_pass_is_tried_again(upload, error, passes):
    list(upload.parts([0, 0]))
    assert (upload.pause_s(error) is not None) is passes


def test_tries_count_as_long_as_nothing_more_is_at_the_registry(upload):
    list(upload.parts([0, 0]))
    assert all(upload.pause_s(LOST) for _ in range(MAX_TRIES - 1))
    assert upload.pause_s(LOST) is None
    list(upload.parts([0, 1000]))
    assert all(upload.pause_s(LOST) for _ in range(MAX_TRIES - 1))
    list(upload.parts([0, 1000]))
    assert upload.pause_s(LOST) is None


def test_a_later_call_goes_on_at_the_offsets_and_ends_the_earlier(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"w" * (2 * PART_BYTES + 3))
    read = read_adapter_folder(folder)
    told: list[int] = []
    upload = Upload(read, "sql", progress=told.append)
    earlier = upload.parts([0, 0])
    for _ in range(6):  # two of its three parts of data, one of which is told
        next(earlier)
    config_bytes = read.files[0].size_bytes
    answer = adapter_pb2.FindUploadResponse(offsets=[config_bytes, PART_BYTES - 5])
    later = list(upload.parts(upload.offsets(answer)))
    assert [(part.file_header.name, part.file_header.offset) for part in later if part.HasField("file_header")] == [
        ("adapter_config.json", config_bytes),
        ("adapter_model.safetensors", PART_BYTES - 5),
    ]
    assert sum(len(part.data) for part in later) == PART_BYTES + 8
    assert list(earlier) == []
    assert min(told) < 0  # of what was handed over, not all had come
    assert sum(told) == read.size_bytes
