"""A separate process that compiles constraints: a slow or crashing one fails only its own request.

Run as a module with the file descriptor of its pipe. It exits when the driver closes the pipe or dies.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

from lp_runtime.config.constraint import ConstraintConfig
from lp_runtime.constraints.compiled import CompiledConstraint, compile_constraint, describe_vocabulary
from lp_runtime.constraints.library import library
from lp_runtime.errors import BusyError, ConfigError, ConstraintError, LookaheadError, ReplicaError
from lp_runtime.text.token_text import TokenTexts
from lp_runtime.utils.owner import OwnerProcess
from lp_runtime.utils.startup import hide_triton_without_gpu, python_command

COMPILE_SECONDS = 5.0  # limit for one constraint; a large schema takes about 0.1 s
START_SECONDS = 120.0  # limit for the process to import its libraries
WAIT_SECONDS = 30.0  # longest wait of a request for the compilation of other requests' constraints
MAX_PENDING = 32  # submitted constraints that wait or compile at the same time; about 3 s of typical ones
MEMORY_BYTES = 4 << 30  # limit for compiling, in addition to what the libraries have mapped
MAX_KEPT_BYTES = 1 << 26  # size of the cache of compiled constraints
READY = "ready"


class ConstraintCompiler:
    """Compiler of constraints in a separate process, with an LRU cache. Thread-safe.

    `tokenizer` is called when the first constraint is compiled. `vocabulary_size` is the model's, which may exceed the
    tokenizer's. `seconds` is the time limit for one constraint.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Any],
        vocabulary_size: int,
        eos_token_ids: Collection[int],
        seconds: float = COMPILE_SECONDS,
    ):
        self._tokenizer, self._vocabulary_size = tokenizer, vocabulary_size
        self._eos_token_ids = eos_token_ids
        self.seconds = seconds
        self._owner = OwnerProcess()
        self._lock = threading.Lock()  # held while a constraint is compiled
        self._process: subprocess.Popen | None = None
        self._pipe: Connection | None = None
        self._threads = ThreadPoolExecutor(MAX_PENDING, "constraints")  # one thread for each pending constraint
        self._state_lock = threading.Lock()  # protects the attributes below; never held for long
        self._kept: OrderedDict[str, CompiledConstraint] = OrderedDict()
        self._pending: dict[str, Future[CompiledConstraint]] = {}
        self._is_closed = False

    def kept(self, config: ConstraintConfig) -> CompiledConstraint | None:
        """Return a constraint from the cache, or None. Never waits for a compilation."""
        self._owner.check("the runtime")
        key = config.key
        with self._state_lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
            return known

    def submit(self, config: ConstraintConfig) -> Future[CompiledConstraint]:
        """Start to compile a constraint in another thread; the future has the result or error of `compile`.

        Callers with equal constraints share one future, so none of them may cancel it.
        """
        self._owner.check("the runtime")
        key = config.key
        with self._state_lock:
            if (pending := self._pending.get(key)) is not None:
                return pending
            self._check_open()
            if len(self._pending) >= MAX_PENDING:
                raise BusyError(f"{MAX_PENDING} other requests' constraints are already waiting to be compiled")
            future = self._pending[key] = self._threads.submit(self.compile, config)
        future.add_done_callback(lambda _: self._forget(key))
        return future

    def compile(self, config: ConstraintConfig) -> CompiledConstraint:
        """Return a compiled constraint, from the cache or after compiling it now.

        The kind of `config` must not be None. Raises a BusyError if other requests' constraints take longer than
        WAIT_SECONDS.
        """
        library()
        if not self._eos_token_ids:
            raise ConfigError("constraint: the model has no end-of-sequence token, which must end the text")
        if (known := self.kept(config)) is not None:
            return known
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            raise BusyError(f"other requests' constraints have been compiling for more than {WAIT_SECONDS:g} s")
        try:
            self._check_open()
            if (known := self.kept(config)) is None:
                known = self._ask(config)
                self._keep(known)
        finally:
            self._lock.release()
        return known

    def _check_open(self) -> None:
        if self._is_closed:
            raise ReplicaError("constraints can no longer be compiled: the runtime is closed")

    def _keep(self, constraint: CompiledConstraint) -> None:
        with self._state_lock:
            self._kept[constraint.key] = constraint
            while sum(len(each.data) for each in self._kept.values()) > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)

    def _forget(self, key: str) -> None:
        with self._state_lock:
            del self._pending[key]

    def _ask(self, config: ConstraintConfig) -> CompiledConstraint:
        """Compile a constraint in the process; kill the process if it does not answer in time."""
        pipe = self._start_process()
        kind = config.kind
        try:
            pipe.send(config)
            if not pipe.poll(self.seconds):
                self._end()
                raise ConstraintError(
                    f"constraint.{kind}: takes longer than {self.seconds:g} s to compile; give a simpler one"
                )
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            self._end()
            raise ConstraintError(f"constraint.{kind}: the compiler crashed on it; give a simpler one") from error
        if isinstance(answer, LookaheadError):
            raise answer
        return answer

    def _start_process(self) -> Connection:
        """Start the process if it is not running; return the pipe to it."""
        if self._pipe is not None and self._process is not None and self._process.poll() is None:
            return self._pipe
        self._end()  # it may have been killed while it was idle
        texts = TokenTexts(self._tokenizer())
        info = [
            describe_vocabulary(texts, self._vocabulary_size, self._eos_token_ids, special).serialize_json()
            for special in (False, True)
        ]
        self._pipe, theirs = Pipe()
        command = python_command("lp_runtime.constraints.compile_process", str(theirs.fileno()))
        try:
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=null, stderr=null, start_new_session=True
            )
            theirs.close()
            self._pipe.send(info)
            if not self._pipe.poll(START_SECONDS) or self._pipe.recv() != READY:
                raise OSError(f"it was not ready within {START_SECONDS:g} s")
        except (EOFError, OSError) as error:
            self._end()
            raise ConfigError(f"constraints: the compiler process failed to start: {error}") from error
        return self._pipe

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def close(self) -> None:
        """End the process after its current constraint; constraints that still wait are refused."""
        if not self._owner.is_current:
            return
        with self._state_lock:
            self._is_closed = True
        self._threads.shutdown(wait=False)
        with self._lock:
            self._end()


def serve(pipe: Connection) -> None:
    """Run the process: compile the constraints received over a pipe until it is closed."""
    with contextlib.suppress(EOFError, OSError):
        plain, special = map(library().TokenizerInfo.deserialize_json, pipe.recv())
        limit_memory(MEMORY_BYTES)
        pipe.send(READY)
        while True:
            config = pipe.recv()
            try:
                pipe.send(compile_constraint(config, special if config.kind == "structural_tag" else plain))
            except LookaheadError as error:
                pipe.send(error)


def limit_memory(num_bytes: int) -> None:
    """Limit this process's address space to `num_bytes` more than it has mapped; no effect without /proc."""
    try:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes, mapped + num_bytes))


if __name__ == "__main__":
    hide_triton_without_gpu()
    serve(Connection(int(sys.argv[1])))
