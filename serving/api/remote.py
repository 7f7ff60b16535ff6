"""Which remote images may be asked for: the form of their address, the hosts that were named, the networks. No I/O.

One parser decides and the connection is made from its parts, so that no second reading of the text can differ.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

IpAddress = IPv4Address | IPv6Address

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_CHARS = 4096
_HOST = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*"
# Only characters that mean the same to every reader: no backslash, no blank, nothing outside ASCII, no bracket. Without
# re.ASCII the Kelvin sign would be a k, as its lower case is one.
_PATH = r"[!$%&'()*+,\-./0-9:;=?@A-Z_a-z~]*"
_URL = re.compile(rf"(https?)://({_HOST})\.?(?::([0-9]{{1,5}}))?((?:[/?]{_PATH})?)", re.IGNORECASE | re.ASCII)
_ENTRY = re.compile(rf"({_HOST})(?::([0-9]{{1,5}}))?", re.IGNORECASE | re.ASCII)
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)

# What IPv6 calls global unicast. Everything that carries an IPv4 address and could be used to reach a private one lies
# outside (mapped ::ffff:0:0/96, compatible ::/96, NAT64 64:ff9b::/96 and 64:ff9b:1::/48) or is named below.
_IPV6_UNICAST = IPv6Network("2000::/3")
_IPV6_CARRIERS = (IPv6Network("2002::/16"), IPv6Network("2001::/32"))  # 6to4, Teredo
_6TO4_RELAYS = IPv4Network("192.88.99.0/24")


class Refused(Exception):  # noqa: N818 -- an answer, not a fault
    """A rule forbids it. The text names the rule and nothing that was looked up or received."""


@dataclass(frozen=True)
class RemoteUrl:
    """The parts of an http or https address. host is lower case, target is path and query and begins with a slash."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def host_header(self) -> str:
        return self.host if self.port == _DEFAULT_PORTS[self.scheme] else f"{self.host}:{self.port}"


def parse_url(text: str) -> RemoteUrl:
    """The one reading of an image's address. A fragment is dropped.

    Raises:
        Refused: not a plain http or https address, or one with a user name or password.
    """
    if len(text) > _MAX_CHARS:
        raise Refused(f"the image's address has {len(text)} characters; the limit is {_MAX_CHARS}")
    if not text.lower().startswith(("http://", "https://")):
        raise Refused("the image's address must begin with http:// or https://")
    found = _URL.fullmatch(text.partition("#")[0])
    if found is None:
        # Anything before an @ would be read as a user name by some; a path may hold one.
        if "@" in re.split(r"[/?#\\]", text.partition("://")[2], maxsplit=1)[0]:
            raise Refused("the image's address must not hold a user name or password")
        raise Refused(
            "the image's address is not plain: a host name, an optional port and a path in percent-encoded ASCII"
        )
    scheme, host, port, target = found.groups()
    scheme = scheme.lower()
    number = int(port) if port else _DEFAULT_PORTS[scheme]
    return RemoteUrl(scheme, host.lower(), number, target if target.startswith("/") else f"/{target}")


def redirected(url: RemoteUrl, location: bytes) -> RemoteUrl:
    """Where a redirect from `url` leads.

    Raises:
        Refused: as `parse_url`, or it leaves https.
    """
    try:
        text = location.decode("ascii")
    except UnicodeDecodeError:
        raise Refused("a redirect's address must be percent-encoded ASCII") from None
    if text.startswith("//"):
        text = f"{url.scheme}:{text}"
    elif not _ABSOLUTE.match(text):
        folder = "" if text.startswith("/") else url.target.partition("?")[0].rpartition("/")[0] + "/"
        text = f"{url.scheme}://{url.host}:{url.port}{folder}{text}"
    target = parse_url(text)
    if url.scheme == "https" and target.scheme != "https":
        raise Refused("a redirect must not leave https")
    return target


@dataclass(frozen=True)
class ImageHosts:
    """The hosts that images may be fetched from, each with its ports."""

    ports: Mapping[str, frozenset[int]]

    @classmethod
    def parse(cls, text: str) -> "ImageHosts":
        """From "a.example,b.example:8443". A name alone stands for its ports 80 and 443, and for no other name.

        Raises:
            ValueError: an entry is not a host name with an optional port.
        """
        ports: dict[str, frozenset[int]] = {}
        for entry in text.split(","):
            found = _ENTRY.fullmatch(entry.strip())
            if found is None or not 0 < int(found[2] or 443) < 65536:
                raise ValueError(
                    f"{entry.strip()!r} is not a host name with an optional port, such as img.example:8443"
                )
            host = found[1].lower()
            wanted = frozenset({int(found[2])}) if found[2] else frozenset(_DEFAULT_PORTS.values())
            ports[host] = ports.get(host, frozenset()) | wanted
        return cls(ports)

    def check(self, url: RemoteUrl) -> None:
        """
        Raises:
            Refused: the host was not named, or not with this port.
        """
        ports = self.ports.get(url.host)
        if ports is None:
            raise Refused("the image's host is not one that this server fetches from; send the image as a data URI")
        if url.port not in ports:
            raise Refused(f"this server does not fetch from port {url.port} of the image's host")


def is_public(address: IpAddress) -> bool:
    """Whether an address belongs to the public internet and nothing else.

    False for private, shared (CGNAT), loopback, link-local, multicast, reserved and documentation networks, and for
    every IPv6 form that carries an IPv4 address: a translator behind it might lead back inside.
    """
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, IPv4Address):
        return address not in _6TO4_RELAYS
    return address in _IPV6_UNICAST and not any(address in network for network in _IPV6_CARRIERS)
