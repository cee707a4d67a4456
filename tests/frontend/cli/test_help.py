"""`--help` finds groups, options and words, and fits the terminal."""

import re

import pytest

from quire.frontend.cli import bench, run_batch, serve
from quire.frontend.cli.main import QUIRE
from quire.frontend.flags.parser import CommandParser


def show(*words: str, capsys: pytest.CaptureFixture[str], command: object = serve) -> str:
    parser = CommandParser("quire serve", "Serve a model.")
    command.add_arguments(parser)  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(list(words))
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", ["20", "40", "80", "200"])
@pytest.mark.parametrize("topic", ["", "=all", "=listgroup", "=SchedulerConfig", "=max-num-seqs", "=prefix"])
def test_help_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str, topic: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = show("--help" + topic, capsys=capsys)
    limit = max(24, min(100, int(columns)))
    long_words = re.compile(r"\s*\S+( [A-Z]\S*)?")  # a flag that is wider than the terminal stays whole
    assert [line for line in text.splitlines() if len(line) > limit and not long_words.fullmatch(line)] == []


def test_plain_help_is_short_and_points_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = show("some-model", "--help", capsys=capsys)
    assert text.startswith("Usage: quire serve [MODEL] [options]")
    assert "--port" in text
    assert "--help=all" in text
    assert "--long-prefill-token-threshold" not in text
    assert len(text.splitlines()) < 60
    assert show("-h", capsys=capsys) == text


def test_help_all_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    text = show("--help=all", capsys=capsys)
    parser = CommandParser("quire serve", "Serve a model.")
    serve.add_arguments(parser)
    assert [flag for flag in parser.fields if flag not in text] == []
    assert "[8000]" in text
    lines = " ".join(text.split())
    assert "Listen on this Unix socket instead of --host and --port. [unset]" in lines
    assert "Log the stack trace of every error answer. [off]" in lines


def test_help_on_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = show("--help=CacheConfig", capsys=capsys)
    assert "--block-size" in text
    assert "--port" not in text
    assert show("--help=cacheconfig", capsys=capsys) == text


def test_help_on_one_option(capsys: pytest.CaptureFixture[str]) -> None:
    for spelling in ("max-num-seqs", "max_num_seqs", "--max-num-seqs"):
        text = show(f"--help={spelling}", capsys=capsys)
        assert "SchedulerConfig" in text
        assert "--max-num-queued-reqs" not in text
    assert "[8000]" not in show("--help=port", capsys=capsys)
    assert "8000" in show("--help=port", capsys=capsys)
    assert "--hf-overrides.key VALUE" in show("--help=hf-overrides", capsys=capsys)
    assert "unset" in show("--help=no-enable-prefix-caching", capsys=capsys)


def test_help_lists_groups(capsys: pytest.CaptureFixture[str]) -> None:
    text = show("--help=listgroup", capsys=capsys)
    for name in ("ModelConfig", "CacheConfig", "ServerConfig"):
        assert name in text


def test_help_searches_names_and_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    text = show("--help=preemption", capsys=capsys)
    assert "--num-gpu-blocks-override" in text
    assert "--port" not in text


def test_help_knows_unsupported_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not supported: Adapters change" in show("--help=enable-tower-connector-lora", capsys=capsys)
    assert "Taken as 1, which asks for nothing." in show("--help=renderer-num-workers", capsys=capsys)
    assert "--jit-monitor-verbose changes nothing" in show("--help=jit-monitor-verbose", capsys=capsys)
    assert "--max-lora-rank" in show("--help=lora", capsys=capsys)


def test_help_on_nothing_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser("quire serve", "Serve a model.")
    serve.add_arguments(parser)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(["--help=max-num-seqz"])
    assert stopped.value.code == 2
    assert "did you mean --help=max-num-seqs?" in capsys.readouterr().err


def test_required_options_are_in_the_usage_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = show("--help", capsys=capsys, command=run_batch)
    assert "--input-file TEXT --output-file TEXT" in text.splitlines()[0]


@pytest.mark.parametrize("columns", ["40", "80"])
def test_overviews_name_every_command(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for prog, program in (("quire", QUIRE), ("quire bench", bench.BENCH)):
        text = program.overview(prog)
        assert [name for name in program.commands if name not in text] == []
        assert max(map(len, text.splitlines())) <= int(columns)
        if columns == "80":
            assert [name for name in program.commands if f"  {name}  " not in text] == []
