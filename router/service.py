"""The router's gRPC services for clients: InferenceService, ModelService."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from common.bearer import sent_authorization
from common.pages import page_of
from loraplex.errors import EmptyPrompt
from loraplex.metadata_keys import MIN_REVISION_KEY, REQUEST_ID_KEY
from loraplex.router.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)
from router.access import Access
from router.catalog import Adapter, Base, Catalog, Version, parse_min_revision
from router.forward import Job
from router.inference import Inference, request_id_from
from router.traces import add_spans, describe_usage, name_request


def check_input(request: inference_pb2.GenerateRequest) -> None:
    """Refuse a request without input. Raises EmptyPrompt; whether it fits the model is for the worker to say."""
    kind = request.WhichOneof("input")
    given = {"prompt": request.prompt, "chat": request.chat.messages, "tokens": request.tokens.token_ids}
    if kind is None or not given[kind]:
        raise EmptyPrompt("the request has no input; give a prompt, chat messages or tokens", field=kind or "input")


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The public front of the cluster over gRPC."""

    def __init__(self, inference: Inference, access: Access) -> None:
        self._inference = inference
        self._access = access

    async def Generate(  # noqa: N802 - the name is the RPC's
        self, request: inference_pb2.GenerateRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Relay one generation from a worker."""
        inference = self._inference
        metadata = dict(context.invocation_metadata() or ())
        with ExitStack() as held:
            observation = held.enter_context(inference.observed("grpc"))
            tenant = self._access.client(authorization(context))
            held.enter_context(inference.admitted(tenant))
            request_id = request_id_from(_text(metadata, REQUEST_ID_KEY))
            operation = "chat" if request.WhichOneof("input") == "chat" else "text_completion"
            name_request(request_id, request.model, operation)
            check_input(request)
            deadline_s = inference.deadline_s(context.time_remaining())
            resolved = await inference.resolve(tenant, request.model, _text(metadata, MIN_REVISION_KEY))
            stream = await inference.open(Job(request_id, tenant, resolved, request, deadline_s))
            try:
                observation.first_event()
                await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
                async for event in stream:
                    match event.WhichOneof("event"):
                        case "delta":
                            yield inference_pb2.GenerateResponse(delta=event.delta)
                        case "choice_finished":
                            yield inference_pb2.GenerateResponse(choice_finished=event.choice_finished)
                        case "finished":
                            usage = event.finished.usage
                            observation.usage(usage.prompt_tokens, usage.completion_tokens)
                            describe_usage(usage.prompt_tokens, usage.completion_tokens)
                            add_spans(event.finished)
                            yield inference_pb2.GenerateResponse(finished=event.finished)
                        case _:
                            pass
            finally:
                stream.close()


def min_revision(context: aio.ServicerContext[Any, Any]) -> int:
    """Return the revision that a caller wants to see at least. Raises InvalidParameter."""
    return parse_min_revision(_text(dict(context.invocation_metadata() or ()), MIN_REVISION_KEY))


def authorization(context: aio.ServicerContext[Any, Any]) -> str | None:
    """Return a call's credential as it was sent."""
    return sent_authorization(context.invocation_metadata())


def _text(metadata: dict[str, str | bytes], key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) else None


def to_model(item: Base | Adapter) -> models_pb2.Model:
    """Return what a listing says of a base or of an adapter's current version."""
    if isinstance(item, Base):
        return models_pb2.Model(
            name=item.base_id, base_digest=item.digest, create_time=Timestamp(seconds=item.create_time_s)
        )
    return _adapter_model(item.name, item.base_id, item.current)


def _model_key(item: Base | Adapter) -> str:
    return f"0{item.base_id}" if isinstance(item, Base) else f"1{item.name}"


def _adapter_model(name: str, base_id: str, version: Version) -> models_pb2.Model:
    return models_pb2.Model(
        name=name,
        parent=base_id,
        base_digest=version.base_digest,
        version_digest=version.version_digest,
        artifact_digest=version.artifact_digest,
        rank=version.rank,
        artifact_bytes=version.artifact_bytes,
        create_time=Timestamp(seconds=version.create_time_s),
    )


class ModelService(models_pb2_grpc.ModelServiceServicer):
    """The models a caller may name."""

    def __init__(self, catalog: Catalog, access: Access) -> None:
        self._catalog = catalog
        self._access = access

    async def ListModels(  # noqa: N802 - the name is the RPC's
        self, request: models_pb2.ListModelsRequest, context: aio.ServicerContext[Any, Any]
    ) -> models_pb2.ListModelsResponse:
        """List bases, then adapters."""
        tenant = self._access.reader(authorization(context))
        snapshot = await self._catalog.at_least(min_revision(context))
        models = snapshot.models(tenant)
        page, token = page_of("models", models, _model_key, request.page_size, request.page_token)
        return models_pb2.ListModelsResponse(models=[to_model(item) for item in page], next_page_token=token)

    async def GetModel(  # noqa: N802 - the name is the RPC's
        self, request: models_pb2.GetModelRequest, context: aio.ServicerContext[Any, Any]
    ) -> models_pb2.GetModelResponse:
        """Tell what a name means now."""
        tenant = self._access.reader(authorization(context))
        snapshot = await self._catalog.at_least(min_revision(context))
        resolved = snapshot.resolve(tenant, request.name)
        if resolved.version is None:
            model = to_model(snapshot.bases[resolved.base_id])
        else:
            model = _adapter_model(request.name, resolved.base_id, resolved.version)
        return models_pb2.GetModelResponse(model=model)
