"""A base's weights are found by the digest of their folder, and what is missing is told with the setting's name."""

from __future__ import annotations

import numpy as np
import pytest

from loraplex.errors import FailedPrecondition
from loraplex.manifest import read_manifest
from registry.base_folders import BaseFolders
from tests.tiny_base import write_tiny_base


def test_the_folder_with_the_digest_is_read(tmp_path):
    folders = [write_tiny_base(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    (tmp_path / "not yet").mkdir()
    found = BaseFolders([tmp_path / "not yet", *folders], tmp_path / "cache")
    read = []
    for folder in folders:
        weights = found.weights(read_manifest(folder).digest(), "a test")
        blocks = dict(weights.rows("lm_head.weight"))
        assert list(blocks) == [0]
        read.append(blocks[0])
    assert not np.array_equal(read[0], read[1])


def test_weights_that_changed_on_the_disk_are_not_taken_for_the_base(tmp_path):
    folder = write_tiny_base(tmp_path / "base")
    digest = read_manifest(folder).digest()
    found = BaseFolders([folder], tmp_path / "cache")
    found.weights(digest, "a test")
    write_tiny_base(folder, seed=5)
    with pytest.raises(FailedPrecondition, match="none of the registry's folders") as caught:
        found.weights(digest, "DoRA (use_dora)")
    assert caught.value.field == "base_dirs"
    assert caught.value.message.startswith("DoRA (use_dora) needs the weights of base")


def test_without_folders_the_setting_is_named(tmp_path):
    with pytest.raises(FailedPrecondition, match="this registry has none; start it with --base-dirs FOLDER"):
        BaseFolders([], tmp_path).weights("0" * 64, "a test")


def test_a_folder_that_is_not_there_is_told_at_the_start(tmp_path):
    with pytest.raises(FailedPrecondition, match=r"--base-dirs names .*nowhere, which is not a folder"):
        BaseFolders([tmp_path / "nowhere"], tmp_path)
