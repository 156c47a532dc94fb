"""What the commands do once their settings are sound. Apart from cli.py, because what it imports takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lp_runtime.bench.command import bench, check_bench
from lp_runtime.config.commands import BenchConfig, ChatConfig, GenerateConfig, ServeConfig
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.entrypoints.batch import check_output, generate_file
from lp_runtime.entrypoints.chat import chat, check_chat
from lp_runtime.entrypoints.generate import generate_one
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.server.ray_serve import serve_on_ray
from lp_runtime.server.serve import check_serve, serve
from lp_runtime.utils.prompt_file import parse_ids, read_prompts

Work = Callable[[LookaheadRuntime], None]


def run_command(config: RuntimeConfig, is_leader: bool) -> None:
    """Do what a command's settings, which are of its schema, ask for.

    Args:
        config: the settings.
        is_leader: False on the ranks of torchrun that follow rank 0.

    Raises:
        LookaheadError: whatever is wrong.
    """
    # What can be refused without a model is refused before replicas start; by rank 0, whose end ends the others.
    work = _PREPARE[type(config)](config) if is_leader else None
    if isinstance(config, ServeConfig) and config.server == "ray_serve":
        if work is not None:
            serve_on_ray(config)  # the runtime is there
        return
    with LookaheadRuntime.from_config(config) as runtime:
        if work is not None:
            work(runtime)  # the other ranks serve as they leave the block


def _prepare_generate(config: GenerateConfig) -> Work:
    if config.prompts is not None:
        check_output(Path(config.output))
        prompts = read_prompts(config.prompts, config.prompt_field, config.limit, config.ids)
        return partial(generate_file, config=config, prompts=prompts)
    prompt = parse_ids(config.prompt, "prompt") if config.ids else config.prompt
    return partial(generate_one, config=config, prompt=prompt)


def _prepare_chat(config: ChatConfig) -> Work:
    check_chat(config)
    return partial(chat, config=config)


def _prepare_serve(config: ServeConfig) -> Work:
    check_serve(config)
    return partial(serve, config=config)


def _prepare_bench(config: BenchConfig) -> Work:
    check_bench(config)
    return partial(bench, config=config)


_PREPARE = {
    GenerateConfig: _prepare_generate,
    ChatConfig: _prepare_chat,
    ServeConfig: _prepare_serve,
    BenchConfig: _prepare_bench,
}
