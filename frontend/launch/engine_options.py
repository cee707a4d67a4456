"""Engine options as one object, for programs that build them before the engine: vLLM's `EngineArgs`."""

import os
from types import SimpleNamespace
from typing import Any

from quire.core.config.engine_args import EngineArgs
from quire.frontend.launch.keywords import read_keywords


class EngineOptions(SimpleNamespace):
    """Engine options as attributes, by the flags' names. Options that are not given have their defaults.

        args = EngineArgs(model="Qwen/Qwen3-0.6B", max_num_seqs=64)
        args.seed = 7
        LLM.from_engine_args(args), LLMEngine.from_engine_args(args), AsyncLLM.from_engine_args(args), LLM(**vars(args))

    Raises:
        ConfigError: there is no such option, or it has no such value.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        options["model"] = model
        super().__init__(**{**read_keywords(options).flat(), **options})

    def grouped(self) -> EngineArgs:
        """The options by group, read again. Raises ConfigError if a changed one is wrong."""
        return read_keywords(vars(self))
