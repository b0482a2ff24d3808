"""Framing, waking, ends and bounds of the engine's end of the mailbox."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from worker.engine.inbox import MAX_READS, MAX_UNSENT_BYTES, READ_BYTES, Inbox, MailboxBroken, MailboxClosed
from worker.mailbox import (
    MAX_FRAME_BYTES,
    Abort,
    EngineStatus,
    Failure,
    Sampling,
    Shutdown,
    Step,
    Submit,
    ToEngine,
    encode,
)

STATUS = EngineStatus(0, 0, 0, 1, 1.0, 1.0)
SUBMIT = Submit(7, tuple(range(300)), Sampling(logit_bias=((3, 0.5),)), None, "default", 1.5)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Inbox]]:
    front, back = socket.socketpair()
    inbox = Inbox(back)
    yield front, inbox
    inbox.close(flush_s=0.1)
    front.close()


def test_a_frame_that_comes_byte_by_byte_is_one_message(ends: tuple[socket.socket, Inbox]) -> None:
    front, inbox = ends
    *most, last = encode(SUBMIT)
    for byte in most:
        front.send(bytes([byte]))
        assert inbox.receive(timeout_s=0) == []
    front.send(bytes([last]))
    assert inbox.receive(timeout_s=0) == [SUBMIT]


def test_many_frames_at_once_are_many_messages_in_order(ends: tuple[socket.socket, Inbox]) -> None:
    front, inbox = ends
    messages: list[ToEngine] = [SUBMIT, Abort((1, 2)), Abort(()), Shutdown()]
    half = encode(SUBMIT)
    front.sendall(b"".join(encode(m) for m in messages) + half[:9])
    assert inbox.receive(timeout_s=1) == messages
    front.sendall(half[9:])
    assert inbox.receive(timeout_s=1) == [SUBMIT]


def test_a_frame_larger_than_any_read_arrives_whole(ends: tuple[socket.socket, Inbox]) -> None:
    front, inbox = ends
    large = Submit(1, tuple(range(2**20)), Sampling(), None, "default", 0.0)
    sender = threading.Thread(target=front.sendall, args=(encode(large),))
    sender.start()
    messages: list[object] = []
    while not messages:
        messages += inbox.receive(timeout_s=5)
    sender.join()
    assert messages == [large]


def test_one_receive_reads_a_bounded_amount(ends: tuple[socket.socket, Inbox]) -> None:
    front, inbox = ends
    frame = encode(Submit(1, (70_000,) * 60_000, Sampling(), None, "default", 0.0))
    count = 3 * MAX_READS * READ_BYTES // len(frame)
    sender = threading.Thread(target=front.sendall, args=(frame * count,))
    sender.start()
    got: list[int] = []
    while sum(got) < count:
        got.append(len(inbox.receive(timeout_s=5)))
    sender.join()
    assert max(got) <= MAX_READS * READ_BYTES // len(frame) + 1


@pytest.mark.parametrize("sent", [b"", b"\x05\x00", encode(SUBMIT)[:-1]])
def test_the_end_of_the_stream_is_told_even_within_a_frame(ends: tuple[socket.socket, Inbox], sent: bytes) -> None:
    front, inbox = ends
    front.sendall(sent)
    front.close()
    with pytest.raises(MailboxClosed):  # noqa: PT012 - the bytes before the end may come on their own
        for _ in range(3):
            inbox.receive(timeout_s=1)


def test_an_oversized_frame_is_refused_by_its_length_alone(ends: tuple[socket.socket, Inbox]) -> None:
    front, inbox = ends
    front.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(MailboxBroken, match=str(MAX_FRAME_BYTES + 1)):
        inbox.receive(timeout_s=1)


@pytest.mark.parametrize("body", [b"\xc1", b"\x91\xa5Bogus", b"", b"\x92\xa6Submit\x01"])
def test_a_body_that_is_no_message_is_refused(ends: tuple[socket.socket, Inbox], body: bytes) -> None:
    front, inbox = ends
    front.sendall(len(body).to_bytes(4, "little") + body)
    with pytest.raises(MailboxBroken, match="no message"):
        inbox.receive(timeout_s=1)


def test_a_wake_from_another_thread_ends_the_wait(ends: tuple[socket.socket, Inbox]) -> None:
    _, inbox = ends
    threading.Timer(0.05, inbox.wake).start()
    started = time.monotonic()
    assert inbox.receive(timeout_s=20) == []
    assert time.monotonic() - started < 10


def test_wakes_before_the_wait_are_not_lost_and_end_it_once(ends: tuple[socket.socket, Inbox]) -> None:
    _, inbox = ends
    for _ in range(100_000):  # more than any buffer holds: must not block
        inbox.wake()
    assert inbox.receive(timeout_s=20) == []
    started = time.monotonic()
    assert inbox.receive(timeout_s=0.05) == []
    assert time.monotonic() - started >= 0.04


def test_waking_a_closed_inbox_is_harmless() -> None:
    front, back = socket.socketpair()
    inbox = Inbox(back)
    inbox.close(flush_s=0.1)
    inbox.wake()
    front.close()


def test_a_front_end_that_does_not_read_makes_it_congested_until_it_reads(ends: tuple[socket.socket, Inbox]) -> None:
    front, inbox = ends
    step = Step(1, (), (Failure(1, "INTERNAL", "x" * 100_000),), STATUS)
    sent = 0
    while not inbox.congested:
        inbox.send(step)
        sent += 1
    front.sendall(encode(Abort((1,))))
    assert inbox.receive(timeout_s=1) == [Abort((1,))]  # it still hears
    expected = sent * len(encode(step))
    assert expected > MAX_UNSENT_BYTES
    got = bytearray()
    front.settimeout(0.2)
    while len(got) < expected:
        got += front.recv(2**20)
        inbox.receive(timeout_s=0)
    assert bytes(got) == encode(step) * sent
    assert not inbox.congested


def test_sending_to_a_dead_front_end_is_told(ends: tuple[socket.socket, Inbox]) -> None:
    front, inbox = ends
    front.close()
    with pytest.raises(MailboxClosed):
        inbox.send(Step(1, (), (), STATUS))


def test_close_sends_what_stands_unsent() -> None:
    front, back = socket.socketpair()
    inbox = Inbox(back)
    step = Step(1, (), (Failure(1, "INTERNAL", "x" * 1_000_000),), STATUS)
    inbox.send(step)
    got = bytearray()

    def read() -> None:
        while data := front.recv(2**20):
            got.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    inbox.close(flush_s=60)
    reader.join()
    front.close()
    assert bytes(got) == encode(step)
