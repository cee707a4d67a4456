"""Programs that take engine options on their own command line, as vLLM's do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, AsyncEngineArgs, EngineArgs, SamplingParams
from quire.frontend.launch.keywords import read_keywords
from quire.utils.argparse_utils import FlexibleArgumentParser


def parser() -> FlexibleArgumentParser:
    made = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(description="A program."))
    made.set_defaults(model="a-model")
    made.add_argument("--max-tokens", type=int)
    return made


def test_a_program_has_engine_options_beside_its_own() -> None:
    words = ["--max-tokens", "3", "--max_num_seqs", "12", "--no-enable-prefix-caching", "--enforce-eager"]
    args = parser().parse_args([*words, "--structured-outputs-config.backend", "guidance"])
    assert (args.max_tokens, args.model, args.max_num_seqs, args.seed) == (3, "a-model", 12, 0)
    options = EngineArgs.from_cli_args(args)
    switches = {"enable_prefix_caching": False, "enforce_eager": True}
    given = {"structured_outputs_config": {"backend": "guidance"}, **switches}
    assert options.grouped() == read_keywords({"model": "a-model", "max_num_seqs": 12, **given})
    assert not hasattr(options, "max_tokens")


def test_an_option_that_is_not_given_has_its_default() -> None:
    assert EngineArgs.from_cli_args(parser().parse_args([])).grouped() == read_keywords({"model": "a-model"})


def test_a_flag_that_quire_does_not_have_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--enable-tower-connector-lora"])
    assert "--enable-tower-connector-lora is not supported" in capsys.readouterr().err


def test_help_tells_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    for topic, said in (("", "--max-tokens"), ("=max-num-seqs", "--max-num-seqs")):
        with pytest.raises(SystemExit):
            parser().parse_args([f"--help{topic}"])
        assert said in capsys.readouterr().out


def test_parsed_arguments_are_keywords_of_llm(checkpoint: Callable[..., Path]) -> None:
    words = ["--model", str(checkpoint("llama")), "--max-tokens", "3", "--num-gpu-blocks-override", "64"]
    options = vars(parser().parse_args(words))
    sampling = SamplingParams(max_tokens=options.pop("max_tokens"), ignore_eos=True)
    with LLM(**options) as llm:
        [output] = llm.generate("Hello", sampling, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
