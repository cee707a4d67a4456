"""Descriptions of the served model, one for each of its names."""

import time
import uuid

from msgspec import UNSET

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.openai.answers import ModelCard, ModelList, ModelPermission


class ModelCards:
    """Describes the model under each of its names."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        created = self._created = int(time.time())
        self._permissions = {
            name: ModelPermission(id=f"modelperm-{uuid.uuid4().hex}", created=created) for name in engine.model.names
        }

    def card(self, name: str) -> ModelCard:
        """Description under one name. Raises NotFoundError."""
        self._engine.model.check_name(name)
        pooling = self._engine.config.pooling
        return ModelCard(
            id=name,
            created=self._created,
            root=self._engine.model.folder,
            max_model_len=self._engine.max_model_len,
            permission=[self._permissions[name]],
            task=UNSET if pooling is None else pooling.tasks[0],
            dimensions=UNSET if pooling is None or not pooling.embeds else pooling.embedding_size,
        )

    def list(self) -> ModelList:
        """All names."""
        return ModelList(data=[self.card(name) for name in self._engine.model.names])
