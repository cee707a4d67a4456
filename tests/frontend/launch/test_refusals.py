"""vLLM's flags that Quire lacks are refused by name; the data file contains no supported flag."""

import importlib

import pytest

from quire.frontend.cli import run_batch, serve
from quire.frontend.cli.bench import BENCH, SWEEP
from quire.frontend.cli.program import Command, Program
from quire.frontend.flags.parser import CommandParser
from quire.frontend.launch.refusals import unsupported


def parser_of(command: object) -> CommandParser:
    parser = CommandParser("quire serve", "Serve.")
    command.add_arguments(parser)  # type: ignore[attr-defined]
    return parser


@pytest.mark.parametrize("command", [serve, run_batch])
def test_no_flag_is_both_supported_and_refused(command: object) -> None:
    parser = parser_of(command)
    refused = {flag for section in parser.refused_sections for flag in unsupported(section)}
    assert refused & set(parser.flags) == set()


@pytest.mark.parametrize(("program", "section"), [(BENCH, "bench"), (SWEEP, "sweep")])
def test_no_benchmark_takes_a_flag_that_benchmarks_refuse(program: Program, section: str) -> None:
    commands = [command for command in program.commands.values() if isinstance(command, Command)]
    taken = {flag for command in commands for flag in parser_of(importlib.import_module(command.module)).flags}
    assert taken & set(unsupported(section)) == set()


@pytest.mark.parametrize("section", ["engine", "server", "run-batch", "bench", "sweep"])
def test_every_reason_is_a_sentence(section: str) -> None:
    reasons = unsupported(section)
    assert reasons
    assert [reason for reason in reasons.values() if not (reason[0].isupper() or reason[0] == "/")] == []
    assert [reason for reason in reasons.values() if not reason.endswith(".")] == []


@pytest.mark.parametrize(
    ("flag", "piece"),
    [
        ("--enable-lora", "LoRA"),
        ("--no-enable-lora", "LoRA"),
        ("--pipeline-parallel-size", "--tensor-parallel-size"),
        ("-pp", "--tensor-parallel-size"),
        ("--enforce-eager", "drop this flag"),
        ("--swap-space", "KV cache"),
        ("--disable-log-requests", "--enable-log-requests"),
        ("--speculative-config.method", "Speculative"),
        ("--compilation-config", "drop this flag"),
        ("-O3", "drop this flag"),
        ("-O", "drop this flag"),
    ],
)
def test_known_flags_are_refused_by_name(flag: str, piece: str) -> None:
    line = parser_of(serve).refusals.explain(flag)
    assert line.startswith(f"{flag} is not supported: ")
    assert piece in line


def test_a_misspelt_unsupported_flag_gets_its_name_and_reason() -> None:
    line = parser_of(serve).refusals.explain("--enable-loras")
    assert "did you mean --enable-lora?" in line
    assert "not supported" in line
