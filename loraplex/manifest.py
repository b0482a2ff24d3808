"""What identifies a base model: its manifest and digest, computed where the weights are.

Owns the definition of the base digest. Reads Hugging Face folders (config.json, safetensors, tokenizer.json); needs
neither torch nor numpy. Knows nothing of services.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from loraplex.digests import digest_of
from loraplex.errors import InvalidBaseModel
from loraplex.safetensors_header import read_header

_VOLATILE_CONFIG: Final = ("_name_or_path", "transformers_version")
MAX_HEADER_BYTES: Final = 100 * 2**20  # the format's own limit
_HASH_STEP: Final = 2**24


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, shape, safetensors dtype and SHA-256 of one weight."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True, slots=True)
class BaseManifest:
    """A base model without its weights; `tensors` are sorted by name."""

    config_json: str
    tokenizer_sha256: str
    chat_template_sha256: str
    tensors: tuple[TensorInfo, ...]

    @property
    def config(self) -> dict[str, Any]:
        """The parsed config.json."""
        parsed: dict[str, Any] = json.loads(self.config_json)
        return parsed

    @property
    def num_parameters(self) -> int:
        """Number of stored weights."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def digest(self) -> str:
        """Lower-case hex SHA-256 over everything that changes an answer, as canonical JSON."""
        config = {key: value for key, value in self.config.items() if key not in _VOLATILE_CONFIG}
        facts = {
            "config": config,
            "tokenizer": self.tokenizer_sha256,
            "chat_template": self.chat_template_sha256,
            "tensors": [[t.name, t.dtype, list(t.shape), t.sha256] for t in self.tensors],
        }
        return digest_of(facts)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a base model folder, sorted. Raises InvalidBaseModel when there are none."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InvalidBaseModel(f"{index}: weight_map must map tensors to files", field="base")
        names = sorted(set(weight_map.values()))
        files = [folder / Path(name).name for name in names]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise InvalidBaseModel(f"{folder}: shards are missing: {', '.join(missing)}", field="base")
        return files
    single = folder / "model.safetensors"
    if not single.exists():
        raise InvalidBaseModel(
            f"{folder} holds no model.safetensors (nor an index of shards); give a Hugging Face folder "
            "with config.json, tokenizer.json and safetensors weights",
            field="base",
        )
    return [single]


def chat_template(folder: Path) -> str | None:
    """Return the folder's chat template: chat_template.jinja, else tokenizer_config.json's, else None."""
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return _read_text(separate)
    config = folder / "tokenizer_config.json"
    if not config.exists():
        return None
    template = _read_object(config).get("chat_template")
    if isinstance(template, list):  # several named templates: the default one
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a base model folder. Raises InvalidBaseModel, naming the file."""
    return _parse_object(file, _read_text(file))


def _parse_object(file: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidBaseModel(f"{file} is not JSON: {error}", field="base") from error
    if not isinstance(value, dict):
        raise InvalidBaseModel(f"{file} is not a JSON object", field="base")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidBaseModel(f"{file} cannot be read: {error}", field="base") from error


def _hash_tensors(file: Path, progress: Callable[[int], None]) -> Iterator[TensorInfo]:
    header = read_header(file, max_header_bytes=MAX_HEADER_BYTES)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for name, entry in sorted(header.tensors.items()):
            digest = hashlib.sha256()
            for at in range(entry.start, entry.stop, _HASH_STEP):
                step = mapped[at : min(entry.stop, at + _HASH_STEP)]
                digest.update(step)
                progress(len(step))
            yield TensorInfo(name, entry.shape, entry.dtype, digest.hexdigest())


def _fingerprint(folder: Path) -> str:
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    files = [folder / name for name in names if (folder / name).exists()] + weight_files(folder)
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def read_manifest(
    folder: Path, *, cache_dir: Path | None = None, progress: Callable[[int], None] = lambda _: None
) -> BaseManifest:
    """Compute the manifest of a base model folder.

    `cache_dir` remembers manifests by path, size and mtime of the files; `progress` is told the bytes hashed.
    Raises InvalidBaseModel or CorruptArtifact, naming the file and the remedy.
    """
    if not folder.is_dir():
        raise InvalidBaseModel(f"{folder} is not a folder", field="base")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise InvalidBaseModel(f"{folder} holds no {name}; give a Hugging Face folder", field="base")
    cached = cache_dir / "manifests" / f"{_fingerprint(folder)}.json" if cache_dir else None
    if cached and cached.exists():
        try:
            return manifest_from_json(cached.read_text())
        except (ValueError, KeyError, TypeError):
            cached.unlink(missing_ok=True)  # a damaged cache entry is only a slow start
    config_json = _read_text(folder / "config.json")
    _parse_object(folder / "config.json", config_json)
    template = chat_template(folder)
    manifest = BaseManifest(
        config_json=config_json,
        tokenizer_sha256=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        chat_template_sha256=hashlib.sha256(template.encode()).hexdigest() if template is not None else "",
        tensors=tuple(
            sorted((t for file in weight_files(folder) for t in _hash_tensors(file, progress)), key=lambda t: t.name)
        ),
    )
    if cached:
        with suppress(OSError):  # a full or read-only disk is only a slow start next time
            _keep(cached, manifest_to_json(manifest))
    return manifest


def _keep(file: Path, text: str) -> None:
    """Write `file` whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".{secrets.token_hex(4)}")
    try:
        scratch.write_text(text)
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def manifest_to_json(manifest: BaseManifest) -> str:
    """Return the manifest as one line, to be kept."""
    return json.dumps(asdict(manifest), separators=(",", ":"))


def manifest_from_json(text: str) -> BaseManifest:
    """Return the manifest that `manifest_to_json` wrote. Raises ValueError, KeyError or TypeError for anything else."""
    raw = json.loads(text)
    tensors = tuple(TensorInfo(t["name"], tuple(t["shape"]), t["dtype"], t["sha256"]) for t in raw["tensors"])
    return BaseManifest(raw["config_json"], raw["tokenizer_sha256"], raw["chat_template_sha256"], tensors)
