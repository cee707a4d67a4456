"""Adapters among the weights of a checkpoint, one for each task, as Jina's embedders have them (arXiv:2409.10173)."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from quire.core.config.lora import AdapterOptions
from quire.core.errors import ModelLoadError

NO_ADAPTER = "none"
"""The name of the task that has no adapter."""
_DEFAULT_TASK = "text-matching"


class TaskAdapters(Struct, frozen=True, kw_only=True):
    """The tasks of a checkpoint, and the one that its weights are loaded for.

    Attributes:
        names: of the tasks with adapters, in the order of their weights.
        loaded: the task of requests that name none; its adapter is added to the weights when they are loaded.
        is_fixed: requests cannot choose another.
        rank, scale: of each adapter.
    """

    names: list[str]
    loaded: str
    is_fixed: bool
    rank: int
    scale: float

    @classmethod
    def of(cls, config: Mapping[str, Any], model: str) -> "TaskAdapters | None":
        """Those that config.json tells of; None: the checkpoint has none. `model` is its name, for errors.

        Raises:
            ModelLoadError: `jina_task` is none of the tasks.
        """
        names, asked = config.get("lora_adaptations") or [], config.get("jina_task")
        if asked is not None and asked not in (*names, NO_ADAPTER):
            raise ModelLoadError(
                f"{model}: jina_task {asked!r} is none of the checkpoint's tasks, which are "
                f"{', '.join(names) or 'none'}; choose with --hf-overrides '{{\"jina_task\": ...}}'."
            )
        if not names:
            return None
        rank = config.get("lora_rank", 1)
        return cls(
            names=names,
            loaded=asked or (_DEFAULT_TASK if _DEFAULT_TASK in names else NO_ADAPTER),
            is_fixed=asked is not None,
            rank=rank,
            scale=config.get("lora_alpha", 1) / rank,
        )

    @property
    def choices(self) -> list[str]:
        """The tasks that requests may name."""
        return [self.loaded] if self.is_fixed else [*self.names, NO_ADAPTER]

    def options(self) -> AdapterOptions | None:
        """The room for all tasks but the loaded one; None: there is no choice.

        A change from one task to another takes away the adapter of the first, so that its rank is twice that of one.
        """
        if self.is_fixed:
            return None
        count = len(self.choices) - 1
        rank = self.rank if self.loaded == NO_ADAPTER else 2 * self.rank
        return AdapterOptions(max_adapters=count, max_rank=rank, max_on_host=count)

    def describe(self) -> str:
        """A few words for people."""
        if self.is_fixed:
            return f"task {self.loaded}"
        return f"tasks by request {', '.join(self.choices)} (default {self.loaded})"
