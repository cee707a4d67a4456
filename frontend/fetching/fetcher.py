"""Fetches URLs within rules: schemes, domains, addresses, redirects, bytes and seconds.

A host's addresses are checked and the request goes to a checked one, so that a name cannot lead elsewhere when it is
asked again. Where the environment names a proxy for the URL, the proxy resolves names and its own rules hold.
"""

import asyncio
import ipaddress
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from msgspec import Struct

from quire.core.errors import RequestError

CHUNK_BYTES = 1 << 20
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses whose last 32 bits are those of the IPv4 host that a gateway leads to (RFC 6052)."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class FetchError(RequestError):
    """A URL was not fetched: a rule forbids it, or the other server failed."""


class FetchRules(Struct, frozen=True, kw_only=True):
    """What may be fetched.

    Attributes:
        schemes: of URLs.
        domains: hosts, and those below them; None: any.
        allows_private: the URL's own host may have addresses that are not public, as the loopback's. Redirects to other
            hosts never lead to such.
        max_redirects: each is checked as the URL is; none leads from https to http.
        max_bytes: of the answer.
        idle_seconds, total_seconds: without a byte, and altogether.
    """

    schemes: frozenset[str] = frozenset({"https", "http"})
    domains: frozenset[str] | None = None
    allows_private: bool = False
    max_redirects: int = 0
    max_bytes: int
    idle_seconds: float = 60.0
    total_seconds: float


class Fetcher:
    """Fetches URLs."""

    def __init__(self, rules: FetchRules) -> None:
        self._rules = rules

    @asynccontextmanager
    async def get(self, url: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The parts of a URL's content.

        Raises:
            FetchError: also while the parts are read.
        """
        rules = self._rules
        try:
            async with asyncio.timeout(rules.total_seconds), httpx.AsyncClient(timeout=rules.idle_seconds) as client:
                response = await self._follow(client, httpx.URL(url))
                try:
                    yield self._bounded(response)
                finally:
                    await response.aclose()
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise FetchError(f"{error or type(error).__name__}") from None
        except TimeoutError:
            raise FetchError(f"it took more than {rules.total_seconds:g} s") from None

    async def _follow(self, client: httpx.AsyncClient, url: httpx.URL) -> httpx.Response:
        first = url
        for _ in range(self._rules.max_redirects + 1):
            is_own = url.host == first.host
            self._check(url, first)
            request = await self._pinned(client, url, allows_private=self._rules.allows_private and is_own)
            response = await client.send(request, stream=True)
            if response.status_code not in _REDIRECTS or "location" not in response.headers:
                if response.is_success:
                    return response
                await response.aclose()
                raise FetchError(f"{url.host} answered {response.status_code} {response.reason_phrase}")
            await response.aclose()
            url = url.join(response.headers["location"])
        raise FetchError(f"more redirects than {self._rules.max_redirects}")

    def _check(self, url: httpx.URL, first: httpx.URL) -> None:
        rules = self._rules
        if url.scheme not in rules.schemes or (first.scheme == "https" and url.scheme != "https"):
            raise FetchError(f"the scheme {url.scheme!r} is not allowed here")
        if rules.domains is not None and not any(
            url.host == domain or url.host.endswith("." + domain) for domain in rules.domains
        ):
            raise FetchError(f"the host {url.host!r} is not among those that are allowed")

    async def _pinned(self, client: httpx.AsyncClient, url: httpx.URL, *, allows_private: bool) -> httpx.Request:
        """The request, to a checked address of the URL's host."""
        if _proxy_of(url) is not None:
            return client.build_request("GET", url)
        address = await _address_of(url, allows_private=allows_private)
        headers = {"Host": url.netloc.decode("ascii")}
        pinned = url.copy_with(host=address)
        return client.build_request("GET", pinned, headers=headers, extensions={"sni_hostname": url.host})

    async def _bounded(self, response: httpx.Response) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for chunk in response.aiter_bytes(CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > self._rules.max_bytes:
                raise FetchError(f"it has more than {self._rules.max_bytes} bytes")
            yield chunk


async def _address_of(url: httpx.URL, *, allows_private: bool) -> str:
    """The first address of a URL's host, once all are checked: which of them is taken must not matter."""
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise FetchError(f"the host {url.host!r} is not found: {error.strerror or error}") from None
    addresses = [str(each[4][0]) for each in found]
    if not allows_private and not all(map(_is_public, addresses)):
        raise FetchError(f"the host {url.host!r} has an address that is not public")
    return addresses[0]


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF) if parsed in _NAT64 else None
        parsed = parsed.ipv4_mapped or parsed.sixtofour or translated or parsed
    return parsed.is_global and not parsed.is_multicast


def _proxy_of(url: httpx.URL) -> str | None:
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return None if proxy is None or urllib.request.proxy_bypass(url.host) else proxy
