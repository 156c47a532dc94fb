"""Transport over torch.distributed: NCCL between GPUs, gloo between CPUs, on one machine or several."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lp_runtime.distributed.transport.group import CPU, Transport
from lp_runtime.errors import ReplicaError, first_line
from lp_runtime.utils.memory import is_out_of_memory

if TYPE_CHECKING:  # torch.distributed has this class, but does not mark it as exported
    from torch._C._distributed_c10d import Store

TURN_POLL_SECONDS = 10.0  # length of one wait for rank 0, which is repeated
YIELD_SECONDS = 1e-3  # the wait for an event yields the CPU between polls for this long, and sleeps between them later
SLEEP_SECONDS = 5e-5  # length of these sleeps


class CollectiveTransport(Transport):
    """Transport over the default process group of torch.distributed, which must have been formed."""

    def __init__(
        self,
        backend: str,  # "gloo" or "nccl": the one that gathers tensors
        rank: int,
        device: torch.device,
        step_timeout: float,  # seconds after which a peer that does not answer is an error; gloo uses its group's
        store: Store | None = None,  # where rank 0 signals the start of a patient broadcast; None to wait inside it
        is_ours: bool = True,  # `close` destroys the process group
    ):
        super().__init__(backend, device if backend == "nccl" else CPU)
        self._rank = rank
        self._step_timeout = step_timeout
        self._store = store
        self._is_ours = is_ours
        self._num_turns = 0
        self._is_aborted = False

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        # all_gather_into_tensor is called all_gather_single from torch 2.13 on
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._peers():
            gather(received, sent)

    def broadcast(self, data: bytes | None, is_patient: bool) -> bytes:
        with self._peers():
            if is_patient and self._store is not None:
                self._wait_for_turn(self._store)
            size = torch.tensor([0 if data is None else len(data)], dtype=torch.int64, device=self.device)
            dist.broadcast(size, src=0)
            payload = torch.empty(int(size), dtype=torch.uint8, device=self.device)
            if data:
                payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dist.broadcast(payload, src=0)
            return payload.cpu().numpy().tobytes()

    def _wait_for_turn(self, store: Store) -> None:
        """Wait until rank 0 makes the same call; a collective would time out after the step's timeout."""
        key, self._num_turns = f"turn/{self._num_turns}", self._num_turns + 1
        if self._rank == 0:
            store.set(key, "")
            return
        while not self._is_aborted:
            with contextlib.suppress(dist.DistStoreError):  # the wait timed out; a lost store raises another error
                store.wait([key], timedelta(seconds=TURN_POLL_SECONDS))
                return

    def wait(self, event: torch.cuda.Event) -> None:
        if self.device.type != "cuda":
            event.synchronize()
            return
        # Polled: an NCCL kernel that waits for a lost peer never ends, and event.synchronize() would block forever.
        start = time.monotonic()
        while not event.query():
            waited = time.monotonic() - start
            if self._is_aborted or waited > self._step_timeout:
                self.abort()
                raise ReplicaError(
                    f"rank {self._rank} lost a peer in the exchange: no answer within {self._step_timeout:g} s"
                )
            if waited < YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(SLEEP_SECONDS)

    @contextmanager
    def _peers(self) -> Iterator[None]:
        """Convert errors from a peer to ReplicaError; errors of this replica's own device and memory pass through."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.AcceleratorError) or is_out_of_memory(error):
                raise
            raise ReplicaError(f"rank {self._rank} lost a peer in the exchange: {first_line(error)}") from error

    def abort(self) -> None:
        self._is_aborted = True
        with contextlib.suppress(RuntimeError, ValueError, AttributeError):  # no group any more, or torch lacks `abort`
            assert dist.group.WORLD is not None
            dist.group.WORLD.abort()

    def close(self) -> None:
        if not self._is_ours:
            return
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # destroying a broken group may fail
            if self.device.type == "cuda":
                self.abort()  # destroying an NCCL communicator waits for all its members; aborting it does not
            dist.destroy_process_group()
