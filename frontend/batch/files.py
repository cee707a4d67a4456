"""Reads a batch's requests from a file or URL, and writes its answers to one. Memory use stays constant."""

import contextlib
import hashlib
import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import httpx
import msgspec
from msgspec import Struct

from quire.core.errors import ConfigError
from quire.core.logging import get_logger

logger = get_logger(__name__)

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60.0


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
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"--input-file: downloading {name} failed: {error}") from None
        yield path


@contextlib.asynccontextmanager
async def open_output(name: str) -> AsyncIterator[Path]:
    """The file for answers: `name` itself, or a temporary file that is PUT to the URL `name` at the end.

    Raises:
        ConfigError: the folder does not exist, or the upload failed (the answers are then kept; the error says where).
    """
    if not is_url(name):
        yield _file_in_existing_folder(name)
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


def _file_in_existing_folder(name: str) -> Path:
    folder = Path(name).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--output-file: there is no folder {str(folder)!r}.")
    return Path(name)


async def _download(url: str, path: Path) -> None:
    async with (
        httpx.AsyncClient(follow_redirects=True, timeout=TIMEOUT_SECONDS) as client,
        client.stream("GET", url) as response,
    ):
        response.raise_for_status()
        with path.open("wb") as file:
            async for chunk in response.aiter_bytes(CHUNK_BYTES):
                file.write(chunk)


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
            if line.strip():
                yield number, line


def count_lines(path: Path) -> int:
    return sum(1 for _ in read_lines(path))


# -------------------------------------------------------------------------------------------------------------- resume


class _Answer(Struct):
    """The fields of a written answer that resuming needs."""

    id: str
    custom_id: str | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class Answered:
    """The requests that have an answer, at 8 bytes each, so that a million requests fit easily."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._hashes = array("Q", sorted(array("Q", map(_hash, keys))))

    def __contains__(self, key: str) -> bool:
        wanted = _hash(key)
        place = bisect_left(self._hashes, wanted)
        return place < len(self._hashes) and self._hashes[place] == wanted

    def __len__(self) -> int:
        return len(self._hashes)


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class OutputFile:
    """Writes answers, one line each. Lines are not buffered, so that a killed run can resume.

    Args:
        resume: keep the file's answers, without an incomplete last line.

    Raises:
        ConfigError: the file cannot be written, or holds anything but answers.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.num_failed_before = 0
        self.answered = Answered()
        self._path = path
        end = 0
        if resume and path.exists():
            end = self._read()
        try:
            self._file: BinaryIO = path.open("r+b" if end else "wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"--output-file: cannot write {str(path)!r}: {error.strerror}.") from None
        if end:  # only then: a pipe or a terminal cannot be cut
            self._file.truncate(end)
            self._file.seek(end)

    def _read(self) -> int:
        """Reads the answers that the file holds; returns the number of bytes to keep."""
        decoder = msgspec.json.Decoder(_Answer)
        end = 0

        def read_keys() -> Iterator[str]:
            nonlocal end
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        logger.warning("the last line of %s was half-written; its request runs again", self._path)
                        return
                    try:
                        answer = decoder.decode(line)
                    except (msgspec.MsgspecError, UnicodeDecodeError):
                        raise ConfigError(
                            f"--resume: line {number} of {str(self._path)!r} is no answer of a batch; "
                            "give another --output-file, or leave --resume out to write it anew."
                        ) from None
                    end += len(line)
                    self.num_failed_before += bytes(answer.error) != b"null"
                    yield answer.id if answer.custom_id is None else answer.custom_id

        self.answered = Answered(read_keys())
        return end

    def write(self, line: bytes) -> None:
        """One answer, without its newline.

        Raises:
            ConfigError: the answer cannot be written; earlier ones stay.
        """
        rest = memoryview(line + b"\n")
        try:
            while rest:  # a nearly full disk takes only a part
                rest = rest[self._file.write(rest) :]
        except BrokenPipeError:  # the reader of the answers is gone
            raise
        except OSError as error:
            raise ConfigError(
                f"--output-file: cannot write {str(self._path)!r}: {error.strerror}. Once that is mended, the same "
                "command with --resume goes on from here."
            ) from None

    def close(self) -> None:
        self._file.close()
