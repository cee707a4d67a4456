"""Descriptions of the served model for Anthropic's clients, one for each of its names."""

from datetime import UTC, datetime

from quire.frontend.anthropic.answers import ModelInfo, ModelPage
from quire.frontend.async_llm import AsyncLLM


class ModelInfos:
    """Describes the model under each of its names."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._created_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def card(self, name: str) -> ModelInfo:
        """Description under one name. Raises NotFoundError."""
        if name not in self._engine.model.served_names:
            raise self._engine.model.not_found(name)
        limit = self._engine.max_model_len
        return ModelInfo(
            id=name, display_name=name, created_at=self._created_at, max_input_tokens=limit, max_tokens=limit
        )

    def list(self) -> ModelPage:
        """All names."""
        names = self._engine.model.served_names
        return ModelPage(data=[self.card(name) for name in names], first_id=names[0], last_id=names[-1])
