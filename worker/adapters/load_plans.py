"""How an adapter's bytes get from a mapped file into the arena, worked out once for all files that lie alike.

Tenants' adapters are mostly of a few shapes: of one rank, format and choice of modules. Then their files' headers
differ in nothing but the version's digest, and what was worked out for one (where each piece goes, by which records
kernels find it) holds for the next, whose load is one call that copies.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.tensor_file import MAX_HEADER_BYTES
from loraplex.safetensors_header import LENGTH_BYTES
from worker.kernels.tiles import Layout

_KEPT: Final = 64
_VERSION: Final = b'\\"version_digest\\":\\"'
"""Behind it the digest stands in a packed file's header, which holds JSON in a string of JSON."""
_DIGEST_LENGTH: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """What one call does to bring an adapter into its chunks; see `worker.kernels.cpu.copying` for the tables."""

    layout: Layout
    program: NDArray[np.int64]
    constants: NDArray[np.uint8]
    checks: NDArray[np.int64]
    """Numbers of the file that must be sound, as whoever made the plan has seen of the first file."""
    reusable: bool
    """Whether it holds for other files with such a header; not where the first one's values went into it."""


@dataclass(frozen=True, slots=True)
class FileForm:
    """What a packed file says of itself: all that a plan depends on, and the version that it holds."""

    key: bytes
    version_digest: str

    @classmethod
    def read(cls, stream: BinaryIO) -> FileForm | None:
        """Read a file's header; None for one that is not as packed files are, which a reader will explain."""
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            return None
        header = stream.read(length)
        at = header.find(_VERSION) + len(_VERSION)
        digest = header[at : at + _DIGEST_LENGTH]
        if header.count(_VERSION) != 1 or len(digest) != _DIGEST_LENGTH or not digest.isalnum():
            return None
        size = os.fstat(stream.fileno()).st_size
        rest = hashlib.sha256(header[:at] + header[at + _DIGEST_LENGTH :])
        rest.update(b"%d %d" % (length, size))
        return cls(rest.digest(), digest.decode())


class LoadPlans:
    """The plans used last, for all threads that load."""

    def __init__(self) -> None:
        self._plans: OrderedDict[bytes, LoadPlan] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, form: FileForm) -> LoadPlan | None:
        """Return the plan of files of a form, if there is one."""
        with self._lock:
            plan = self._plans.get(form.key)
            if plan is not None:
                self._plans.move_to_end(form.key)
        return plan

    def keep(self, form: FileForm, plan: LoadPlan) -> None:
        """Remember a plan that holds for every file of a form, and forget the one that was not used for longest."""
        with self._lock:
            self._plans[form.key] = plan
            while len(self._plans) > _KEPT:
                self._plans.popitem(last=False)


class MappedFile:
    """A file's bytes at an address, for as long as this lives."""

    def __init__(self, mapped: mmap.mmap | None) -> None:
        """Without a file the address is 0, and nothing is in it."""
        self.bytes: NDArray[np.uint8] = (
            np.zeros(0, np.uint8) if mapped is None else np.frombuffer(mapped, dtype=np.uint8)
        )
        self.address = 0 if mapped is None else int(self.bytes.ctypes.data)

    @classmethod
    def open(cls, path: Path) -> MappedFile:
        """Map a file. Raises OSError, or ValueError where it is empty."""
        with path.open("rb") as stream:
            return cls(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))

    @classmethod
    def behind(cls, arrays: Sequence[NDArray[Any]]) -> MappedFile:
        """Return the file that the first array is a view of."""
        base: Any = arrays[0] if len(arrays) else None
        while isinstance(base, np.ndarray):
            base = base.base
        owner = base.obj if isinstance(base, memoryview) else base
        return cls(owner if isinstance(owner, mmap.mmap) else None)

    def place_of(self, array: NDArray[Any]) -> int | None:
        """Return where in the file an array begins, None where it is no part of it."""
        place: int = array.__array_interface__["data"][0] - self.address
        return place if 0 <= place < len(self.bytes) else None
