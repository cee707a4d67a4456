"""The join token: a secret that all nodes share. The keys of their sockets are derived from it."""

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from quire.core import envs
from quire.core.errors import ConfigError
from quire.core.wire.channel import CurveKeys

MIN_CHARACTERS = 32


class JoinToken:
    """A secret of 32 characters or more. Only a process that knows it can join or speak to a node.

    Raises:
        ConfigError: the secret is shorter. The message does not repeat the secret.
    """

    def __init__(self, secret: str, *, source: str = "QUIRE_JOIN_TOKEN") -> None:
        if len(secret) < MIN_CHARACTERS:
            raise ConfigError(
                f"{source} has {len(secret)} characters and needs {MIN_CHARACTERS} or more, because it is all that "
                "keeps others from joining; `openssl rand -base64 33` prints a good one."
            )
        self.secret = secret

    def keys(self) -> CurveKeys:
        """The key pairs of the sockets between nodes."""
        return CurveKeys.derive(self.secret.encode())

    @classmethod
    def from_environment(cls) -> "JoinToken | None":
        """The token that the user has set; None if it is unset."""
        secret = envs.read("JOIN_TOKEN")
        return None if secret is None else cls(secret.strip())

    @classmethod
    def from_file(cls, path: Path) -> "JoinToken":
        """The token in `path`; creates the file if it is missing. Only its owner may read it.

        Raises:
            ConfigError: the file cannot be written or read, or others may read it.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _write_new(path, secrets.token_urlsafe(33) + "\n")
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                raise ConfigError(f"Others may read the join token in {path}; remove the file, and another is made.")
            return cls(path.read_text().strip(), source=str(path))
        except OSError as error:
            raise ConfigError(
                f"The join token cannot be kept in {path}: {error.strerror}. Set QUIRE_JOIN_TOKEN on all nodes instead."
            ) from None


def _write_new(path: Path, text: str) -> None:
    """Creates a file with its whole content, readable by its owner alone. Keeps a file that another process has created
    meanwhile."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # of mode 600
        file.write(text)
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
