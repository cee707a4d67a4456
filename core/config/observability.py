"""Options: what is logged, counted and recorded."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


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
    enable_log_requests: Annotated[bool, Meta(description="Log one line for each request.")] = False
    profiler_config: Annotated[
        ProfilerConfig | None,
        Meta(
            description='Record timelines of engine and worker: {"profiler": "torch", "torch_profiler_dir": "DIR"}; '
            "POST /start_profile and /stop_profile.",
            extra={"parse": "json"},
        ),
    ] = None
