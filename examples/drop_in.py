"""Speed up `generate` of a model that transformers has loaded: one more argument, the same tokens.

python examples/drop_in.py             the demo model
python examples/drop_in.py DIRECTORY   any causal language model, or a hub id
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from lp_runtime import lookahead_generate
from lp_runtime.config.settings import DEMO_MODEL

PROMPT = "def fibonacci(n):\n"


def main(model_path: str) -> None:
    """Print the text of `generate` with lookahead, and whether plain `generate` gives the same tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="float32")  # 16-bit types may differ at near ties
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with_lookahead = model.generate(**inputs, max_new_tokens=64, do_sample=False, custom_generate=lookahead_generate)
    plain = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(with_lookahead[0]))
    print(f"the same tokens: {'yes' if with_lookahead.equal(plain) else 'no'}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(DEMO_MODEL))
