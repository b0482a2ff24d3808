"""The client library: typed calls to a Loraplex cluster.

    from loraplex.client import Client, Sampling, TextDelta

    with Client() as client:                                        # router 127.0.0.1:50050, registry 127.0.0.1:50051
        client.add_adapter("text-to-sql", "adapters/text-to-sql")   # uploads a PEFT folder
        for event in client.generate("text-to-sql", "How many users signed up?", sampling=Sampling(max_tokens=64)):
            if isinstance(event, TextDelta):
                print(event.text, end="", flush=True)

`AsyncClient` has the same methods with `async`. Every call has a deadline (see `Timeouts`) and raises a class of
`loraplex.errors`. A client reads its own writes: after a change it asks the router for at least that revision of the
catalog. One client may be used by many threads (`Client`) or tasks (`AsyncClient`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc

from loraplex import wire
from loraplex.async_client import AsyncClient
from loraplex.calls import CHANNEL_OPTIONS, DEFAULT_REGISTRY, DEFAULT_ROUTER, PAGE_SIZE, Page, Peer, Timeouts
from loraplex.credentials import Credentials, Metadata
from loraplex.downloads import ArtifactFile
from loraplex.generation import (
    Choice,
    ChoiceFinished,
    Completion,
    Event,
    Finished,
    Gatherer,
    Message,
    Sampling,
    TextDelta,
    gather,
)
from loraplex.manifest import BaseManifest
from loraplex.peft_folder import read_adapter_folder
from loraplex.records import (
    Adapter,
    AdapterOutcome,
    AdapterPin,
    AdapterRegistration,
    Advice,
    ApiKey,
    BaseModel,
    BaseRegistration,
    Evaluation,
    ImportProgress,
    Model,
    NewApiKey,
    Worker,
)
from loraplex.registration import Upload, is_unknown_call
from loraplex.registry.v1 import (
    adapter_pb2,
    adapter_pb2_grpc,
    api_key_pb2,
    api_key_pb2_grpc,
    base_model_pb2,
    base_model_pb2_grpc,
)
from loraplex.router.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)
from loraplex.spans import Span
from loraplex.types.v1 import evaluation_pb2

__all__ = [
    "AsyncClient",
    "Choice",
    "ChoiceFinished",
    "Client",
    "Completion",
    "Credentials",
    "Event",
    "Finished",
    "Gatherer",
    "Message",
    "Sampling",
    "Span",
    "TextDelta",
    "Timeouts",
    "gather",
]

P = TypeVar("P", bound=Page)


class Client:
    """A synchronous client. Connects on first use; close it or use it as a context manager."""

    def __init__(
        self,
        router: str = DEFAULT_ROUTER,
        registry: str = DEFAULT_REGISTRY,
        *,
        credentials: Credentials | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        """Credentials come from the environment unless they are given; see `loraplex.credentials`."""
        self.timeouts = timeouts or Timeouts()
        self.min_revision = 0
        """The newest registry revision this client has made; sent with every call to the router."""
        self._credentials = Credentials.from_environment() if credentials is None else credentials
        self._operator = self._credentials.for_operators
        self._router, self._registry = Peer("router", router), Peer("registry", registry)
        self._router_channel = grpc.insecure_channel(router, options=CHANNEL_OPTIONS)
        self._registry_channel = grpc.insecure_channel(registry, options=CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._router_channel)
        self._models = models_pb2_grpc.ModelServiceStub(self._router_channel)
        self._fleet = fleet_pb2_grpc.FleetServiceStub(self._router_channel)
        self._adapters = adapter_pb2_grpc.AdapterServiceStub(self._registry_channel)
        self._bases = base_model_pb2_grpc.BaseModelServiceStub(self._registry_channel)
        self._keys = api_key_pb2_grpc.ApiKeyServiceStub(self._registry_channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; calls in flight are cancelled."""
        self._router_channel.close()
        self._registry_channel.close()

    def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        trace: bool = False,
    ) -> Generator[Event, None, None]:
        """Yield the events of a generation as they come; leaving the iterator early cancels the request.

        Give one of `prompt` (plain text), `messages` (rendered with the chat template) and `token_ids`.
        `trace` asks for the request's spans, which come with `Finished`.
        """
        request = wire.generate_request(model, prompt, messages, token_ids, sampling)
        with self._router.calls():
            call = self._inference.Generate(
                request,
                timeout=self.timeouts.generate_s if timeout_s is None else timeout_s,
                metadata=wire.metadata(self.min_revision, request_id, self._credentials.for_requests, trace=trace),
            )
            try:
                for response in call:
                    yield wire.event(response)
            finally:
                call.cancel()

    def add_adapter(
        self,
        name: str,
        path: str | Path,
        *,
        base_id: str = "",
        quantization: str = "",
        progress: Callable[[int], None] = lambda _: None,
    ) -> AdapterRegistration:
        """Register a version of an adapter from a PEFT folder; `progress` is told the bytes of each part sent.

        An upload that breaks off goes on where it was, this one or that of an earlier call; `progress` is then told of
        what is there already, and less than nothing of what was lost.

        `base_id` may be empty where exactly one base is registered. `quantization` is int8, int4 or none (exact); empty
        keeps what a version that is known already has, else takes the registry's default.
        """
        upload = Upload(read_adapter_folder(Path(path)), name, base_id, progress, wire.quantization(quantization))
        deadline_s = time.monotonic() + self.timeouts.upload_s
        while True:
            try:
                offsets = self._uploaded(upload)
                response = self._adapters.UploadArtifact(
                    upload.parts(offsets), timeout=deadline_s - time.monotonic(), metadata=self._operator
                )
                break
            except grpc.RpcError as error:
                pause_s = upload.pause_s(error)
                if pause_s is None or time.monotonic() + pause_s > deadline_s:
                    raise self._registry.error(error) from error
                time.sleep(pause_s)
        self._seen(response.revision)
        return wire.registration(response)

    def _uploaded(self, upload: Upload) -> Sequence[int]:
        """Return how much the registry has of each file already."""
        try:
            answer = self._adapters.FindUpload(upload.question, timeout=self.timeouts.call_s, metadata=self._operator)
        except grpc.RpcError as error:
            if not is_unknown_call(error):
                raise
            return upload.offsets(None)
        return upload.offsets(answer)

    def import_adapter(
        self,
        name: str,
        source: str,
        *,
        base_id: str = "",
        quantization: str = "",
        weights_sha256: str = "",
        progress: Callable[[ImportProgress], None] = lambda _: None,
        timeout_s: float | None = None,
    ) -> AdapterRegistration:
        """Have the registry fetch a version of an adapter and register it.

        `source` is hf://owner/repo[/folder][@revision], s3://, gs:// or az://bucket/prefix, https://host/folder/, or a
        path below the registry's import root; the registry's settings say which it takes, and its credentials are used.
        `weights_sha256` is what adapter_model.safetensors must have, if given: else CorruptArtifact, naming it as the
        field. `progress` is told how far it is. Else as `add_adapter`. Raises SourceNotFound, SourceForbidden,
        SourceTimeout and SourceUnreachable. Whoever leaves early ends the import.
        """
        request = wire.import_request(name, source, base_id, quantization, weights_sha256)
        registered: adapter_pb2.UploadArtifactResponse | None = None
        with self._registry.calls():
            call = self._adapters.ImportAdapter(
                request,
                timeout=self.timeouts.import_s if timeout_s is None else timeout_s,
                metadata=self._operator,
            )
            try:
                for event in call:
                    if event.HasField("progress"):
                        progress(wire.import_progress(event.progress))
                    else:
                        registered = event.registered
            finally:
                call.cancel()
        response = wire.whole(registered)
        self._seen(response.revision)
        return wire.registration(response)

    def repack_adapter(self, name: str, quantization: str) -> AdapterRegistration:
        """Pack an adapter's current version as int8, int4 or none (exact). Raises AdapterNotFound.

        The version stays; its artifact is another, which requests take from then on.
        """
        request = adapter_pb2.UpdateAdapterRequest(name=name, format=wire.quantization(quantization))
        with self._registry.calls():
            response = self._adapters.UpdateAdapter(request, timeout=self.timeouts.upload_s, metadata=self._operator)
        self._seen(response.revision)
        return wire.registration(response)

    def evaluate_adapter(
        self,
        name: str,
        *,
        quantization: str = "",
        progress: Callable[[int, int], None] = lambda _done, _total: None,
        timeout_s: float | None = None,
    ) -> Evaluation:
        """Have a worker measure what quantizing an adapter's current version cost end to end, and record it.

        `quantization` is what the adapter is packed in (as "" is), or none, to compare the exact artifact with itself.
        `progress` is told the prompts that are done, of how many. Raises AdapterNotFound, QueueFull where a worker
        evaluates already, and DeadlineExceeded.
        """
        adapter = self.get_adapter(name)
        request = wire.evaluation_request(adapter.current, quantization)
        found: evaluation_pb2.Evaluation | None = None
        with self._router.calls():
            call = self._fleet.EvaluateAdapter(
                request,
                timeout=self.timeouts.evaluate_s if timeout_s is None else timeout_s,
                metadata=self._operator,
            )
            try:
                for event in call:
                    if event.HasField("progress"):
                        progress(event.progress.done_prompts, event.progress.total_prompts)
                    else:
                        found = event.evaluation
            finally:
                call.cancel()
        record = adapter_pb2.RecordEvaluationRequest(name=name, evaluation=found)
        with self._registry.calls():
            response = self._adapters.RecordEvaluation(record, timeout=self.timeouts.call_s, metadata=self._operator)
        self._seen(response.revision)
        return wire.evaluation(response.report)

    def get_adapter(self, name: str) -> Adapter:
        """Return an adapter with all its versions. Raises AdapterNotFound."""
        with self._registry.calls():
            response = self._adapters.GetAdapter(
                adapter_pb2.GetAdapterRequest(name=name), timeout=self.timeouts.call_s, metadata=self._operator
            )
        return wire.adapter(response.adapter, response.reports, response.evaluations)

    def list_adapters(self) -> Iterator[Adapter]:
        """Yield all adapters by name."""

        def ask(token: str) -> adapter_pb2.ListAdaptersResponse:
            request = adapter_pb2.ListAdaptersRequest(page_size=PAGE_SIZE, page_token=token)
            return self._adapters.ListAdapters(request, timeout=self.timeouts.call_s, metadata=self._operator)

        for page in _pages(self._registry, ask):
            yield from map(wire.adapter, page.adapters)

    def pin_adapter(self, name: str, replicas: int = 1) -> AdapterPin:
        """Have so many workers of its base keep an adapter whatever the demand; 0 lets go of it.

        `loraplex.pins.PIN_ON_ALL` is all workers. A new version takes the old one's place. Raises AdapterNotFound, and
        FailedPrecondition for unpinning what the registry's configuration pins.
        """
        request = adapter_pb2.PinAdapterRequest(name=name, pin_replicas=replicas)
        with self._registry.calls():
            response = self._adapters.PinAdapter(request, timeout=self.timeouts.call_s, metadata=self._operator)
        self._seen(response.revision)
        return wire.adapter_pin(response)

    def download_artifact(
        self, artifact_digest: str, file: Path, progress: Callable[[int, int], None] = lambda _done, _total: None
    ) -> None:
        """Write the packed file of an artifact to `file`, checked; `progress` is told bytes so far and of all.

        Raises ArtifactNotFound, or CorruptArtifact where other bytes came; then there is no file.
        """
        request = adapter_pb2.DownloadArtifactRequest(artifact_digest=artifact_digest)
        with self._registry.calls(), ArtifactFile(artifact_digest, file, progress) as taken:
            for part in self._adapters.DownloadArtifact(
                request, timeout=self.timeouts.upload_s, metadata=self._operator
            ):
                taken.take(part)

    def remove_adapter(self, name: str) -> int:
        """Delete an adapter with its versions; return the revision without it. Raises AdapterNotFound."""
        with self._registry.calls():
            response = self._adapters.DeleteAdapter(
                adapter_pb2.DeleteAdapterRequest(name=name), timeout=self.timeouts.call_s, metadata=self._operator
            )
        self._seen(response.revision)
        return response.revision

    def prefetch_adapter(
        self, name: str, *, worker_id: str = "", num_workers: int = 1, to_device: bool = False
    ) -> list[AdapterOutcome]:
        """Have workers fetch an adapter ahead of its requests, on to the device if asked; does not wait for it.

        Without `worker_id` the router takes the workers that requests would go to. Raises ModelNotFound, NotFound for
        a worker that is not known, NoWorker, and what all workers refuse with.
        """
        request = fleet_pb2.PrefetchAdapterRequest(
            name=name, worker_id=worker_id, num_workers=num_workers, to_device=to_device
        )
        with self._router.calls():
            response = self._fleet.PrefetchAdapter(request, timeout=self.timeouts.call_s, metadata=self._for_fleet)
        return list(map(wire.adapter_outcome, response.outcomes))

    def load_adapter(self, name: str, *, worker_id: str = "", num_workers: int = 1) -> list[AdapterOutcome]:
        """Have workers load an adapter, and wait until it is on their device; see `prefetch_adapter`."""
        request = fleet_pb2.LoadAdapterRequest(name=name, worker_id=worker_id, num_workers=num_workers)
        with self._router.calls():
            response = self._fleet.LoadAdapter(request, timeout=self.timeouts.load_s, metadata=self._for_fleet)
        return list(map(wire.adapter_outcome, response.outcomes))

    def unload_adapter(self, name: str, *, worker_id: str = "", from_disk: bool = False) -> list[AdapterOutcome]:
        """Have a worker, or all that hold it, take an adapter off their device.

        With `from_disk` it leaves host memory and the disk cache too, and the next request fetches it anew, whatever it
        failed with before. Where it is in use or pinned it is refused with FailedPrecondition.
        """
        request = fleet_pb2.UnloadAdapterRequest(name=name, worker_id=worker_id, from_disk=from_disk)
        with self._router.calls():
            response = self._fleet.UnloadAdapter(request, timeout=self.timeouts.call_s, metadata=self._for_fleet)
        return list(map(wire.adapter_outcome, response.outcomes))

    def add_base(self, base_id: str, manifest: BaseManifest) -> BaseRegistration:
        """Register a base model by its manifest (see `loraplex.manifest.read_manifest`)."""
        request = base_model_pb2.CreateBaseModelRequest(
            base_id=base_id, manifest=wire.manifest_message(manifest, manifest.digest())
        )
        with self._registry.calls():
            response = self._bases.CreateBaseModel(request, timeout=self.timeouts.call_s, metadata=self._operator)
        self._seen(response.revision)
        return BaseRegistration(wire.base_model(response.base_model), response.revision)

    def list_bases(self) -> Iterator[BaseModel]:
        """Yield all base models by id."""

        def ask(token: str) -> base_model_pb2.ListBaseModelsResponse:
            request = base_model_pb2.ListBaseModelsRequest(page_size=PAGE_SIZE, page_token=token)
            return self._bases.ListBaseModels(request, timeout=self.timeouts.call_s, metadata=self._operator)

        for page in _pages(self._registry, ask):
            yield from map(wire.base_model, page.base_models)

    def add_key(self, name: str) -> NewApiKey:
        """Make an API key for clients of the routers. Raises AlreadyExists for a name that is taken."""
        request = api_key_pb2.CreateApiKeyRequest(name=name)
        with self._registry.calls():
            response = self._keys.CreateApiKey(request, timeout=self.timeouts.call_s, metadata=self._operator)
        self._seen(response.revision)
        return NewApiKey(wire.api_key(response.api_key), response.revision, response.key)

    def list_keys(self) -> Iterator[ApiKey]:
        """Yield the API keys by id."""

        def ask(token: str) -> api_key_pb2.ListApiKeysResponse:
            request = api_key_pb2.ListApiKeysRequest(page_size=PAGE_SIZE, page_token=token)
            return self._keys.ListApiKeys(request, timeout=self.timeouts.call_s, metadata=self._operator)

        for page in _pages(self._registry, ask):
            yield from map(wire.api_key, page.api_keys)

    def remove_key(self, key_id: str) -> int:
        """Revoke an API key; return the revision without it. Raises NotFound."""
        request = api_key_pb2.DeleteApiKeyRequest(key_id=key_id)
        with self._registry.calls():
            response = self._keys.DeleteApiKey(request, timeout=self.timeouts.call_s, metadata=self._operator)
        self._seen(response.revision)
        return response.revision

    def get_model(self, name: str) -> Model:
        """Return what the router knows of a model. Raises ModelNotFound."""
        with self._router.calls():
            response = self._models.GetModel(
                models_pb2.GetModelRequest(name=name),
                timeout=self.timeouts.call_s,
                metadata=wire.metadata(self.min_revision, credentials=self._credentials.for_models),
            )
        return wire.model(response.model)

    def list_models(self) -> Iterator[Model]:
        """Yield what the router serves: bases, then adapters by name."""

        def ask(token: str) -> models_pb2.ListModelsResponse:
            request = models_pb2.ListModelsRequest(page_size=PAGE_SIZE, page_token=token)
            metadata = wire.metadata(self.min_revision, credentials=self._credentials.for_models)
            return self._models.ListModels(request, timeout=self.timeouts.call_s, metadata=metadata)

        for page in _pages(self._router, ask):
            yield from map(wire.model, page.models)

    def list_workers(self) -> Iterator[Worker]:
        """Yield the workers the router knows, by id."""

        def ask(token: str) -> fleet_pb2.ListWorkersResponse:
            request = fleet_pb2.ListWorkersRequest(page_size=PAGE_SIZE, page_token=token)
            return self._fleet.ListWorkers(request, timeout=self.timeouts.call_s, metadata=self._operator)

        for page in _pages(self._router, ask):
            yield from map(wire.worker, page.workers)

    def list_advice(self) -> Iterator[Advice]:
        """Yield what an operator might do about the traffic that the router sees; most pressing of each kind first."""

        def ask(token: str) -> fleet_pb2.ListAdviceResponse:
            request = fleet_pb2.ListAdviceRequest(page_size=PAGE_SIZE, page_token=token)
            return self._fleet.ListAdvice(request, timeout=self.timeouts.call_s, metadata=self._operator)

        for page in _pages(self._router, ask):
            yield from map(wire.advice, page.advice)

    @property
    def _for_fleet(self) -> Metadata:
        return wire.metadata(self.min_revision, credentials=self._operator)

    def _seen(self, revision: int) -> None:
        self.min_revision = max(self.min_revision, revision)


def _pages(peer: Peer, ask: Callable[[str], P]) -> Iterator[P]:
    """Yield the pages of a list; `ask` gets one by its token."""
    token: str | None = ""
    while token is not None:
        with peer.calls():
            page = ask(token)
        yield page
        token = page.next_page_token or None
