"""Finds the hosts of a run by the environment variables in this folder's README.md, and writes a log per host."""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tpu_kit.config.fields import hide_secrets
from tpu_kit.distributed.output import printing_to
from tpu_kit.machine.checks import Machine

PORT = 29477  # on host 0, where the hosts meet; libtpu uses 8471 to 8479, and Megascale 8080


@dataclass(frozen=True)
class Hosts:
    """The names of a run's hosts, host 0 first, this host's `index`, and host 0's "address:port" (`coordinator`)."""

    index: int = 0  # number of this host
    names: tuple[str, ...] = ("localhost",)  # names of all hosts
    coordinator: str = ""  # "address:port" of host 0, where the hosts meet; empty for a single host
    source: str = "one host"  # names of the environment variables that the hosts were read from
    slices: int = 1  # number of TPU slices, which have equal numbers of hosts

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(self.names)

    def name(self, index: int) -> str:
        """Returns a host's name for messages: "host 2 of 4, 10.0.0.7"."""
        return f"host {index} of {self.count}, {self.names[index]}"

    @property
    def address(self) -> tuple[str, int]:
        """Address and port of host 0, where the hosts meet; ValueError for a single host, which has none."""
        host, _, port = self.coordinator.rpartition(":")
        return host, int(port)


ONE = Hosts()


def find_hosts(at: Machine | None = None) -> Hosts:
    """Finds the hosts in the environment, or on a TPU VM in its metadata server; by default a single host (`ONE`).

    It reads the first of these that is set: TPU_KIT_HOSTS or TPU_KIT_HOST_INDEX; MEGASCALE_NUM_SLICES or several names
    in TPU_WORKER_HOSTNAMES, from JobSet and xpk; SKYPILOT_NODE_IPS. If none is set, it asks the metadata server of a
    TPU VM, unless TPU_SKIP_MDS_QUERY is set. A single name in a single slice gives `ONE`, too.
    `at` is the machine with its environment; None for this machine.

    Raises:
        ValueError: a variable that belongs to the found variable is missing, or the number of this host or slice is not
            an integer from 0 to their count - 1. Or TPU_KIT_COORDINATOR is not address:port, or without it a host is
            named twice.
    """
    at = at or Machine()
    environ = at.environ
    if "TPU_KIT_HOSTS" in environ or "TPU_KIT_HOST_INDEX" in environ:
        names, index = environ.get("TPU_KIT_HOSTS", ""), environ.get("TPU_KIT_HOST_INDEX", "")
        return _hosts(at, index, names, "TPU_KIT_HOST_INDEX", "TPU_KIT_HOSTS")
    if "MEGASCALE_NUM_SLICES" in environ or "," in environ.get("TPU_WORKER_HOSTNAMES", ""):
        return _of_slices(at)
    if "SKYPILOT_NODE_IPS" in environ:
        names = ",".join(environ["SKYPILOT_NODE_IPS"].split())
        return _hosts(at, environ.get("SKYPILOT_NODE_RANK", ""), names, "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")
    if at.tpus() and not environ.get("TPU_SKIP_MDS_QUERY"):
        with contextlib.suppress(OSError, http.client.HTTPException, IndexError):
            ends, number = map(at.metadata, ("attributes/worker-network-endpoints", "attributes/agent-worker-number"))
            if ends and number:
                names = ",".join(end.split(":")[2] for end in ends.split(","))  # name:id:address, each
                return _hosts(at, number, names, "agent-worker-number", "the metadata")
    return ONE


def _of_slices(at: Machine) -> Hosts:
    """Returns the hosts of all slices by JobSet's and xpk's variables, slice by slice; ValueError as in `find_hosts`.

    The names of this slice's hosts are known; hosts of other slices get names such as "slice 1 worker 0".
    """
    environ = at.environ
    index, names = environ.get("TPU_WORKER_ID", ""), environ.get("TPU_WORKER_HOSTNAMES", "")
    found = _hosts(at, index, names, "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
    slices = _number(environ.get("MEGASCALE_NUM_SLICES", "1"), "MEGASCALE_NUM_SLICES", 1 << 20)
    if slices <= 1:
        return found
    mine = _number(environ.get("MEGASCALE_SLICE_ID", ""), "MEGASCALE_SLICE_ID", slices)
    first = environ.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0]
    if not first and "TPU_KIT_COORDINATOR" not in environ:
        raise ValueError(f"MEGASCALE_NUM_SLICES={slices}, but MEGASCALE_COORDINATOR_ADDRESS is not set: set it")
    every = [
        name if number == mine else f"slice {number} worker {worker}"
        for number in range(slices)
        for worker, name in enumerate(found.names or (f"slice {number} worker 0",))
    ]
    at_port = _coordinator(at, first)
    number, source = mine * len(found.names) + found.index, "MEGASCALE_SLICE_ID and TPU_WORKER_ID"
    return Hosts(number, tuple(every), at_port, source, slices)


