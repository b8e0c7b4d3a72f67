"""A network of this machine's own: one network namespace per rank, each with a link of given speed to a switch.

Linux only, with iproute2 (`ip`, `tc`) and the rights of root. Whatever ends the process takes the namespaces with it;
if it is killed, the next network to be made removes them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from types import FrameType

from splaxel_ns.bench.rank_job import NAMESPACES, Home

PREFIX = "splaxel"
INTERFACE = "eth0"
"""Of every rank, in its namespace."""
BURST = "256kb"
"""At 1 Gbit/s the shaper is due every few milliseconds; less than it lets pass then would slow it down."""
LATENCY = "50ms"
MAX_RANKS = 64


class Network:
    """R namespaces around a switch; a context manager.

    Args:
        size: R.
        rate: Of each link and direction, as `tc` writes it, for example 1gbit. None: as fast as the machine.

    Raises:
        RuntimeError: Namespaces are not possible here; the message says why.
        ValueError: `tc` does not know the rate.
    """

    def __init__(self, size: int, rate: str | None) -> None:
        if rate is not None and not re.fullmatch(r"\d+(\.\d+)?[kmgt]?(bit|bps)", rate):
            raise ValueError(f"The rate is {rate!r}; it must be a number with kbit, mbit or gbit, as in 1gbit.")
        reason = why_not()
        if reason is not None:
            raise RuntimeError(reason)
        self._names = [f"{PREFIX}-{os.getpid()}-{number}" for number in range(size + 1)]
        self._rate = rate
        self._handler: object = None

    def __enter__(self) -> list[Home]:
        remove_orphans()
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, _end)
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return [Home(name, INTERFACE, _address(0)) for name in self._names[1:]]

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            if (NAMESPACES / name).exists():
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)  # type: ignore[arg-type]
            self._handler = None

    def _make(self) -> None:
        switch = self._names[0]
        for name in self._names:
            _run(f"ip netns add {name}")
        _run(f"ip -n {switch} link add switch type bridge")
        _run(f"ip -n {switch} link set switch up")
        for rank, name in enumerate(self._names[1:]):
            port = f"port{rank}"
            _run(f"ip -n {switch} link add {port} type veth peer name {INTERFACE} netns {name}")
            _run(f"ip -n {switch} link set {port} master switch")
            _run(f"ip -n {name} address add {_address(rank)}/24 dev {INTERFACE}")
            for place, link in ((switch, port), (name, INTERFACE)):
                _run(f"ip -n {place} link set {link} addrgenmode none")  # no packets of its own
                if self._rate is not None:
                    _run(
                        f"tc -n {place} qdisc add dev {link} root tbf rate {self._rate} burst {BURST} latency {LATENCY}"
                    )
                _run(f"ip -n {place} link set {link} up")
            _run(f"ip -n {name} link set lo up")


def why_not() -> str | None:
    """Why namespaces are not possible here; None if they are."""
    needed = "Ranks in network namespaces need Linux, root and iproute2: "
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{needed}`{tool}` is not installed (apt-get install iproute2)."
    if os.geteuid() != 0:
        return f"{needed}this process is not root's."
    name = f"{PREFIX}-{os.getpid()}-trial"
    try:
        _run(f"ip netns add {name}")
        _run(f"ip -n {name} link add switch type bridge")
        _run(f"ip -n {name} link add left type veth peer name right")
        _run(f"tc -n {name} qdisc add dev left root tbf rate 1gbit burst {BURST} latency {LATENCY}")
    except RuntimeError as error:
        return f"{needed}{error}."
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


def remove_orphans() -> None:
    """Remove the namespaces of processes that have been killed."""
    for path in NAMESPACES.glob(f"{PREFIX}-*-*"):
        process = path.name.split("-")[1]
        if process.isdigit() and not Path("/proc", process).exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True)


def _address(rank: int) -> str:
    return f"10.177.0.{rank + 1}"


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"`{command}` failed ({(done.stderr or done.stdout).strip()})")


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
