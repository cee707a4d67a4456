"""Environment variables: `QUIRE_X`, and vLLM's `VLLM_X` where ours is absent. docs/environment.md explains each."""

import math
import os
from pathlib import Path
from typing import NamedTuple

from quire.core.errors import ConfigError


class Number(NamedTuple):
    """A variable that holds a number above 0, or 0 where that is allowed."""

    default: float
    may_be_zero: bool = False


NUMBERS = {
    "CPU_KVCACHE_SPACE": Number(0.0, may_be_zero=True),  # 0: the memory plan decides
    "ENGINE_HEARTBEAT_TIMEOUT_S": Number(60.0),
    "ENGINE_ITERATION_TIMEOUT_S": Number(300.0),
    "HTTP_TIMEOUT_KEEP_ALIVE": Number(5.0, may_be_zero=True),
    "HTTP_TIMEOUT_REQUEST": Number(120.0),  # 8 MiB, the default limit of a body, at 70 kB/s
    "IMAGE_FETCH_TIMEOUT": Number(5.0),
    "LOG_STATS_INTERVAL": Number(10.0),
    "LORA_LOAD_TIMEOUT_S": Number(120.0),
    "LOST_WEIGHTS_TIMEOUT_S": Number(60.0, may_be_zero=True),  # 0: three starts, however soon they fail
    "AUDIO_FETCH_TIMEOUT": Number(10.0),
    "VIDEO_FETCH_TIMEOUT": Number(30.0),
    "MAX_AUDIO_CLIP_FILESIZE_MB": Number(25.0),
    "MAX_AUDIO_DECODE_DURATION_S": Number(7200.0),
    "MAX_IMAGE_PIXELS": Number(178_956_970.0, may_be_zero=True),  # 0: no limit; twice what Pillow warns of
    "RINGBUFFER_WARNING_INTERVAL": Number(60.0),
}
FLAGS = {
    "ALLOW_INSECURE_SERIALIZATION": False,
    "ALLOW_LONG_MAX_MODEL_LEN": False,
    "ALLOW_RUNTIME_LORA_UPDATING": False,
    "BATCH_INVARIANT": False,
    "CONFIGURE_LOGGING": True,
    "KEEP_ALIVE_ON_ENGINE_DEATH": False,
    "SERVER_DEV_MODE": False,
}
TEXTS = (
    *("API_KEY", "CACHE_ROOT", "CPU_ACTIVATION_BITS", "CPU_ISA", "DISABLED_KERNELS", "HOST_IP", "JOIN_TOKEN"),
    *("LOGGING_CONFIG_PATH", "LOGGING_LEVEL", "LOGGING_PREFIX", "LORA_RESOLVER_CACHE_DIR"),
    *("LORA_RESOLVER_HF_REPO_LIST", "PP_LAYER_PARTITION"),
    *("RPC_BASE_PATH", "TRITON_CANARY", "TRITON_LAUNCHER", "WHEEL_ISA"),
)
NAMES = frozenset((*NUMBERS, *FLAGS, *TEXTS))
"""Every variable that is read, without its prefix."""
ACTIVATION_BITS = ("", "8", "16")
"""What `CPU_ACTIVATION_BITS` may be."""
KERNELS = ("cpu_native",)
"""Names that `DISABLED_KERNELS` may list, separated by commas."""

_FLAG_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def read(name: str, default: str | None = None) -> str | None:
    """The value of `QUIRE_<name>`, else of `VLLM_<name>`, else `default`."""
    return os.environ.get(f"QUIRE_{name}", os.environ.get(f"VLLM_{name}", default))


def read_float(name: str) -> float:
    """The number `name`, one of `NUMBERS`, in seconds or in the unit that docs/environment.md gives.

    Raises:
        ConfigError: the value is no finite number, or out of its range.
    """
    number = NUMBERS[name]
    text = read(name)
    if text is None:
        return number.default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (value == 0 and not number.may_be_zero):
        wanted = "0 or more" if number.may_be_zero else "above 0"
        raise ConfigError(f"{_source(name)} must be a number {wanted}, got {text!r}.")
    return value


def read_flag(name: str) -> bool:
    """The flag `name`, one of `FLAGS`: 1 or 0, or a word for it.

    Raises:
        ConfigError: the value is none of these.
    """
    text = read(name)
    if not text:
        return FLAGS[name]
    if text.lower() not in _FLAG_WORDS:
        raise ConfigError(f"{_source(name)} must be 1 or 0, got {text!r}.")
    return _FLAG_WORDS[text.lower()]


def cache_folder() -> Path:
    """The folder for files that are kept between starts: `QUIRE_CACHE_ROOT`, else quire/ in the user's cache."""
    root = read("CACHE_ROOT")
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "quire"
    return Path(root or default).expanduser()


def check() -> None:
    """Raises ConfigError if a value is wrong. Start-up calls this, so that errors show before a model is loaded."""
    for name in NUMBERS:
        read_float(name)
    for name in FLAGS:
        read_flag(name)
    if (bits := read("CPU_ACTIVATION_BITS", "")) not in ACTIVATION_BITS:
        raise ConfigError(f"{_source('CPU_ACTIVATION_BITS')} must be 8 or 16, got {bits!r}.")
    for name in filter(None, map(str.strip, (read("DISABLED_KERNELS") or "").split(","))):
        if name not in KERNELS and not name.endswith("Kernel"):  # vLLM's are FooLinearKernel; none of them runs here
            raise ConfigError(f"{_source('DISABLED_KERNELS')} must be empty or {', '.join(KERNELS)}, got {name!r}.")


def in_force() -> dict[str, str | float | bool | None]:
    """The values of all variables, without secrets; None for texts that are not set.

    Raises:
        ConfigError: a value is wrong.
    """
    texts = {name: read(name) for name in TEXTS if "KEY" not in name and "TOKEN" not in name}
    values = {name: read_float(name) for name in NUMBERS} | {name: read_flag(name) for name in FLAGS} | texts
    return {f"QUIRE_{name}": values[name] for name in sorted(values)}


def _source(name: str) -> str:
    """The variable that `read` takes `name` from."""
    return f"QUIRE_{name}" if f"QUIRE_{name}" in os.environ else f"VLLM_{name}"
