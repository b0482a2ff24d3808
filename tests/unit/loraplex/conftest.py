"""A fake router and registry behind one real gRPC server, in a thread of its own."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import timestamp_pb2
from grpc import aio

from common.rpc import Server
from loraplex.errors import (
    AdapterNotFound,
    AlreadyExists,
    CatalogBehind,
    FailedPrecondition,
    LoraplexError,
    ModelNotFound,
    SourceNotFound,
    Unauthenticated,
)
from loraplex.registry.v1 import adapter_pb2, adapter_pb2_grpc, base_model_pb2, base_model_pb2_grpc
from loraplex.router.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)
from loraplex.types.v1 import evaluation_pb2, generation_pb2
from tests.tiny_adapters import write_adapter
from tests.tiny_base import write_tiny_base

FORMAT_NAMES = ("none", "none", "int8", "int4")  # by AdapterFormat; the registry's default is none here


@dataclass
class FakeCluster(
    inference_pb2_grpc.InferenceServiceServicer,
    models_pb2_grpc.ModelServiceServicer,
    fleet_pb2_grpc.FleetServiceServicer,
    adapter_pb2_grpc.AdapterServiceServicer,
    base_model_pb2_grpc.BaseModelServiceServicer,
):
    """Remembers what it was asked; answers by simple rules (see the methods)."""

    address: str = ""
    revision: int = 0
    catalog_lag: int = 0
    """So many router calls that ask for the newest revision are answered with CatalogBehind."""
    page_size: int = 2
    asks_for_key: bool = False
    """The router's ModelService then refuses calls without any authorization."""
    adapters: dict[str, adapter_pb2.Adapter] = field(default_factory=dict)
    bases: dict[str, base_model_pb2.BaseModel] = field(default_factory=dict)
    uploads: dict[str, dict[str, bytes]] = field(default_factory=dict)
    steered: list[Any] = field(default_factory=list)
    """Calls that say where an adapter shall be."""
    imports: list[adapter_pb2.ImportAdapterRequest] = field(default_factory=list)
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    remaining_s: list[float] = field(default_factory=list)
    evaluation_error: LoraplexError | None = None
    format_errors: dict[str, float] = field(default_factory=dict)
    load_facts: adapter_pb2.LoadFacts | None = None
    evaluations: dict[str, adapter_pb2.EvaluationReport] = field(default_factory=dict)
    cancelled: threading.Event = field(default_factory=threading.Event)

    async def Generate(self, request, context) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Echoes the input; model "unknown" does not exist, "endless" never ends."""
        self._note(context)
        self.requests.append(request)
        if request.model == "unknown":
            raise ModelNotFound("there is no model unknown; `loraplex models` lists them", model="unknown")
        said = request.chat.messages[-1].content if request.WhichOneof("input") == "chat" else request.prompt
        try:
            while request.model == "endless":
                yield _delta(0, "x", 1)
                await asyncio.sleep(0.01)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise
        for index in range(request.sampling.n or 1):
            for word in said.split(" "):
                yield _delta(index, f"{word} ", len(word))
            yield inference_pb2.GenerateResponse(
                choice_finished=generation_pb2.ChoiceFinished(index=index, reason=generation_pb2.FINISH_REASON_STOP)
            )
        finished = generation_pb2.Finished()
        finished.usage.prompt_tokens, finished.usage.completion_tokens, finished.usage.cached_tokens = 3, 4, 2
        finished.facts.base_digest, finished.facts.worker_id = "b" * 64, "w0"
        finished.facts.artifact_digest, finished.facts.version_digest = "a" * 64, "f" * 64
        finished.facts.tier_hit = generation_pb2.ADAPTER_TIER_DISK
        finished.facts.adapter_load_time.FromMilliseconds(250)
        yield inference_pb2.GenerateResponse(finished=finished)

    async def GetModel(self, request, context) -> models_pb2.GetModelResponse:
        self._note(context)
        if self.asks_for_key and "authorization" not in self.metadata[-1]:
            raise Unauthenticated("an API key is needed")
        self._lag(context)
        if request.name in self.bases:
            return models_pb2.GetModelResponse(model=models_pb2.Model(name=request.name))
        if request.name not in self.adapters:
            raise ModelNotFound(f"there is no model {request.name}")
        return models_pb2.GetModelResponse(model=self._model(self.adapters[request.name]))

    async def ListModels(self, request, context) -> models_pb2.ListModelsResponse:
        self._note(context)
        entries = [models_pb2.Model(name=name, base_digest="b" * 64) for name in self.bases]
        entries += [self._model(adapter) for adapter in self.adapters.values()]
        page, token = self._page(entries, request.page_token)
        return models_pb2.ListModelsResponse(models=page, next_page_token=token)

    async def ListWorkers(self, request, context) -> fleet_pb2.ListWorkersResponse:
        worker = fleet_pb2.Worker(worker_id="w0", address="127.0.0.1:1", state="serving", total_blocks=9)
        worker.device, worker.dtype, worker.base_quantization = "cpu", "bfloat16", "int8"
        worker.adapters.add(artifact_digest="a" * 64, names=["sql"], tier=generation_pb2.ADAPTER_TIER_DEVICE)
        worker.adapters.add(
            artifact_digest="c" * 64,
            names=["bad"],
            tier=generation_pb2.ADAPTER_TIER_DISK,
            pinned=True,
            quarantine_reason="CORRUPT_ARTIFACT",
            quarantine_end_time=timestamp_pb2.Timestamp(seconds=60),
        )
        worker.device_tier.used_bytes, worker.device_tier.budget_bytes = 1_500_000, 64_000_000
        worker.device_tier.num_adapters, worker.device_tier.max_adapters = 1, 32
        worker.disk_tier.used_bytes, worker.disk_tier.budget_bytes = 2_000, 10**9
        return fleet_pb2.ListWorkersResponse(workers=[worker])

    async def PrefetchAdapter(self, request, context) -> fleet_pb2.PrefetchAdapterResponse:
        """One outcome per worker asked; the third one refuses."""
        self.steered.append(request)
        names = [request.worker_id] if request.worker_id else [f"w{i}" for i in range(request.num_workers)]
        outcomes = [fleet_pb2.AdapterOutcome(worker_id=name, tier=generation_pb2.ADAPTER_TIER_SOURCE) for name in names]
        if len(outcomes) > 2:
            outcomes[2] = fleet_pb2.AdapterOutcome(worker_id="w2", error_reason="NO_SPACE", error="the disk is full")
        return fleet_pb2.PrefetchAdapterResponse(outcomes=outcomes)

    async def ListAdvice(self, request, context) -> fleet_pb2.ListAdviceResponse:
        self._note(context)
        figure = fleet_pb2.AdviceFigure(name="cold_ratio", value=0.5)
        entries = [
            fleet_pb2.Advice(
                kind=fleet_pb2.ADVICE_KIND_PROMOTE, tenant="default", adapter="sql", figures=[figure], reason="it waits"
            ),
            fleet_pb2.Advice(kind=fleet_pb2.ADVICE_KIND_THROTTLE, tenant="acme", reason="it displaces"),
            fleet_pb2.Advice(kind=fleet_pb2.ADVICE_KIND_MERGE, adapter="sql", worker_id="w0", reason="it is most"),
        ]
        page, token = self._page(entries if self.adapters else [], request.page_token)
        return fleet_pb2.ListAdviceResponse(advice=page, next_page_token=token)

    async def LoadAdapter(self, request, context) -> fleet_pb2.LoadAdapterResponse:
        self.steered.append(request)
        outcome = fleet_pb2.AdapterOutcome(worker_id="w0", tier=generation_pb2.ADAPTER_TIER_DISK)
        outcome.load_time.FromMilliseconds(20)
        return fleet_pb2.LoadAdapterResponse(outcomes=[outcome])

    async def UnloadAdapter(self, request, context) -> fleet_pb2.UnloadAdapterResponse:
        self.steered.append(request)
        if request.name == "nowhere":
            return fleet_pb2.UnloadAdapterResponse()
        if request.name == "pinned":
            raise FailedPrecondition("it is pinned")
        outcome = fleet_pb2.AdapterOutcome(worker_id="w0", tier=generation_pb2.ADAPTER_TIER_DEVICE)
        return fleet_pb2.UnloadAdapterResponse(outcomes=[outcome])

    async def EvaluateAdapter(self, request, context) -> AsyncIterator[fleet_pb2.EvaluateAdapterResponse]:
        """Tells progress, then figures; `evaluation_error` in the place of the latter."""
        self._note(context)
        for done in (0, 1):
            progress = evaluation_pb2.EvaluationProgress(done_prompts=done, total_prompts=2)
            yield fleet_pb2.EvaluateAdapterResponse(progress=progress)
        if self.evaluation_error is not None:
            raise self.evaluation_error
        evaluation = evaluation_pb2.Evaluation(
            version_digest=request.version_digest,
            artifact_digest=request.artifact_digest,
            exact_artifact_digest=request.exact_artifact_digest,
            base_digest=request.base_digest,
            prompt_set=1,
            num_prompts=2,
            num_positions=80,
            top1_agreement=0.975,
            mean_kl=0.00123,
            max_kl=0.5,
            device="cpu float32",
        )
        yield fleet_pb2.EvaluateAdapterResponse(evaluation=evaluation)

    async def RecordEvaluation(self, request, context) -> adapter_pb2.RecordEvaluationResponse:
        self._note(context)
        self.revision += 1
        form = self.adapters[request.name].current.format
        report = adapter_pb2.EvaluationReport(format=form, evaluation=request.evaluation)
        self.evaluations[request.name] = report
        return adapter_pb2.RecordEvaluationResponse(revision=self.revision, report=report)

    async def FindUpload(self, request, context) -> adapter_pb2.FindUploadResponse:
        return adapter_pb2.FindUploadResponse(offsets=[0 for _ in request.files])

    async def ImportAdapter(self, request, context) -> AsyncIterator[adapter_pb2.ImportAdapterResponse]:
        """Fetches nothing, and tells of it; a source with "missing" in it does not exist."""
        self._note(context)
        if "missing" in request.source:
            raise SourceNotFound(f"{request.source} does not exist", field="source")
        self.imports.append(request)
        for received in (0, 512, 1024):
            progress = adapter_pb2.ImportProgress(source=request.source, received_bytes=received, total_bytes=1024)
            yield adapter_pb2.ImportAdapterResponse(progress=progress)
        version = adapter_pb2.AdapterVersion(
            version_digest="c" * 64, artifact_digest="d" * 64, rank=4, num_modules=14, num_base_modules=14,
            format=FORMAT_NAMES[request.format], exact_artifact_digest="e" * 64, source=request.source,
        )  # fmt: skip
        self.revision += 1
        self.adapters[request.name] = adapter_pb2.Adapter(
            name=request.name, base_id=request.base_id or "tiny", current=version, versions=[version]
        )
        registered = adapter_pb2.UploadArtifactResponse(
            adapter=self.adapters[request.name], revision=self.revision, changed=True, report=self._report(request.name)
        )
        yield adapter_pb2.ImportAdapterResponse(registered=registered)

    async def UploadArtifact(self, request_iterator, context) -> adapter_pb2.UploadArtifactResponse:
        files: dict[str, bytearray] = {}
        announced: dict[str, adapter_pb2.FileHeader] = {}
        name = base_id = current = ""
        form = 0
        async for request in request_iterator:
            part = request.WhichOneof("part")
            if part == "header":
                name, base_id, form = request.header.name, request.header.base_id, int(request.header.format)
            elif part == "file_header":
                current = request.file_header.name
                files[current], announced[current] = bytearray(), request.file_header
            else:
                assert len(request.data) <= 2**20
                files[current] += request.data
        for file, data in files.items():
            assert announced[file].size_bytes == len(data)
            assert announced[file].sha256 == hashlib.sha256(data).hexdigest()
        self.uploads[name] = {file: bytes(data) for file, data in files.items()}
        digest = hashlib.sha256(files["adapter_model.safetensors"]).hexdigest()
        form_name = FORMAT_NAMES[form]
        changed = name not in self.adapters or self.adapters[name].current.artifact_digest != digest
        self.revision += changed
        version = adapter_pb2.AdapterVersion(
            version_digest=digest,
            artifact_digest=digest,
            rank=4,
            num_modules=14,
            num_base_modules=14,
            format=form_name,
            exact_artifact_digest=digest if form_name == "none" else "e" * 64,
        )
        self.adapters[name] = adapter_pb2.Adapter(
            name=name, base_id=base_id or "tiny", current=version, versions=[version]
        )
        return adapter_pb2.UploadArtifactResponse(
            adapter=self.adapters[name], revision=self.revision, changed=changed, report=self._report(name)
        )

    async def UpdateAdapter(self, request, context) -> adapter_pb2.UpdateAdapterResponse:
        if request.name not in self.adapters:
            raise AdapterNotFound(f"there is no adapter {request.name}")
        adapter = self.adapters[request.name]
        changed = adapter.current.format != FORMAT_NAMES[request.format]
        self.revision += changed
        for version in (adapter.current, adapter.versions[0]):
            version.format = FORMAT_NAMES[request.format]
        return adapter_pb2.UpdateAdapterResponse(
            adapter=adapter, revision=self.revision, changed=changed, report=self._report(request.name)
        )

    def _report(self, name: str) -> adapter_pb2.PackingReport:
        version = self.adapters[name].current
        return adapter_pb2.PackingReport(
            version_digest=version.version_digest,
            format=version.format,
            sizes=[
                adapter_pb2.FormatSize(format=form, size_bytes=2048, mean_error=self.format_errors.get(form))
                for form in ("none", "int8", "int4")
            ],
            load=self.load_facts,
            mean_error=0.0123,
            modules=[adapter_pb2.ModuleError(module=f"layers.{n}.mlp.up_proj", relative_error=0.5) for n in range(5)],
        )

    async def DownloadArtifact(self, request, context):
        if request is not None:
            raise AssertionError("clients download nothing")
        yield

    async def Watch(self, request, context):
        if request is not None:
            raise AssertionError("clients watch nothing")
        yield

    async def GetAdapter(self, request, context) -> adapter_pb2.GetAdapterResponse:
        if request.name not in self.adapters:
            raise AdapterNotFound(f"there is no adapter {request.name}")
        evaluation = self.evaluations.get(request.name)
        return adapter_pb2.GetAdapterResponse(
            adapter=self.adapters[request.name],
            reports=[self._report(request.name)],
            evaluations=[] if evaluation is None else [evaluation],
        )

    async def ListAdapters(self, request, context) -> adapter_pb2.ListAdaptersResponse:
        page, token = self._page(list(self.adapters.values()), request.page_token)
        return adapter_pb2.ListAdaptersResponse(adapters=page, next_page_token=token)

    async def PinAdapter(self, request, context) -> adapter_pb2.PinAdapterResponse:
        if request.name not in self.adapters:
            raise AdapterNotFound(f"there is no adapter {request.name}")
        adapter = self.adapters[request.name]
        changed = adapter.pin_replicas != request.pin_replicas
        self.revision += changed
        adapter.pin_replicas = request.pin_replicas
        return adapter_pb2.PinAdapterResponse(adapter=adapter, revision=self.revision, changed=changed)

    async def DeleteAdapter(self, request, context) -> adapter_pb2.DeleteAdapterResponse:
        if self.adapters.pop(request.name, None) is None:
            raise AdapterNotFound(f"there is no adapter {request.name}")
        self.revision += 1
        return adapter_pb2.DeleteAdapterResponse(revision=self.revision)

    async def CreateBaseModel(self, request, context) -> base_model_pb2.CreateBaseModelResponse:
        known = self.bases.get(request.base_id)
        if known is not None and known.digest != request.manifest.digest:
            raise AlreadyExists(f"{request.base_id} is another model")
        self.revision += known is None
        base = base_model_pb2.BaseModel(
            base_id=request.base_id, digest=request.manifest.digest, architecture="LlamaForCausalLM", num_parameters=7
        )
        self.bases[request.base_id] = base
        return base_model_pb2.CreateBaseModelResponse(base_model=base, revision=self.revision)

    async def GetBaseModel(self, request, context) -> base_model_pb2.GetBaseModelResponse:
        return base_model_pb2.GetBaseModelResponse(base_model=self.bases[request.base_id])

    async def ListBaseModels(self, request, context) -> base_model_pb2.ListBaseModelsResponse:
        page, token = self._page(list(self.bases.values()), request.page_token)
        return base_model_pb2.ListBaseModelsResponse(base_models=page, next_page_token=token)

    def _note(self, context) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining_s.append(context.time_remaining())

    def _lag(self, context) -> None:
        if "x-loraplex-min-revision" in dict(context.invocation_metadata()) and self.catalog_lag:
            self.catalog_lag -= 1
            raise CatalogBehind("the catalog is behind")

    def _page(self, entries: list[Any], token: str) -> tuple[list[Any], str]:
        start = int(token or 0)
        end = start + self.page_size
        return entries[start:end], str(end) if end < len(entries) else ""

    @staticmethod
    def _model(adapter: adapter_pb2.Adapter) -> models_pb2.Model:
        return models_pb2.Model(
            name=adapter.name, parent=adapter.base_id, artifact_digest=adapter.current.artifact_digest, rank=4
        )


def _delta(index: int, text: str, token: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(delta=generation_pb2.Delta(index=index, text=text, token_ids=[token]))


@pytest.fixture
def fake_cluster() -> Iterator[FakeCluster]:
    fake = FakeCluster()
    loop = asyncio.new_event_loop()
    up, down = threading.Event(), asyncio.Event()

    def register(server: aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
        models_pb2_grpc.add_ModelServiceServicer_to_server(fake, server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(fake, server)
        adapter_pb2_grpc.add_AdapterServiceServicer_to_server(fake, server)
        base_model_pb2_grpc.add_BaseModelServiceServicer_to_server(fake, server)

    async def serve() -> None:
        server = Server([register], [])
        fake.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        up.set()
        await down.wait()
        await server.stop(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert up.wait(60)
    yield fake
    loop.call_soon_threadsafe(down.set)
    thread.join(60)
    loop.close()


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "tiny", tiny_base)
