"""An engine without processes around it: scheduler and runner in turn, with as many resident adapters as asked for.

What is timed is what an engine does for a step: schedule, execute, update, and the frame for the front end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from bench.template import AdapterTemplate
from loraplex.manifest import read_manifest
from worker.engine.config import EngineConfig
from worker.engine.plan import AdapterLoad
from worker.engine.rates import StepRates
from worker.engine.scheduler import Schedule, Scheduler
from worker.mailbox import AdapterFile, Sampling, Step, Submit, encode
from worker.model.runner import ModelRunner

PROMPT_TOKENS: Final = 16
_ROOM: Final = 1.25  # chunks that an adapter is granted while it loads, per what it needs
_KV_BYTES: Final = 2**28


class InProcessEngine:
    """One base model, `residents` adapters made from a template, and room for all of them."""

    def __init__(self, runner: ModelRunner, config: EngineConfig, template: AdapterTemplate, scratch: Path) -> None:
        self._runner, self._config, self._template, self._scratch = runner, config, template, scratch
        self._scheduler = Scheduler(config, StepRates(1000.0, 100.0))
        self._last_id = 0
        self._live: set[int] = set()
        self.resident: set[str] = set()

    @classmethod
    def open(
        cls,
        base: Path,
        template: AdapterTemplate,
        *,
        residents: int,
        batch: int,
        dtype: str,
        threads: int,
        scratch: Path,
    ) -> Self:
        """Open the base; adapters are loaded by `load`."""
        runner = ModelRunner.open(
            base,
            device="cpu",
            dtype=dtype,
            arena_bytes=_KV_BYTES + int(_ROOM * residents * template.num_bytes),
            max_context_tokens=512,
            max_running_requests=batch,
            max_resident_adapters=residents,
            max_prefill_tokens=batch * PROMPT_TOKENS,
            base_digest=read_manifest(base).digest(),
            threads=threads,
        )
        config = EngineConfig(
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            max_context_tokens=runner.max_context_tokens,
            block_tokens=runner.block_tokens,
            total_blocks=runner.total_blocks,
            max_running_requests=batch,
            max_prefill_tokens=batch * PROMPT_TOKENS,
            max_resident_adapters=residents,
            chunk_bytes=runner.chunk_bytes,
            adapter_chunk_bytes=runner.adapter_chunk_bytes,
        )
        return cls(runner, config, template, scratch)

    def load(self, residents: int) -> None:
        """Load adapters 0 … residents - 1, a batch's worth at a time. Raises RuntimeError when not all can stay."""
        batch = self._config.max_running_requests
        for first in range(0, residents, batch):
            self._submit(range(first, min(first + batch, residents)), prompt_tokens=1, max_tokens=1)
            self._finish()
        if len(self.resident) != residents:
            raise RuntimeError(f"{len(self.resident)} of {residents} adapters are resident; the arena is too small")

    def steps(self, adapters: Sequence[int | None], count: int) -> list[float]:
        """Run one request for each of the adapters (None: the base) and return seconds of `count` decoding steps."""
        self._submit(adapters, max_tokens=count + 2)
        while not self._turn():
            pass  # until all prompts are computed and every request generates
        taken = []
        for _ in range(count):
            started_s = time.perf_counter()
            self._turn()
            taken.append(time.perf_counter() - started_s)
        self._finish()
        return taken

    def _submit(self, adapters: Sequence[int | None], *, max_tokens: int, prompt_tokens: int = PROMPT_TOKENS) -> None:
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for number in adapters:
            self._last_id += 1
            prompt = tuple((self._last_id * 31 + at * 7) % 10_000 + 1000 for at in range(prompt_tokens))
            file = None if number is None else AdapterFile(f"{number:064}", "", self._template.num_bytes)
            failure = self._scheduler.submit(Submit(self._last_id, prompt, sampling, file, "bench", 0.0))
            if failure is not None:
                raise RuntimeError(f"a request was refused: {failure.message}")
            self._live.add(self._last_id)

    def _finish(self) -> None:
        while self._live:
            self._turn()

    def _turn(self) -> bool:
        """Do one step, after what it needs is loaded; returns whether all that live have generated in it."""
        while (schedule := self._schedule()).plan is None:
            pass
        plan = schedule.plan
        result = self._runner.execute(plan)
        outputs = self._scheduler.update(plan, result, 0.1, 0.0)
        changes = self._scheduler.take_adapter_changes()
        encode(Step(plan.step, tuple(outputs), (), self._scheduler.status(), changes.adapters, changes.gone))
        self.resident |= {adapter.artifact_digest for adapter in changes.adapters}
        self.resident -= set(changes.gone)
        all_generate = len(outputs) == len(self._live)
        self._live -= {output.request_id for output in outputs if output.finish}
        return all_generate

    def _schedule(self) -> Schedule:
        schedule = self._scheduler.schedule(0.0)
        for slot in schedule.evicted_slots:
            self._runner.release_adapter(slot)
        for placement in schedule.placements:
            number = int(placement.file.artifact_digest)
            file = self._template.write(number, self._scratch / "adapter.packed")
            load = self._runner.prepare_adapter(placement.slot, file, placement.chunk_ids)
            self._scheduler.adapter_loaded(placement.slot, AdapterLoad(load.device_bytes, load.chunks_used), 0.01, 0.0)
        return schedule
