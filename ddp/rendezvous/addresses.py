"""Addresses: can the ranks meet at MASTER_ADDR, and which interface do gloo and NCCL offer to the other hosts?

An address that cannot be the place to meet is an error at once, and not after the timeout of the rendezvous.

Gloo offers the address of the host's own name, NCCL the first interface that looks right. On a host with several (Docker's, a
management network) that may be one that no other host can reach: the ranks meet at the rendezvous, and hang in their first
collective. All hosts can reach MASTER_ADDR, so the interface that the kernel takes on the way there is one that works.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Mapping

from common.distributed.dist_env import DistEnv
from common.errors import UsageError

# The variables that gloo and NCCL read. NCCL takes "eth1" as the beginning of a name, as of eth10; "=eth1" is that interface alone.
VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}


def offer_interface(master_address: str, named: str | None = None) -> str | None:
    """Have gloo and NCCL offer one interface: the named one; else what the user's variables say; else the one on the way to the rendezvous.

    :param master_address: of the rendezvous, a name or an address
    :param named: ``--interface``; when None, the interface on the way to the rendezvous
    :returns: its name; None when the rendezvous is on this host alone, or cannot be found: then nothing is chosen
    :raises UsageError: when there is no interface of that name, or it has no address; when the variable of gloo names such a one
    """
    if named is not None:
        _require_interface(named, f"--interface {named}")
    elif any(name in os.environ for name in VARIABLES):
        _require_gloo_interface()
        return None
    interface = named or interface_towards(master_address)
    if interface is not None:
        for name, value in VARIABLES.items():
            os.environ[name] = value.format(interface)
    return interface


def _require_gloo_interface() -> None:
    """Gloo takes names alone. (NCCL's variable may have beginnings of names, and those that are left out.)"""
    value = os.environ.get("GLOO_SOCKET_IFNAME")
    cure = ": leave it unset, and each host takes the one that leads to MASTER_ADDR"
    for name in value.split(",") if value else []:
        _require_interface(name, f"GLOO_SOCKET_IFNAME={value}: {name}", cure)


def _require_interface(name: str, source: str, cure: str = "") -> None:
    addresses = addresses_by_interface()
    if not addresses.get(name):
        has = [f"{other} ({', '.join(of)})" for other, of in sorted(addresses.items()) if of]
        reason = "has no address" if name in addresses else "is not an interface"
        raise UsageError(f"{source} {reason} of {socket.gethostname()}, which has {', '.join(has)}{cure}")


def interface_towards(host: str) -> str | None:
    """The interface from which this host would send to another (or to an address of its own).

    :param host: a name or an address
    :returns: None when the other is this host by its loopback address, or its name or route is not known
    """
    try:
        own = next(map(_own_address_towards, _resolve(host, 0.0)), None)
    except OSError:
        return None
    if own is None or _is_loopback(own):
        return None
    return next((name for name, addresses in addresses_by_interface().items() if own in addresses), None)


def addresses_by_interface() -> Mapping[str, list[str]]:
    """The IP addresses of each interface of this host that is up."""
    import psutil  # only for several hosts

    up = psutil.net_if_stats()
    return {
        name: [one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    }


RESOLVE_S = 5.0  # for rank 0. Others wait longer: a name of Kubernetes can be resolved only when its pod has started
CONNECT_S = 3.0
LISTEN_S = 20.0  # in which rank 0 begins to listen, if it is on this host
RETRY_S = 0.5


def require_master_address(env: DistEnv, address: str, port: int, timeout_s: float) -> None:
    """Check what one rank can know by itself.

    :param address: MASTER_ADDR, a name or an address
    :param port: MASTER_PORT
    :param timeout_s: of the rendezvous
    :raises UsageError: when the address cannot be resolved, has no route, or is this host's loopback address although rank 0 is
        on another; on rank 0, which listens there, when it is that of another host
    """
    addresses = _resolve(address, min(RESOLVE_S, timeout_s) if env.rank == 0 else timeout_s)
    if not addresses:
        raise UsageError(
            f"MASTER_ADDR {address} cannot be resolved on {env.host}: set it to the name or address of the host of rank 0"
        )
    problems = [_route_problem(one) for one in addresses]
    if env.rank == 0:
        if not any(map(_is_own, addresses)) and not _leads_here(address, port):
            raise UsageError(
                f"rank 0 is on {env.host}, but MASTER_ADDR {address} ({', '.join(addresses)}) is another host: start rank 0 there, "
                f"or set MASTER_ADDR to an address of {env.host}"
            )
    elif all(problems):
        raise UsageError(
            f"{env.host} has no way to MASTER_ADDR {address}: {problems[0]}: check the address, and the network between the hosts"
        )
    only_here = env.rank >= env.local_world_size and all(map(_is_loopback, addresses))
    if only_here and timeout_s > LISTEN_S and not _listens(addresses[0], port):
        raise UsageError(
            f"MASTER_ADDR {address} is {env.host} itself, and no rank 0 is here: set it to an address of rank 0's host that all "
            "hosts can reach"
        )


def _is_own(address: str) -> bool:
    own = [one for addresses in addresses_by_interface().values() for one in addresses]
    return address in own or _is_loopback(address)


def _leads_here(address: str, port: int) -> bool:
    """Whether a connection to that address comes to this process, as through a service of Kubernetes or a public address."""
    try:
        with socket.create_server(("", port)):
            socket.create_connection((address, port), CONNECT_S).close()
            return True
    except OSError as error:
        return error.errno == errno.EADDRINUSE  # which the store will say


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _listens(address: str, port: int) -> bool:
    deadline = time.monotonic() + LISTEN_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), RETRY_S).close()
            return True
        except OSError:
            time.sleep(RETRY_S)
    return False


def _resolve(address: str, patience_s: float) -> list[str]:
    """The IP addresses; none if there are none in time."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            answers = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in answers))
        except OSError:
            if time.monotonic() > deadline:
                return []
            time.sleep(RETRY_S)


def _route_problem(address: str) -> str | None:
    """Why nothing can be sent there, as far as this host's own routes tell; sends nothing."""
    try:
        _own_address_towards(address)
    except OSError as error:
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EPERM):
            return (error.strerror or str(error)).lower()
    return None


def _own_address_towards(address: str) -> str:
    """The address of this host from which it would send there. Nothing is sent: this only chooses the route.

    :raises OSError: when there is no route
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))
        return str(probe.getsockname()[0])
