"""Run unmodified libraries against a running lp-serve.

    python scripts/try_libraries.py URL MODEL DIR LIBRARY

try_clients.py calls this script in a library's environment. It prints a line; the exit status is 1 if the library
fails. lm-evaluation-harness's results are compared with those of its Hugging Face backend.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUESTIONS = [
    {"question": "def add(a, b):\n    return a +", "choices": [" b", " a", " c", " self"], "answer": 0},
    {"question": "import", "choices": [" os", " while", " def", " 7"], "answer": 0},
    {"question": "for i in", "choices": [" range", " return", " import", " class"], "answer": 0},
    {
        "question": "class Stack:\n    def __init__(self):\n        self.items =",
        "choices": [" []", " for", " if"],
        "answer": 0,
    },
    {"question": "if x is not", "choices": [" None", " def", " import"], "answer": 0},
]
TASKS: dict[str, dict[str, Any]] = {
    "lp_choice": {
        "output_type": "multiple_choice",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "lp_generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def try_litellm(url: str, model: str) -> str:
    """Return litellm's answer; a chat whole and streamed must be equal."""
    import litellm

    options: dict[str, Any] = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    messages = [{"role": "user", "content": "Write a loop."}]
    whole = litellm.completion(messages=messages, max_tokens=24, **options).choices[0].message.content
    chunks = litellm.completion(messages=messages, max_tokens=24, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    return repr(whole[:40])


def try_langchain(url: str, model: str) -> str:
    """Return langchain-openai's answer; invoke and stream must be equal."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_completion_tokens=24)
    whole = chat.invoke("Write a loop.").content
    assert "".join(chunk.content for chunk in chat.stream("Write a loop.")) == whole
    return repr(whole[:40])


def try_openai(url: str, model: str) -> str:
    """Return the openai client's answer; chats and responses must be equal."""
    import openai

    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "user", "content": "Write a loop."}]
    options: dict[str, Any] = {"model": model, "temperature": 0}
    chat = client.chat.completions.create(
        messages=messages, max_tokens=24, logprobs=True, top_logprobs=5, **options
    ).choices[0]
    assert all(len(each.top_logprobs) == 5 for each in chat.logprobs.content)
    assert client.responses.create(input="Write a loop.", max_output_tokens=24, **options).output_text == (
        chat.message.content
    )
    return repr(chat.message.content[:40])


def schema_of_a_record() -> dict[str, Any]:
    """Return the JSON schema for structured outputs and calls; it is short, as models here are small."""
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }


def checked(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record that satisfies the schema.

    Raises:
        AssertionError: it does not.
    """
    assert record.keys() == {"name", "age"} and isinstance(record["name"], str) and isinstance(record["age"], int)
    assert len(record["name"]) <= 12 and record["age"] <= 120
    return record


def try_openai_structure(url: str, model: str) -> str:
    """Return the openai client's answers by response_format, tools (whole and streamed) and responses."""
    import openai

    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "user", "content": "Who is Ada?"}]
    options: dict[str, Any] = {"model": model, "temperature": 0}
    schema = schema_of_a_record()
    form = {"type": "json_schema", "json_schema": {"name": "record", "schema": schema, "strict": True}}
    chat = client.chat.completions.create(messages=messages, response_format=form, **options)
    record = checked(json.loads(chat.choices[0].message.content))
    tool = {"type": "function", "function": {"name": "save", "description": "Save.", "parameters": schema}}
    asked = {"messages": messages, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, **options}
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    pieces, names = [], []
    for chunk in client.chat.completions.create(stream=True, **asked):
        for delta in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            names.append(delta.function.name)
            pieces.append(delta.function.arguments or "")
    assert call.function.name == "save" and "".join(filter(None, names)) == "save"
    assert json.loads("".join(pieces)) == checked(json.loads(call.function.arguments))
    flat = {"type": "function", "name": "save", "description": "Save.", "parameters": schema}
    response = client.responses.create(
        input="Who is Ada?", tools=[flat], tool_choice="required", parallel_tool_calls=False, **options
    )
    (item,) = response.output
    assert item.type == "function_call" and checked(json.loads(item.arguments))
    return f"{json.dumps(record)} and {call.function.name}({call.function.arguments})"


