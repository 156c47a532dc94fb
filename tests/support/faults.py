"""Logits processors that run out of memory, or fail, on replicas in the middle of a request."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import torch
from transformers import LogitsProcessor


class LacksMemory(LogitsProcessor):
    """Raises OutOfMemoryError once a text has `num_tokens` tokens.

    Args:
        folder: where replicas count their failures.
        num_tokens: number of tokens, prompt included.
        pids: process ids of the replicas that fail; None for all.
        times: how often each of them fails; None for always.
    """

    prefix_only = True

    def __init__(self, folder: Path, num_tokens: int, pids: Collection[int] | None = None, times: int | None = None):
        self._folder, self._num_tokens, self._pids, self._times = folder, num_tokens, pids, times

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self._num_tokens and (self._pids is None or os.getpid() in self._pids):
            failures = self._folder / str(os.getpid())
            num_failures = len(failures.read_bytes()) if failures.exists() else 0
            if self._times is None or num_failures < self._times:
                failures.write_bytes(b"." * (num_failures + 1))
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return scores


class FailsOnce(LogitsProcessor):
    """Fails once, in one replica's next step after a file was created.

    Args:
        signal: the file; removed by the failure.
        pid: process id of the replica.
        kind: class of the error.
    """

    prefix_only = True

    def __init__(self, signal: Path, pid: int, kind: type[Exception]):
        self._signal, self._pid, self._kind = signal, pid, kind

    def __call__(self, input_ids, scores):
        if os.getpid() == self._pid and self._signal.exists():
            self._signal.unlink()
            raise self._kind("an error that a test causes")
        return scores
