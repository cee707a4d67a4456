"""Logs prompts, where the option for it is set."""

from quire.core.logging import get_logger

logger = get_logger(__name__)


class PromptLog:
    """Logs prompts at the log's level for details.

    Args:
        enabled: False logs nothing.
        max_length: characters or token ids that a line shows at most; None shows all.
    """

    def __init__(self, *, enabled: bool, max_length: int | None) -> None:
        self._enabled = enabled
        self._max_length = max_length

    def add(self, request_id: str, prompt: str | list[int]) -> None:
        """Logs one prompt."""
        if self._enabled:
            shown = prompt if self._max_length is None else prompt[: self._max_length]
            logger.debug("request %s: prompt %r", request_id, shown)
