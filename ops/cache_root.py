"""The user's cache folder."""

import os
from pathlib import Path


def cache_root() -> Path:
    """`QUIRE_CACHE_ROOT`, else `$XDG_CACHE_HOME/quire` or `~/.cache/quire`."""
    root = os.environ.get("QUIRE_CACHE_ROOT", os.environ.get("VLLM_CACHE_ROOT"))
    if root:
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quire"
