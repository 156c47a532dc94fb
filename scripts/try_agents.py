"""Run unmodified coding agents against a running lp-serve; see try_clients.py.

Each reads a file, writes a program and runs it, in a new folder and a new home, for at most SECONDS.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 1800  # a slow device reads 18,000 tokens of tools in 15 minutes
TASK = "Read the file notes.txt, then create a file hello.py that prints hello, then run it."
LENGTH = 160  # maximum tokens of an answer, for agents with such a setting; small models do not end


@dataclass(frozen=True)
class Agent:
    """Command and settings of a coding agent; @URL and @MODEL in texts stand for the server's.

    Attributes:
        command: its first word is looked up in PATH; @TASK stands for the task.
        files: settings, by their path in the home folder.
        variables: environment variables.
        project: further files of the project.
    """

    command: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    project: dict[str, str] = field(default_factory=dict)


OPENAI = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": "@URL/v1", "OPENAI_API_BASE": "@URL/v1"}
CONTINUE_MODEL = {
    "name": "lp",
    "provider": "openai",
    "model": "@MODEL",
    "apiBase": "@URL/v1",
    "apiKey": "none",
    "capabilities": ["tool_use"],
    "defaultCompletionOptions": {"maxTokens": LENGTH},
}
OPENCODE_PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "@URL/v1", "apiKey": "none"},
    "models": {"@MODEL": {"limit": {"context": 32768, "output": LENGTH}}},
}
CLAUDE = {
    "ANTHROPIC_BASE_URL": "@URL",
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": "@MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "@MODEL",
    "API_TIMEOUT_MS": str(SECONDS * 1000),
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "IS_SANDBOX": "1",
}
AGENTS = {
    "codex": Agent(
        ("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "@TASK"),
        {
            ".codex/config.toml": 'model = "@MODEL"\nmodel_provider = "lp"\n'
            '[model_providers.lp]\nname = "lp"\nbase_url = "@URL/v1"\nwire_api = "responses"\n'
        },
    ),
    "claude": Agent(("claude", "-p", "@TASK", "--dangerously-skip-permissions"), variables=CLAUDE),
    "claude, four tools": Agent(  # all of them take 18,727 tokens
        ("claude", "-p", "@TASK", "--dangerously-skip-permissions", "--tools", "Read,Write,Edit,Bash"),
        variables=CLAUDE,
    ),
    "opencode": Agent(
        ("opencode", "run", "-m", "lp/@MODEL", "@TASK"),
        project={"opencode.json": json.dumps({"provider": {"lp": OPENCODE_PROVIDER}, "small_model": "lp/@MODEL"})},
    ),
    "qwen": Agent(
        ("qwen", "--auth-type", "openai", "--yolo", "-p", "@TASK"),
        {
            ".qwen/settings.json": json.dumps(
                {"model": {"generationConfig": {"samplingParams": {"max_tokens": LENGTH}}}}
            )
        },
        OPENAI | {"OPENAI_MODEL": "@MODEL"},
    ),
    "cn": Agent(
        ("cn", "-p", "--auto", "--config", "@HOME/config.yaml", "@TASK"),
        {"config.yaml": json.dumps({"name": "lp", "version": "0.0.1", "schema": "v1", "models": [CONTINUE_MODEL]})},
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    "aider": Agent(
        (
            *("aider", "--model", "openai/@MODEL", "--yes-always", "--no-check-update", "--analytics-disable"),
            *("--no-show-model-warnings", "--message", "@TASK", "notes.txt"),
        ),
        variables=OPENAI,
    ),
    "mini": Agent(
        (
            "mini",
            "-y",
            "--exit-immediately",
            "-l",
            "0",
            "-m",
            "openai/@MODEL",
            "-o",
            "@HOME/trajectory.json",
            "-t",
            "@TASK",
        ),
        variables=OPENAI | {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    ),
}


def run(agent: Agent, url: str, model: str) -> str:
    """Run an agent; return its outcome."""
    with tempfile.TemporaryDirectory() as folder:
        home, project = Path(folder) / "home", Path(folder) / "project"

        def filled(text: str) -> str:
            for name, value in (("@URL", url), ("@MODEL", model), ("@HOME", str(home)), ("@TASK", TASK)):
                text = text.replace(name, value)
            return text

        written = {home / name: text for name, text in agent.files.items()}
        written |= {project / name: text for name, text in agent.project.items()}
        for path, text in (written | {project / "notes.txt": "The answer is 42.\n"}).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(filled(text))
        home.mkdir(exist_ok=True)
        subprocess.run(["git", "init", "--quiet", str(project)], check=True)
        variables = {name: filled(text) for name, text in agent.variables.items()}
        process = subprocess.Popen(
            [filled(word) for word in agent.command],
            cwd=project,
            env={**os.environ, **variables, "HOME": str(home), "PWD": str(project)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return f"was ended after {SECONDS} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # no process is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return f"ended with status {process.returncode}"
