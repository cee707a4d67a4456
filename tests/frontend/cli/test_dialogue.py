"""`quire chat` and `quire complete` at a terminal, with the demo model or a small server."""

import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.cli.echo_server import EchoServer
from tests.frontend.cli.terminals import PROMPT, Terminal
from tests.servers import ServerProcess

Open = Callable[..., Terminal]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def open_terminal(state: Path) -> Iterator[Open]:
    """`open_terminal("chat", "--url", url)` is a program that waits for its first message."""
    terminals = []

    def start(*arguments: str, columns: int = 80, env: dict[str, str] | None = None) -> Terminal:
        terminal = Terminal(*arguments, columns=columns, env={"XDG_STATE_HOME": str(state), **(env or {})})
        terminals.append(terminal)
        terminal.read_until(PROMPT)
        return terminal

    yield start
    for terminal in terminals:
        terminal.close()


def messages(echo: EchoServer) -> list[tuple[str, str]]:
    """(role, content) of each message of the last request."""
    found: list[dict[str, Any]] = echo.requests[-1][2]["messages"]
    return [(message["role"], message["content"]) for message in found]


def say(terminal: Terminal, keys: str) -> str:
    """What is printed from `keys` on to the next prompt."""
    terminal.type(keys)
    return terminal.read_until(PROMPT)


@pytest.mark.parametrize("columns", [20, 80])
def test_a_conversation_with_a_model(demo_server: ServerProcess, open_terminal: Open, columns: int) -> None:
    terminal = open_terminal("chat", "--url", demo_server.base_url, columns=columns)
    terminal.type("What is the capital of France?\r")
    terminal.read_until("Paris")
    terminal.read_until(PROMPT)
    assert "/system" in say(terminal, "/help\r")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(echo: EchoServer, open_terminal: Open) -> None:
    terminal = open_terminal("chat", "--url", echo.url)
    terminal.type("forever\r")
    terminal.read_until("on on ")
    terminal.type("\x03")
    terminal.read_until("(stopped)")
    assert echo.disconnected.wait(60)
    terminal.read_until(PROMPT)
    assert "(Ctrl-D leaves)" in say(terminal, "half a mess\x03")
    assert "again \r\n" in say(terminal, "again\r")
    assert [role for role, _ in messages(echo)] == ["user", "assistant", "user"]
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


@pytest.mark.parametrize(
    "keys",
    ["\x1b[200~one\ntwo\x1b[201~\r", "one\x1b\rtwo\r", '"""one\rtwo"""\r', '"""\rone\rtwo\r"""\r'],
    ids=["pasted", "alt-enter", "quoted", "quotes-apart"],
)
def test_a_message_of_many_lines(echo: EchoServer, open_terminal: Open, keys: str) -> None:
    terminal = open_terminal("chat", "--url", echo.url, columns=20)
    say(terminal, keys)
    assert messages(echo) == [("user", "one\ntwo")]


def test_commands(echo: EchoServer, open_terminal: Open) -> None:
    terminal = open_terminal("chat", "--url", echo.url, "--system-prompt", "Be kind.")
    say(terminal, "one\r")
    say(terminal, "/clear\r")
    say(terminal, "two\r")
    assert messages(echo) == [("system", "Be kind."), ("user", "two")]
    say(terminal, "/system Be brief.\r")
    say(terminal, "three\r")
    assert messages(echo) == [("system", "Be brief."), ("user", "two"), ("assistant", "two "), ("user", "three")]
    say(terminal, "/system\r")
    say(terminal, "/clear\r")
    assert "did you mean /clear?" in say(terminal, "/claer\r")
    say(terminal, "/etc/hosts\r")
    assert messages(echo) == [("user", "/etc/hosts")]
    say(terminal, '"""/clear"""\r')
    assert messages(echo)[2:] == [("user", "/clear")]
    terminal.type("/exit\r")
    assert terminal.process.wait(60) == 0


def test_completions_know_the_commands_that_make_sense(echo: EchoServer, open_terminal: Open) -> None:
    terminal = open_terminal("complete", "--url", echo.url)
    assert "/clear" not in say(terminal, "/help\r")
    assert "once upon \r\n" in say(terminal, "once upon\r")
    terminal.type("/quit\r")
    assert terminal.process.wait(60) == 0


def test_the_history_is_kept_for_the_next_conversation(echo: EchoServer, open_terminal: Open, state: Path) -> None:
    terminal = open_terminal("chat", "--url", echo.url)
    say(terminal, "something to repeat\r")
    terminal.type("/exit\r")
    assert terminal.process.wait(60) == 0
    [file] = (state / "quire").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second = open_terminal("chat", "--url", echo.url)
    say(second, "\x1b[A\x1b[A\r")  # /exit is above
    assert messages(echo) == [("user", "something to repeat")]
    private = open_terminal("chat", "--url", echo.url, "--no-history")
    before = file.read_text()
    say(private, "a secret\r")
    assert file.read_text() == before


def test_without_a_place_for_the_history_there_is_none(echo: EchoServer, open_terminal: Open, state: Path) -> None:
    state.write_text("a file where the folder should be")
    terminal = open_terminal("chat", "--url", echo.url)
    assert "hello \r\n" in say(terminal, "hello\r")


def test_reasoning_is_dimmed(echo: EchoServer, open_terminal: Open) -> None:
    assert "\x1b[2mlet me see\x1b[22m\r\nthink \r\n" in say(open_terminal("chat", "--url", echo.url), "think\r")
    plain = say(open_terminal("chat", "--url", echo.url, env={"NO_COLOR": "1"}), "think\r")
    assert "<think>\r\nlet me see\r\n</think>\r\nthink \r\n" in plain


def test_a_server_that_is_gone_does_not_end_the_conversation(echo: EchoServer, open_terminal: Open) -> None:
    terminal = open_terminal("chat", "--url", echo.url)
    say(terminal, "hello\r")
    echo.shutdown()
    echo.server_close()
    assert f"quire chat: no server answers at {echo.url}. Start one" in say(terminal, "hello\r")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


def test_a_dumb_terminal_gets_no_escapes(echo: EchoServer, state: Path) -> None:
    terminal = Terminal("chat", "--url", echo.url, env={"XDG_STATE_HOME": str(state), "TERM": "dumb"})
    try:
        shown = terminal.read_until("> ")
        terminal.type("think\r")
        shown += terminal.read_until("think \r\n")
        assert "\x1b" not in shown
    finally:
        terminal.close()
