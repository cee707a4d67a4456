"""Options: the accelerator."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from quire.core.config.graphs import CompilationConfig
from quire.core.config.types import NotNegative, Positive

PerformanceMode = Literal["balanced", "interactivity", "throughput"]


class DeviceConfig(Struct, frozen=True, kw_only=True):
    """The accelerator."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs; auto prefers an accelerator.")
    ] = "auto"
    enforce_eager: Annotated[
        bool,
        Meta(
            description="Launch the kernels of a decode step one by one: no CUDA graphs, and no recorded lists of "
            "kernels on a CPU. Slower, for a search for faults."
        ),
    ] = False
    cudagraph_capture_sizes: Annotated[
        list[Positive] | None,
        Meta(
            description="Numbers of requests for which a CUDA graph is captured, when a decode step first needs it. A "
            "step has the graph of the next greater number; one of more requests than all has none."
        ),
    ] = None
    max_cudagraph_capture_size: Annotated[
        NotNegative | None,
        Meta(description="Decode steps of more requests run without CUDA graphs; 0: all do."),
    ] = None
    compilation_config: Annotated[
        CompilationConfig | None,
        Meta(
            description="cudagraph_mode (NONE, FULL_DECODE_ONLY), cudagraph_capture_sizes, max_cudagraph_capture_size. "
            "vLLM's other keys change nothing, because no model is compiled.",
            extra={"parse": "json", "aliases": ["-cc"]},
        ),
    ] = None
    optimization_level: Annotated[
        Literal[0, 1, 2, 3],
        Meta(
            description="0 captures no CUDA graphs, unless --compilation-config.cudagraph_mode asks for them. The "
            "others are alike.",
            extra={"aliases": ["-O"]},
        ),
    ] = 2
    performance_mode: Annotated[
        PerformanceMode,
        Meta(
            description="interactivity captures CUDA graphs for each number of up to 32 requests. throughput doubles "
            "the defaults of --max-num-seqs and --max-num-batched-tokens."
        ),
    ] = "balanced"
    attention_backend: Annotated[
        str | None,
        Meta(
            description="There is one for each device: TRITON_ATTN on a GPU, CPU_ATTN on a CPU; auto, or unset, is it."
        ),
    ] = None
