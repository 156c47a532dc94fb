"""Process of a shard other than 0: loads its slice of the model, then runs what shard 0 announces."""

from __future__ import annotations

from collections.abc import Callable

from lp_runtime.config.settings import RuntimeConfig
from lp_runtime.errors import ShardError
from lp_runtime.launchers.wire.messages import PING, PONG, Failed
from lp_runtime.launchers.worker.process_host import Placement
from lp_runtime.replica.loaded_model import load_follower


class FollowerServer:
    """Counterpart of ReplicaServer for shards other than 0. Sends only PONG and, if it fails, Failed."""

    def __init__(self, config: RuntimeConfig, place: Placement, send: Callable[[object], None]):
        self._config = config
        self._place = place
        self._send = send

    def post(self, message: object) -> None:
        """Handle a message from the driver; see ReplicaServer."""
        assert message == PING, "followers get their orders from shard 0"
        self._send(PONG)

    def run(self) -> None:
        """Load this shard and follow shard 0. Returns when it cannot continue."""
        place = self._place
        try:
            follower = load_follower(self._config, place.device_index, place.num_local, place.shard)
            for message in follower.messages():
                raise AssertionError(f"shard 0 announced {message!r}")
        except ShardError:  # another shard is gone: it has sent the reason itself, or the driver sees its process end
            return
        except Exception as error:
            failed = Failed.from_error(error)
            self._send(failed if failed.kind else Failed(f"shard {place.shard.shard}: {failed.message}", None))
