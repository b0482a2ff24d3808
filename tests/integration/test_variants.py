"""Every kind of adapter that PEFT makes is served as PEFT computes it: alone, and all of a base in one batch.

By the whole path: PEFT's folder is validated and packed as at a registration, and a real engine serves the file on the
CPU's kernels in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from common.adapter_format.base import read_linears
from common.adapter_format.base_weights import BaseWeights
from common.adapter_format.packed import open_packed, pack
from common.adapter_format.quantize import quantize
from common.adapter_format.validate import WEIGHTS_FILE, validate
from loraplex.manifest import read_manifest
from tests.integration.golden import EngineSession
from tests.packed_oracle import packed_logits
from tests.peft_variants import BASES, PROMPTS, VARIANTS, load_base, make_variant, peft_model, write_base
from tests.unit.worker.model.tiny import first_logits, greedy_logits, open_runner, whole_logits
from worker.adapters.outside import outside_of
from worker.mailbox import AdapterFile, Sampling
from worker.model.runner import ModelRunner

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TOLERANCE = 1e-4
"""Of the largest logit."""
NUM_TOKENS = 6
QUANTIZED = frozenset(
    (
        *("mixed_ranks", "dora_biased", "dora_rslora", "lora_bias_biased", "embedding_dora", "head_bias"),
        *("saved_both", "embedding_and_head_tied", "saved_head_lora_embedding", "dora_bf16"),
    )
)
SAMPLING = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Expected:
    """What PEFT computes with one variant, for each of PROMPTS."""

    file: AdapterFile
    first: tuple[torch.Tensor, ...]
    """Logits of the answer's first token."""
    tokens: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A base and all variants that are made on it."""

    folder: Path
    base_digest: str
    plain: tuple[torch.Tensor, ...]
    """The base's own logits of the answer's first token."""
    variants: dict[str, Expected]

    def open_runner(self) -> ModelRunner:
        return open_runner(
            self.folder,
            base_digest=self.base_digest,
            arena_bytes=48 * 2**20,
            max_running_requests=160,
            max_resident_adapters=64,
        )


@pytest.fixture(scope="module", params=BASES)
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("variants")
    base = write_base(request.param, folder / "base")
    linears = read_linears(read_manifest(base))
    variants = {}
    for name, variant in VARIANTS.items():
        if variant.base != request.param:
            continue
        made, file = make_variant(name, base, folder / name), folder / f"{name}.packed"
        adapter = validate(
            (made / "adapter_config.json").read_bytes(), made / WEIGHTS_FILE, linears, lambda _: BaseWeights.open(base)
        )
        digest = pack(adapter, file)
        answers = [greedy_logits(peft_model(base, made), prompt, NUM_TOKENS) for prompt in PROMPTS]
        variants[name] = Expected(
            AdapterFile(digest, str(file), file.stat().st_size, *outside_of(file)),
            tuple(rows[0] for rows in answers),
            tuple(rows.argmax(dim=-1).tolist() for rows in answers),
        )
    model = load_base(base)
    plain = tuple(whole_logits(model, prompt)[-1] for prompt in PROMPTS)
    yield Matrix(base, linears.base_digest, plain, variants)
    torch.set_num_threads(threads)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two rows of logits, by the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


def test_first_logits_are_pefts(matrix: Matrix) -> None:
    runner = matrix.open_runner()
    chunks = tuple(range(1000, runner.total_blocks))
    wrong = {}
    for name, variant in matrix.variants.items():
        runner.prepare_adapter(0, Path(variant.file.path), chunks)
        for prompt, expected, plain in zip(PROMPTS, variant.first, matrix.plain, strict=True):
            assert distance(plain, expected) > 0.01, f"{name} should change something"
            error = distance(first_logits(runner, prompt, 0), expected)
            if error > TOLERANCE:
                wrong[name] = error
        runner.release_adapter(0)
    assert not wrong


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_variants_compute_what_their_numbers_say(matrix: Matrix, quantization: str, tmp_path: Path) -> None:
    runner = matrix.open_runner()
    chunks = tuple(range(1000, runner.total_blocks))
    for name in QUANTIZED & matrix.variants.keys():
        adapter = quantize(open_packed(Path(matrix.variants[name].file.path)), quantization).adapter
        pack(adapter, tmp_path / name)
        runner.prepare_adapter(0, tmp_path / name, chunks)
        for prompt, expected in zip(PROMPTS, packed_logits(matrix.folder, adapter), strict=True):
            assert distance(first_logits(runner, prompt, 0), torch.from_numpy(expected[-1])) < TOLERANCE, name
        runner.release_adapter(0)


def test_greedy_tokens_are_pefts_alone_and_all_in_one_batch(matrix: Matrix) -> None:
    requests = [(prompt, variant.file, SAMPLING) for variant in matrix.variants.values() for prompt in PROMPTS]
    expected = [tokens for variant in matrix.variants.values() for tokens in variant.tokens]
    names = [name for name in matrix.variants for _ in PROMPTS]
    session = EngineSession(
        matrix.open_runner(), max_prefill_tokens=4096, max_resident_adapters=64, max_running_requests=160
    )
    try:
        alone = [session.generate([request])[0] for request in requests]
        mixed = session.generate([*requests, *reversed(requests)])
    finally:
        session.close()
    wrong = {name for name, tokens, wanted in zip(names, alone, expected, strict=True) if tokens != wanted}
    assert not wrong
    assert mixed == [*expected, *reversed(expected)]
    assert session.largest_batch == len(mixed)
