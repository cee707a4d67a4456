"""Command lines and YAML files become options; wrong ones end in one clear line and exit code 2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.config.engine_args import EngineArgs
from quire.frontend.cli import run_batch, serve
from quire.frontend.flags.parser import CommandParser
from quire.frontend.http.server_config import ServerConfig

Usage = Callable[..., str]


def parse(*words: str, command: Any = serve) -> Any:
    parser = CommandParser("quire serve", "Serve.")
    command.add_arguments(parser)
    return parser.parse_args(words)


def engine(*words: str) -> EngineArgs:
    return parse(*words).engine_args


def server(*words: str) -> ServerConfig:
    return parse(*words).server_config


@pytest.fixture
def usage_error(capsys: pytest.CaptureFixture[str]) -> Usage:
    """The line on stderr of a command line that is refused with exit code 2."""

    def refused(*words: str, command: Any = serve) -> str:
        with pytest.raises(SystemExit) as stopped:
            parse(*words, command=command)
        assert stopped.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("quire serve: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return refused


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "quire.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_no_flags_are_the_defaults() -> None:
    args = parse()
    assert args.engine_args == EngineArgs()
    assert args.server_config == ServerConfig()


def test_dashes_and_underscores_and_equals() -> None:
    for words in (["--max-num-seqs", "8"], ["--max_num_seqs", "8"], ["--max_num-seqs=8"]):
        assert engine(*words).scheduler.max_num_seqs == 8


def test_every_group_is_reached() -> None:
    args = parse(
        "m", "--dtype", "float32", "--load-format", "dummy", "--block-size", "32", "--max-num-batched-tokens", "1K",
        "-tp", "2", "--device", "cpu", "--enable-log-requests", "--port", "0",
    )  # fmt: skip
    options = args.engine_args
    assert (options.model.model, options.model.dtype, options.load.load_format) == ("m", "float32", "dummy")
    assert (options.cache.block_size, options.scheduler.max_num_batched_tokens) == (32, 1024)
    assert (options.parallel.tensor_parallel_size, options.device.device) == (2, "cpu")
    assert options.observability.enable_log_requests
    assert args.server_config.port == 0


def test_booleans_have_three_states() -> None:
    assert engine().cache.enable_prefix_caching is None
    assert engine("--enable-prefix-caching").cache.enable_prefix_caching is True
    assert engine("--no_enable_prefix_caching").cache.enable_prefix_caching is False
    assert engine("--no-use-tqdm-on-load").load.use_tqdm_on_load is False
    assert engine("--enable-log-requests", "--no-enable-log-requests").observability.enable_log_requests is False
    for words in (["--enable-chunked-prefill=False"], ["--enable-chunked-prefill", "False"]):
        assert engine("m", *words).scheduler.enable_chunked_prefill is False
    assert engine("--enable-chunked-prefill", "True", "--port", "1").scheduler.enable_chunked_prefill is True
    assert engine("--enable-chunked-prefill", "m").model.model == "m"
    assert engine("m", "--enable-lora", "False") == engine("m")
    assert engine("m", "--enforce-eager", "True").device.enforce_eager is True


def test_lists_take_one_value_or_several() -> None:
    assert server("--api-key", "a").api_key == ["a"]
    assert server("--api-key", "a", "b", "--port", "1").api_key == ["a", "b"]
    assert engine("--served-model-name", "x", "y").model.served_model_name == ["x", "y"]
    assert engine("--served-model-name", "None").model.served_model_name is None


def test_repeated_keys_are_all_kept(config_file: Callable[[str], str]) -> None:
    """The command line's replace those of a file, as every option's does."""
    assert server("--api-key", "a", "--api-key", "b").api_key == ["a", "b"]
    assert server("--api-key", "a", "b", "--api-key=c").api_key == ["a", "b", "c"]
    path = config_file("api-key: [a, b]")
    assert server("--config", path).api_key == ["a", "b"]
    assert server("--config", path, "--api-key", "c", "--api-key", "d").api_key == ["c", "d"]


def test_null_negative_and_auto() -> None:
    assert engine("--max-num-seqs", "None").scheduler.max_num_seqs is None
    assert engine("--max-num-seqs=").scheduler.max_num_seqs is None
    assert engine("--max-model-len", "-1").model.max_model_len == -1
    assert engine("--max-model-len=auto").model.max_model_len == -1
    assert engine("--max-logprobs", "-1").model.max_logprobs == -1


def test_aliases_and_optional_values() -> None:
    assert engine("--device-memory-utilization", "0.5").cache.gpu_memory_utilization == 0.5
    assert engine("-tp=2").parallel.tensor_parallel_size == 2
    assert engine("--hf-token", "--seed", "3").model == EngineArgs.from_flat(hf_token=True, seed=3).model
    assert engine("--hf-token", "secret").model.hf_token == "secret"


def test_json_whole_and_dotted_are_equal() -> None:
    whole = engine("--hf-overrides", '{"a": {"b": 1}, "l": ["v", "w", "x"]}')
    parts = engine("--hf-overrides.a.b", "1", "--hf_overrides.l+", "v", "--hf-overrides.l+=w,x")
    assert whole == parts
    assert engine("--hf-overrides", '{"a": 1}', "--hf-overrides.b=-1").model.hf_overrides == {"a": 1, "b": -1}
    assert engine("--hf-overrides.rope_scaling.some_key", "x_y").model.hf_overrides == {
        "rope_scaling": {"some_key": "x_y"}
    }
    assert server("--allowed-origins+", "https://a", "--allowed-origins+=b,c").allowed_origins == [
        "https://a",
        "b",
        "c",
    ]


@pytest.mark.parametrize("text", ["{temperature: 1}", "[1]", "hot", "null", '{"a": 1}{'])
def test_json_that_is_no_object_is_told(usage_error: Usage, text: str) -> None:
    said = usage_error("--override-generation-config", text)
    assert said.startswith("quire serve: --override-generation-config: needs a JSON object")
    assert text in said


def test_dotted_keys_are_checked(usage_error: Usage) -> None:
    assert "--hf-overrides.a: needs a value" in usage_error("--hf-overrides.a")
    assert "empty part" in usage_error("--hf-overrides.", "1")
    assert "--allowed-origins+: expected str" in usage_error("--allowed-origins+", "1")
    assert "there is no option --port.x" in usage_error("--port.x", "1")


def test_the_model_may_stand_alone_or_after_its_flag(usage_error: Usage) -> None:
    assert engine("a").model.model == engine("--model", "a").model.model == engine("a", "--model=a").model.model == "a"
    assert engine("--port", "1", "a").model.model == "a"
    assert "'b' and --model 'a'" in usage_error("--model", "a", "b")
    assert "unrecognized arguments: b; --help says what there is" in usage_error("a", "b")


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        (["--port", "70000"], ["--port", "at most 65535", "'70000'"]),
        (["--tensor-parallel-size", "0"], ["--tensor-parallel-size", "at least 1", "'0'"]),
        (["-tp", "x"], ["--tensor-parallel-size", "whole number", "'x'"]),
        (["--dtype", "fp8"], ["--dtype", "bfloat16", "'fp8'"]),
        (["--max-num-batched-tokens", "2.5K"], ["lower-case", "2.5k"]),
        (["--max-num-seqs"], ["--max-num-seqs", "needs a value"]),
        (["--api-key"], ["--api-key", "needs at least one value"]),
        (["--api-key", ""], ["--api-key", "is empty", "unprotected"]),
        (["--api-key="], ["--api-key", "is empty"]),
        (["--api-key", "a", ""], ["--api-key", "is empty"]),
        (["--ssl-certfile", ""], ["--ssl-certfile", "is empty"]),
        (["--ssl-ca-certs="], ["--ssl-ca-certs", "is empty"]),
        (["--uds", ""], ["--uds", "is empty"]),
        (["--enable-prefix-caching=off"], ["takes no value", "'off'", "--no-enable-prefix-caching turns it off"]),
        (["--served-model-name", "mine", "owner/model"], ["takes every word", "'owner/model'", "model first"]),
        (["--structured-outputs-config.backnd", "xgrammar"], ["no key backnd", "did you mean backend?"]),
        (["--structured-outputs-config", '{"x": 1}'], ["no key x", "backend, "]),
        (["--structured-outputs-config", '{"backend": "x"}'], ["backend: choose from ", "xgrammar"]),
        (["--hf-overrides", "{"], ["--hf-overrides", "JSON object"]),
        (["--max-num-sqs", "1"], ["did you mean --max-num-seqs?"]),
        (["--max-num-seq", "1"], ["did you mean --max-num-seqs?"]),
        (["--zzzzzz"], ["no option --zzzzzz", "--help=all"]),
        (["-z"], ["no option -z"]),
        (
            ["--quantization", "aqlm"],
            ["choose from ", "compressed-tensors, ", "torchao (got 'aqlm')", "docs/quantization.md"],
        ),
        (["--ssl-keyfile", "key.pem"], ["--ssl-certfile"]),
    ],
)
def test_wrong_words_are_explained(usage_error: Usage, words: list[str], pieces: list[str]) -> None:
    line = usage_error(*words)
    assert [piece for piece in pieces if piece not in line] == []


# --------------------------------------------------------------------------------------------------- configuration


def test_config_file_sets_and_the_command_line_wins(config_file: Callable[[str], str]) -> None:
    path = config_file(
        """
        model: from-file
        max-num-seqs: 64
        max_num_batched_tokens: 2k
        revision: 1.10
        enable-prefix-caching: false
        served-model-name: [a, b]
        api_key: one
        hf-overrides: {rope_theta: 10000.0, deep: {list: [1, 2]}}
        allowed-origins: ["*"]
        max-model-len: auto
        hf-token: true
        async-scheduling: "False"
        """
    )
    args = parse("--config", path, "--max-num-seqs", "8", "--hf-overrides.x", "1")
    options = args.engine_args
    assert (options.model.model, options.scheduler.max_num_seqs) == ("from-file", 8)
    assert options.scheduler.max_num_batched_tokens == 2000
    assert options.model.revision == "1.10"
    assert options.cache.enable_prefix_caching is False
    assert options.model.served_model_name == ["a", "b"]
    assert options.model.hf_overrides == {"rope_theta": 10000.0, "deep": {"list": [1, 2]}, "x": 1}
    assert options.model.max_model_len == -1
    assert options.model.hf_token is True
    assert options.scheduler.async_scheduling is False
    assert (args.server_config.api_key, args.server_config.allowed_origins) == (["one"], ["*"])
    assert parse(f"--config={path}", "mine").engine_args.model.model == "mine"
    assert parse(f"--config={path}", "--model", "mine").engine_args.model.model == "mine"
    assert parse(f"--config={path}", "--enable-prefix-caching").engine_args.cache.enable_prefix_caching is True


def test_config_file_takes_nulls_dotted_keys_and_model_tag(config_file: Callable[[str], str]) -> None:
    path = config_file("model_tag: m\nmax-num-seqs: null\nhf-overrides.a.b: 1\nhf_overrides.l+: v\n")
    options = parse("--config", path).engine_args
    assert (options.model.model, options.scheduler.max_num_seqs) == ("m", None)
    assert options.model.hf_overrides == {"a": {"b": 1}, "l": ["v"]}
    assert parse("--config", config_file("")).engine_args == EngineArgs()


def test_config_file_supplies_required_options(config_file: Callable[[str], str]) -> None:
    args = parse("--config", config_file("input-file: a\noutput-file: b\nresume: true"), command=run_batch)
    assert (args.batch_config.input_file, args.batch_config.output_file, args.batch_config.resume) == ("a", "b", True)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("max-num-sqs: 1", ["did you mean --max-num-seqs?"]),
        ("enable-tower-connector-lora: true", ["--enable-tower-connector-lora is not supported"]),
        ("port: 70000", ["port", "at most 65535"]),
        ('api-key: ""', ["api-key", "is empty"]),
        ('api-key: [a, ""]', ["api-key", "is empty"]),
        ("port: [1, 2]", ["port", "single value"]),
        ("enable-prefix-caching: 1", ["enable-prefix-caching", "true or false"]),
        ("[1, 2]", ["must map option names to values"]),
        ("a: b: c", ["is not YAML"]),
        ("config: other.yaml", ["config cannot be nested"]),
    ],
)
def test_wrong_files_are_explained(
    usage_error: Usage, config_file: Callable[[str], str], text: str, pieces: list[str]
) -> None:
    path = config_file(text)
    line = usage_error("--config", path)
    assert [piece for piece in [*pieces, path] if piece not in line] == []


def test_missing_file_is_explained(usage_error: Usage) -> None:
    assert "cannot read 'nowhere.yaml': No such file or directory\n" in usage_error("--config", "nowhere.yaml")
    assert "--config: needs a value" in usage_error("--config")


# --------------------------------------------------------------------------------------------------------- batches


def test_run_batch_needs_both_files(usage_error: Usage) -> None:
    args = parse("-i", "in.jsonl", "-oout.jsonl", "--model", "m", "--max-in-flight", "4", command=run_batch)
    assert (args.batch_config.input_file, args.batch_config.output_file) == ("in.jsonl", "out.jsonl")
    assert (args.batch_config.max_in_flight, args.engine_args.model.model) == (4, "m")
    assert "-o/--output-file" in usage_error("-i", "in.jsonl", command=run_batch)
    assert "No server listens" in usage_error("-i", "a", "-o", "b", "--port", "1", command=run_batch)
