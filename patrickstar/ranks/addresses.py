"""Hosts, interfaces and ports: listening addresses, and the hosts to which messages may point a process."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence

LOOPBACK = "127.0.0.1"
NETWORKS_VARIABLE = "PATRICKSTAR_ELASTIC_NETWORKS"
"""The environment variable with the networks of an elastic run's hosts, such as ``10.1.0.0/16,10.2.0.0/16``."""
_PRIVATE_NETWORKS = "10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,169.254.0.0/16,100.64.0.0/10,fc00::/7,fe80::/10"
_LOOPBACK_NETWORKS = "127.0.0.0/8,::1/128"
_INTERFACE_VARIABLE, _LOOPBACK_INTERFACE = "GLOO_SOCKET_IFNAME", "lo"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_MOST_PORT = 65535


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 address stands in brackets.

    Raises:
        ValueError: the text is no such address.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= _MOST_PORT:
        raise ValueError(f"{address!r} is no address; give host:port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of :func:`split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolved(host: str) -> str:
    """The IP address of a host name, an address or a network interface of this machine; IPv4 if there is one.

    Raises:
        OSError: nothing has that name.
    """
    if host in (name for _, name in socket.if_nameindex()):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", host.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def listening_address(host: str) -> str:
    """The IP address to listen at for processes that reach this machine by ``host``.

    Raises:
        ValueError: ``host`` is unknown, or stands for all interfaces.
    """
    try:
        address = resolved(host)
    except OSError as error:
        raise ValueError(f"{host!r} is no address, name or interface of this machine ({error})") from error
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise ValueError(
            f"{host!r} stands for all interfaces; give the address or the interface by which the other processes reach "
            "this machine"
        )
    return address


def is_loopback(host: str) -> bool:
    """True for a host name or address on this machine's loopback; False for an unknown name."""
    try:
        return ipaddress.ip_address(resolved(host).partition("%")[0]).is_loopback
    except (OSError, ValueError):
        return False


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at one IP address; port 0 takes a free one.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _networks_around(rendezvous: str) -> list[str]:
    given = os.environ.get(NETWORKS_VARIABLE)
    return (given or f"{_PRIVATE_NETWORKS},{resolved(rendezvous)}").split(",")


@contextlib.contextmanager
def gloo_on_loopback(host: str) -> Iterator[None]:
    """Context in which new gloo groups listen on loopback if ``host`` is there, since all ranks are then on this
    machine. An interface named by the user stays.
    """
    chooses = is_loopback(host) and _INTERFACE_VARIABLE not in os.environ
    if chooses:
        os.environ[_INTERFACE_VARIABLE] = _LOOPBACK_INTERFACE
    try:
        yield
    finally:
        if chooses:
            os.environ.pop(_INTERFACE_VARIABLE, None)


class AllowedHosts:
    """The networks of an elastic run's hosts; other addresses in messages are refused.

    Args:
        networks: in CIDR notation.

    Raises:
        ValueError: one of them is no network.
    """

    def __init__(self, networks: Sequence[str]):
        try:
            self._networks = [ipaddress.ip_network(network.strip()) for network in networks]
        except ValueError as error:
            raise ValueError(f"{NETWORKS_VARIABLE}: {error}; give networks such as 10.1.0.0/16") from error

    @classmethod
    def around(cls, rendezvous: str) -> AllowedHosts:
        """The networks for a run whose rendezvous is at a host.

        On loopback: loopback alone. Otherwise also those of ``PATRICKSTAR_ELASTIC_NETWORKS``, or if unset, private
        addresses and the rendezvous' own.
        """
        networks = [] if is_loopback(rendezvous) else _networks_around(rendezvous)
        return cls([*_LOOPBACK_NETWORKS.split(","), *networks])

    def check(self, host: str) -> None:
        """Refuses a host outside these networks.

        Raises:
            ValueError: the host is in none of them, or is no IP address.
        """
        try:
            address = ipaddress.ip_address(host)
        except ValueError as error:
            raise ValueError(f"{host[:100]!r} is no IP address") from error
        if not any(address in network for network in self._networks):
            networks = ", ".join(map(str, self._networks))
            raise ValueError(
                f"the host {host} is not in the run's networks ({networks}); {NETWORKS_VARIABLE} names others"
            )
