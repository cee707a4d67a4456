"""The tasks that the served model can do, and the errors of routes whose task it cannot."""

from typing import Literal

from quire.core.config.pooling import PoolingSpec
from quire.core.errors import ParameterError
from quire.core.wire.pooling import PoolingTask
from quire.frontend.async_llm import AsyncLLM

Comparison = Literal["vectors", "token vectors", "pairs", "lists"]
"""The way to a score of two texts: each has a vector, each has vectors of its tokens, or the model reads both, or one
with a list of others.
"""

_NEEDS: dict[PoolingTask, str] = {
    "embed": "makes no vectors of texts",
    "token_embed": "makes no vectors of tokens",
    "classify": "does not classify texts",
    "token_classify": "does not classify tokens",
    "embed&token_classify": "does not weight tokens beside a vector",
    "plugin": "has no plugin",
}
_OPTIONS: dict[PoolingTask, str] = {
    "embed": "--runner pooling --convert embed",
    "token_embed": "--runner pooling --convert embed",
    "classify": "--runner pooling --convert classify",
    "token_classify": "--runner pooling --convert classify",
    "embed&token_classify": "a checkpoint with sparse_linear.pt",
    "plugin": "--io-processor-plugin",
}


class WrongTaskError(ParameterError):
    """The served model cannot do what the route is for."""


class Tasks:
    """The tasks of one engine's model."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._name = engine.model.name
        self._spec = engine.config.pooling

    @property
    def has_any(self) -> bool:
        """False for a model that generates text."""
        return self._spec is not None

    @property
    def spec(self) -> PoolingSpec:
        """How the model makes vectors. Raises WrongTaskError for a model that generates text."""
        if self._spec is None:
            raise self._cannot("embed")
        return self._spec

    def choose(self, *tasks: PoolingTask) -> PoolingTask:
        """The first of the model's tasks that is one of these.

        Raises:
            WrongTaskError: there is none.
        """
        for task in [] if self._spec is None else self._spec.tasks:
            if task in tasks:
                return task
        raise self._cannot(tasks[0])

    def asked(self, task: str | None) -> PoolingTask:
        """The task that a request names, or else the model's first.

        Raises:
            WrongTaskError: the model generates text.
            ParameterError: there is no such task, or the model cannot do it.
        """
        own = self.spec.tasks
        if task is None:
            return own[0]
        for each in own:
            if each == task:
                return each
        raise ParameterError(
            f"task {task!r} is none of this model's, which are {', '.join(own)}; leave it out for {own[0]}.",
            param="task",
        )

    def comparison(self) -> Comparison:
        """The way to the model's scores.

        Raises:
            WrongTaskError: it compares no texts.
        """
        task = self.choose("embed", "classify", "token_embed") if self._spec is None else self._spec.tasks[0]
        match task:
            case "embed":
                return "vectors"
            case "token_embed":
                return "token vectors" if self.spec.ranking is None else "lists"
            case "classify" if len(self.spec.classes) == 1:
                return "pairs"
        raise WrongTaskError(
            f"The model {self._name!r} makes no scores: {self._deeds()}; scores need vectors, or exactly one class.",
            param="model",
        )

    def check_reads_pairs(self) -> None:
        """Raises WrongTaskError unless the model scores a pair by reading both texts at once."""
        if self.comparison() != "pairs":
            raise WrongTaskError(
                f"The model {self._name!r} is no reranker: {self._deeds()}. Rerank with /v1/rerank, which compares "
                "vectors, or serve a model with one class.",
                param="model",
            )

    def _cannot(self, task: PoolingTask) -> WrongTaskError:
        return WrongTaskError(
            f"The model {self._name!r} {_NEEDS[task]}: {self._deeds()}. Ask another route, or start the server with "
            f"{_OPTIONS[task]}.",
            param="model",
        )

    def _deeds(self) -> str:
        if self._spec is None:
            return "its task is generate"
        own, classes = self._spec.tasks, len(self._spec.classes)
        names = f"its {'tasks are' if len(own) > 1 else 'task is'} {', '.join(own)}"
        return names + (f", of {classes} classes" if classes > 1 else "")
