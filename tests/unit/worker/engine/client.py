"""The front end's side of a mailbox, blocking, for tests."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from worker.mailbox import (
    Abort,
    AdapterFile,
    AdapterOnDevice,
    Failure,
    FromEngine,
    Output,
    Sampling,
    Step,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)


class Client:
    def __init__(self, mailbox: socket.socket) -> None:
        mailbox.settimeout(60)
        self.socket = mailbox
        self.received = bytearray()
        self.steps: list[Step] = []
        self.outputs: dict[int, list[Output]] = {}
        self.failures: dict[int, Failure] = {}
        self.adapters: dict[str, AdapterOnDevice] = {}

    def send(self, message: ToEngine) -> None:
        self.socket.sendall(encode(message))

    def submit(
        self, request_id: int, prompt: tuple[int, ...] = (5, 6, 7), adapter: Path | None = None, **sampling: object
    ) -> None:
        file = None if adapter is None else AdapterFile(adapter.name, str(adapter), len(adapter.name))
        sampling.setdefault("max_tokens", 4)
        self.send(Submit(request_id, prompt, Sampling(**sampling), file, "default", time.monotonic()))  # type: ignore[arg-type]

    def abort(self, *request_ids: int) -> None:
        self.send(Abort(request_ids))

    def _exactly(self, count: int) -> bytes:
        while len(self.received) < count:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self.received += data
        taken = bytes(self.received[:count])
        del self.received[:count]
        return taken

    def read(self) -> FromEngine:
        """The next message; raises EOFError at the end and TimeoutError after 60 s of silence."""
        message = decode_from_engine(self._exactly(int.from_bytes(self._exactly(4), "little")))
        if isinstance(message, Step):
            self.steps.append(message)
            self.adapters |= {adapter.artifact_digest: adapter for adapter in message.adapters}
            for digest in message.gone:
                del self.adapters[digest]
            for output in message.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            for failure in message.failures:
                assert failure.request_id not in self.failures
                self.failures[failure.request_id] = failure
        return message

    def read_step(self) -> Step:
        message = self.read()
        assert isinstance(message, Step)
        return message

    def read_until_ended(self, *request_ids: int) -> None:
        while not all(self.ended(request_id) for request_id in request_ids):
            self.read_step()

    def ended(self, request_id: int) -> bool:
        outputs = self.outputs.get(request_id)
        return request_id in self.failures or bool(outputs and outputs[-1].finish)

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.outputs.get(request_id, ()) for token in output.token_ids]
