"""Reloads TLS certificates when their files change, for `--enable-ssl-refresh`."""

import asyncio
import os
import ssl

from quire.core.logging import get_logger

logger = get_logger(__name__)

POLL_SECONDS = 1.0


class CertificateWatcher:
    """Loads a TLS context's files again when they change. New connections use them; open ones keep theirs.

    The files are polled, because tools that renew certificates often swap a folder's symbolic link, which file-system
    events of the certificate itself do not show.

    Args:
        context: the context of the listening server.
        certificate: file with the chain, and with the key if `key` is None.
        authorities: file with the authorities that may sign clients' certificates. New ones are added; an authority
            that left the file stays accepted until the server restarts.
    """

    def __init__(self, context: ssl.SSLContext, certificate: str, key: str | None, authorities: str | None) -> None:
        self._context = context
        self._certificate = certificate
        self._key = key
        self._authorities = authorities
        self._paths = [path for path in (certificate, key, authorities) if path]
        self._seen = self._read_state()

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.check()

    def check(self) -> None:
        """Reloads the files if they have changed since the last call; logs a warning if they cannot be used."""
        state = self._read_state()
        if state is None or state == self._seen:
            return
        self._seen = state
        try:
            # OpenSSL keeps a new certificate even if the key does not match, so another context tries the pair first.
            self._load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load_into(self._context)
        except OSError as error:  # ssl's errors are OSErrors
            logger.warning("the changed TLS files cannot be used, so the former ones stay in use: %s", error)
        else:
            logger.info("TLS files loaded again: %s", ", ".join(self._paths))

    def _load_into(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self._certificate, self._key, password="")  # else OpenSSL asks the terminal for one
        if self._authorities:
            context.load_verify_locations(self._authorities)

    def _read_state(self) -> list[tuple[int, int, int]] | None:
        """Inode, size and modification time of each file; None while one is missing, as between two renames."""
        try:
            stats = [os.stat(path) for path in self._paths]
        except OSError:
            return None
        return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