def _hosts(at: Machine, index: str, names: str, index_from: str, names_from: str) -> Hosts:
    """Returns the hosts for this host's number `index` ("2") and all `names` ("a,b,c"); `ONE` for one name.

    `index_from` and `names_from` are the variables that have them. Raises ValueError for a wrong number, no names, a
    name that occurs twice without TPU_KIT_COORDINATOR, or a wrong TPU_KIT_COORDINATOR.
    """
    if not (found := tuple(name.strip() for name in names.split(",") if name.strip())):
        raise ValueError(f"{index_from}={index}, but {names_from} names no hosts: set it to all hosts, host 0 first")
    number = _number(index, index_from, len(found))
    if len(found) == 1:
        return ONE
    if len(set(found)) < len(found) and "TPU_KIT_COORDINATOR" not in at.environ:
        raise ValueError(f"{names_from}={names} names a host twice: name every host once")
    coordinator = _coordinator(at, found[0])
    return Hosts(number, found, coordinator, f"{index_from} and {names_from}")


def _coordinator(at: Machine, first: str) -> str:
    """Returns TPU_KIT_COORDINATOR, or else address:port of the host `first`; ValueError if it has another form."""
    coordinator = at.environ.get("TPU_KIT_COORDINATOR") or f"{first}:{PORT}"
    if not coordinator.rpartition(":")[0] or not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(f"TPU_KIT_COORDINATOR={coordinator} is not address:port, such as {first or 'host-0'}:{PORT}")
    return coordinator


def _number(text: str, name: str, below: int) -> int:
    """Returns the text of the variable `name` as an integer; raises ValueError unless it is from 0 to `below` - 1."""
    if not text.strip().isdigit() or int(text) >= below:
        raise ValueError(f"{name}={text!r} is not a number from 0 to {below - 1}: set it to this host's own")
    return int(text)


def interface(hosts: Hosts) -> str:
    """Returns the network interface, such as "eth0", through which this host reaches the others; sends nothing.

    It is the interface to `hosts.address`. On host 0 that may be the loopback (Debian's 127.0.1.1): then it is the
    first other interface to another host, or "lo" if there is none. By default, gloo and NCCL use the interface of the
    host's name, often the loopback.

    Raises:
        OSError: host 0's name is unknown, or there is no IPv4 route to it.
        ValueError: there is only a single host.
    """
    found = _interface_to(hosts.address)
    for other in hosts.names[1:] if hosts.index == 0 and found == "lo" else ():
        with contextlib.suppress(OSError):  # this host cannot resolve the name
            if (found := _interface_to((other, hosts.address[1]))) != "lo":
                break
    return found


def _interface_to(address: tuple[str, int]) -> str:
    """Returns the interface of the IPv4 route to an address and port; sends nothing. Raises OSError without a route."""
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if mine in [one.address for one in addresses]:
            return str(name)
    raise OSError(f"no interface has the address {mine}")


@contextlib.contextmanager
def keep_log(hosts: Hosts, folder: Path) -> Iterator[None]:
    """Prefixes lines of stdout and stderr with "[host N] " in the block, and appends them to `FOLDER/logs/host-N.log`.

    N is `hosts.index`, and FOLDER is `folder`, which must exist. Host 0 still shows both streams, with the prefix;
    other hosts print the log's path, then show only stderr. The file gets whole lines without secrets, and only the
    last state of a progress bar.
    """
    path = folder / "logs" / f"host-{hosts.index}.log"
    path.parent.mkdir(exist_ok=True)
    if hosts.index:
        print(f"log              {path.absolute()}", flush=True)
    with path.open("a", buffering=1) as file:
        out = _HostStream(sys.stdout if hosts.index == 0 else None, file, hosts.index)
        with printing_to(out, _HostStream(sys.stderr, file, hosts.index)):
            yield


class _HostStream(io.TextIOBase):
    """A stream that prefixes lines with the host; writes whole lines to `file`, and text at once to `shown`, if any."""

    def __init__(self, shown: TextIO | None, file: TextIO, index: int) -> None:
        self._shown, self._file, self._prefix = shown, file, f"[host {index}] "
        self._line, self._begins = "", True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            last = line.rpartition("\r")[2]  # the last state of a progress bar
            self._file.write(f"{self._prefix}{hide_secrets(last)}\n")
        if self._shown is not None:
            for part in re.findall(r"[^\r\n]*[\r\n]|[^\r\n]+", text):
                self._shown.write((self._prefix if self._begins and part not in "\r\n" else "") + part)
                self._begins = part[-1] in "\r\n"
        return len(text)

    def flush(self) -> None:
        if self._shown is not None:
            self._shown.flush()
