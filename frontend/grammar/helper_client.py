"""The frontend's end of one helper process: sends a question, and awaits the answer or the process's end."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys

import msgspec

from quire.frontend.grammar.messages import LENGTH, Answer, Compile, Setup, framed


class HelperDied(Exception):
    """The helper ended before it answered: out of memory, or a crash in a library."""


class OutOfTime(HelperDied):
    """The helper ended because the answer took more processor time than the limit."""


class Helper:
    """One running helper. To be used from one event loop, with one question at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, setup: Setup) -> "Helper":
        """Starts a helper process. The helper ends with this process, because its standard input then closes."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 (a millisecond; asyncio's own would need a child watcher)
                [sys.executable, "-P", "-m", "quire.frontend.grammar.helper_process"],
                stdin=theirs.fileno(),
                start_new_session=True,  # so that Ctrl-C reaches only the parent
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
        """Sends a question, and returns the answer.

        Raises:
            OutOfTime: the answer took more than `Setup.limit_cpu_seconds`.
            HelperDied: the helper ended without an answer.
        """
        try:
            self._writer.write(framed(question))
            [length] = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return msgspec.msgpack.decode(await self._reader.readexactly(length), type=Answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.kill()  # the helper closed the socket, so it is ending; this waits for its exit status
            raise (OutOfTime if self._process.returncode == -signal.SIGPROF else HelperDied) from None

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
