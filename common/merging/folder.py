"""Writes a merged model as a plain Hugging Face folder: sharded as the base is, whole or not at all.

Streams: no more than one block of rows is in memory beside the adapter. Blocks.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from common.adapter_format.packed import PackedAdapter
from common.adapter_format.parts import widen
from common.disk import is_full, sync_folder
from common.merging.changes import Change, Changes, plan_changes, row_blocks
from common.merging.dtypes import NAMES, STORED, narrow
from loraplex.errors import (
    AlreadyExists,
    BaseMismatch,
    CorruptArtifact,
    InvalidBaseModel,
    NoSpace,
    NotFound,
    UnsupportedAdapter,
)
from loraplex.manifest import MAX_HEADER_BYTES, BaseManifest, weight_files
from loraplex.safetensors_header import TensorEntry, read_header

INDEX: Final = "model.safetensors.index.json"
RECORD: Final = "loraplex_merge.json"
"""What the folder was made of."""

_WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
_BLOCK_VALUES: Final = 2**22
_BLOCK_BYTES: Final = 2**24
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class MergedFolder:
    """What was written."""

    folder: Path
    num_bytes: int
    num_changed: int
    """Tensors that are not the base's."""
    untied: bool
    """Embedding and head were one matrix in the base and are two here."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file to be written: the tensors that stay with where the base has them, and those that change."""

    file: Path
    kept: Mapping[str, TensorEntry]
    changed: tuple[Change, ...]


