"""Dispatch of the commands, after their settings are checked; not in cli.py, because imports are slow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lp_runtime.bench.command import bench, check_bench
from lp_runtime.bench.load import put_under_load
from lp_runtime.bench.splits import measure_splits
from lp_runtime.config.commands import BenchConfig, ChatConfig, DoctorConfig, GenerateConfig
from lp_runtime.config.serving import ServeConfig
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.environment import started_by_torchrun
from lp_runtime.distributed.precision import turn_off_tf32
from lp_runtime.entrypoints.batch import check_prompts_file, generate_file
from lp_runtime.entrypoints.chat import chat, check_chat
from lp_runtime.entrypoints.doctor import examine
from lp_runtime.entrypoints.generate import generate_one
from lp_runtime.entrypoints.output_file import check_output
from lp_runtime.entrypoints.remote_chat import chat_with_server
from lp_runtime.model.loading.loader import load_tokenizer
from lp_runtime.model.tokenizer import check_chat_template
from lp_runtime.replica.compile_ahead import compile_steps, is_compiled
from lp_runtime.runtime import LookaheadRuntime
from lp_runtime.server.http.settings import check_serve, listen
from lp_runtime.utils.limits import num_cores
from lp_runtime.utils.prompt_file import check_conversations, parse_ids, read_prompts

Work = Callable[[LookaheadRuntime], None]


def run_command(config: RuntimeConfig, is_leader: bool) -> None:
    """Run the command that the class of `config` stands for; torchrun's ranks other than 0 are no leader."""
    turn_off_tf32()
    if num_cores() < torch.get_num_threads():  # torch does not know a container's quota
        torch.set_num_threads(num_cores())
    if not config.has_runtime:
        for part in _parts_without_runtime(config) if is_leader else ():
            part(config)
        return
    # Rank 0 checks the input before replicas start; if it exits, torchrun ends the other ranks.
    work = _prepare(config) if is_leader else None
    if isinstance(config, BenchConfig) or (isinstance(config, GenerateConfig) and config.compare):
        _compile_measured(config)
    with LookaheadRuntime.from_config(config) as runtime:
        if work is not None:
            work(runtime)  # the other ranks decode for rank 0 in the exit of this `with` block
    if not isinstance(config, ServeConfig):  # a server ends when asked to
        with suppress(KeyboardInterrupt):
            _compile(config, "the drafter for the next command, once per machine; Ctrl-C skips it")


def _compile_measured(config: RuntimeConfig) -> None:
    """Compile before anything is measured: a request would begin without drafts while another process compiles."""
    _compile(config, "what is measured")


def _compile(config: RuntimeConfig, what: str) -> None:
    """Compile what is not compiled yet, or wait until the process that compiles ahead has done so."""
    is_shared = config.num_gpus > 1 or started_by_torchrun() or isinstance(config, BenchConfig)
    if config.lookahead.drafter == "full" and config.launcher.name != "ray" and not is_compiled(is_shared):
        print(f"compiling {what}", file=sys.stderr, flush=True)
        compile_steps(is_shared)


def _parts_without_runtime(config: RuntimeConfig) -> tuple[Callable[[Any], object], ...]:
    """Return the parts of a command that has no runtime in this process."""
    if isinstance(config, DoctorConfig):
        return (examine,)
    if isinstance(config, ServeConfig):
        return check_serve, _serve_on_ray  # the Serve replica has the runtime
    if isinstance(config, ChatConfig):
        return (chat_with_server,)
    assert isinstance(config, BenchConfig)
    return (put_under_load,) if config.url is not None else (check_bench, _compile_measured, measure_splits)


def _serve_on_ray(config: ServeConfig) -> None:
    from lp_runtime.server.ray_serve import serve_on_ray  # needs the extra `serve`

    serve_on_ray(config)


def _prepare(config: RuntimeConfig) -> Work:
    """Check the input of a command that uses a runtime; return the work to do with it."""
    if isinstance(config, GenerateConfig):
        return _prepare_generate(config)
    if isinstance(config, ChatConfig):
        check_chat(config)
        return partial(chat, config=config)
    if isinstance(config, ServeConfig):
        return _prepare_serve(config)
    assert isinstance(config, BenchConfig)
    check_bench(config)
    return partial(bench, config=config)


def _prepare_generate(config: GenerateConfig) -> Work:
    if config.chat:
        check_chat_template(load_tokenizer(config.model), config.model.location)
    if config.prompts is not None:
        assert config.output is not None  # GenerateConfig requires it with `prompts`
        check_output(Path(config.output))
        check_prompts_file(config.prompts)
        prompts = read_prompts(config.prompts, config.prompt_field, config.limit, config.ids)
        if config.turns == "all":
            check_conversations(prompts, config.prompts, config.prompt_field)
        return partial(generate_file, config=config, prompts=prompts)
    assert config.prompt is not None  # GenerateConfig requires it without `prompts`
    prompt = parse_ids(config.prompt, "prompt") if config.ids else config.prompt
    return partial(generate_one, config=config, prompt=prompt)


def _prepare_serve(config: ServeConfig) -> Work:
    check_serve(config)
    from lp_runtime.server.serve import StartingServer, serve  # needs the extra `serve`

    return partial(serve, config=config, starting=StartingServer(listen(config), config))
