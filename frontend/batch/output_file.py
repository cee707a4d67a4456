"""The file of a batch's answers: written line by line, and read again to resume. Memory use stays constant."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from quire.core.errors import ConfigError
from quire.core.logging import get_logger
from quire.frontend.batch.resuming import Answers, mark_of_digest, mark_of_key

logger = get_logger(__name__)


class _Answer(Struct):
    """The fields of a written answer that resuming needs."""

    id: str
    custom_id: str | None = None
    digest: str | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def mark(self) -> str:
        """The mark of the line that was answered; see `Answers`."""
        if self.digest:
            return mark_of_digest(self.digest)
        return mark_of_key(self.id if self.custom_id is None else self.custom_id)

    @property
    def failed(self) -> bool:
        return bytes(self.error) != b"null"


class OutputFile:
    """Writes answers, one line each. Lines are not buffered, so that a killed run can resume.

    Args:
        resume: keep the file's answers, without those of failed requests and without an incomplete last line.

    Raises:
        ConfigError: the file cannot be written, or holds anything but answers.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.answers = Answers()
        self._path = path
        end = 0
        if resume and path.exists():
            end = self._keep_good_answers()
        try:
            self._file: BinaryIO = path.open("r+b" if end else "wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"--output-file: cannot write {str(path)!r}: {error.strerror}.") from None
        if end:  # only then: a pipe or a terminal cannot be cut
            self._file.truncate(end)
            self._file.seek(end)

    def _keep_good_answers(self) -> int:
        """Reads the answers that the file holds, and removes those of failed requests; returns the bytes to keep."""
        end = num_failed = 0

        def marks() -> Iterator[str]:
            nonlocal end, num_failed
            for line, answer in self._read():
                end += len(line)
                if answer.failed:
                    num_failed += 1
                else:
                    yield answer.mark

        self.answers = Answers(marks())
        if not num_failed:
            return end
        logger.info("requests that failed before, and run again: %d", num_failed)
        return self._rewrite(line for line, answer in self._read() if not answer.failed)

    def _read(self) -> Iterator[tuple[bytes, _Answer]]:
        """Each whole line of the file, and what it says."""
        decoder = msgspec.json.Decoder(_Answer)
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    logger.warning("the last line of %s was half-written; its request runs again", self._path)
                    return
                try:
                    yield line, decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    raise ConfigError(
                        f"--resume: line {number} of {str(self._path)!r} is no answer of a batch; "
                        "give another --output-file, or --overwrite in place of --resume."
                    ) from None

    def _rewrite(self, lines: Iterable[bytes]) -> int:
        """Puts a new file in the place of the old one, at once: a killed run loses no answer. Returns its bytes."""
        path = self._path.resolve()
        copy = path.with_name(path.name + ".resuming")
        try:
            with copy.open("wb") as file:
                file.writelines(lines)
                size = file.tell()
            copy.replace(path)
        except OSError as error:
            copy.unlink(missing_ok=True)
            raise ConfigError(f"--resume: cannot write {str(copy)!r}: {error.strerror}.") from None
        return size

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
