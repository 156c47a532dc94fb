"""Transport between several machines: shared memory inside each, the network between their leaders.

The leader of a machine is its first replica. Rows go to the leader, between the leaders, and back from the leader to
its machine, so that fewer processes take part in the slow network exchange.

Letters: R replicas, M machines, n integers that each replica sends.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from lp_runtime.distributed.transport.group import CPU, Transport
from lp_runtime.distributed.transport.shared_memory import FOLDER

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def this_machine() -> str:
    """Return a name that is equal in processes that can share memory: those of one machine or container."""
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        boot = ""
    memory = os.stat(FOLDER).st_dev if FOLDER.exists() else 0
    return f"{socket.gethostname()} {boot} {memory}"


class MachinesTransport(Transport):
    """Transport of a group of replicas on several machines.

    `machines` has the machine number of each replica, [R]: 0, 1 ... in order of first appearance. `local` is between
    the replicas of this machine, by rank, and None if there is only one; `leaders` is None if this one is no leader.
    """

    def __init__(self, rank: int, machines: Sequence[int], local: Transport | None, leaders: Transport | None):
        super().__init__("shared and network", CPU)
        self._local, self._leaders = local, leaders
        counts = [machines.count(machine) for machine in range(max(machines) + 1)]
        self._num_local, self._num_machines = counts[machines[rank]], len(counts)
        self._largest = max(counts)
        # Position of each replica's row in the leaders' gather, where every machine sends `_largest` rows.
        places = [machine * self._largest + machines[:place].count(machine) for place, machine in enumerate(machines)]
        self._places = torch.tensor(places)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        num_sent = len(sent)
        mine = torch.zeros(self._largest * num_sent, dtype=torch.int64)
        if self._local is None:
            mine[:num_sent] = sent
        else:
            self._local.all_gather(mine[: self._num_local * num_sent], sent)
        data = None
        if self._leaders is not None:
            rows = torch.empty(self._num_machines * self._largest * num_sent, dtype=torch.int64)
            self._leaders.all_gather(rows, mine)
            received.copy_(rows.reshape(-1, num_sent)[self._places].flatten())
            data = received.numpy().tobytes()
        if self._local is not None:
            all_rows = self._local.broadcast(data, is_patient=False)
            if data is None:
                received.copy_(torch.frombuffer(bytearray(all_rows), dtype=torch.int64))

    def broadcast(self, data: bytes | None, is_patient: bool) -> bytes:
        if self._leaders is not None:
            data = self._leaders.broadcast(data, is_patient)
        if self._local is not None:
            data = self._local.broadcast(data, is_patient)
        assert data is not None  # a replica that is no leader shares its machine, so has `_local`
        return data

    def abort(self) -> None:
        for transport in (self._local, self._leaders):
            if transport is not None:
                transport.abort()

    def close(self) -> None:
        for transport in (self._local, self._leaders):
            if transport is not None:
                transport.close()
