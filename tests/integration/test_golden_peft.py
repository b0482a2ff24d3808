"""The promise, on the real base: tokens and logits equal to PEFT's, for shipped and random adapters in any mix."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.adapter_format.base import read_linears
from examples.demo_base import ensure_demo_base
from loraplex.manifest import read_manifest
from tests.integration.golden import EngineSession, adapter_active, load_adapters, make_adapter, pack_folder
from tests.unit.worker.model.tiny import first_logits, greedy_logits, relative_error
from worker.engine.plan import BASE_SLOT, SequenceStep
from worker.mailbox import AdapterFile, Sampling
from worker.model.batch import build_step
from worker.model.runner import ModelRunner

pytestmark = [
    pytest.mark.demo_base,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # PEFT uses what transformers deprecates
]

EXAMPLES = Path(__file__).parents[2] / "examples"
SHIPPED = sorted(folder.parent.name for folder in EXAMPLES.glob("adapters/*/adapter_config.json"))
RANDOM = {"random-r4": 4, "random-r64": 64}
NAMES: list[str | None] = [None, *SHIPPED, *RANDOM]
NUM_TOKENS = 64
GREEDY = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
DEFAULT_PROMPT = "Write three sentences about the sea."
MIN_TOP1_AGREEMENT = 0.95

by_model = pytest.mark.parametrize("name", NAMES, ids=lambda name: name or "base")


@dataclass(frozen=True, slots=True)
class Reference:
    """What PEFT answers in float32."""

    prompt: list[int]
    logits: torch.Tensor
    """[NUM_TOKENS, vocab]: those from which each greedy token was chosen."""

    @property
    def tokens(self) -> list[int]:
        return [int(token) for token in self.logits.argmax(-1)]


@dataclass(frozen=True, slots=True)
class Golden:
    folder: Path
    base_digest: str
    files: dict[str | None, AdapterFile | None]
    references: dict[str | None, Reference]

    def open(self, dtype: str) -> ModelRunner:
        """Open the base with the adapters in the slots that `slot` says."""
        runner = ModelRunner.open(
            self.folder,
            device="cpu",
            dtype=dtype,
            arena_bytes=None,
            max_context_tokens=512,
            max_running_requests=32,
            max_resident_adapters=len(NAMES),
            max_prefill_tokens=256,
            base_digest=self.base_digest,
        )
        free = list(range(runner.total_blocks))  # prompts use the first chunks
        for name, file in self.files.items():
            if file is not None:
                granted = -(-file.artifact_bytes // runner.adapter_chunk_bytes) + 1
                chunk_ids, free = free[-granted:], free[:-granted]
                runner.prepare_adapter(slot_of(name), Path(file.path), tuple(chunk_ids))
        return runner


def slot_of(name: str | None) -> int:
    return BASE_SLOT if name is None else NAMES.index(name) - 1


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """On a busy machine two threads that wait for each other take far longer than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    work = tmp_path_factory.mktemp("golden")
    folder = ensure_demo_base()
    manifest = read_manifest(folder, cache_dir=work)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    folders = {name: EXAMPLES / "adapters" / name for name in SHIPPED}
    for name, rank in RANDOM.items():
        folders[name] = make_adapter(
            model,
            work / name,
            seed=rank,
            strength=0.3 * rank**-0.5,
            r=rank,
            lora_alpha=rank,
            target_modules="all-linear",
        )
    peft = load_adapters(model, folders)
    linears = read_linears(manifest)
    files: dict[str | None, AdapterFile | None] = {None: None}
    for title, adapter in folders.items():
        files[title] = pack_folder(adapter, linears, work / f"{title}.packed")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    references: dict[str | None, Reference] = {}
    for model_name in NAMES:
        message = [{"role": "user", "content": _prompt(model_name)}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        references[model_name] = Reference(prompt, _logits(peft, model_name, prompt))
    return Golden(folder, manifest.digest(), files, references)


@pytest.fixture(scope="module")
def runner(golden: Golden) -> ModelRunner:
    return golden.open("float32")


@pytest.fixture(scope="module")
def engine(golden: Golden) -> Iterator[EngineSession]:
    """A runner of its own, whose adapters the engine loads when requests need them."""
    files, bare = golden.files, Golden(golden.folder, golden.base_digest, {}, {})
    session = EngineSession(bare.open("float32"), max_prefill_tokens=100, max_resident_adapters=len(files))
    yield session
    session.close()


def _prompt(name: str | None) -> str:
    prompts = json.loads((EXAMPLES / "demo_prompts.json").read_text(encoding="utf-8"))
    fitting = [entry["prompt"] for entry in prompts if entry["model"] == name]
    return str(fitting[0]) if fitting else DEFAULT_PROMPT


def _logits(peft: PeftModel, name: str | None, prompt: Sequence[int]) -> torch.Tensor:
    with adapter_active(peft, name):
        return greedy_logits(peft, prompt, NUM_TOKENS)


def test_an_example_adapter_is_there() -> None:
    assert SHIPPED


def test_the_references_tell_the_models_apart(golden: Golden) -> None:
    answers = [tuple(reference.tokens) for reference in golden.references.values()]
    assert len(set(answers)) == len(NAMES)
    for reference in golden.references.values():
        assert len(set(reference.tokens)) > 8, "an answer that repeats itself would prove little"


@by_model
def test_first_logits_are_pefts(name: str | None, golden: Golden, runner: ModelRunner) -> None:
    reference = golden.references[name]
    logits = first_logits(runner, reference.prompt, slot_of(name))
    assert relative_error(logits, reference.logits[0]) < 1e-3


@by_model
def test_greedy_tokens_are_pefts_alone(name: str | None, golden: Golden, engine: EngineSession) -> None:
    reference = golden.references[name]
    assert engine.generate([(reference.prompt, golden.files[name], GREEDY)]) == [reference.tokens]


def test_greedy_tokens_are_pefts_all_mixed_in_one_batch(golden: Golden, engine: EngineSession) -> None:
    requests = [(golden.references[name].prompt, golden.files[name], GREEDY) for name in NAMES]
    answers = dict(zip(NAMES, engine.generate(requests), strict=True))
    assert engine.largest_batch == len(NAMES)
    for name in NAMES:
        assert answers[name] == golden.references[name].tokens, name


def test_bfloat16_agrees_on_the_likeliest_token(golden: Golden, record_property: Callable[[str, object], None]) -> None:
    """Fed with the reference's own tokens, so that one disagreement does not breed others."""
    runner = golden.open("bfloat16")
    agreeing = 0
    for name, reference in golden.references.items():
        tokens = [*reference.prompt, *reference.tokens[:-1]]
        blocks = tuple(range(-(-len(tokens) // runner.block_tokens)))
        sequence = SequenceStep(0, tuple(tokens), 0, blocks, slot_of(name), sample=True)
        with torch.inference_mode():
            batch = build_step([sequence], runner._adapters.get).batch
            scores = runner._decoder.scores(batch, np.arange(len(tokens) - NUM_TOKENS, len(tokens)))
        assert scores is not None
        same = int((scores.likeliest == torch.tensor(reference.tokens)).sum())
        agreeing += same
        record_property(f"bfloat16 top-1 agreement, {name or 'base'}", same / NUM_TOKENS)
        print(f"bfloat16 top-1 agreement with float32 PEFT, {name or 'base'}: {same}/{NUM_TOKENS}")  # noqa: T201
    assert agreeing / (NUM_TOKENS * len(NAMES)) >= MIN_TOP1_AGREEMENT
