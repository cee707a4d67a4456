"""A checkpoint's defaults for parsers."""

from pathlib import Path

import pytest

from quire.core.config.reasoning import ReasoningConfig
from quire.core.errors import ConfigError
from quire.frontend.chat.config import ChatConfig
from quire.frontend.checkpoint.serving_defaults import FILE_NAME, read_serving_defaults


def test_fills_in_what_nobody_set(tmp_path: Path) -> None:
    assert ChatConfig().with_defaults(read_serving_defaults(tmp_path)) == ChatConfig()
    (tmp_path / FILE_NAME).write_text('{"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}')
    checkpoint = read_serving_defaults(tmp_path)
    filled = ChatConfig().with_defaults(checkpoint)
    assert filled.tool_call_parser == "hermes"
    assert checkpoint.complete(ReasoningConfig()).reasoning_parser == "qwen3"
    assert filled.enable_auto_tool_choice
    identity = ReasoningConfig(reasoning_parser="identity")
    assert checkpoint.complete(identity) == identity
    own = ChatConfig(tool_call_parser="mistral")
    assert own.with_defaults(checkpoint) == own, "what was set wins, and nothing is turned on beside it"


@pytest.mark.parametrize("text", ["{", '{"tool_call_parser": 5}', '{"tool_parser_plugin": "evil.py"}'])
def test_a_file_that_says_more_than_it_may_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ConfigError, match=r"serving\.json"):
        read_serving_defaults(tmp_path)
