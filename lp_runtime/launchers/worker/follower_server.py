"""The process of a shard that follows shard 0 of its replica: load, then run what that one announces."""

from __future__ import annotations

from collections.abc import Callable

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.errors import LookaheadError, ShardError
from lp_runtime.launchers.wire.messages import PING, PONG, Failed
from lp_runtime.launchers.worker.process_host import Placement
from lp_runtime.replica.replica import load_follower


class FollowerServer:
    """A shard that follows, as ReplicaServer is for shard 0. The driver hears of it only if it fails.

    Args:
        config: the runtime's settings.
        place: where this shard is.
        send: sends a message to the driver; called from several threads.
    """

    def __init__(self, config: RuntimeConfig, place: Placement, send: Callable[[object], None]):
        self._config = config
        self._place = place
        self._send = send

    def post(self, message: object) -> None:
        """Take a message of the driver's; never waits. Called from another thread than `run`."""
        assert message == PING, "followers get their orders from shard 0"
        self._send(PONG)

    def run(self) -> None:
        """Load this shard, and follow. Returns when it cannot go on."""
        place = self._place
        try:
            follower = load_follower(self._config, place.device_index, place.num_local, place.shard)
            for message in follower.messages():
                raise AssertionError(f"shard 0 announced {message!r}")
        except ShardError:  # the one that is gone has told why, or its process has ended
            return
        except Exception as error:
            failed = Failed.from_error(error)
            kind = failed.kind if isinstance(error, LookaheadError) else None
            self._send(Failed(f"shard {place.shard.shard}: {failed.message}" if kind is None else failed.message, kind))
