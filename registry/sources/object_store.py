"""s3://bucket/prefix, gs://bucket/prefix, az://container/prefix: a folder of an object store.

Credentials are the registry's own, found as every program finds them: AWS_*, GOOGLE_*, AZURE_* in its environment, or
the identity of the machine or pod that it runs on. Endpoints are its settings'. A client names bucket and prefix only.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, Final

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from registry.sources.source import Opened, forbidden, invalid, not_found, unreachable

SCHEMES: Final = ("s3", "gs", "az")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_CONNECT: Final = timedelta(seconds=10)
_LONGEST: Final = timedelta(days=1)  # of a whole request; whoever fetches has deadlines of his own
_RETRIES: Final[Any] = {"max_retries": 0}
_STORES: Final[Mapping[str, tuple[Callable[..., Any], str]]] = {
    "s3": (S3Store, "endpoint"),
    "gs": (GCSStore, "base_url"),
    "az": (AzureStore, "endpoint"),
}
_SECRET: Final = re.compile(r"\?\S*")


class ObjectFolder:
    """A prefix in a bucket. An object that changes while it is read is read anew."""

    def __init__(self, scheme: str, place: str, endpoint: str | None) -> None:
        """Check the place. Raises InvalidParameter for one without a bucket, or with a path out of its prefix."""
        bucket, _, prefix = place.partition("/")
        segments = [segment for segment in prefix.split("/") if segment]
        if not _BUCKET.fullmatch(bucket) or ".." in bucket:
            raise invalid(f"is not of the form {scheme}://bucket/prefix: the bucket's name is none")
        if any(segment in (".", "..") or not segment.isprintable() for segment in segments):
            raise invalid(f"is not of the form {scheme}://bucket/prefix: the prefix is no plain path")
        self._prefix = "".join(f"{segment}/" for segment in segments)
        self._shown = f"{scheme}://{bucket}/{self._prefix}"
        self._scheme = scheme
        self._bucket = bucket
        self._endpoint = endpoint
        self._store: Any = None

    async def locate(self) -> str:
        """Return bucket and prefix. Raises SourceForbidden where the registry has no usable credentials."""
        make, endpoint_key = _STORES[self._scheme]
        config = {endpoint_key: self._endpoint} if self._endpoint else {}
        client = {
            "allow_http": (self._endpoint or "").startswith("http://"),
            "connect_timeout": _CONNECT,
            "timeout": _LONGEST,
        }
        try:
            self._store = make(self._bucket, config=config, client_options=client, retry_config=_RETRIES)
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise forbidden(self._shown, f"the registry's credentials are of no use: {_in_words(error)}") from error
        return self._shown

    @asynccontextmanager
    async def open(self, name: str, offset: int, stamp: str) -> AsyncIterator[Opened]:
        """Open an object, from an offset if it has not changed since `stamp`."""
        with _typed_failures(self._shown + name):
            found = await self._get(self._prefix + name, offset if stamp else 0, stamp)
            yield Opened(
                aiter(found.stream(min_chunk_size=1)),  # as it comes: what is held back looks like a stall
                offset=found.range[0],
                size_bytes=found.meta["size"],
                stamp=found.meta["e_tag"] or "",
            )

    async def _get(self, path: str, offset: int, stamp: str) -> obstore.GetResult:
        if offset:
            try:
                return await obstore.get_async(
                    self._store, path, options={"range": {"offset": offset}, "if_match": stamp}
                )
            except exceptions.PreconditionError:  # another object is there now
                pass
        return await obstore.get_async(self._store, path)


@contextmanager
def _typed_failures(what: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise not_found(what) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise forbidden(what, "the store does not take the registry's credentials") from error
    except (exceptions.BaseError, ValueError) as error:
        raise unreachable(what, _in_words(error)) from error


def _in_words(error: Exception) -> str:
    """Return the first line of an error, which names the request, without the query in it that may hold a signature."""
    line = _SECRET.sub("", str(error).partition("\n")[0])
    return line if len(line) <= 300 else f"{line[:297]}..."