def try_langchain_structure(url: str, model: str) -> str:
    """Return langchain-openai's answer: with_structured_output by both methods, and bind_tools."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0)
    schema = schema_of_a_record() | {"title": "save", "description": "Save."}
    for method in ("json_schema", "function_calling"):
        answer = checked(chat.with_structured_output(schema, method=method).invoke("Who is Ada?"))
    bound = chat.bind_tools([schema], tool_choice="required", parallel_tool_calls=False)
    (call,) = bound.invoke("Who is Ada?").tool_calls
    assert call["name"] == "save" and checked(call["args"])
    return json.dumps(answer)


def try_litellm_tools(url: str, model: str) -> str:
    """Return the tool call that litellm gets."""
    import litellm

    tool = {"type": "function", "function": {"name": "save", "parameters": schema_of_a_record()}}
    answer = litellm.completion(
        model=f"openai/{model}",
        api_base=f"{url}/v1",
        api_key="none",
        temperature=0,
        messages=[{"role": "user", "content": "Who is Ada?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "save"}},
    )
    (call,) = answer.choices[0].message.tool_calls
    return json.dumps(checked(json.loads(call.function.arguments)))


def try_instructor(url: str, model: str) -> str:
    """Return the records that instructor gets in its modes of tools and of JSON schemas."""
    import instructor
    import openai
    from pydantic import BaseModel, Field

    class Record(BaseModel):
        name: str = Field(max_length=12)
        age: int = Field(le=120)

    answers = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
        messages = [{"role": "user", "content": "Who is Ada?"}]
        answers.append(
            client.chat.completions.create(
                model=model, temperature=0, messages=messages, response_model=Record, max_retries=0
            )
        )
    return " and ".join(repr(each) for each in answers)


def try_lm_eval(url: str, model: str, folder: str) -> str:
    """Return how many results of lm-evaluation-harness equal those of the backend hf; all must.

    Args:
        url: the server.
        model: name of the model on the server.
        folder: directory of the model, for the hf backend and the tokenizer.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "questions.jsonl"
        data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
        common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        for name, task in TASKS.items():  # JSON is YAML
            whole: dict[str, Any] = {"task": name, **common, "doc_to_text": "question", **task}
            (Path(place) / f"{name}.yaml").write_text(json.dumps(whole))
        manager = TaskManager(include_path=place, include_defaults=False)
        results = []
        for kind, arguments in (
            ("local-completions", f"base_url={url}/v1/completions,model={model},tokenizer={folder},num_concurrent=4"),
            ("hf", f"pretrained={folder},dtype=float32,device=cpu"),
        ):
            done = lm_eval.simple_evaluate(
                kind, model_args=arguments, tasks=list(TASKS), task_manager=manager, log_samples=True, bootstrap_iters=0
            )
            results.append([each["filtered_resps"] for name in TASKS for each in done["samples"][name]])
    served, local = results
    for one, other in zip(served, local, strict=True):
        if isinstance(one[0], str):
            assert one == other, f"{one} and {other}"
        else:
            for (value, is_greedy), (expected, expected_greedy) in zip(one, other, strict=True):
                assert abs(float(value) - float(expected)) < 1e-2 and str(is_greedy) == str(expected_greedy)
    return f"{len(served)} of {len(local)} samples are those of the hf backend"


def try_pydantic_ai(url: str, model: str) -> str:
    """Return the calls that pydantic-ai made, and its final answer."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(chat, model_settings={"max_tokens": 100, "temperature": 0})
    called = []

    @agent.tool_plain
    def read_file(path: str) -> str:
        """Read a file and return its text."""
        called.append(path)
        return "The answer is 42."

    limits = UsageLimits(request_limit=6)
    result = agent.run_sync("Read the file notes.txt with the tool and tell me the answer.", usage_limits=limits)
    return f"{called} {result.output[:40]!r}"


def try_llama_index(url: str, model: str) -> str:
    """Return llama-index's answers after a call, and by a stream."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def read_file(path: str) -> str:
        """Read a file and return its text."""
        return f"{path}: The answer is 42."

    options = {"is_chat_model": True, "is_function_calling_model": True, "max_tokens": 80, "temperature": 0}
    chat = OpenAILike(model=model, api_base=f"{url}/v1", api_key="none", timeout=600, **options)
    tool = FunctionTool.from_defaults(read_file)
    answer = chat.predict_and_call([tool], user_msg="Read the file notes.txt.", error_on_no_tool_call=False)
    chunks = list(chat.stream_chat([ChatMessage(role="user", content="Say hello.")]))
    assert chunks[-1].message.content == "".join(chunk.delta or "" for chunk in chunks)
    return f"{str(answer)[:40]!r} and {chunks[-1].message.content[:40]!r}"


def try_dspy(url: str, model: str) -> str:
    """Return DSPy's answer."""
    import dspy

    options = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 120, "temperature": 0, "cache": False}
    with dspy.context(lm=dspy.LM(f"openai/{model}", **options)):
        return repr(dspy.Predict("question -> answer")(question="What is 1+1?").answer[:40])


# By name: the module that must be installed, and the function, which gets url, model and the model's folder.
LIBRARIES: dict[str, tuple[str, Callable[[str, str, str], str]]] = {
    "openai": ("openai", lambda url, model, _: try_openai(url, model)),
    "litellm": ("litellm", lambda url, model, _: try_litellm(url, model)),
    "langchain-openai": ("langchain_openai", lambda url, model, _: try_langchain(url, model)),
    "openai structure": ("openai", lambda url, model, _: try_openai_structure(url, model)),
    "litellm tools": ("litellm", lambda url, model, _: try_litellm_tools(url, model)),
    "langchain structure": ("langchain_openai", lambda url, model, _: try_langchain_structure(url, model)),
    "instructor": ("instructor", lambda url, model, _: try_instructor(url, model)),
    "pydantic-ai": ("pydantic_ai", lambda url, model, _: try_pydantic_ai(url, model)),
    "llama-index": ("llama_index.llms.openai_like", lambda url, model, _: try_llama_index(url, model)),
    "DSPy": ("dspy", lambda url, model, _: try_dspy(url, model)),
    "lm-evaluation-harness": ("lm_eval", try_lm_eval),
}


def main() -> int:
    """Try a library; return the exit status."""
    url, model, folder, name = sys.argv[1:]
    try:
        print(LIBRARIES[name][1](url, model, folder))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
