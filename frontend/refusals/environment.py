"""Finds environment variables that somebody set for Quire or for vLLM, and that nothing reads."""

import os
import re
from difflib import get_close_matches

from quire.core import envs

_PREFIX = re.compile(r"(?:QUIRE|VLLM)_(?P<name>[A-Z0-9_]+)")
_OF_CONTAINERS = re.compile(
    r"(?:.*_)?SERVICE_(?:HOST|PORT)(?:_.*)?|(?:.*_)?PORT_\d+_(?:TCP|UDP)(?:_.*)?"  # Kubernetes, for a service
    r"|BUILD_\w+|DOCKER_BUILD_CONTEXT|IMAGE_TAG|TARGET_DEVICE|USAGE_SOURCE|ENABLE_CUDA_COMPATIBILITY"  # vLLM's images
)
_ASK_FOR_NOTHING = {
    *("NO_USAGE_STATS", "DO_NOT_TRACK", "USAGE_STATS_SERVER"),  # no statistics are sent
    *("NO_DEPRECATION_WARNING", "DISABLE_LOG_LOGO", "SKIP_MODEL_NAME_VALIDATION", "WORKER_MULTIPROC_METHOD"),
    *("USE_V1", "SKIP_P2P_CHECK"),
}
_INSTEAD = {
    "ATTENTION_BACKEND": "kernels are chosen by device",
    "ASSETS_CACHE": "use HF_HOME",
    "CHAT_TEMPLATE_FUEL": "chat templates have a limit of time",
    "CONFIG_ROOT": "use --config",
    "CPU_INT4_W4A8": "use QUIRE_CPU_ACTIVATION_BITS",
    "CPU_NUM_OF_RESERVED_CPU": "use OMP_NUM_THREADS",
    "CPU_OMP_THREADS_BIND": "use OMP_NUM_THREADS, and taskset or numactl",
    "DP_SIZE": "use --data-parallel-size",
    "ENABLE_RESPONSES_API_STORE": "responses are kept; --max-stored-responses bounds them",
    "EXECUTE_MODEL_TIMEOUT_SECONDS": "use QUIRE_ENGINE_ITERATION_TIMEOUT_S",
    "ENABLE_V1_MULTIPROCESSING": "the engine always runs in a process of its own",
    "HTTP_MAX_REQUEST_BODY_SIZE": "use --max-request-body-bytes",
    "LOG_BATCHSIZE_INTERVAL": "use QUIRE_LOG_STATS_INTERVAL",
    "PLUGINS": "use --logits-processors, --tool-parser-plugin or --reasoning-parser-plugin",
    "PORT": "use --port",
    "REQUEST_BODY_LOG_LEVEL": "use --enable-log-requests",
    "RPC_TIMEOUT": "use QUIRE_ENGINE_HEARTBEAT_TIMEOUT_S",
    "TORCH_PROFILER_DIR": "use --profiler-config",
    "USE_MODELSCOPE": "download the model and name its folder",
}


def unread() -> list[str]:
    """Variables that are set and that nothing reads, each with what to use instead where something is known.

    Leaves out variables that container managers and vLLM's images set by themselves, and variables that ask for
    nothing.
    """
    return [
        f"{variable} ({hint})" if (hint := _hint(variable, found["name"])) else variable
        for variable, value in sorted(os.environ.items())
        if (found := _PREFIX.fullmatch(variable))
        and found["name"] not in envs.NAMES | _ASK_FOR_NOTHING
        and not _OF_CONTAINERS.fullmatch(found["name"])
        and not (variable.endswith("_PORT") and "://" in value)  # Kubernetes again
    ]


def _hint(variable: str, name: str) -> str | None:
    if name in _INSTEAD:
        return _INSTEAD[name]
    near = get_close_matches(name, envs.NAMES, n=1, cutoff=0.85)
    return f"did you mean {variable.removesuffix(name)}{near[0]}?" if near else None
