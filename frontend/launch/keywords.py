"""Engine options as Python keywords, for programs that start an engine."""

import os
from typing import Any

from quire.core.config.engine_args import EngineArgs
from quire.core.errors import ConfigError
from quire.frontend.launch.refusals import Refusals


def read_keywords(options: dict[str, Any]) -> EngineArgs:
    """Engine options out of keywords: `model="...", max_num_seqs=64`.

    Raises:
        ConfigError: a value is wrong, or there is no such option; the error suggests similar ones, as for a flag.
    """
    flags = ["--" + name.replace("_", "-") for name in EngineArgs().flat()]
    for name in options:
        flag = "--" + name.replace("_", "-")
        if flag not in flags:
            raise ConfigError(f"Option {name!r}: {Refusals(flags, ['engine']).explain(flag)}")
    if isinstance(options.get("model"), os.PathLike):
        options = {**options, "model": os.fspath(options["model"])}
    return EngineArgs.from_flat(**options)
