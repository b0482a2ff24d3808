"""The folders with base weights that this registry may read, told apart by the digests of their manifests. Blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from common.adapter_format.base_weights import BaseWeights
from loraplex.errors import FailedPrecondition, LoraplexError
from loraplex.manifest import read_manifest

log = structlog.get_logger(__name__)


class BaseFolders:
    """Finds a base's weights. A folder is hashed when first needed; `cache_dir` remembers that while its files stay.

    Raises FailedPrecondition for what is no folder; one without a model is looked into again each time.
    """

    def __init__(self, folders: Sequence[Path], cache_dir: Path) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise FailedPrecondition(f"--base-dirs names {folder}, which is not a folder", field="base_dirs")
        self._folders = tuple(folders)
        self._cache_dir = cache_dir
        self._one_at_a_time = threading.Lock()  # hashing the same folder twice at once would only take longer

    def weights(self, base_digest: str, needed_for: str) -> BaseWeights:
        """Return the weights of a base. Raises FailedPrecondition, naming the setting, where no folder holds them."""
        with self._one_at_a_time:
            for folder in self._folders:
                try:
                    if read_manifest(folder, cache_dir=self._cache_dir).digest() == base_digest:
                        return BaseWeights.open(folder)
                except (LoraplexError, OSError) as error:
                    log.warning("registry.base_folder_unusable", folder=str(folder), error=str(error))
        where = ", ".join(map(str, self._folders))
        raise FailedPrecondition(
            f"{needed_for} needs the weights of base {base_digest[:12]}, and "
            + (f"none of the registry's folders holds them ({where})" if where else "this registry has none")
            + "; start it with --base-dirs FOLDER (LORAPLEX_REGISTRY_BASE_DIRS)",
            field="base_dirs",
            base_digest=base_digest,
        )
