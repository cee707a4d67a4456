"""Prompts in the log."""

import logging

import pytest

from quire.frontend.requests.prompt_log import PromptLog


def test_logged_prompts_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="quire.frontend.requests.prompt_log"):
        PromptLog(enabled=True, max_length=3).add("r", "abcdef")
        PromptLog(enabled=True, max_length=2).add("r", [1, 2, 3])
        PromptLog(enabled=True, max_length=None).add("r", "abcdef")
        PromptLog(enabled=False, max_length=None).add("r", "abcdef")
    assert [record.args for record in caplog.records] == [("r", "abc"), ("r", [1, 2]), ("r", "abcdef")]
