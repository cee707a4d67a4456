"""Options: what is logged, counted and recorded."""

import os
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from quire.core.errors import ConfigError
from quire.core.logging import LoggingConfig, LogLevel


class ProfilerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recorder of timelines: which, and the folder that its files go to."""

    profiler: Literal["torch"] | None = None
    torch_profiler_dir: str = ""

    def __post_init__(self) -> None:
        if self.profiler is not None and not self.torch_profiler_dir:
            raise ValueError("torch_profiler_dir must name a folder")


class ObservabilityConfig(Struct, frozen=True, kw_only=True):
    """What is logged and counted."""

    disable_log_stats: Annotated[bool, Meta(description="Neither collect nor log engine statistics.")] = False
    show_hidden_metrics_for_version: Annotated[
        str | None,
        Meta(
            description="Show also the metrics that vLLM has hidden since this version, such as 0.11: former names of "
            "renamed ones, all hidden in 0.12. Later versions show none."
        ),
    ] = None
    enable_log_requests: Annotated[
        bool,
        Meta(
            description="Log each request's parameters when it comes, and a summary at its end; at log level DEBUG "
            "its prompt as well."
        ),
    ] = False
    logging_config: Annotated[
        LoggingConfig | None,
        Meta(
            description="Logging of all processes, with the keys log_level, formatter (text or json), "
            "configure_logging (false leaves logging alone) and pylogging_config_file (JSON in Python's dictConfig "
            "schema, which decides alone).",
            extra={"parse": "json"},
        ),
    ] = None
    log_level: Annotated[
        LogLevel | None, Meta(description="Least level that is logged; short for --logging-config.log_level.")
    ] = None
    log_config_file: Annotated[
        str | None, Meta(description="Short for --logging-config.pylogging_config_file; vLLM deprecates it.")
    ] = None
    profiler_config: Annotated[
        ProfilerConfig | None,
        Meta(
            description='Record timelines of engine and worker: {"profiler": "torch", "torch_profiler_dir": "DIR"}; '
            "POST /start_profile and /stop_profile.",
            extra={"parse": "json"},
        ),
    ] = None

    @property
    def logging(self) -> LoggingConfig:
        """The three options of logging as one, with an absolute path."""
        config = self.logging_config or LoggingConfig()
        file = self.log_config_file or config.pylogging_config_file
        return msgspec.structs.replace(
            config,
            log_level=self.log_level or config.log_level,
            pylogging_config_file=file and os.path.abspath(file),
        )

    def __post_init__(self) -> None:
        version = self.show_hidden_metrics_for_version
        if version is not None and not re.fullmatch(r"\d+\.\d+(\.\w+)*", version):
            raise ConfigError(
                f"--show-hidden-metrics-for-version must be a version of vLLM such as 0.11, got {version!r}."
            )

    @property
    def hidden_metrics_version(self) -> tuple[int, ...] | None:
        """Major and minor number of `show_hidden_metrics_for_version`."""
        text = self.show_hidden_metrics_for_version
        return None if text is None else tuple(int(part) for part in text.split(".")[:2])
