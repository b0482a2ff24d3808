"""A web server on a real socket whose files misbehave as a test says, and a hub's API on top of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Request:
    """One request as it came; header names are lower case."""

    method: str
    target: str
    headers: dict[str, str]

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path)


@dataclass
class Answer:
    """What a path answers; after `until` bytes of the body it is cut off, or nothing comes any more."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    until: int | None = None
    stalls: bool = False
    announced: int | None = None
    """Another content-length than the body has."""
    ranges: bool = True
    tagged: bool = True


Act = Callable[[Request], Answer]


def _always(answer: Answer) -> Act:
    return lambda _: answer


class FileServer:
    """`acts[path]` are the answers of the next requests for a path, the last of them for all further ones."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.acts: dict[str, list[Act]] = {}
        self.requests: list[Request] = []
        self.stalling = 0
        self.stalled = asyncio.Condition()

    def put(self, path: str, *answers: Answer | bytes) -> None:
        """Let a path answer so, request after request."""
        self.acts[path] = [_always(Answer(answer) if isinstance(answer, bytes) else answer) for answer in answers]

    def put_folder(self, path: str, folder: Path) -> None:
        """Serve an adapter's two files below `path`, which ends in /."""
        for file in folder.iterdir():
            self.put(f"{path}{file.name}", file.read_bytes())

    def asked(self, path: str) -> list[Request]:
        """Requests that came for a path."""
        return [request for request in self.requests if request.path == path]

    async def until_stalling(self, count: int) -> None:
        """Wait until so many answers stand still."""
        async with self.stalled, asyncio.timeout(30):
            await self.stalled.wait_for(lambda: self.stalling >= count)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await self._head(reader):
                self.requests.append(head)
                acts = self.acts.get(head.path, [lambda _: Answer(b"no such file", 404)])
                if not await self._send(head, (acts.pop(0) if len(acts) > 1 else acts[0])(head), writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> Request | None:
        raw = await reader.readuntil(b"\r\n\r\n")
        line, *rest = raw.decode("latin-1").rstrip().split("\r\n")
        method, target, _ = line.split(" ")
        return Request(method, target, {k.lower(): v for k, v in (entry.split(": ", 1) for entry in rest)})

    async def _send(self, request: Request, answer: Answer, writer: asyncio.StreamWriter) -> bool:
        status, body, headers = answer.status, answer.body, dict(answer.headers)
        if status == 200:
            tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            if answer.tagged:
                headers.setdefault("ETag", tag)
            wanted = request.headers.get("range")
            same = request.headers.get("if-range", headers.get("ETag")) == headers.get("ETag")
            if wanted and answer.ranges and same:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                status, body = 206, body[start:]
        headers["Content-Length"] = str(len(body) if answer.announced is None else answer.announced)
        lines = [f"HTTP/1.1 {status} X", *(f"{key}: {value}" for key, value in headers.items())]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        if request.method == "HEAD":
            return True
        writer.write(body if answer.until is None else body[: answer.until])
        await writer.drain()
        if answer.stalls:
            async with self.stalled:
                self.stalling += 1
                self.stalled.notify_all()
            await asyncio.Event().wait()
        return answer.until is None and answer.announced is None


@asynccontextmanager
async def file_server(tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> AsyncIterator[FileServer]:
    """Run a server; at the end of the block its connections are cut."""
    tasks: set[asyncio.Task[None]] = set()
    server = FileServer("")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        tasks.add(task)
        try:
            await server.serve(reader, writer)
        except asyncio.CancelledError:
            writer.close()  # the task is the stream protocol's, which takes no cancellation for an answer
        finally:
            tasks.discard(task)

    listener = await asyncio.start_server(serve, host, 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    server.base = f"{'https' if tls else 'http'}://{host}:{port}"
    try:
        yield server
    finally:
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """A model repository as the Hugging Face hub serves it: weights lie in a store that the hub redirects to."""

    def __init__(self, server: FileServer, store: FileServer, repo: str = "acme/sql") -> None:
        self.server = server
        self.store = store
        self.repo = repo
        self.files: dict[str, bytes] = {}
        self.token = ""
        self.told: dict[str, object] = {}
        """Changes what is told of the repository."""
        for revision in ("", "/revision/main", "/revision/refs%2Fpr%2F1", "/revision/refs/pr/1", f"/revision/{COMMIT}"):
            server.acts[f"/api/models/{repo}{unquote(revision)}"] = [self._info]

    @property
    def endpoint(self) -> str:
        return self.server.base

    def put_folder(self, folder: Path, below: str = "") -> None:
        """Commit an adapter's two files."""
        for file in folder.iterdir():
            self.put(f"{below}{file.name}", file.read_bytes())

    def put(self, path: str, raw: bytes) -> None:
        """Commit a file."""
        self.files[path] = raw
        for revision in (COMMIT, "main"):
            self.server.acts[f"/{self.repo}/resolve/{revision}/{path}"] = [lambda _: self._resolve(path)]
        self.store.put(self.store_path(path), raw)

    def store_path(self, path: str) -> str:
        """Where the store has a file."""
        return f"/store/{hashlib.sha256(self.files[path]).hexdigest()}"

    def _refusal(self, request: Request) -> Answer | None:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return Answer(b"", 401, {"X-Error-Code": "RepoNotFound"})
        return None

    def _info(self, request: Request) -> Answer:
        siblings = []
        for path, raw in self.files.items():
            entry: dict[str, object] = {"rfilename": path, "size": len(raw), "blobId": hashlib.sha1(raw).hexdigest()}
            if self._is_lfs(path):
                entry["lfs"] = {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw), "pointerSize": 134}
            siblings.append(entry)
        told = {
            "id": self.repo,
            "modelId": self.repo,
            "sha": COMMIT,
            "private": False,
            "siblings": siblings,
            "tags": [],
        }
        return self._refusal(request) or Answer(
            json.dumps({**told, **self.told}).encode(), headers={"Content-Type": "application/json"}
        )

    def _resolve(self, path: str) -> Answer:
        raw = self.files[path]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(raw).hexdigest()}"'}
        if not self._is_lfs(path):
            return self._refusal(self.server.requests[-1]) or Answer(raw, headers=headers)
        headers |= {"X-Linked-Size": str(len(raw)), "X-Linked-ETag": f'"{hashlib.sha256(raw).hexdigest()}"'}
        headers["Location"] = f"{self.store.base}{self.store_path(path)}?signature=secret"
        return self._refusal(self.server.requests[-1]) or Answer(b"", 302, headers)

    def _is_lfs(self, path: str) -> bool:
        return path.endswith(".safetensors")
