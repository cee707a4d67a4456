"""Descriptions of the served model, one for each of its names."""

import time

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.openai.answers import ModelCard, ModelList


class ModelCards:
    """Describes the model under each of its names."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._created = int(time.time())

    def card(self, name: str) -> ModelCard:
        """Description under one name. Raises NotFoundError."""
        self._engine.model.check_name(name)
        return ModelCard(
            id=name,
            created=self._created,
            root=self._engine.model.folder,
            max_model_len=self._engine.max_model_len,
        )

    def list(self) -> ModelList:
        """All names."""
        return ModelList(data=[self.card(name) for name in self._engine.model.names])
