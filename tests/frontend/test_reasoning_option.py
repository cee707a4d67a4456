"""`reasoning_parser` as an engine option: formats begin after the reasoning, in the Python API and in a server."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.core.config.reasoning import ReasoningConfig
from quire.core.errors import ConfigError
from quire.frontend.chat.config import ChatConfig
from quire.frontend.checkpoint.serving_defaults import ServingDefaults
from quire.frontend.cli import serve
from quire.frontend.flags.parser import CommandParser
from quire.frontend.parsing.answers.constraints import ConstraintsAfterReasoning
from quire.frontend.parsing.answers.parsers import OutputParsers

THINKING, PLAIN = "Hi<think>\n", "Hi<think>so</think>"
DIGITS = SamplingParams(
    max_tokens=12, temperature=1, seed=1, structured_outputs=StructuredOutputsParams(regex="[0-9]{12}")
)


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(checkpoint("llama"), reasoning_parser="deepseek_r1", device="cpu", num_gpu_blocks_override=64) as llm:
        yield llm


def test_reasoning_is_free_and_the_rest_is_held_to_the_format(llm: LLM) -> None:
    free, held = (output.outputs[0].text for output in llm.generate([THINKING, PLAIN], DIGITS))
    assert not free.isdigit()
    assert held.isdigit()


def test_the_end_of_a_prompt_of_token_ids_is_read(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.encode(text) for text in (THINKING, PLAIN)]
    free, held = (output.outputs[0].text for output in llm.generate(prompts, DIGITS))
    assert not free.isdigit()
    assert held.isdigit()


def test_a_format_may_hold_from_the_first_token(checkpoint: Callable[..., Path]) -> None:
    options = {"reasoning_parser": "deepseek_r1", "structured_outputs_config": {"enable_in_reasoning": True}}
    with LLM(checkpoint("llama"), device="cpu", num_gpu_blocks_override=64, **options) as llm:
        [output] = llm.generate(THINKING, DIGITS)
    assert output.outputs[0].text.isdigit()


def test_the_format_begins_where_the_reasoning_ends() -> None:
    after = ConstraintsAfterReasoning(OutputParsers(reasoning_parser="deepseek_r1"), lambda token_ids: THINKING)
    for prompt in (THINKING, None):
        applied = after.apply(DIGITS, prompt, [1, 2]).structured_outputs
        assert applied is not None
        thought, _, form = applied.structural_tag["format"]["elements"]
        assert (thought["begin"], thought["end"]) == ("", "</think>")
        assert form == {"type": "regex", "pattern": "[0-9]{12}"}
    assert after.apply(SamplingParams(), THINKING, []) == SamplingParams()


def test_a_wrong_name_is_told_before_the_engine_starts(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="there is no parser 'nobodys'"):
        LLM(checkpoint("llama"), reasoning_parser="nobodys")
    with pytest.raises(ConfigError, match="--reasoning-parser"):
        LLM(checkpoint("llama"), structured_outputs_config={"reasoning_parser": "qwen3"})


@pytest.mark.parametrize("name", ["none", "NONE"])
def test_none_is_no_parser_whatever_the_checkpoint_says(name: str) -> None:
    """vLLM takes `none` in any case, too, as it takes no name."""
    parser = CommandParser("quire serve", "Serve.")
    serve.add_arguments(parser)
    asked = parser.parse_args(["--reasoning-parser", name]).engine_args.reasoning
    checkpoint = ServingDefaults(reasoning_parser="qwen3")
    for reasoning in (asked, checkpoint.complete(asked)):
        parsers = ChatConfig(tool_call_parser="hermes").make_output_parsers(reasoning)
        assert not parsers.reads_reasoning
        assert parsers.reads_calls
    assert checkpoint.complete(ReasoningConfig()).parser_name == "qwen3"


def test_without_a_parser_reasoning_stays_in_the_text(checkpoint: Callable[..., Path]) -> None:
    with LLM(checkpoint("llama"), reasoning_parser="none", device="cpu", num_gpu_blocks_override=64) as llm:
        [output] = llm.generate(THINKING, DIGITS)
    assert output.outputs[0].text.isdigit()
