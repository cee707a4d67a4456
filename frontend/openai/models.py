"""The names that the served model goes by."""

import time

from quire.core.errors import NotFoundError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.openai.answers import ModelCard, ModelList


class ServedModels:
    """Knows which names may be used, and describes the model under each."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._names = engine.model.names
        self._created = int(time.time())

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self._names[0]

    def check(self, name: str | None) -> None:
        """Raises NotFoundError for a name that is not served; None stands for the only model there is."""
        if name is not None and name not in self._names:
            raise NotFoundError(
                f"The model {name!r} is not served here; use {' or '.join(map(repr, self._names))}.", param="model"
            )

    def card(self, name: str) -> ModelCard:
        """Description under one name. Raises NotFoundError."""
        self.check(name)
        return ModelCard(
            id=name,
            created=self._created,
            root=self._engine.model.folder,
            max_model_len=self._engine.max_model_len,
        )

    def list(self) -> ModelList:
        """All names."""
        return ModelList(data=[self.card(name) for name in self._names])
