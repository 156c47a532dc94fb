"""Make the model answer in JSON that follows a schema, and with one of several words.

pip install -c constraints.txt -e '.[constraints]'
python examples/structured_output.py
"""

import json

from lp_runtime import ConstraintConfig, LookaheadRuntime

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "arguments": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
        "language": {"enum": ["python", "rust", "c"]},
    },
    "required": ["name", "arguments", "language"],
}


def main() -> None:
    """Print the parsed answer and the chosen word."""
    with LookaheadRuntime() as runtime:
        in_json = runtime.generate("Describe fib(n): ", 128, constraint=ConstraintConfig(json_schema=SCHEMA))
        print(json.loads(in_json.text))
        word = runtime.generate("Is it recursive? ", 8, constraint=ConstraintConfig(choice=["yes", "no"]))
        print(word.text)


if __name__ == "__main__":
    main()
