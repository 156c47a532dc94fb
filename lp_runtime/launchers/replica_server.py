"""A replica's side of the conversation with its driver: load, then carry out orders until the driver is gone."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from lp_runtime.config import RuntimeConfig
from lp_runtime.decoding import Report
from lp_runtime.errors import LaunchError, LookaheadError, ReplicaError, StateMismatchError
from lp_runtime.launchers.messages import (
    CANCEL,
    PING,
    PONG,
    Broken,
    Decode,
    Failed,
    Finished,
    Join,
    Joined,
    Loaded,
    Progress,
    Refused,
    Streamed,
)
from lp_runtime.worker import LoadedModel, Replica, join_group, load_replica


class ReplicaServer:
    """Carries out a driver's orders, one after another.

    Args:
        config: the runtime's.
        device_index, num_local: see ReplicaContext.
        send: says something to the driver; called from several threads.
    """

    def __init__(self, config: RuntimeConfig, device_index: int, num_local: int, send: Callable[[object], None]):
        self._config = config
        self._place = (device_index, num_local)
        self._send = send
        self._orders: queue.Queue[Join | Decode] = queue.Queue()
        self._cancelled = threading.Event()
        self._group = contextlib.ExitStack()
        self._replica: Replica | None = None

    def post(self, message: object) -> None:
        """Take a message of the driver's; never waits. Called from another thread than `run`."""
        if message == PING:
            self._send(PONG)
        elif message == CANCEL:
            self._cancelled.set()
        else:
            self._cancelled.clear()  # a cancellation that came after its request's end
            self._orders.put(message)

    def run(self) -> None:
        """Load the model, then carry out orders. Returns when this replica cannot go on; the driver has been told."""
        try:
            loaded = load_replica(self._config, *self._place, owns_process=True)
            self._send(Loaded(loaded.info))
            while True:
                order = self._orders.get()
                if isinstance(order, Join):
                    self._join(loaded, order)
                else:
                    self._decode(order)
        except Exception as error:  # whatever it is; said before the group is left, which may wait for peers
            self._send(Failed.from_error(error))

    def _leave(self) -> None:
        self._replica = None
        with contextlib.suppress(Exception):  # a broken group may not even end well
            self._group.close()

    def _join(self, loaded: LoadedModel, order: Join) -> None:
        self._leave()
        self._group = contextlib.ExitStack()
        group = join_group(self._config, loaded, order.context, is_abandoned=lambda: not self._orders.empty())
        try:
            self._replica = self._group.enter_context(group)
        except (ReplicaError, LaunchError) as error:  # peers that did not come, or went
            self._send(Broken(order.order, Progress(), str(error)))
            self._leave()
        except LookaheadError as error:
            self._send(Refused(order.order, str(error), type(error)))
            self._leave()
        else:
            self._send(Joined(order.order, self._replica.info))

    def _decode(self, order: Decode) -> None:
        progress = Progress()
        if self._replica is None:  # it left on its own, after what the driver had not heard of yet
            self._send(Broken(order.order, progress, "this replica is in no group"))
            return
        leads = self._replica.context.rank == 0
        try:
            for event in self._replica.decode(order.request, self._cancelled.is_set):
                if isinstance(event, Report):
                    self._send(Finished(order.order, progress, event))
                else:
                    progress = progress.after(event)
                    if leads:
                        self._send(Streamed(order.order, event))
        except ReplicaError as error:
            digests = error.digests if isinstance(error, StateMismatchError) else None
            self._send(Broken(order.order, progress, str(error), digests))
            self._leave()
        except LookaheadError as error:
            self._send(Refused(order.order, str(error), type(error)))
            self._leave()
