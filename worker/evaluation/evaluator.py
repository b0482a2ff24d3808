"""Evaluations on this worker: at most one at a time, behind all clients' requests, and nothing left of it afterwards.

For each built-in prompt the exact artifact answers greedily, as a request of a tenant of its own whose weight lets all
others go first. Then the engine computes that answer's tokens under both artifacts and compares their next-token
distributions at each position of the answer. So what is measured is where the adapter is used: along its own answers.

A task does it all, and what is held is given back with its end: the place among the worker's requests, the leases on
both files, what is in the engine. It ends with the RPC, its deadline, the worker's drain, or the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from common.adapter_format.packed import open_packed
from common.adapter_format.parts import FORMAT_NONE
from loraplex.errors import (
    CorruptArtifact,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    LoraplexError,
    PromptTooLong,
    QueueFull,
)
from worker.adapters.store import AdapterStore
from worker.adapters.versions import UNREADABLE_FILE, Versions
from worker.admission import Admission
from worker.deadline import time_to_wait
from worker.engine_client import EngineClient
from worker.evaluation import engine_calls
from worker.evaluation.outcome import Outcome, Progress, computed_in, software_version
from worker.evaluation.prompts import built_in_prompts
from worker.evaluation.requests import EvaluationRequest
from worker.evaluation.tally import Tally
from worker.mailbox import AdapterFile, Compare, Compared, Ready, Sampling, Submit, Urgency
from worker.text.chat import Message
from worker.text.model import TextModel

log = structlog.get_logger(__name__)

TENANT: Final = "loraplex/evaluation"
"""No client's: names of tenants have no slash."""
_WEIGHT: Final = 1e-3
"""Against 1 of a client: what is computed for an evaluation counts a thousand times."""
_NUM_AT_ONCE: Final = 4
"""Answers that are generated side by side."""
ANSWER_TOKENS: Final = 64
"""Tokens of an answer at most."""
_DEFAULT_TIMEOUT_S: Final = 600.0
_RETRY_AFTER_S: Final = 10.0


@dataclass(slots=True)
class EvaluationRun:
    """One evaluation. `task` owns all it holds; the RPC reads the rest."""

    request: EvaluationRequest
    total: int = 0
    tally: Tally = field(default_factory=Tally)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: LoraplexError | None = None
    """What whoever still listens is told, where somebody else than its task ended it."""
    task: asyncio.Task[None] | None = None

    def end(self, error: LoraplexError | None = None) -> None:
        """End it, with an error for whoever still listens."""
        if self.task is not None and not self.task.done():
            self.error = self.error or error
            self.task.cancel()


