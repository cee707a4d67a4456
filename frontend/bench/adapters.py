"""The adapters that the requests of a benchmark have."""

import argparse
import random
from collections.abc import Callable, Sequence

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError
from quire.frontend.checkpoint.adapters import LoRARequest

Adapters = Callable[[int], list[LoRARequest | None] | None]
"""The adapters of the first so many requests; None: they have none."""


def add_adapter_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds vLLM's flags, of which the first takes several folders."""
    group.add_argument("--lora-path", nargs="+", help="Folders of adapters for the requests; needs --enable-lora.")
    group.add_argument(
        "--lora-assignment",
        choices=("random", "round-robin"),
        default="random",
        help="Which request has which adapter of several (default: random, by --seed).",
    )


def chosen_adapters(paths: Sequence[str] | None, assignment: str, engine: EngineArgs, seed: int) -> Adapters:
    """The adapters that the flags ask for. Raises ConfigError if the engine would take none."""
    if not paths:
        return lambda count: None
    if not engine.lora.enable_lora:
        raise ConfigError("--lora-path needs --enable-lora as well.")
    known = [LoRARequest(str(number), number, path) for number, path in enumerate(paths, 1)]

    def adapters(count: int) -> list[LoRARequest | None]:
        if assignment == "round-robin":
            return [known[index % len(known)] for index in range(count)]
        draw = random.Random(seed)
        return [draw.choice(known) for _ in range(count)]

    return adapters
