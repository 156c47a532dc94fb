"""Entry points of the commands: settings, exit statuses, one-line errors.

This module imports nothing slow, so that bad settings are refused before torch is imported.
"""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import platform
import signal
import sys
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from typing import NamedTuple, NoReturn

from lp_runtime.config.commands import BenchConfig, ChatConfig, DoctorConfig, GenerateConfig
from lp_runtime.config.overrides import as_yaml, help_keys, load_config
from lp_runtime.config.serving import ServeConfig
from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.distributed.environment import ReplicaContext, keep_caches_in, started_by_torchrun
from lp_runtime.errors import ConfigError, LaunchError, LookaheadError, ModelError, RequestError
from lp_runtime.model.hf.location import check_location
from lp_runtime.utils.limits import MORE_PROCESSES
from lp_runtime.utils.startup import hide_triton_without_gpu, no_garbage_collection

BAD_INPUT = (ConfigError, RequestError, ModelError, LaunchError)
EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED = 2, 1, 130
EXIT_SIGNAL = 128  # plus the number of the signal that ended the process
NO_THREAD = "start new thread"  # in Python's error
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)  # errors of writing to stdout


class Command(NamedTuple):
    """A command: its name, the schema of its settings, and what `--help` says."""

    name: str
    schema: type[RuntimeConfig]
    about: str
    usage: str


GENERATE = Command(
    "lp-generate",
    GenerateConfig,
    "Generate text for one prompt, or for a file of prompts.",
    """\
lp-generate prompt="def fib(n):" [gpus=2] [lookahead.W=15 lookahead.N=5 lookahead.G=15] [KEY=VALUE ...]
       lp-generate prompts=FILE.jsonl output=OUT.jsonl [prompt_field=prompt] [KEY=VALUE ...]""",
)
CHAT = Command(
    "lp-chat",
    ChatConfig,
    "Chat on the terminal, with a model of this machine or with a server.",
    """\
lp-chat model.path=PATH_OR_ID [gpus=2] [system="You are ..."] [sampling.temperature=0.7] [KEY=VALUE ...]
       lp-chat url=http://HOST:PORT [api_key_file=FILE] [KEY=VALUE ...]""",
)
SERVE = Command(
    "lp-serve",
    ServeConfig,
    "Serve a model over HTTP, with the APIs of OpenAI and Anthropic.",
    "lp-serve model.path=PATH_OR_ID [gpus=2] [host=127.0.0.1] [port=8000] [api_key=KEY] [KEY=VALUE ...]",
)
BENCH = Command(
    "lp-bench",
    BenchConfig,
    "Measure how fast methods and numbers of replicas decode prompts, or how fast a server answers.",
    """\
lp-bench [prompts=FILE.jsonl:FIELD] [gpus=2] [degrees=[1,2,4,8]] [output=FOLDER] [KEY=VALUE ...]
       lp-bench url=http://HOST:PORT [rate=REQUESTS_A_SECOND | concurrency=CLIENTS] [num_requests=N] [KEY=VALUE ...]""",
)
DOCTOR = Command(
    "lp-doctor",
    DoctorConfig,
    "Check what this machine lacks for these settings.",
    "lp-doctor [model.path=PATH_OR_ID] [gpus=2] [device=cuda] [KEY=VALUE ...]",
)


def _run(command: Command, arguments: list[str] | None = None) -> None:
    """Run a command; `arguments` is the command line, None for the process's own.

    The process exits with 0, 2 (bad input), 1 (failed while working), 130 (Ctrl-C) or 143 (SIGTERM to lp-serve).
    """
    parser, schema = _parser(command), command.schema
    _prepare_process(is_server=schema is ServeConfig)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    rank = 0
    try:
        if started_by_torchrun():
            rank = ReplicaContext.from_torchrun().rank
        options = parser.parse_intermixed_args(arguments)
        _check_working_directory()
        try:
            config = load_config(schema, options.overrides, options.config_dir)
            if not options.cfg:
                check_location(config.model)
        except LookaheadError:
            if rank:  # rank 0 reports the error; if this rank failed too, torchrun could kill rank 0 before that
                return
            raise
        if options.cfg:
            print(as_yaml(config), end="", flush=True)
            return
        keep_caches_in(config.cache_dir)
        _run_command(config, is_leader=rank == 0)
        sys.stdout.flush()  # here a reader that is gone, or a full disk, is reported like any other error
    except LookaheadError as error:
        line = " ".join(str(error).splitlines())  # a value quoted in the message may have several lines
        print(f"error: {f'rank {rank}: ' if rank else ''}{line}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT if isinstance(error, BAD_INPUT) else EXIT_FAILED)
    except OSError as error:
        _end_unwritable(error)
    except RuntimeError as error:
        if NO_THREAD not in str(error):
            raise
        print(f"error: {error}: {MORE_PROCESSES}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def _run_command(config: RuntimeConfig, is_leader: bool) -> None:
    """Import the slow modules that commands need, and run the command."""
    if sys.flags.optimize > 1:
        raise ConfigError("PYTHONOPTIMIZE=2, or python -OO: must be off; transformers does not work without docstrings")
    from lp_runtime.replica.compile_ahead import compiling_ahead
    from lp_runtime.replica.process_start import starting_ahead

    with ExitStack() as stack:
        if config.has_runtime:
            stack.enter_context(compiling_ahead(config, is_shared=started_by_torchrun()))
            if not started_by_torchrun():
                stack.enter_context(starting_ahead(config))
        with no_garbage_collection():
            hide_triton_without_gpu()
            from lp_runtime.entrypoints.commands import run_command
        run_command(config, is_leader)


def _check_working_directory() -> None:
    """Raise ConfigError if the working directory has been deleted: relative paths would have no meaning."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory has been deleted: change to one that exists") from None


class _ShowVersions(argparse.Action):
    """Argument that prints the versions of the packages that output depends on, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        python = f"Python {platform.python_version()}"
        print(", ".join([*(f"{name} {version(name)}" for name in ("lp_runtime", "torch", "transformers")), python]))
        parser.exit()


def _prepare_process(is_server: bool) -> None:
    """Replace unencodable characters in the standard streams; make SIGTERM end a server cleanly."""
    if is_server and not started_by_torchrun():  # torchrun kills its ranks at once anyway
        signal.signal(signal.SIGTERM, _end_in_order)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _end_unwritable(error: OSError) -> NoReturn:
    """End the process if stdout has lost its reader (silently), a disk is full, or a file may not be used."""
    if isinstance(error, PermissionError) and error.filename:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    if error.errno not in UNWRITABLE:
        raise error
    if not isinstance(error, BrokenPipeError):
        print(f"error: {error.filename or 'stdout'}: cannot be written: {error.strerror}", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports the error again at exit
    sys.exit(EXIT_FAILED)


def _end_in_order(number: int, frame: object) -> NoReturn:
    """Turn a signal into SystemExit, so that replicas are closed and remaining output is sent."""
    sys.exit(EXIT_SIGNAL + number)


def _parser(command: Command) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command.name,
        usage=command.usage,
        description=f"{command.about}\nSettings are Hydra overrides; docs/settings.md explains them.",
        epilog=help_keys(command.schema),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="see below; groups are chosen by name")
    parser.add_argument("--cfg", action="store_true", help="print the resulting settings and exit")
    parser.add_argument("--version", action=_ShowVersions, nargs=0, help="print versions and exit")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with further configuration groups")
    return parser


main = partial(_run, GENERATE)
chat_main = partial(_run, CHAT)
serve_main = partial(_run, SERVE)
bench_main = partial(_run, BENCH)
doctor_main = partial(_run, DOCTOR)