class Evaluator:
    """Measures artifacts on the engine. `versions` is what the worker knows of files."""

    def __init__(self, engine: EngineClient, admission: Admission, store: AdapterStore, versions: Versions) -> None:
        self._engine = engine
        self._admission = admission
        self._store = store
        self._versions = versions
        self._run: EvaluationRun | None = None

    def begin(
        self, request: EvaluationRequest, base_digest: str, text: TextModel, ready: Ready, remaining_s: float | None
    ) -> EvaluationRun:
        """Start an evaluation, which the caller ends (`end`) whatever happens. Raises QueueFull."""
        if self._run is not None:
            raise QueueFull(
                "an evaluation is running on this worker already, and it does one at a time; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        width = min(_NUM_AT_ONCE, ready.max_running_requests)
        ticket = self._admission.admit(width, request.artifact_digest, time.monotonic(), typical=False)
        run = self._run = EvaluationRun(request)
        left_s = _DEFAULT_TIMEOUT_S if remaining_s is None else remaining_s
        work = self._work(run, text, ready, time_to_wait(left_s))
        run.task = asyncio.create_task(work, name=f"evaluation of {request.artifact_digest[:12]}")

        def ended(task: asyncio.Task[None]) -> None:  # even of a task that was cancelled before it began
            ticket.close(time.monotonic())
            self._run = None
            if not task.cancelled():
                task.exception()  # told to the RPC, if there still is one

        run.task.add_done_callback(ended)
        log.info("evaluation.started", artifact=request.artifact_digest[:12], base=base_digest[:12])
        return run

    def cut(self, error: LoraplexError) -> None:
        """End what runs with an error."""
        if self._run is not None:
            self._run.end(error)

    async def events(self, run: EvaluationRun, base_digest: str, ready: Ready) -> AsyncIterator[Progress | Outcome]:
        """Yield progress and then the outcome. Raises the error that ended the evaluation."""
        task = run.task
        if task is None:
            raise ValueError("the evaluation was never begun")
        told = -1
        while not task.done():
            if run.total and told != run.tally.num_prompts:
                told = run.tally.num_prompts
                yield Progress(told, run.total)
            waker = asyncio.create_task(run.changed.wait())
            try:
                await asyncio.wait({task, waker}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waker.cancel()
            run.changed.clear()
        if task.cancelled():
            raise run.error or asyncio.CancelledError
        task.result()
        tally, request = run.tally, run.request
        log.info("evaluation.done", artifact=request.artifact_digest[:12], top1=tally.top1_agreement, kl=tally.mean_kl)
        yield Outcome(
            version_digest=request.version_digest,
            artifact_digest=request.artifact_digest,
            exact_artifact_digest=request.exact_artifact_digest,
            base_digest=base_digest,
            prompt_set=built_in_prompts().version,
            num_prompts=tally.num_prompts,
            num_positions=tally.num_positions,
            top1_agreement=tally.top1_agreement,
            mean_kl=tally.mean_kl,
            max_kl=tally.max_kl,
            worker_version=software_version(),
            device=computed_in(ready),
        )

    async def _work(self, run: EvaluationRun, text: TextModel, ready: Ready, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._measure(run, text, ready)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline passed after {run.tally.num_prompts} of {run.total} prompts: evaluations wait for "
                "clients' requests; give it more time, or try when less is asked of the worker"
            ) from None
        except BaseExceptionGroup as group:
            raise _first(group) from None
        except LoraplexError as error:
            log.info("evaluation.failed", reason=error.reason, why=error.message)
            raise

    async def _measure(self, run: EvaluationRun, text: TextModel, ready: Ready) -> None:
        request = run.request
        async with AsyncExitStack() as held:
            files: list[AdapterFile] = []
            for digest in (request.exact_artifact_digest, request.artifact_digest):
                lease = await self._store.acquire(digest, Urgency.ASKED)
                held.callback(lease.release)
                await self._versions.check(lease.file, request.version_digest)
                files.append(lease.file)
            exact, measured = files
            await _check_exact(exact)
            prompts = await _tokens(built_in_prompts().texts, text, limit=ready.max_context_tokens - ANSWER_TOKENS)
            run.total = len(prompts)
            run.changed.set()
            rest = iter(prompts)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(_NUM_AT_ONCE, ready.max_running_requests)):
                        tasks.create_task(self._compare_all(rest, run, exact, measured))
            except BaseExceptionGroup as group:
                if getattr(_first(group), "reason", "") in UNREADABLE_FILE:
                    for file in files:
                        self._store.distrust(file.artifact_digest)
                raise

    async def _compare_all(
        self, prompts: Iterator[tuple[int, ...]], run: EvaluationRun, exact: AdapterFile, measured: AdapterFile
    ) -> None:
        """Take one prompt after the other that nobody has taken."""
        for prompt in prompts:
            outcome = await self._compare(prompt, exact, measured)
            run.tally.add(outcome.same_top, outcome.kl)
            run.changed.set()

    async def _compare(self, prompt: tuple[int, ...], exact: AdapterFile, measured: AdapterFile) -> Compared:
        def ask(request_id: int) -> Submit:
            sampling = Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS)
            return Submit(request_id, prompt, sampling, exact, TENANT, time.monotonic(), _WEIGHT)

        tokens = await engine_calls.answer(self._engine, ask)

        def compare(request_id: int) -> Compare:
            return Compare(request_id, (*prompt, *tokens[:-1]), len(prompt) - 1, exact, measured, TENANT)

        return await engine_calls.compared(self._engine, compare)


async def _tokens(texts: Iterable[str], text: TextModel, *, limit: int) -> list[tuple[int, ...]]:
    """Return the prompts' tokens, as turns of a user where the base chats. Raises FailedPrecondition if none fits."""
    prompts: list[tuple[int, ...]] = []
    for prompt in texts:
        await asyncio.sleep(0)  # a short text is encoded at once, and streams go on in between
        try:
            if text.has_chat_template:
                prompts.append(await text.encode_chat([Message("user", prompt)], limit=limit))
            else:
                prompts.append(await text.encode_prompt(prompt, limit=limit))
        except PromptTooLong:
            continue
    if not prompts:
        raise FailedPrecondition(
            f"none of the prompts fits this worker's context beside an answer of {ANSWER_TOKENS} tokens; raise "
            "--max-context-tokens or --arena-bytes"
        )
    return prompts


async def _check_exact(file: AdapterFile) -> None:
    """Check what the exact artifact's file says. One that cannot be read passes: the engine tells what is wrong."""
    try:
        adapter = await asyncio.to_thread(open_packed, Path(file.path))
    except (CorruptArtifact, OSError):
        return
    if adapter.format != FORMAT_NONE:
        raise InvalidRequest(
            f"artifact {file.artifact_digest[:12]} has format {adapter.format}, so it is not exact; name the version's "
            f"artifact of format {FORMAT_NONE}",
            field="exact_artifact_digest",
        )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in a group, which may hold groups."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
