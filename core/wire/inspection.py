"""Answers of the inspection process, which examines a model without running it: one message on its standard output."""

from msgspec import Struct

from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.model_cost import ModelCost


class RankPlan(Struct, array_like=True):
    """Bytes that one rank needs, and bytes of its device. `state_bytes` are for one sequence."""

    weights_bytes: int
    workspace_bytes: int
    state_bytes: int
    page_bytes: int
    total_bytes: int
    free_bytes: int


class LoadPlan(Struct, array_like=True, tag="planned"):
    """The plan of loading a model. Pages and length are the least over all ranks; 0 if the model does not fit."""

    is_native: bool  # else the model is Transformers' own class with our layers
    num_parameters: int  # of the whole model, as the checkpoint stores them
    ranks: list[RankPlan]
    kv_groups: list[KVGroupSpec]
    num_pages: int
    max_model_len: int
    obstacle: str | None = None  # why the model does not fit, and what would make it
    quantization: str | None = None  # the checkpoint's own, or the one that was asked for


class Obstacles(Struct, array_like=True, tag="obstacles"):
    """The reasons why each rank does not fit into each of its candidate devices; None where it fits."""

    by_rank: list[list[str | None]]


class FilesSaved(Struct, array_like=True, tag="saved"):
    """The files of all ranks together."""

    num_files: int
    num_bytes: int


class InspectionRefused(Struct, array_like=True, tag="refused"):
    """The user's mistake, as a sentence that says what to change."""

    message: str


class LayerShape(Struct):
    """The sizes of one decoder layer.

    The defaults are Qwen3-0.6B's. The experts are Qwen3-30B-A3B's, but fewer; the latents are DeepSeek V2 Lite's; the
    window, the indexer and the rows for `rate` tokens each are DeepSeek V4's.
    """

    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    num_experts: int = 32
    top_k: int = 8
    expert_hidden_size: int = 2048
    expert_size: int = 768
    context: int = 1024  # tokens that a row attends to
    latent_rank: int = 512
    latent_rotary_dim: int = 64
    window: int = 128
    rate: int = 4
    index_heads: int = 64
    index_head_dim: int = 128
    index_top_k: int = 512


class OpsQuestion(Struct):
    """The kernels to time: each operation for each of its dtypes and each number of rows."""

    shape: LayerShape
    operations: list[str]
    dtypes: list[str]
    rows: list[int]
    seconds: float  # for each of them
    num_threads: int | None = None  # None: all that torch has


class OpTiming(Struct):
    """The best of several rounds of one operation, and its floor: the time for its bytes or its multiplications."""

    operation: str
    dtype: str
    rows: int
    num_bytes: int  # of weights, keys and values
    num_operations: int  # multiplications and additions
    best_s: float
    read_s: float  # to read the bytes
    multiply_s: float  # to multiply at the level's best


class OpsTimed(Struct, array_like=True, tag="timed"):
    """The times of the kernels of one level, and the processor's own rates at that level."""

    isa: str
    available: list[str]  # the processor's levels, the best first
    num_threads: int
    bytes_per_second: float
    operations_per_second: dict[str, float]  # by the dtype that is multiplied: float32, bfloat16, int8, int4
    timings: list[OpTiming]


InspectionAnswer = LoadPlan | Obstacles | ModelCost | FilesSaved | OpsTimed | InspectionRefused
