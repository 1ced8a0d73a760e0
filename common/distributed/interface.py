"""Which network interface a rank offers to the others: the one that leads to the rendezvous.

Gloo offers the address of the host's own name, NCCL the first interface that looks right. On a host with several (Docker's, a
management network) that may be one that no other host can reach: the ranks meet at the rendezvous, and hang in their first
collective. All hosts can reach MASTER_ADDR, so the interface that the kernel takes on the way there is one that works.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

from common.errors import UsageError

# What gloo and NCCL read. NCCL takes "eth1" as the beginning of a name, as of eth10; "=eth1" is that interface alone.
VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}


def offer_interface(master_address: str, named: str | None = None) -> str | None:
    """Have gloo and NCCL offer one interface: the named one; else what the user's variables say; else the one found.

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
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: only chooses the route
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    if ipaddress.ip_address(own.partition("%")[0]).is_loopback:
        return None
    return next((name for name, addresses in addresses_by_interface().items() if own in addresses), None)


def addresses_by_interface() -> Mapping[str, list[str]]:
    """The IP addresses of each interface of this host that is up."""
    import psutil  # only for several hosts

    up = psutil.net_if_stats()
    return {
        name: [one.address for one in found if one.family in (socket.AF_INET, socket.AF_INET6)]
        for name, found in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    }
