"""Options: CUDA graphs, and vLLM's options of compilation."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.core.config.types import NotNegative, Positive

GraphMode = Literal["NONE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE"]
"""The steps for which CUDA graphs are captured; all but NONE mean decode steps here."""

MAX_GRAPH_ROWS = 512
"""Steps of more requests run without graphs."""

_GRAPH_KEYS = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")


class CompilationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's object. Its keys about CUDA graphs are honoured; the others are taken, and change nothing.

    Quire compiles no model, and captures no graphs of steps with prompts.
    """

    cudagraph_mode: str | None = None  # in any case; see `GraphMode`
    cudagraph_capture_sizes: list[Positive] | None = None
    max_cudagraph_capture_size: NotNegative | None = None
    mode: Any = None
    backend: Any = None
    cache_dir: Any = None
    compile_cache_save_format: Any = None
    compile_mm_encoder: Any = None
    compile_ranges_endpoints: Any = None
    compile_sizes: Any = None
    cudagraph_copy_inputs: Any = None
    cudagraph_decoder_replay: Any = None
    cudagraph_mm_encoder: Any = None
    cudagraph_num_of_warmups: Any = None
    cudagraph_specialize_lora: Any = None
    custom_ops: Any = None
    debug_dump_path: Any = None
    decoder_replay_cudagraph_capture_sizes: Any = None
    decoder_replay_trim_threshold: Any = None
    dynamic_shapes_config: Any = None
    encoder_cudagraph_max_frames_per_batch: Any = None
    encoder_cudagraph_max_vision_items_per_batch: Any = None
    encoder_cudagraph_token_budgets: Any = None
    fast_moe_cold_start: Any = None
    inductor_compile_config: Any = None
    inductor_passes: Any = None
    ir_enable_torch_wrap: Any = None
    pass_config: Any = None
    splitting_ops: Any = None
    use_inductor_graph_partition: Any = None

    def __post_init__(self) -> None:
        known = GraphMode.__args__  # type: ignore[attr-defined]
        if self.cudagraph_mode is not None and self.cudagraph_mode.upper() not in known:
            instead = (
                " FULL_DECODE_ONLY captures decode steps whole." if self.cudagraph_mode.upper() == "PIECEWISE" else ""
            )
            raise ValueError(f"cudagraph_mode must be one of {', '.join(known)}, got {self.cudagraph_mode!r}.{instead}")

    @property
    def keys_without_effect(self) -> list[str]:
        """The keys that are given and change nothing."""
        given = msgspec.structs.asdict(self)
        return [name for name, value in given.items() if value not in (None, {}, [], "") and name not in _GRAPH_KEYS]


class GraphConfig(Struct, frozen=True, kw_only=True):
    """The decode steps that are captured as CUDA graphs.

    Attributes:
        is_enabled: False: none.
        sizes: ascending numbers of rows; a step has the graph of the next greater one, or none. None: the backend's.
        max_size: steps of more rows have no graph; None: the backend's limit.
        is_fine: small steps have graphs of exactly their number of rows.
    """

    is_enabled: bool = True
    sizes: list[int] | None = None
    max_size: int | None = None
    is_fine: bool = False
