"""`quire chat` and `quire complete` with -q and with lines of a pipe, against a small server."""

import io
import sys

import pytest

from quire.frontend.cli.main import QUIRE
from quire.frontend.cli.terminal import UNSAFE
from tests.frontend.cli.echo_server import EchoServer


def quire(*words: str) -> int:
    return QUIRE.run("quire", list(words))


def test_quick_chat_prints_the_answer_and_leaves(echo: EchoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chat", "--url", echo.url, "-q", "hello there", "--system-prompt", "Be kind.") == 0
    assert capsys.readouterr() == ("hello there \n", "")
    path, headers, body = echo.requests[0]
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert body["model"] == "echo-model"
    assert body["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello there"},
    ]


def test_quick_completion(echo: EchoServer, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["complete", "--url", echo.url, "--model-name", "mine", "--max-tokens", "5", "--quick", "once upon"]
    assert quire(*words, "--stats") == 0
    captured = capsys.readouterr()
    assert captured.out == "once upon \n"
    assert "[3 prompt + 2 output tokens, first after" in captured.err
    path, _, body = echo.requests[0]
    assert (path, body["model"], body["prompt"], body["max_tokens"]) == ("/v1/completions", "mine", "once upon", 5)


def test_key_of_the_flag_beats_the_environment(echo: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "environment")
    quire("chat", "--url", echo.url, "-q", "a")
    quire("chat", "--url", echo.url, "-q", "a", "--api-key", "flag")
    assert [headers["Authorization"] for _, headers, _ in echo.requests] == ["Bearer environment", "Bearer flag"]


def test_a_bare_address_is_completed(echo: EchoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chat", "--url", f"127.0.0.1:{echo.server_port}", "-q", "hi") == 0
    assert capsys.readouterr().out == "hi \n"


def test_without_a_server_it_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chat", "--url", "http://127.0.0.1:9/v1", "-q", "hi") == 1
    line = capsys.readouterr().err
    assert "no server answers at http://127.0.0.1:9/v1. Start one with `quire serve`" in line
    assert line.count("\n") == 1


def test_wrong_addresses_and_texts_are_told_apart(
    echo: EchoServer, base_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire("chat", "--url", f"{base_url}/v2", "-q", "hi") == 1
    assert f"({base_url}/v2/models)" in capsys.readouterr().err
    assert quire("chat", "--url", base_url, "--model-name", "wrong", "-q", "hi") == 1
    assert "'wrong' is not served here" in capsys.readouterr().err
    assert quire("chat", "--url", f"https://127.0.0.1:{echo.server_port}", "-q", "hi") == 1
    assert "SSL" in capsys.readouterr().err
    assert quire("chat", "--url", echo.url, "-q", "\udcff") == 1
    assert capsys.readouterr().err == "quire chat: the text has bytes that are not UTF-8.\n"


def test_errors_of_the_server_are_shown(echo: EchoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chat", "--url", echo.url, "-q", "error") == 1
    assert capsys.readouterr() == ("", "quire chat: max_tokens must be at least 1.\n")
    assert quire("complete", "--url", echo.url, "-q", "break") == 1
    assert capsys.readouterr() == ("break \n", "quire complete: the engine died\n")


def test_a_number_that_is_none_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quire("complete", "-q", "hello", "--max-tokens", "many")
    assert capsys.readouterr().err == "quire complete: --max-tokens: needs a whole number (got 'many')\n"


def test_conversation_keeps_what_was_said(
    echo: EchoServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\nerror\ntwo"))
    assert quire("chat", "--url", echo.url) == 1
    captured = capsys.readouterr()
    assert captured.out == "one \ntwo \n"
    assert captured.err == "quire chat: max_tokens must be at least 1.\n"
    assert [message["content"] for message in echo.requests[-1][2]["messages"]] == ["one", "one ", "two"]


def test_lines_of_a_pipe_are_text_and_not_commands(
    echo: EchoServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/exit\n"))
    assert quire("chat", "--url", echo.url) == 0
    assert capsys.readouterr() == ("/exit \n", "")


def test_reasoning_stays_out_of_the_answer(echo: EchoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chat", "--url", echo.url, "-q", "think") == 0
    assert capsys.readouterr() == ("think \n", "<think>\nlet me see\n</think>\n")


def test_an_answer_that_is_cut_off_says_so(echo: EchoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert quire("chat", "--url", echo.url, "-q", "long") == 0
    assert capsys.readouterr() == ("long \n", "(cut off: the answer has as many tokens as the server allows)\n")


def test_terminal_escapes_do_not_pass() -> None:
    assert "a\x1b]0;title\x07b\x9b2Jc\nd\te\r".translate(UNSAFE) == "a]0;titleb2Jc\nd\te"
