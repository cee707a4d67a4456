"""One fetcher keeps rules for all requests to other servers."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.frontend.fetching.fetcher import Fetcher, FetchError, FetchRules, _is_public


class Handler(BaseHTTPRequestHandler):
    """Answers /bytes/N with N bytes, /to?URL with a redirect, /host with the header Host, and all else with 404."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        body = b""
        if path == "/to":
            self.send_response(302)
            self.send_header("Location", query)
        elif path.startswith("/bytes/"):
            self.send_response(200)
            body = b"x" * int(path.removeprefix("/bytes/"))
        elif path == "/host":
            self.send_response(200)
            body = self.headers["Host"].encode()
        else:
            self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def fetched(url: str, **rules: Any) -> bytes:
    limits = {"allows_private": True, "max_bytes": 1000, "total_seconds": 20.0} | rules

    async def main() -> bytes:
        async with Fetcher(FetchRules(**limits)).get(url) as parts:
            return b"".join([part async for part in parts])

    return asyncio.run(main())


def test_content_comes_whole_and_the_host_is_the_urls(port: int) -> None:
    assert fetched(f"http://127.0.0.1:{port}/bytes/1000") == b"x" * 1000
    assert fetched(f"http://localhost:{port}/host") == f"localhost:{port}".encode()


@pytest.mark.parametrize(
    ("path", "rules", "said"),
    [
        ("/bytes/1001", {}, "more than 1000 bytes"),
        ("/bytes/1", {"allows_private": False}, "not public"),
        ("/bytes/1", {"schemes": frozenset({"https"})}, "scheme 'http' is not allowed"),
        ("/bytes/1", {"domains": frozenset({"example.org"})}, "not among those"),
        ("/to?/bytes/1", {}, "more redirects than 0"),
        ("/to?/to?/to?/bytes/1", {"max_redirects": 2}, "more redirects than 2"),
        ("/to?file:///etc/hosts", {"max_redirects": 2}, "scheme 'file' is not allowed"),
        ("/nothing", {}, "answered 404"),
    ],
)
def test_what_the_rules_forbid_is_not_fetched(port: int, path: str, rules: dict[str, Any], said: str) -> None:
    with pytest.raises(FetchError, match=said):
        fetched(f"http://127.0.0.1:{port}{path}", **rules)


def test_redirects_stay_away_from_other_private_hosts(port: int) -> None:
    """The URL's own host may be private where the rules say so, and another one may not."""
    assert fetched(f"http://127.0.0.1:{port}/to?/bytes/3", max_redirects=1) == b"xxx"
    with pytest.raises(FetchError, match="'localhost' has an address that is not public"):
        fetched(f"http://127.0.0.1:{port}/to?http://localhost:{port}/bytes/3", max_redirects=1)


def test_hosts_below_a_domain_are_of_it(port: int) -> None:
    rules = {"domains": frozenset({"0.0.1"})}  # "127.0.0.1" ends with it
    assert fetched(f"http://127.0.0.1:{port}/bytes/1", **rules) == b"x"
    with pytest.raises(FetchError, match="not among those"):
        fetched(f"http://127.0.0.1:{port}/bytes/1", domains=frozenset({"7.0.0.1"}))


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("64:ff9b::808:808", True),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("2002:0a00:0001::", False),
    ],
)
def test_addresses_that_are_not_public(address: str, is_public: bool) -> None:
    assert _is_public(address) is is_public
