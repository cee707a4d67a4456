"""The answer of GET /server_info: resolved options, environment variables, and the machine. No secrets."""

import os
import platform
from importlib import metadata
from typing import Any, Literal

import msgspec
import psutil
from msgspec import Struct

import quire
from quire.core import envs
from quire.core.config.resolved import EngineConfig
from quire.frontend.http.server_config import ServerConfig

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "xgrammar", "litestar", "msgspec", "pyzmq")


class ServerInfo(Struct, kw_only=True):
    """Answer of GET /server_info, under vLLM's names, and with `server_config`."""

    vllm_config: dict[str, Any] | str  # the engine's options
    server_config: dict[str, Any]  # the HTTP server's, with "***" for each API key
    vllm_env: dict[str, str | float | bool | None]  # variables that Quire reads, without keys
    system_env: dict[str, str | int | None]


def describe(config: EngineConfig, server: ServerConfig, config_format: Literal["text", "json"]) -> ServerInfo:
    """The description of a server with this engine; `config_format` is that of `vllm_config`."""
    options = msgspec.to_builtins(server)
    return ServerInfo(
        vllm_config=str(config) if config_format == "text" else msgspec.to_builtins(config),
        server_config=options
        | {
            "api_key": ["***"] * len(server.accepted_api_keys) or None,
            "admin_api_key": ["***"] * len(server.admin_api_key or []) or None,
        },
        vllm_env=envs.in_force(),
        system_env=_system(),
    )


def _system() -> dict[str, str | int | None]:
    return {
        "quire_version": quire.__version__,
        "python_version": platform.python_version(),
        "python_platform": platform.platform(),
        "libc_version": " ".join(platform.libc_ver()),
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        **{f"{name}_version": _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
