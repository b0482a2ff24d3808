"""One engine process and the socket to it: frames in, frames out, and its end told in words."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence

import msgspec

from worker.mailbox import LENGTH_BYTES, MAX_FRAME_BYTES, FromEngine, ToEngine, decode_from_engine, encode


class EngineStartError(Exception):
    """The engine cannot start, and starting it again would not help."""


class LinkClosed(Exception):
    """The engine process closed the mailbox: it has died or is about to."""


class LinkBroken(Exception):
    """What came is no frame of the mailbox."""


class EngineLink:
    """Owns a running engine process until `close`."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: Sequence[str]) -> EngineLink:
        """Run `command --fd N`, where N is the engine's end of the mailbox. Raises EngineStartError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--fd",
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C on a terminal is for the front end, which drains first
                )
        except OSError as error:
            ours.close()
            raise EngineStartError(f"the engine process cannot be started: {error}") from error
        except BaseException:
            ours.close()
            raise
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def unread_bytes(self) -> int:
        """Bytes that were sent and wait in this process for the engine to read."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: ToEngine) -> None:
        """Queue a frame; does nothing once the mailbox is closed, which `receive` tells."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> FromEngine:
        """Return the next message. Raises LinkClosed at the end, LinkBroken on a malformed frame."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            if length > MAX_FRAME_BYTES:
                raise LinkBroken(f"a frame of {length} bytes")
            return decode_from_engine(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise LinkClosed from error
        except msgspec.MsgspecError as error:
            raise LinkBroken(str(error)) from error

    async def exited(self, timeout_s: float) -> bool:
        """Wait for the process's end; returns whether it came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def kill(self) -> None:
        """End the process now."""
        if self._process.returncode is None:
            self._process.kill()

    async def close(self, timeout_s: float) -> str:
        """Close the mailbox, kill the process if it does not end within `timeout_s`; returns how it ended."""
        self._writer.close()
        if not await self.exited(timeout_s):
            self.kill()
        status = await self._process.wait()
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
