"""Streams an answer with the stock OpenAI client.

    python -m examples.openai_client [MODEL] [PROMPT]

Against a running `loraplex up`. A model is a base model's id or an adapter's name.
"""

import sys

from openai import OpenAI

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPT = sys.argv[2] if len(sys.argv) > 2 else "What is the capital of France?"

client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="not needed")
print("models:", ", ".join(model.id for model in client.models.list()))

stream = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": PROMPT}],
    max_tokens=64,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f"\n-- {chunk.usage.completion_tokens} tokens")
