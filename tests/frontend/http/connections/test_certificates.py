"""TLS certificates that are renewed while the server runs."""

import asyncio
import logging
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from quire.frontend.http.connections import certificates
from tests.frontend.http.test_server import run, stop

pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command"),
    pytest.mark.usefixtures("without_model"),
]


def make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """(key, certificate) for 127.0.0.1, signed by itself."""
    key, certificate = folder / f"{name}-key.pem", folder / f"{name}.pem"
    command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN={name}"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return key, certificate


async def is_trusted(url: str, certificate: Path) -> bool:
    """Whether a new connection is offered `certificate`."""
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(certificate))) as client:
        try:
            return (await client.get(f"{url}/version")).status_code == 200
        except httpx.ConnectError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                return False
            raise


async def logged(caplog: pytest.LogCaptureFixture, words: str) -> None:
    async with asyncio.timeout(60):
        while words not in caplog.text:
            await asyncio.sleep(0.02)


def test_renewed_certificates_serve_new_connections(
    checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "POLL_SECONDS", 0.02)
    key, certificate = make_pair(tmp_path, "used")
    old = shutil.copy(certificate, tmp_path / "old.pem")
    new_key, new = make_pair(tmp_path, "new")

    async def scenario(client: httpx.AsyncClient) -> list[bool]:
        url = str(client.base_url)
        seen = [await is_trusted(url, old), await is_trusted(url, new)]
        shutil.copy(new, certificate)  # its key comes later
        await logged(caplog, "former ones stay in use")
        seen += [await is_trusted(url, old), await is_trusted(url, new)]
        shutil.copy(new_key, key)
        await logged(caplog, "TLS files loaded again")
        seen += [await is_trusted(url, old), await is_trusted(url, new)]
        assert (await client.get("/version")).status_code == 200  # over the connection from before
        stop()
        return seen

    with caplog.at_level(logging.INFO, logger="quire"):
        seen = run(
            checkpoint("llama"),
            scenario,
            tls=ssl.create_default_context(cafile=str(old)),
            ssl_keyfile=str(key),
            ssl_certfile=str(certificate),
            enable_ssl_refresh=True,
        )
    assert seen == [True, False, True, False, False, True]


def test_new_authorities_sign_for_clients(
    checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "POLL_SECONDS", 0.02)
    key, certificate = make_pair(tmp_path, "server")
    client_key, client_certificate = make_pair(tmp_path, "client")
    authorities = tmp_path / "authorities.pem"
    shutil.copy(certificate, authorities)
    tls = ssl.create_default_context(cafile=str(certificate))
    tls.load_cert_chain(certificate, key)  # signed by the server's own authority
    other = ssl.create_default_context(cafile=str(certificate))
    other.load_cert_chain(client_certificate, client_key)

    async def scenario(client: httpx.AsyncClient) -> int:
        async with httpx.AsyncClient(verify=other, base_url=client.base_url) as stranger:
            with pytest.raises(httpx.TransportError):
                await stranger.get("/version")
            authorities.write_bytes(certificate.read_bytes() + client_certificate.read_bytes())
            await logged(caplog, "TLS files loaded again")
            status = (await stranger.get("/version")).status_code
        stop()
        return status

    with caplog.at_level(logging.INFO, logger="quire"):
        status = run(
            checkpoint("llama"),
            scenario,
            tls=tls,
            ssl_keyfile=str(key),
            ssl_certfile=str(certificate),
            ssl_ca_certs=str(authorities),
            ssl_cert_reqs=2,
            enable_ssl_refresh=True,
        )
    assert status == 200
