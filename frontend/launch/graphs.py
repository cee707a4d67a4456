"""Resolves the options of CUDA graphs and of attention's kernels."""

from typing import Literal, TypeVar

from quire.core.config.device import DeviceConfig
from quire.core.config.graphs import MAX_GRAPH_ROWS, CompilationConfig, GraphConfig
from quire.core.errors import ConfigError
from quire.core.logging import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

ATTENTION_BACKENDS = {"cuda": "TRITON_ATTN", "cpu": "CPU_ATTN"}
"""vLLM's names of what computes attention here, by device."""


def resolve_graphs(args: DeviceConfig, kind: Literal["cpu", "cuda"], max_num_batched_tokens: int) -> GraphConfig:
    """Returns the steps that are captured; tells what has no effect.

    Raises:
        ConfigError: an option is given twice, or two contradict each other.
    """
    config = args.compilation_config or CompilationConfig()
    if config.keys_without_effect:
        keys = ", ".join(config.keys_without_effect)
        logger.info("--compilation-config: no model is compiled, so these keys change nothing: %s", keys)
    sizes = _one_of("cudagraph_capture_sizes", args.cudagraph_capture_sizes, config.cudagraph_capture_sizes)
    most = _one_of("max_cudagraph_capture_size", args.max_cudagraph_capture_size, config.max_cudagraph_capture_size)
    mode = config.cudagraph_mode and config.cudagraph_mode.upper()
    if sizes is not None and not sizes:
        raise ConfigError("--cudagraph-capture-sizes needs a number; --max-cudagraph-capture-size 0 turns graphs off.")
    if sizes and most is not None and most != max(sizes):
        raise ConfigError(
            f"--max-cudagraph-capture-size {most} is not the greatest of --cudagraph-capture-sizes, {max(sizes)}; "
            "leave one of them out."
        )
    if kind == "cpu":
        given = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": most, "cudagraph_mode": mode}
        if names := [name for name, value in given.items() if value is not None]:
            logger.info("there are no CUDA graphs on a CPU, so %s changes nothing", ", ".join(names))
        return GraphConfig()
    if mode in ("FULL", "FULL_AND_PIECEWISE"):
        logger.info("cudagraph_mode %s: decode steps have CUDA graphs; steps with prompts run without", mode)
    is_enabled = not args.enforce_eager and most != 0 and mode != "NONE" and bool(args.optimization_level or mode)
    limit = min(max_num_batched_tokens, MAX_GRAPH_ROWS)
    kept = None if sizes is None else sorted({size for size in sizes if size <= limit})
    if sizes is not None and max(sizes) > limit:
        logger.warning("--cudagraph-capture-sizes: graphs are of at most %d requests; larger sizes are left out", limit)
    return GraphConfig(
        is_enabled=is_enabled and kept != [],
        sizes=kept,
        max_size=most,
        is_fine=args.performance_mode == "interactivity",
    )


def check_attention_backend(name: str | None, kind: Literal["cpu", "cuda"]) -> None:
    """Raises ConfigError, which names the one that there is, for the name of another."""
    here = ATTENTION_BACKENDS[kind]
    if name is not None and name.upper() not in ("AUTO", here):
        raise ConfigError(
            f"--attention-backend {name}: attention on this device has kernels of Quire's own, which {here} names; "
            "drop this flag."
        )


def _one_of(name: str, flag: T | None, key: T | None) -> T | None:
    """The option's value, from its flag or from the object."""
    if flag is not None and key is not None:
        raise ConfigError(f"--{name.replace('_', '-')} and --compilation-config.{name} say the same; leave one out.")
    return key if flag is None else flag
