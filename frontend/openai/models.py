"""Descriptions of the served model, one for each of its names."""

import time
import uuid

from msgspec import UNSET

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.checkpoint.adapters import ServedAdapter
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
        adapters = self._engine.model.adapters
        adapter = None if adapters is None else adapters.find(name)
        if adapter is None and name not in self._permissions:
            raise self._engine.model.not_found(name)
        pooling = self._engine.config.pooling
        return ModelCard(
            id=name,
            created=self._created if adapter is None else adapter.created,
            root=self._engine.model.folder if adapter is None else adapter.root,
            parent=None if adapter is None else adapter.parent,
            max_model_len=self._engine.max_model_len,
            permission=[self._permissions[name] if adapter is None else _permission(adapter)],
            task=UNSET if pooling is None else pooling.tasks[0],
            dimensions=UNSET if pooling is None or not pooling.embeds else pooling.embedding_size,
        )

    def list(self) -> ModelList:
        """All names."""
        return ModelList(data=[self.card(name) for name in self._engine.model.served_names])


def _permission(adapter: ServedAdapter) -> ModelPermission:
    """The permission for an adapter, always the same one."""
    return ModelPermission(id=f"modelperm-{adapter.adapter.digest.hex()[:32]}", created=adapter.created)
