"""Ask a running lp-serve with the `openai` package: a stream, its usage, and fields of lp-serve.

pip install -c constraints.txt -e '.[serve]' openai
lp-serve &
python examples/server_client.py                              http://127.0.0.1:8000
LP_KEY=KEY python examples/server_client.py https://HOST      a server with keys
"""

import os
import sys

from openai import OpenAI


def main(url: str) -> None:
    """Print a streamed answer with its number of tokens, then one with its drafting metrics."""
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("LP_KEY", "none"))
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model,
        prompt="def fibonacci(n):\n",
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        print("".join(choice.text for choice in chunk.choices), end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens", file=sys.stderr)
    small = {"lookahead": {"budget": 32}}  # fields that OpenAI does not have: extra_body, model_extra
    answer = client.completions.create(model=model, prompt="import ", max_tokens=16, temperature=0, extra_body=small)
    print(answer.choices[0].text)
    print(answer.model_extra["metrics"]["speculative_decoding"], file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
