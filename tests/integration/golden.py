"""What the golden tests share: PEFT adapters made and packed, and a real engine loop on a real runner, in process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from common.adapter_format.base import BaseLinears
from common.adapter_format.packed import pack
from common.adapter_format.validate import WEIGHTS_FILE, validate
from worker.engine.config import EngineConfig
from worker.engine.inbox import Inbox
from worker.engine.loader import Loader
from worker.engine.loop import EngineLoop
from worker.engine.rates import StepRates
from worker.engine.scheduler import Scheduler
from worker.engine_process import describe
from worker.mailbox import (
    LENGTH_BYTES,
    AdapterFile,
    EngineStatus,
    Sampling,
    Shutdown,
    Step,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)
from worker.model.runner import ModelRunner

DEADLINE_S = 120.0
"""For the next frame of the engine: a step on a busy machine."""


def make_adapter(base: Any, folder: Path, *, seed: int, strength: float, **config: Any) -> Path:
    """Write a PEFT adapter with random factors, B included; `base` comes back without it."""
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            elif "lora_B" in name:
                parameter.normal_(0, strength)
    model.save_pretrained(str(folder))
    model.unload()
    return folder


def load_adapters(base: Any, folders: Mapping[str, Path]) -> PeftModel:
    """Return `base` with all adapters loaded, as PEFT loads them for inference."""
    (first, folder), *rest = folders.items()
    model = PeftModel.from_pretrained(base, str(folder), adapter_name=first)
    for name, folder in rest:
        model.load_adapter(str(folder), adapter_name=name)
    return model.eval()


@contextmanager
def adapter_active(model: PeftModel, name: str | None) -> Iterator[PeftModel]:
    """Make one adapter (None: the base alone) what the model computes."""
    if name is None:
        with model.disable_adapter():
            yield model
    else:
        model.set_adapter(name)
        yield model


def pack_folder(folder: Path, linears: BaseLinears, file: Path) -> AdapterFile:
    """Validate and pack a PEFT folder, as a registration does."""
    validated = validate((folder / "adapter_config.json").read_bytes(), folder / WEIGHTS_FILE, linears)
    digest = pack(validated, file)
    return AdapterFile(digest, str(file), file.stat().st_size)


class EngineSession:
    """An engine's loop on a thread of its own, spoken to through its mailbox."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_prefill_tokens: int,
        max_resident_adapters: int,
        max_running_requests: int = 32,
        **limits: Any,
    ) -> None:
        self._mailbox, theirs = socket.socketpair()
        self._mailbox.settimeout(DEADLINE_S)
        self._inbox = Inbox(theirs)
        self._loader = Loader(runner.prepare_adapter, self._inbox.wake)
        config = EngineConfig(
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            max_context_tokens=runner.max_context_tokens,
            block_tokens=runner.block_tokens,
            total_blocks=runner.total_blocks,
            chunk_bytes=runner.chunk_bytes,
            adapter_chunk_bytes=runner.adapter_chunk_bytes,
            max_running_requests=max_running_requests,
            max_prefill_tokens=max_prefill_tokens,
            max_resident_adapters=max_resident_adapters,
            **limits,
        )
        scheduler = Scheduler(config, StepRates(100.0, 10.0))
        self._loop = EngineLoop(runner, scheduler, self._inbox, self._loader, describe=describe)
        self._thread = threading.Thread(target=self._loop.run, name="engine")
        self._thread.start()
        self._next_id = 1
        self.largest_batch = 0
        self.status: EngineStatus | None = None

    def generate(self, requests: Sequence[tuple[Sequence[int], AdapterFile | None, Sampling]]) -> list[list[int]]:
        """Submit all requests at once and return each one's tokens."""
        first = self._next_id
        self._next_id += len(requests)
        self._send(  # at once: the engine must not be done with some before the others come
            *(
                Submit(first + index, tuple(prompt), sampling, adapter, "default", 0.0)
                for index, (prompt, adapter, sampling) in enumerate(requests)
            )
        )
        tokens: dict[int, list[int]] = {first + index: [] for index in range(len(requests))}
        left = set(tokens)
        while left:
            step = self._receive()
            assert not step.failures, step.failures
            self.status = step.status
            self.largest_batch = max(self.largest_batch, len(step.outputs))
            for output in step.outputs:
                tokens[output.request_id] += output.token_ids
                if output.finish:
                    left.remove(output.request_id)
        return [tokens[first + index] for index in range(len(requests))]

    def close(self) -> None:
        """End the loop; fails the test when it does not end."""
        self._send(Shutdown())
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._loader.close(timeout_s=DEADLINE_S)
        self._inbox.close(flush_s=1.0)
        self._mailbox.close()

    def _send(self, *messages: ToEngine) -> None:
        self._mailbox.sendall(b"".join(map(encode, messages)))

    def _receive(self) -> Step:
        length = int.from_bytes(self._read(LENGTH_BYTES), "little")
        message = decode_from_engine(self._read(length))
        assert isinstance(message, Step)
        return message

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._mailbox.recv(count - len(data))
            assert more, "the engine closed its mailbox"
            data += more
        return data
