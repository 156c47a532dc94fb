"""Run unmodified clients against a running lp-serve: libraries, services, load generators, coding agents.

    python -m venv VENV && VENV/bin/pip install openai litellm langchain-openai instructor mcp 'lm-eval[api,hf]'
    python -m venv VENV2 && VENV2/bin/pip install open-webui        # separately, clients that need other versions:
        # 'litellm[proxy]', guidellm, 'evalscope[perf]', aider-chat, mini-swe-agent, 'pydantic-ai-slim[openai]',
        # 'llama-index-core llama-index-llms-openai-like', dspy
    npm install --prefix DIR @openai/codex opencode-ai @qwen-code/qwen-code @continuedev/cli @anthropic-ai/claude-code
    lp-serve model.path=MODEL port=8000 access_log=true max_body_bytes=8000000 2> LOG &
    export PATH=$PATH:VENV/bin:VENV2/bin:DIR/node_modules/.bin
    python scripts/try_clients.py http://127.0.0.1:8000 MODEL LOG [CLIENT ...]

Commands are found in PATH, and libraries in the environment of any `python` there. Clients that are not installed are
skipped. Prints a line for each client: its answer or outcome, and how many of its requests were refused according to
the access log. The exit status is 1 if a client failed, or a request was refused. The model needs a chat template
that shows tools. A small model's success with an agent's task does not count.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

from try_agents import AGENTS, run
from try_libraries import LIBRARIES
from try_services import SERVICES


def python_with(module: str) -> str | None:
    """Return this Python or the first one in PATH that has a module; None if none has."""
    check = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    for folder in os.environ["PATH"].split(os.pathsep):
        python = shutil.which("python", path=folder)
        if python and not subprocess.run([python, "-c", check], stderr=subprocess.DEVNULL, check=False).returncode:
            return python
    return None


def try_library(name: str, url: str, model: str, folder: str) -> str:
    """Try a library in its environment; return its answer.

    Raises:
        RuntimeError: it failed.
    """
    python = python_with(LIBRARIES[name][0])
    if python is None:
        return NOT_INSTALLED
    script = Path(__file__).with_name("try_libraries.py")
    command = [python, str(script), url, model, folder, name]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    if done.returncode:
        raise RuntimeError(last)
    return last


def try_service(name: str, url: str, model: str, folder: str) -> str:
    """Try a service; return its answer."""
    command, attempt = SERVICES[name]
    return NOT_INSTALLED if shutil.which(command) is None else attempt(url, model, folder)


def try_agent(name: str, url: str, model: str, _: str) -> str:
    """Try an agent; return its outcome."""
    return NOT_INSTALLED if shutil.which(AGENTS[name].command[0]) is None else run(AGENTS[name], url, model)


NOT_INSTALLED = "is not installed"
CLIENTS: dict[str, Callable[[str, str, str, str], str]] = {
    **dict.fromkeys(LIBRARIES, try_library),
    **dict.fromkeys(SERVICES, try_service),
    **dict.fromkeys(AGENTS, try_agent),
}


def statuses(log: Path, start: int) -> list[int]:
    """Return the statuses of requests in an access log, from byte `start` on."""
    with open(log, "rb") as lines:
        lines.seek(start)
        return [json.loads(line)["status"] for line in lines if line.startswith(b'{"time"')]


def main() -> int:
    """Try the clients; return the exit status."""
    if len(sys.argv) < 4:
        sys.exit(f"usage: {sys.argv[0]} URL MODEL LOG [CLIENT ...]")
    url, folder, log, names = sys.argv[1].rstrip("/"), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
    if unknown := [name for name in names if name not in CLIENTS]:
        sys.exit(f"try_clients: {unknown[0]}: must be one of {', '.join(CLIENTS)}")
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    is_bad = False
    for name in names or CLIENTS:
        start = log.stat().st_size
        try:
            outcome = CLIENTS[name](name, url, model, folder)
        except Exception as error:
            is_bad = True
            outcome = f"FAILED: {type(error).__name__}: {error}"
        answered = statuses(log, start)
        refused = [status for status in answered if status >= 400]
        is_bad = is_bad or bool(refused)
        counts = f"; {len(answered)} requests, {len(refused)} refused {refused or ''}" if answered else ""
        print(f"{name:24} {outcome}{counts}".rstrip(), flush=True)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
