"""The engine's end of the mailbox: whole messages in, frames out, over one non-blocking Unix stream socket.

The engine's thread waits here and nowhere else; other threads end the wait by `wake`. What is read at once and what
may stand unsent are bounded: a front end that floods is slowed by the socket, one that does not read makes the engine
`congested`, which then computes no step but still takes aborts and notices the end.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from typing import Final

from worker.mailbox import LENGTH_BYTES, MAX_FRAME_BYTES, FromEngine, ToEngine, decode_to_engine, encode

READ_BYTES: Final = 256 * 2**10
MAX_READS: Final = 8
"""Reads per `receive`, so that a flood of messages cannot hold up the running batch."""
MAX_UNSENT_BYTES: Final = 4 * 2**20


class MailboxClosed(Exception):
    """The front end closed its end, or died."""


class MailboxBroken(Exception):
    """The front end sent something that is no frame; nothing after it can be understood."""


class Inbox:
    """Owns the socket from construction to `close`."""

    def __init__(self, mailbox: socket.socket, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        mailbox.setblocking(False)
        self._socket = mailbox
        self._max_frame_bytes = max_frame_bytes
        self._received = bytearray()
        self._unsent = bytearray()
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._wake_send.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wake_receive, selectors.EVENT_READ)

    @property
    def congested(self) -> bool:
        """Whether so much stands unsent that no more should be produced."""
        return len(self._unsent) > MAX_UNSENT_BYTES

    def wake(self) -> None:
        """End a `receive` that waits, or the next one. For any thread; never blocks."""
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody waits any more
            self._wake_send.send(b"w")

    def receive(self, *, timeout_s: float | None) -> list[ToEngine]:
        """Return the messages that came; wait up to `timeout_s` (None: for ever) for one, a wake or room to send.

        Raises MailboxClosed at the end of the stream and MailboxBroken on a frame that is too large or undecodable.
        """
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._wake_receive:
                with contextlib.suppress(BlockingIOError):
                    while self._wake_receive.recv(4096):
                        pass
        self._flush()
        for _ in range(MAX_READS):
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                raise MailboxClosed(str(error)) from error
            if not data:
                raise MailboxClosed("end of stream")
            self._received += data
            if len(data) < READ_BYTES:
                break
        return self._messages()

    def send(self, message: FromEngine) -> None:
        """Send a message as far as the socket takes it; the rest goes out during later calls.

        Raises MailboxClosed when the front end is gone.
        """
        self._unsent += encode(message)
        self._flush()

    def close(self, *, flush_s: float) -> None:
        """Send what stands unsent, waiting for room up to `flush_s` at a time, and close."""
        with contextlib.suppress(MailboxClosed, OSError):
            while self._unsent:
                self._socket.settimeout(flush_s)
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        self._selector.close()
        for end in (self._socket, self._wake_receive, self._wake_send):
            end.close()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                break
            except OSError as error:
                self._unsent.clear()
                raise MailboxClosed(str(error)) from error
            del self._unsent[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if self._selector.get_key(self._socket).events != wanted:
            self._selector.modify(self._socket, wanted)

    def _messages(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        start = 0
        while len(self._received) - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            length = int.from_bytes(self._received[start:body], "little")
            if length > self._max_frame_bytes:
                raise MailboxBroken(f"a frame of {length} bytes exceeds {self._max_frame_bytes}")
            if len(self._received) - body < length:
                break
            try:
                messages.append(decode_to_engine(bytes(self._received[body : body + length])))
            except ValueError as error:  # msgspec's decoding errors are ValueErrors
                raise MailboxBroken(f"a frame of {length} bytes is no message: {error}") from error
            start = body + length
        del self._received[:start]
        return messages
