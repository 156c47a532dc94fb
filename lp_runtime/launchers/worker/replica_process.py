"""Main module of a spawned replica's process; its argument is the file descriptor of its pipe."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from lp_runtime.distributed.environment import use_expandable_segments
from lp_runtime.utils.startup import hide_triton_without_gpu, no_garbage_collection

if TYPE_CHECKING:
    from lp_runtime.launchers.worker.replica_server import FollowerServer, ReplicaServer


def be_replica(pipe: Connection) -> None:
    """Run a replica, or a shard of one, for the driver at the other end of a pipe; exits with it."""
    use_expandable_segments()
    with no_garbage_collection():
        hide_triton_without_gpu()
        from lp_runtime.launchers.wire.messages import Failed, decode_order
        from lp_runtime.launchers.worker.replica_server import FollowerServer, ReplicaServer

    lock = threading.Lock()

    def send(message: object) -> None:
        with lock, contextlib.suppress(OSError):  # the driver is gone: `listen` ends the process
            pipe.send(message)

    def listen(server: ReplicaServer | FollowerServer) -> None:
        while True:
            try:
                server.post(decode_order(pipe.recv_bytes()))
            except (EOFError, OSError):
                os._exit(0)  # the driver closed the pipe or died: stop at once, whatever the main thread is doing
            except Exception as error:  # a message that cannot be decoded
                send(Failed.from_error(error))
                os._exit(1)

    try:
        config, place = pipe.recv()  # a pickled (RuntimeConfig, Placement); encoded orders follow
    except (EOFError, OSError):
        return  # the driver ended before it sent the settings
    server = ReplicaServer(config, place, send) if place.shard.is_leader else FollowerServer(config, place, send)
    try:
        threading.Thread(target=listen, args=(server,), daemon=True).start()
    except RuntimeError as error:  # the limit of processes and threads is reached
        send(Failed.from_error(error))
    else:
        server.run()
    os._exit(1)  # skips atexit handlers, which may block on a broken group


if __name__ == "__main__":
    # The driver ends its replicas. systemd sends SIGTERM to all processes of a service: running answers must go on.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    be_replica(Connection(int(sys.argv[1])))
