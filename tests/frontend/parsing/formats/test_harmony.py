"""Answers of gpt-oss that vLLM's own tests of Harmony read, and headers that the model garbles."""

from typing import Any

import pytest

from quire.frontend.parsing.answers.parsers import OutputParsers
from tests.frontend.parsing.test_tool_parsers import Parsed, chunkings, parse

PARSERS = OutputParsers("openai", "openai_gptoss")
ARGUMENTS = '{"location": "SF"}'
CALL = [("get_weather", ARGUMENTS)]
TO_FUNCTION = "<|start|>assistant to=functions.get_weather<|channel|>commentary"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        pytest.param("<|channel|>final<|message|>I'm in", "", "I'm in", [], id="interrupted_first_message"),
        pytest.param("<|channel|>analysis<|message|>I'm in", "I'm in", "", [], id="interrupted_reasoning"),
        pytest.param(
            f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}I'm in", "Hm.", "I'm in", [], id="interrupted_content"
        ),
        pytest.param("<|channel|>final<|message|>It is 4.<|end|>", "", "It is 4.", [], id="complete_content"),
        pytest.param("<|channel|>commentary<|message|>Tools.<|end|>", "", "Tools.", [], id="complete_commentary"),
        pytest.param("<|channel|>analysis<|message|>Hard.<|end|>", "Hard.", "", [], id="complete_reasoning"),
        pytest.param("<|channel|>commentary<|message|>I'll sea", "", "I'll sea", [], id="interrupted_preamble"),
        pytest.param(
            f"<|channel|>commentary<|message|>A look.<|end|>{FINAL}It is 42.<|end|>", "", "A look.\nIt is 42.", [],
            id="preamble_then_final",
        ),
        pytest.param(
            f"<|channel|>commentary<|message|>A look.<|end|>{TO_FUNCTION}<|message|>{ARGUMENTS}<|end|>",
            "", "A look.", CALL, id="commentary_with_recipient_excluded",
        ),
        pytest.param(
            f"<|channel|>analysis<|message|>Hm.<|end|>{TO_FUNCTION}<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            "Hm.", "", CALL, id="tool_call_after_reasoning",
        ),
        *(
            pytest.param(
                f"<|channel|>{channel} to={recipient}<|message|>{ARGUMENTS}<|call|>", "", "", CALL,
                id=f"function_recipient-{channel}-{recipient}",
            )
            for channel in ("commentary", "comment", "analysis", "final")
            for recipient in ("functions.get_weather", "get_weather")
        ),
        *(
            pytest.param(
                f"<|channel|>{channel} to={recipient}<|message|>import this<|call|>", "import this", "", [],
                id=f"builtin_recipient-{channel}-{recipient}",
            )
            for channel in ("commentary", "analysis")
            for recipient in ("python", "browser.search", "container.exec")
        ),
        pytest.param(
            f"{TO_FUNCTION}<|message|>{ARGUMENTS}<|call|>{TO_FUNCTION}<|message|>{ARGUMENTS}<|call|>",
            "", "", CALL * 2, id="multiple_function_calls",
        ),
        pytest.param(f"{TO_FUNCTION}<|message|><|call|>", "", "", [("get_weather", "{}")], id="empty_arguments"),
        # vLLM drops the text of a channel that Harmony does not have. It may be the answer.
        pytest.param("<|channel|>comment<|message|>A look.<|end|>", "", "A look.", [], id="unknown_channel"),
    ],
)  # fmt: skip
def test_answers_of_every_kind_are_read(text: str, reasoning: str, content: str, calls: list[Any]) -> None:
    expected = Parsed(content, reasoning, calls)
    assert parse(PARSERS, [text]) == expected
    for pieces in chunkings(text, 20):
        assert parse(PARSERS, pieces) == expected
