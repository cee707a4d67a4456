"""A helper process as the frontend sees it: a question, an answer, or its end."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys

import msgspec

from quire.frontend.grammar.messages import LENGTH, Answer, Compile, Setup, framed


class HelperDied(Exception):
    """It ended while it was asked something: out of memory, a crash in a library."""


class OutOfTime(HelperDied):
    """It ended because an answer took more processor time than it may."""


class Helper:
    """One running helper. Use from one event loop, one question at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, setup: Setup) -> "Helper":
        """Starts a process; it ends when this one does, because its standard input closes."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 (a millisecond; asyncio's own would need a child watcher)
                [sys.executable, "-P", "-m", "quire.frontend.grammar.helper_process"],
                stdin=theirs.fileno(),
                start_new_session=True,  # Ctrl-C is for the parent
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            process.kill()
            process.wait()
            raise
        helper = cls(process, reader, writer)
        writer.write(framed(setup))
        return helper

    async def ask(self, question: Compile) -> Answer:
        """The answer.

        Raises:
            OutOfTime: it would take more than `Setup.limit_cpu_seconds`.
            HelperDied: there will be none.
        """
        try:
            self._writer.write(framed(question))
            [length] = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return msgspec.msgpack.decode(await self._reader.readexactly(length), type=Answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.kill()  # its end of the socket is closed, so it is dying: what remains is to learn of what
            raise (OutOfTime if self._process.returncode == -signal.SIGPROF else HelperDied) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process, whatever it is doing. Idempotent."""
        with contextlib.suppress(RuntimeError):  # the loop may be over
            self._writer.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
