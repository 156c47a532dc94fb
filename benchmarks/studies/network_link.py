"""Link between two network namespaces of this machine that delays or loses packets, or is cut.

Each namespace has a TUN device; a thread passes packets between the two. This needs no kernel module for emulation, but
it needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN), /dev/net/tun and the command `ip`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

INTERFACE = "lpnet0"  # the same in both namespaces
TUN_SET_INTERFACE = 0x400454CA  # TUNSETIFF of linux/if_tun.h
IS_TUN, NO_HEADER = 0x0001, 0x1000
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h
MAX_PACKET_BYTES = 1 << 16
POLL_SECONDS = 0.05  # maximum of one wait, so that the thread notices the end of the link


class LinkError(Exception):
    """Raised if this machine does not allow such a link; the message says why."""


class Link:
    """Two namespaces, numbered 0 and 1, and the link between them. Use it in a `with` block.

    Attributes:
        delay_ms: delay of every packet in milliseconds.
        loss: share of packets that are lost, 0 to 1.
        is_cut: whether all packets are lost.
        num_lost: packets lost so far.
    """

    def __init__(self) -> None:
        self.delay_ms, self.loss = 0.0, 0.0
        self.is_cut, self.num_lost = False, 0
        self._names = [f"lp-{os.getpid()}-{side}" for side in range(2)]
        self._devices: list[int] = []
        self._has_ended = False
        self._thread = threading.Thread(target=self._pass_packets, name="lp-link", daemon=True)

    def heal(self) -> None:
        """Stop delaying and losing packets."""
        self.delay_ms, self.loss = 0.0, 0.0
        self.is_cut = False

    def __enter__(self) -> Link:
        try:
            for side, name in enumerate(self._names):
                _ip(f"netns add {name}")
                device = f"lp{os.getpid()}{side}"
                self._devices.append(_open_tun(device))
                _ip(f"link set {device} netns {name} name {INTERFACE}")
                _ip(f"-n {name} addr add 10.77.0.{side + 1}/24 dev {INTERFACE}")
                for each in ("lo", INTERFACE):
                    _ip(f"-n {name} link set {each} up")
        except OSError as error:
            self._close()
            raise LinkError(str(error)) from error
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._has_ended = True
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for device in self._devices:
            os.close(device)
        for name in self._names:
            with contextlib.suppress(OSError):
                _ip(f"netns del {name}")

    @contextlib.contextmanager
    def entered(self, side: int) -> Iterator[None]:
        """Move this thread, and processes and threads that it starts, into the network of one side."""
        with open(f"/proc/self/task/{threading.get_native_id()}/ns/net") as old:
            with open(f"/run/netns/{self._names[side]}") as new:
                _enter(new.fileno())
            try:
                yield
            finally:
                _enter(old.fileno())

    def _pass_packets(self) -> None:
        rng, number = random.Random(0), 0
        waiting: list[tuple[float, int, int, bytes]] = []  # (due time, number, device, packet)
        while not self._has_ended:
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else POLL_SECONDS
            for device in select.select(self._devices, [], [], min(timeout, POLL_SECONDS))[0]:
                packet, number = os.read(device, MAX_PACKET_BYTES), number + 1
                if self.is_cut or rng.random() < self.loss:
                    self.num_lost += 1
                    continue
                due = time.monotonic() + self.delay_ms / 1e3
                heapq.heappush(waiting, (due, number, sum(self._devices) - device, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(waiting)
                os.write(device, packet)


def _ip(arguments: str) -> None:
    """Run the command `ip`; raise OSError if it fails."""
    done = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {arguments}: {done.stderr.strip()}")


def _open_tun(name: str) -> int:
    """Create a TUN device and return its file descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, TUN_SET_INTERFACE, struct.pack("16sH22x", name.encode(), IS_TUN | NO_HEADER))
    return device


def _enter(namespace: int) -> None:
    """Move this thread to the network namespace of a file descriptor (os.setns of Python 3.12)."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, NEW_NETWORK):
        raise LinkError(f"setns: {os.strerror(ctypes.get_errno())}")
