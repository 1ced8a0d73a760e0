"""ddp/rendezvous/addresses.py: gloo and NCCL offer an interface that the other hosts can reach."""

from __future__ import annotations

import os
import socket

import pytest

from common.errors import UsageError
from ddp.rendezvous import addresses
from ddp.rendezvous.addresses import VARIABLES, addresses_by_interface, interface_towards, offer_interface

LOOPBACK = next(name for name, own in addresses_by_interface().items() if "127.0.0.1" in own)
FOUND = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.5"], "ib0": []}


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


def test_on_one_host_nothing_is_chosen() -> None:
    for address in ("localhost", "127.0.0.1", "::1", "no-such-host.invalid"):
        assert offer_interface(address) is None
    assert not VARIABLES.keys() & os.environ.keys()


def test_the_interface_on_the_way_to_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank takes the network interface that leads to the master's address.

    Claim (ddp/README.md, 2): ranks offer the interface that leads to the rendezvous, or the one that is named.
    """

    class Probe(socket.socket):
        def connect(self, address: object) -> None: ...

        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.5", 1

    monkeypatch.setattr(addresses, "addresses_by_interface", lambda: FOUND)
    monkeypatch.setattr(socket, "socket", Probe)
    assert interface_towards("10.0.0.1") == "eth0"
    assert offer_interface("10.0.0.1") == "eth0"
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")


def test_the_user_s_own_variable_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    monkeypatch.setattr(addresses, "interface_towards", lambda host: "eth0")
    assert offer_interface("10.0.0.1") is None
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_named_one_is_taken() -> None:
    assert offer_interface("10.0.0.1", LOOPBACK) == LOOPBACK
    assert os.environ["GLOO_SOCKET_IFNAME"] == LOOPBACK


@pytest.mark.parametrize(("named", "reason"), [("eth7", "is not an interface"), ("ib0", "has no address")])
def test_one_that_cannot_be_taken(monkeypatch: pytest.MonkeyPatch, named: str, reason: str) -> None:
    """An interface that does not exist or has no address is refused by name.

    Claim (ddp/README.md, 2): ranks offer the interface that leads to the rendezvous, or the one that is named.
    """
    monkeypatch.setattr(addresses, "addresses_by_interface", lambda: FOUND)
    with pytest.raises(UsageError) as error:
        offer_interface("10.0.0.1", named)
    expected = (
        f"--interface {named} {reason} of {socket.gethostname()}, which has docker0 (172.17.0.1), eth0 (10.0.0.5), lo"
    )
    assert str(error.value).startswith(expected)