def write_merged(
    base_dir: Path,
    manifest: BaseManifest,
    adapter: PackedAdapter,
    out: Path,
    *,
    dtype: str | None = None,
    facts: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> MergedFolder:
    """Write base + adapter to the folder `out`, which must not exist; it appears when it is complete.

    `manifest` is the base folder's. `dtype` is float32, bfloat16 or float16, None keeps the base's; `facts` go into
    the record of the merge; `progress` is told bytes written and to be written. Raises BaseMismatch, AlreadyExists,
    NotFound (no such parent), NoSpace, UnsupportedAdapter and AdapterMismatch; then nothing is left.
    """
    if adapter.base_digest != manifest.digest():
        raise BaseMismatch(
            f"the adapter is for base {adapter.base_digest[:12]}, {base_dir} holds {manifest.digest()[:12]}; give the "
            "folder of the base that it was registered on",
            field="base_dir",
            expected=adapter.base_digest,
            actual=manifest.digest(),
        )
    if out.exists() or out.is_symlink():
        raise AlreadyExists(f"{out} exists; a merge writes a new folder only, give another or remove it", field="out")
    if not out.parent.is_dir():
        raise NotFound(f"{out.parent} is not a folder; make it, or give another place", field="out")
    config = manifest.config
    changes = plan_changes(adapter, config, {tensor.name: tensor.shape for tensor in manifest.tensors})
    shards = list(_shards(base_dir, changes))
    writer = _Writer(changes, NAMES[dtype] if dtype else None, _stored(shards), progress)
    total = sum(writer.shard_bytes(shard) for shard in shards)
    _check_room(out.parent, total)
    with _appearing(out) as folder:
        _copy_others(base_dir, folder)
        merged_config = {**changes.config, **_dtype_fields(config, dtype)}
        _write_json(folder / "config.json", merged_config)
        _write_json(
            folder / RECORD,
            {"base_digest": adapter.base_digest, "version_digest": adapter.version_digest, **(facts or {})},
        )
        writer.total_bytes = total
        weight_map: dict[str, str] = {}
        for shard in shards:
            writer.write(shard, folder / shard.file.name)
            weight_map |= dict.fromkeys((*shard.kept, *(change.name for change in shard.changed)), shard.file.name)
        if (base_dir / INDEX).exists():
            size = sum(writer.tensor_bytes(shard) for shard in shards)
            _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return MergedFolder(
        out,
        total,
        len(changes.tensors),
        bool(config.get("tie_word_embeddings")) and not merged_config.get("tie_word_embeddings"),
    )


def _shards(base_dir: Path, changes: Changes) -> Iterator[_Shard]:
    """Yield a shard for each file of the base; tensors that the base lacks go to the last one."""
    files = weight_files(base_dir)
    placed: set[str] = set()
    for index, file in enumerate(files):
        entries = read_header(file, max_header_bytes=MAX_HEADER_BYTES).tensors
        here = [name for name in entries if name in changes.tensors]
        placed.update(here)
        if index == len(files) - 1:
            here += [name for name in changes.tensors if name not in placed]
        kept = {
            name: entry
            for name, entry in entries.items()
            if name not in changes.tensors and name not in changes.dropped
        }
        yield _Shard(file, kept, tuple(changes.tensors[name] for name in here))


def _stored(shards: list[_Shard]) -> dict[str, tuple[Path, TensorEntry]]:
    """Return where each tensor of the base is."""
    return {
        name: (shard.file, entry)
        for shard in shards
        for name, entry in read_header(shard.file, max_header_bytes=MAX_HEADER_BYTES).tensors.items()
    }


class _Writer:
    """Writes shards; knows where the base's tensors are."""

    def __init__(
        self,
        changes: Changes,
        dtype: str | None,
        stored: Mapping[str, tuple[Path, TensorEntry]],
        progress: Callable[[int, int], None],
    ) -> None:
        self._changes, self._dtype, self._stored, self._progress = changes, dtype, stored, progress
        self._done = 0
        self.total_bytes = 0

    def tensor_bytes(self, shard: _Shard) -> int:
        """Bytes of a shard's tensors."""
        return sum(math.prod(shape) * size for _, _, shape, size in self._tensors(shard))

    def shard_bytes(self, shard: _Shard) -> int:
        """Bytes of a shard's file."""
        return len(self._header(shard)) + self.tensor_bytes(shard)

    def write(self, shard: _Shard, file: Path) -> None:
        """Write a shard and bring it to the disk."""
        with file.open("wb") as stream:
            self._write(stream, self._header(shard))
            for name, entry in shard.kept.items():
                self._keep(stream, shard.file, name, entry)
            for change in shard.changed:
                self._change(stream, change)
            stream.flush()
            os.fsync(stream.fileno())

    def _tensors(self, shard: _Shard) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """Yield (name, dtype, shape, bytes of an element) in the order of the data."""
        for name, entry in shard.kept.items():
            dtype = self._dtype if self._dtype and entry.dtype in STORED else entry.dtype
            size = (entry.stop - entry.start) // max(1, math.prod(entry.shape))
            yield name, dtype, entry.shape, STORED[dtype].itemsize if dtype in STORED else size
        for change in shard.changed:
            dtype = self._change_dtype(change)
            yield change.name, dtype, change.shape, STORED[dtype].itemsize

    def _change_dtype(self, change: Change) -> str:
        if self._dtype:
            return self._dtype
        _, entry = self._stored[change.source or f"{change.name.removesuffix('.bias')}.weight"]
        if entry.dtype not in STORED:
            raise InvalidBaseModel(
                f"the base's {change.name} is {entry.dtype}, no float that can be merged", field="base"
            )
        return entry.dtype

    def _header(self, shard: _Shard) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, dtype, shape, size in self._tensors(shard):
            stop = at + math.prod(shape) * size
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
            at = stop
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
        return len(raw).to_bytes(8, "little") + raw

    def _keep(self, stream: BinaryIO, source: Path, name: str, entry: TensorEntry) -> None:
        """Copy a tensor, in another dtype where one is asked for."""
        converted = self._dtype if entry.dtype in STORED and self._dtype != entry.dtype else None
        for at in range(entry.start, entry.stop, _BLOCK_BYTES):
            raw = _read(source, at, min(entry.stop, at + _BLOCK_BYTES))
            if converted is not None:
                rows = widen(np.frombuffer(raw, STORED[entry.dtype]), entry.dtype)
                raw = self._narrow(rows, converted, name).tobytes()
            self._write(stream, raw)

    def _change(self, stream: BinaryIO, change: Change) -> None:
        dtype = self._change_dtype(change)
        width = math.prod(change.shape[1:])
        for start, stop in row_blocks(change.shape[0], width, _BLOCK_VALUES):
            merged = change.rows(self._base_rows(change, start, stop), start)
            self._write(stream, self._narrow(merged, dtype, change.name).tobytes())

    def _base_rows(self, change: Change, start: int, stop: int) -> NDArray[np.float32]:
        shape = (stop - start, *change.shape[1:])
        if change.source is None or change.matrix is not None:
            return np.zeros(shape, np.float32)
        file, entry = self._stored[change.source]
        item = STORED[entry.dtype].itemsize * math.prod(entry.shape[1:])
        raw = _read(file, entry.start + start * item, entry.start + stop * item)
        return widen(np.frombuffer(raw, STORED[entry.dtype]), entry.dtype).reshape(shape)

    def _narrow(self, rows: NDArray[np.float32], dtype: str, name: str) -> NDArray[Any]:
        out = narrow(rows, dtype)
        if dtype == "F16" and not np.isfinite(out).all() and np.isfinite(rows).all():
            raise UnsupportedAdapter(
                f"{name} has values that float16 does not hold; give --dtype bfloat16 or float32", field="dtype"
            )
        return out

    def _write(self, stream: BinaryIO, raw: bytes) -> None:
        stream.write(raw)
        self._done += len(raw)
        self._progress(self._done, self.total_bytes)


def _read(file: Path, start: int, stop: int) -> bytes:
    """Return the bytes of a part of a file. Raises CorruptArtifact where it has become shorter meanwhile."""
    with file.open("rb") as stream:
        stream.seek(start)
        raw = stream.read(stop - start)
    if len(raw) != stop - start:
        raise CorruptArtifact(f"{file} became shorter while it was read", file=file.name)
    return raw


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Give a folder beside `out` to fill, which becomes `out` at the end, or is removed."""
    scratch = out.parent / f".{out.name}.{secrets.token_hex(4)}"
    scratch.mkdir()
    try:
        yield scratch
        sync_folder(scratch)
        scratch.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if is_full(error):
            raise NoSpace(f"the disk of {out.parent} is full; nothing is left of the merge", field="out") from error
        if out.exists():
            raise AlreadyExists(
                f"{out} was made by somebody else meanwhile; give another folder", field="out"
            ) from error
        raise
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise NoSpace(
            f"the merged model takes {needed} bytes, the disk of {folder} has {free} left; give another place",
            field="out",
            needed=needed,
            free=free,
        )


def _copy_others(base_dir: Path, folder: Path) -> None:
    """Copy what is beside the weights: tokenizer, chat template, generation config, licence."""
    for file in sorted(base_dir.iterdir()):
        hidden = file.name.startswith(".")
        weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not hidden and not weights and file.name not in ("config.json", RECORD):
            shutil.copyfile(file, folder / file.name)


def _dtype_fields(config: Mapping[str, Any], dtype: str | None) -> dict[str, str]:
    if dtype is None:
        return {}
    fields = [field for field in ("dtype", "torch_dtype") if field in config]
    return dict.fromkeys(fields or ["torch_dtype"], dtype)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
