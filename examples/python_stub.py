"""Streams an answer with nothing but the generated gRPC stubs.

    python -m examples.python_stub [MODEL] [PROMPT]

Against a running `loraplex up`. The typed client in `loraplex.client` does the same with less to write.
"""

import sys

import grpc

from loraplex.router.v1 import inference_pb2, inference_pb2_grpc
from loraplex.types.v1 import generation_pb2, sampling_pb2

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPT = sys.argv[2] if len(sys.argv) > 2 else "What is the capital of France?"

with grpc.insecure_channel("127.0.0.1:50050") as channel:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    request = inference_pb2.GenerateRequest(
        model=MODEL,
        chat=generation_pb2.ChatInput(messages=[generation_pb2.ChatMessage(role="user", content=PROMPT)]),
        sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=64),
    )
    try:
        for response in stub.Generate(request, timeout=60):
            match response.WhichOneof("event"):
                case "delta":
                    print(response.delta.text, end="", flush=True)
                case "finished":
                    facts, usage = response.finished.facts, response.finished.usage
                    print(f"\n-- {usage.completion_tokens} tokens by {facts.artifact_digest[:12] or 'the base model'}")
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
