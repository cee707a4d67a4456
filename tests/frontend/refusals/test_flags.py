"""vLLM's flags that Quire lacks are refused by name, unless they ask for nothing; none of them is a supported one."""

import importlib
import shlex

import pytest

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError
from quire.frontend.cli import run_batch, serve
from quire.frontend.cli.bench import BENCH, SWEEP
from quire.frontend.cli.command_group import Command, CommandGroup
from quire.frontend.flags.parser import CommandParser
from quire.frontend.launch.keywords import read_keywords
from quire.frontend.refusals.unsupported_flags import unsupported


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
def test_no_benchmark_takes_a_flag_that_benchmarks_refuse(program: CommandGroup, section: str) -> None:
    commands = [command for command in program.commands.values() if isinstance(command, Command)]
    taken = {flag for command in commands for flag in parser_of(importlib.import_module(command.module)).flags}
    assert taken & set(unsupported(section)) == set()


@pytest.mark.parametrize("section", ["engine", "server", "run-batch", "bench", "sweep"])
def test_every_reason_is_a_sentence(section: str) -> None:
    reasons = {known.reason for known in unsupported(section).values()}
    assert reasons
    assert [reason for reason in reasons if not (reason[0].isupper() or reason[0] in "/-")] == []
    assert [reason for reason in reasons if not reason.endswith(".")] == []


def refusal(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line on stderr with which `quire serve WORDS` is refused."""
    with pytest.raises(SystemExit) as stopped:
        parser_of(serve).parse_args(shlex.split(words))
    assert stopped.value.code == 2
    return capsys.readouterr().err


NEUTRAL = [
    *("-pp 1", "-pp=1", "--pipeline_parallel_size=1", "--nnodes 1", "--data-parallel-size 1", "--api-server-count 1"),
    *("--quantization none", "-q None", "--task generate"),
    *("--swap-space 0", "--cpu-offload-gb 0", "--cpu-offload-gb 0.0"),
    *("--no-enable-lora", "--no_enable_lora", "--no-jit-monitor-verbose", "--jit-monitor-verbose"),
    "--speculative-config None",
    "--no-disable-sliding-window",
    *("--disable-log-requests", "--use-v2-block-manager", "--tokenizer-pool-size 4", "--guided-decoding-backend auto"),
]


@pytest.mark.parametrize("words", NEUTRAL)
def test_a_flag_that_asks_for_nothing_is_taken(words: str) -> None:
    args = parser_of(serve).parse_args(["some-model", *shlex.split(words), "--port", "1"])
    assert args.engine_args == EngineArgs.from_flat(model="some-model")
    assert args.server_config.port == 1


@pytest.mark.parametrize(
    ("words", "piece"),
    [
        ("--enable-tower-connector-lora", "towers"),
        ("--swap-space 16", "KV cache"),
        ("--no-disable-log-requests", "--enable-log-requests"),
        ("--ngram-prompt-lookup-max 4", "--speculative-config.prompt_lookup_max"),
        ("--num-speculative-tokens 4", "--speculative-config.num_speculative_tokens"),
        ("--cuda-graph-sizes 4", "--cudagraph-capture-sizes"),
        ("--guided-decoding-backend outlines", "--structured-outputs-config.backend"),
        ("--rope-theta 1e6", "--hf-overrides.rope_theta"),
        ('--rope-scaling \'{"rope_type": "yarn"}\'', "--hf-overrides.rope_scaling"),
        ("--speculative-model tiny", "--speculative-config"),
        ("--enable-reasoning", "--reasoning-parser"),
    ],
)
def test_known_flags_are_refused_by_name(words: str, piece: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(words, capsys)
    name = words.split(" ")[0].split("=")[0].removesuffix("3")
    assert line.startswith(f"quire serve: {name}")
    assert " is not supported: " in line
    assert piece in line


def test_a_flag_without_its_value_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal("--nnodes", capsys) == "quire serve: --nnodes: needs a value\n"
    assert refusal("--nnodes --port 1", capsys) == "quire serve: --nnodes: needs a value\n"


@pytest.mark.parametrize(
    ("flag", "value", "instead"),
    [
        ("load-format", "runai_streamer", "use safetensors"),
        ("tokenizer-mode", "kimi_audio", "model of audio, which is not served; for a model of text, take auto"),
        ("tokenizer-mode", "alpamayo2_super", "reads images, which is not served; for a model of text, take auto"),
        ("tokenizer-mode", "terratorch", "images alone, which are not served; for a model of text, take auto"),
        ("quantization", "nvfp4_per_token", "take mxfp4"),
    ],
)
def test_a_value_of_vllms_is_refused_with_what_to_use(
    flag: str, value: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert instead in refusal(f"--{flag} {value}", capsys)
    with pytest.raises(ConfigError, match=instead):
        EngineArgs.from_flat(**{flag.replace("-", "_"): value})


def test_a_wrong_format_of_some_layers_is_refused_with_all_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    refused = refusal("--quantization-config.linear int3", capsys)
    assert "linear: choose from bitsandbytes, experts_int8, fp8, " in refused


def test_keywords_that_ask_for_nothing_are_left_out() -> None:
    neutral = {"jit_monitor_verbose": True, "swap_space": 4, "enable_lora": None, "task": "auto"}
    neutral |= {"quantization": "none", "pipeline_parallel_size": 1}
    assert read_keywords({"model": "m", **neutral}) == EngineArgs.from_flat(model="m")
    with pytest.raises(ConfigError, match=r"Option 'swap_space': --swap-space 16 is not supp"):
        read_keywords({"swap_space": 16})
    with pytest.raises(ConfigError, match=r"Option 'enable_tower_connector_lora': --enable-tower-connector-lora is"):
        read_keywords({"enable_tower_connector_lora": True})


def test_a_misspelt_unsupported_flag_gets_its_name_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal("--enable-tower-connector-loras", capsys)
    assert "did you mean --enable-tower-connector-lora?" in line
    assert "not supported" in line


def test_a_value_that_may_be_secret_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser_of(run_batch).parse_args(["-i", "a", "-o", "b", "--api-key", "sk-1"])
    assert "sk-1" not in capsys.readouterr().err


@pytest.mark.parametrize("version", ["next", "0", "v0.11"])
def test_hidden_metrics_are_named_by_a_version(version: str) -> None:
    with pytest.raises(ConfigError, match=f"--show-hidden-metrics-for-version must be a version.*{version!r}"):
        EngineArgs.from_flat(model="m", show_hidden_metrics_for_version=version)
