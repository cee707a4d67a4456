"""The frontend's end of one helper process: sends a question, and awaits the answer or the process's end."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from quire.core.process_activity import is_stopped
from quire.core.process_ends import OUTSIDE
from quire.core.processes import until_ended
from quire.frontend.helpers.frames import LENGTH, framed

A = TypeVar("A")

END_SECONDS = 2.0
LOOK_SECONDS = 0.5
"""The interval at which a question looks whether its helper is stopped."""


class HelperDied(Exception):
    """The helper ended before it answered: out of memory, or a crash in a library."""


class OutOfTime(HelperDied):
    """The helper ended because the answer took more processor time than the limit."""


class HelperKilled(HelperDied):
    """Somebody outside ended or stopped the helper, or the host ran out of memory: the question is not at fault."""


@dataclass(frozen=True)
class HelperProgram(Generic[A]):
    """What helpers of one kind run.

    Attributes:
        module: the program, as `python -m` names it.
        setup: the first message to each helper.
        answers: decodes what comes back.
    """

    module: str
    setup: msgspec.Struct
    answers: msgspec.msgpack.Decoder[A]


class Helper(Generic[A]):
    """One running helper. To be used from one event loop, with one question at a time."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: msgspec.msgpack.Decoder[A],
    ) -> None:
        self._answers = answers
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, program: HelperProgram[A]) -> "Helper[A]":
        """Starts a helper process. The helper ends with this process, because its standard input then closes."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 (a millisecond; asyncio's own would need a child watcher)
                [sys.executable, "-P", "-m", program.module],
                stdin=theirs.fileno(),
                start_new_session=True,  # so that Ctrl-C reaches only the parent
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            process.kill()
            process.wait()
            raise
        helper = cls(process, reader, writer, program.answers)
        writer.write(framed(program.setup))
        return helper

    async def ask(self, question: msgspec.Struct) -> A:
        """Sends a question, and returns the answer.

        Raises:
            OutOfTime: the answer took more processor time than the limit.
            HelperKilled: somebody outside ended or stopped the helper.
            HelperDied: the helper ended without an answer.
        """
        try:
            self._writer.write(framed(question))
            return await self._answer()
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._why_ended() from None

    async def _answer(self) -> A:
        """The answer. Looks meanwhile whether the helper is stopped, because it would then never come."""
        reading = asyncio.create_task(self._read())
        try:
            while not reading.done():
                await asyncio.wait([reading], timeout=LOOK_SECONDS)
                if not reading.done() and is_stopped(self.pid):
                    self.kill()
                    raise HelperKilled
            return reading.result()
        finally:
            reading.cancel()

    async def _why_ended(self) -> HelperDied:
        """The reason for the end of a helper that has closed its socket, and so is about to end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await until_ended(self.pid)
        self.kill()
        match -self._process.returncode:
            case signal.SIGPROF:
                return OutOfTime()
            case number if number in OUTSIDE:
                return HelperKilled()
        return HelperDied()

    async def _read(self) -> A:
        [length] = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return self._answers.decode(await self._reader.readexactly(length))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process at once. Idempotent."""
        with contextlib.suppress(RuntimeError):  # the event loop may be closed
            self._writer.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
