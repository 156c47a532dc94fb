"""The process of a spawned replica: `python -m lp_runtime.launchers.worker_process FD`, FD being its pipe."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from multiprocessing.connection import Connection

from lp_runtime.decoding import Request
from lp_runtime.launchers.messages import Failed, Finished, Ready
from lp_runtime.worker import Replica, start_replica


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    try:
        config, context = pipe.recv()
    except (EOFError, OSError):
        return  # the driver was gone before it could say what to do
    requests: queue.Queue[Request] = queue.Queue()
    cancelled = threading.Event()

    def listen() -> None:
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                os._exit(0)  # the driver closed the pipe or died: there is nothing left to do, wherever we are
            if message == "cancel":
                cancelled.set()
            else:
                cancelled.clear()  # a cancellation that came after its request's end
                requests.put(message)

    def fail(error: Exception) -> None:
        """Let the driver know, whatever it is, and end: not through atexit, where a broken group may block."""
        with contextlib.suppress(OSError):
            pipe.send(Failed.from_error(context.rank, error))
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    try:
        with start_replica(config, context) as replica:
            pipe.send(Ready(replica.info))
            while True:
                request = requests.get()
                try:
                    _serve(replica, request, pipe, cancelled)
                except Exception as error:  # said before the group is left, which may wait for peers
                    fail(error)
    except Exception as error:
        fail(error)


def _serve(replica: Replica, request: Request, pipe: Connection, cancelled: threading.Event) -> None:
    for event in replica.decode(request, cancelled.is_set):
        if replica.context.rank == 0:
            pipe.send(event)
    if replica.context.rank != 0:
        pipe.send(Finished())


if __name__ == "__main__":
    main()
