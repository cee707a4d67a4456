"""Finds a batch's input and output, which are files or URLs. Memory use stays constant."""

import codecs
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx

from quire.core.errors import ConfigError
from quire.frontend.fetching.fetcher import Fetcher, FetchError, FetchRules

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60.0
MAX_INPUT_BYTES = 16 * 2**30
_RULES = FetchRules(
    allows_private=True,  # the command names the URL, and stores are often on the same network
    max_redirects=10,
    max_bytes=MAX_INPUT_BYTES,
    idle_seconds=TIMEOUT_SECONDS,
    total_seconds=6 * 3600.0,
)


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


@contextlib.asynccontextmanager
async def open_input(name: str) -> AsyncIterator[Path]:
    """The requests as a local file. A URL is downloaded first, because a slow model would let the connection time out.

    Raises:
        ConfigError: there is no such file, or the download failed.
    """
    if not is_url(name):
        yield _existing_file(name)
        return
    with _temporary_file() as path:
        try:
            await _download(name, path)
        except FetchError as error:
            raise ConfigError(f"--input-file: downloading {name} failed: {error}") from None
        except OSError as error:
            raise ConfigError(
                f"--input-file: {name} cannot be kept in {path.parent}: {error.strerror}. TMPDIR names another folder."
            ) from None
        yield path


@contextlib.asynccontextmanager
async def open_output(name: str, *, replace: bool) -> AsyncIterator[Path]:
    """The file for answers: `name` itself, or a temporary file that is PUT to the URL `name` at the end.

    Args:
        replace: whether the file may hold something.

    Raises:
        ConfigError: the folder does not exist; the file does and holds something; or the upload failed (the answers
            are then kept; the error says where).
    """
    if not is_url(name):
        yield _output_path(name, replace)
        return
    with _temporary_file() as path:
        yield path
        try:
            await _upload(path, name)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            kept = path.with_suffix(".kept.jsonl")
            path.rename(kept)
            raise ConfigError(f"--output-file: PUT {name} failed: {error}. The answers are in {kept}.") from None


def _existing_file(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        if path.exists():
            raise ConfigError(f"--input-file: {name!r} is a folder or a pipe; name a file.")
        raise ConfigError(f"--input-file: there is no file {name!r}.")
    return path


def _output_path(name: str, replace: bool) -> Path:
    path = Path(name)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--output-file: there is no folder {str(folder)!r}.")
    if path.is_file() and path.stat().st_size > 0 and not replace:
        raise ConfigError(
            f"--output-file: {name!r} exists. --resume keeps its good answers and runs the other requests; "
            "--overwrite replaces it."
        )
    return path


async def _download(url: str, path: Path) -> None:
    async with Fetcher(_RULES).get(url) as parts:
        with path.open("wb") as file:
            async for part in parts:
                file.write(part)


async def _upload(path: Path, url: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk

    with path.open("rb") as file:
        # Stores with signed URLs require a length, and httpx knows none for a generator.
        length = file.seek(0, os.SEEK_END)
        file.seek(0)
        headers = {"Content-Type": "application/jsonl", "Content-Length": str(length)}
        async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS) as client:
            (await client.put(url, content=chunks(), headers=headers)).raise_for_status()


@contextlib.contextmanager
def _temporary_file() -> Iterator[Path]:
    handle, name = tempfile.mkstemp(prefix="quire-batch-", suffix=".jsonl")
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, text) of each line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line
