"""Environment variables: `QUIRE_X`, and vLLM's `VLLM_X` where ours is absent."""

import os

from quire.core.errors import ConfigError


def read(name: str, default: str | None = None) -> str | None:
    """The value of `QUIRE_<name>`, else of `VLLM_<name>`, else `default`."""
    return os.environ.get(f"QUIRE_{name}", os.environ.get(f"VLLM_{name}", default))


def read_float(name: str, default: float) -> float:
    """As `read`, as a number; seconds where the name says `_S` or `TIMEOUT`."""
    value = read(name)
    if value is None:
        return default
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"QUIRE_{name} must be a number, got {value!r}.") from None
