"""Options: what is logged, counted and recorded."""

import os
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from quire.core.config.types import NotNegative, Positive
from quire.core.errors import ConfigError
from quire.core.logging import LoggingConfig, LogLevel


class ProfilerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a profile between its start and its stop, with the folder for its files.

    `timeline` records when engine and worker do what; it costs little, and has no further options. `torch` is torch's
    own profiler in each worker. A recording begins after `delay_iterations` steps and ends after `max_iterations`, if
    that is above 0. With `wait_iterations` or `warmup_iterations`, it skips that number of steps and records
    `active_iterations`. The frontend is not recorded, because it has no torch.
    """

    profiler: Literal["torch", "timeline"] | None = None
    torch_profiler_dir: str = ""
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True
    torch_profiler_dump_cuda_time_total: bool = True  # a table of operations by time, beside each profile
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    delay_iterations: NotNegative = 0
    max_iterations: NotNegative = 0
    warmup_iterations: NotNegative = 0
    active_iterations: Positive = 5
    wait_iterations: NotNegative = 0

    def __post_init__(self) -> None:
        if self.profiler is not None and not self.torch_profiler_dir:
            raise ValueError("torch_profiler_dir must name a folder")
        plain = ProfilerConfig(torch_profiler_dir=self.torch_profiler_dir) if self.profiler == "timeline" else None
        if plain is not None and msgspec.structs.replace(self, profiler=None) != plain:
            raise ValueError("the profiler timeline takes torch_profiler_dir alone")


class ObservabilityConfig(Struct, frozen=True, kw_only=True):
    """Options for logs and metrics."""

    disable_log_stats: Annotated[bool, Meta(description="Neither collect nor log engine statistics.")] = False
    aggregate_engine_logging: Annotated[
        bool, Meta(description="Log one line of statistics for all engines together, and not one for each.")
    ] = False
    show_hidden_metrics_for_version: Annotated[
        str | None,
        Meta(
            description="Show also the metrics that vLLM has hidden since this version, where it is the one before: "
            "0.31. vLLM 0.32 hides none."
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
    log_format: Annotated[
        Literal["text", "json"] | None,
        Meta(description="Form of the log's lines; short for --logging-config.formatter."),
    ] = None
    log_level: Annotated[
        LogLevel | None, Meta(description="Least level that is logged; short for --logging-config.log_level.")
    ] = None
    log_config_file: Annotated[
        str | None, Meta(description="Short for --logging-config.pylogging_config_file; vLLM deprecates it.")
    ] = None
    flight_recorder: Annotated[
        str | None,
        Meta(
            description="Folder in which each engine records requests, plans and results, in files of 64 MiB at most; "
            "quire doctor and quire replay read it. Unset, the last megabytes are kept in memory, and written to the "
            "cache folder after a crash. The records have prompts as token ids; off records nothing."
        ),
    ] = None
    profiler_config: Annotated[
        ProfilerConfig | None,
        Meta(
            description='Profile between POST /start_profile and /stop_profile: {"profiler": "torch", '
            '"torch_profiler_dir": "DIR"} with torch in each worker, {"profiler": "timeline", ...} when engine and '
            "worker do what, which costs less.",
            extra={"parse": "json"},
        ),
    ] = None

    @property
    def logging(self) -> LoggingConfig:
        """The four options of logging as one, with an absolute path."""
        config = self.logging_config or LoggingConfig()
        file = self.log_config_file or config.pylogging_config_file
        return msgspec.structs.replace(
            config,
            log_level=self.log_level or config.log_level,
            formatter=self.log_format or config.formatter,
            pylogging_config_file=file and os.path.abspath(file),
        )

    def __post_init__(self) -> None:
        version = self.show_hidden_metrics_for_version
        if version is not None and not re.fullmatch(r"\d+\.\d+(\.\w+)*", version):
            raise ConfigError(
                f"--show-hidden-metrics-for-version must be a version of vLLM such as 0.31, got {version!r}."
            )
