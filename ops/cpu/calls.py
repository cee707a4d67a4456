"""The arguments of each C++ kernel: the structs of `kernels/kernels.h`, whose comments give the shapes.

The arguments are packed into bytes, and the kernel gets their address, because ctypes converts one argument faster than
twelve.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.ops.activations import Activation

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`Dtype` in `kernels/vector.h`."""

CACHE_DTYPES = DTYPES | {torch.int8: 3, torch.float8_e4m3fn: 4, torch.float8_e5m2: 5, torch.uint8: 6}
"""`CacheDtype` in `kernels/rows.h`."""

ACTIVATIONS: dict[Activation, int] = {
    "silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "gelu": 3, "relu": 4, "relu2": 5, "quick_gelu": 6,
    "clamped_silu": 7,
}  # fmt: skip
"""`Activation` in `kernels/vector.h`."""
NO_ACTIVATION = -1
"""The same."""

CHUNKS = {"own": 0, "previous": 1, "earlier": 2}
"""`Chunks` in `kernels/kernels.h`: those of `AttentionForm.chunks`."""

_FORM = "out_features in_features group codec scale_dtype has_offsets is_gated"
"""`WeightForm` in `kernels/kernels.h`."""


def _form_of(layer: str) -> str:
    """The fields of one of several forms, each name behind that of its layer."""
    return " ".join(layer + name for name in _FORM.split())


def form_fields(layer: str, form: Sequence[int]) -> dict[str, int]:
    """The values of one of several forms by the names of the call's fields."""
    return dict(zip(_form_of(layer).split(), form, strict=True))


@dataclass(frozen=True)
class Call:
    """A kernel's name, and the fields of its struct in order. Each field is eight bytes; a pointer of 0 is null."""

    kernel: str
    pointers: str
    integers: str
    floats: str = ""
    part: str = ""
    """The folder of `kernels/parts/` that has the kernel; empty: the main library."""

    @property
    def fields(self) -> list[str]:
        """The names of all fields, in order."""
        return f"{self.pointers} {self.integers} {self.floats}".split()

    @property
    def layout(self) -> struct.Struct:
        """Packs the values of all fields, in order."""
        num_whole = len(self.pointers.split()) + len(self.integers.split())
        return struct.Struct(f"{num_whole}q{len(self.floats.split())}d")


ATTENTION = Call(
    "quire_attention",
    "q out kv_cache query_lens seq_lens block_tables prefix_spans sinks slopes distance_bias lse",
    "q_token_stride q_head_stride num_requests table_stride page_stride block_size num_kv_heads group head_dim "
    "row_size window chunk span_window chunks reach q_dtype kv_dtype num_threads",
    "scale softcap",
)
ATTENTION_OF_CODES = replace(ATTENTION, kernel="quire_attention_of_codes", part="codes")
"""The same over a cache of codes."""
LINEAR = Call(
    "quire_linear", "x panels bias out", "rows x_stride in_features out_features is_gated activation num_threads"
)
PACK_PANELS = Call("quire_pack_panels", "weight panels", "out_features in_features stride is_gated num_threads")
TAKE_PANEL_ROWS = Call(
    "quire_take_panel_rows", "panels index out", "count out_features in_features num_threads", "scale"
)
QUANTIZED_LINEAR = Call(
    "quire_quantized_linear",
    "x panels table order bias out",
    f"rows x_stride {_FORM} activation dtype x_bits num_threads",
)
PACK_QUANTIZED = Call("quire_pack_quantized", "codes scales offsets panels", f"{_FORM} flip num_threads")
TAKE_QUANTIZED_ROWS = Call(
    "quire_take_quantized_rows", "panels table order index out", f"count {_FORM} dtype num_threads", "scale"
)
ROUTE = Call(
    "quire_route",
    "x weight bias correction shares ids weights",
    "rows x_stride hidden num_experts top_k score renormalize num_groups top_groups group_best dtype num_threads",
    "floor scale distance",
)
EXPERTS = Call(
    "quire_experts",
    "x gate_up up down gate_up_table up_table down_table gate_up_order up_order down_order gate_up_bias down_bias ids "
    "weights gate_up_a gate_up_b down_a down_b adapters ranks out",
    f"rows x_stride hidden size num_experts top_k activation rank {_form_of('gate_up_')} {_form_of('up_')} "
    f"{_form_of('down_')} dtype gate_up_x_bits up_x_bits down_x_bits weighs_inputs num_threads",
)
TAKE_ROWS = Call("quire_take_rows", "x index out", "rows count row_bytes dtype", "scale")
COPY_COLUMNS = Call("quire_copy_columns", "x out", "num_tokens row_bytes x_stride out_stride num_threads")
ROTATION = Call("quire_rotation", "positions frequencies cos sin", "num_tokens half dtype num_threads", "scale")
RMS_NORM = Call(
    "quire_rms_norm",
    "x weight out",
    "num_tokens heads size token_stride head_stride weight_stride dtype weight_dtype num_threads",
    "eps",
)
ADD_RMS_NORM = Call(
    "quire_add_rms_norm", "x residual weight out", "num_tokens size dtype weight_dtype num_threads", "eps"
)
LAYER_NORM = Call(
    "quire_layer_norm",
    "x weight bias out",
    "num_tokens heads size token_stride head_stride weight_stride dtype weight_dtype num_threads",
    "eps",
)
ADD_LAYER_NORM = Call(
    "quire_add_layer_norm", "x residual weight bias out", "num_tokens size dtype weight_dtype num_threads", "eps"
)
ADD_LOW_RANK = Call(
    "quire_add_low_rank",
    "x a b rows ends ranks factors shifts out gated",
    "num_tokens in_features out_features num_parts rank x_stride out_stride activation dtype num_threads",
    part="low_rank",
)
ADD = Call("quire_add", "x residual", "size dtype num_threads")
SCALE = Call("quire_scale", "x", "size dtype num_threads", "factor softcap")
ACTIVATE = Call("quire_activate", "x", "size activation dtype num_threads")
MERGE_ATTENTION = Call(
    "quire_merge_attention",
    "outs sums out",
    "num_parts num_tokens num_heads head_dim out_stride sum_stride dtype num_threads",
)
ROTARY = Call(
    "quire_rotary",
    "x cos sin out",
    "num_tokens heads head_dim rotary_dim token_stride head_stride dtype num_threads",
)
ACTIVATE_AND_MUL = Call("quire_activate_and_mul", "x out", "num_tokens size token_stride activation dtype num_threads")
WRITE_CACHE = Call(
    "quire_write_cache",
    "k v cache slots scales",
    "num_tokens heads head_dim k_token_stride k_head_stride v_token_stride v_head_stride page_stride block_size "
    "dtype cache_dtype num_threads",
    "largest",
)
ROTATE_AND_STORE = Call(
    "quire_rotate_and_store",
    "heads weight cos sin out cache slots scales",
    "num_tokens num_heads num_kv_heads head_dim rotary_dim token_stride page_stride block_size is_interleaved dtype "
    "weight_dtype cache_dtype num_threads",
    "eps largest",
)
CAUSAL_CONV1D = Call(
    "quire_causal_conv1d",
    "x weight bias state out slots starts is_new",
    "num_rows channels width x_stride is_silu dtype num_threads",
    part="recurrent",
)
SELECTIVE_SCAN = Call(
    "quire_selective_scan",
    "x dt b c gate dt_bias a d state out slots starts is_new",
    "num_rows channels size x_stride dt_stride b_stride c_stride gate_stride dtype num_threads",
    part="recurrent",
)
OUTER_PRODUCTS = Call(
    "quire_outer_products",
    "q k v dt beta dt_bias a d state out slots starts is_new",
    "num_rows heads key_heads key_dim value_dim decays q_stride k_stride v_stride dt_stride beta_stride dtype "
    "num_threads",
    "dt_low dt_high least_log_decay beta_scale",
    part="recurrent",
)
MLSTM = Call(
    "quire_mlstm",
    "q k v add keep state out slots starts is_new",
    "num_rows heads key_dim value_dim q_stride k_stride v_stride add_stride keep_stride dtype num_threads",
    "eps",
    part="recurrent",
)
WKV = Call(
    "quire_wkv",
    "k v first log_decay state out slots starts is_new",
    "num_rows channels k_stride v_stride dtype num_threads",
    part="recurrent",
)
RG_LRU = Call(
    "quire_rg_lru",
    "x input_gate decay_gate input_bias decay_bias log_decay state out slots starts is_new",
    "num_rows channels x_stride input_stride decay_stride dtype num_threads",
    part="recurrent",
)
GATED_RMS_NORM = Call(
    "quire_gated_rms_norm",
    "x gate weight out",
    "num_tokens groups size x_stride gate_stride weight_stride is_gate_first activation dtype num_threads",
    "eps",
)
MULTIPLY_GATE = Call(
    "quire_multiply_gate", "x gate out", "num_tokens size num_gates x_stride gate_stride activation dtype num_threads"
)
MATCH_MAGNITUDE = Call(
    "quire_match_magnitude", "x like out", "num_tokens size x_stride like_stride dtype num_threads", "floor"
)
PREDICT_STREAMS = Call(
    "quire_predict_streams",
    "streams coefficients out",
    "num_streams num_tokens size coefficient_stride dtype num_threads",
)
CORRECT_STREAMS = Call(
    "quire_correct_streams",
    "streams activated coefficients out",
    "num_streams num_tokens size activated_stride coefficient_stride active dtype num_threads",
)
ADD_TO_OTHERS = Call("quire_add_to_others", "streams x", "num_streams num_tokens size x_stride dtype num_threads")
KEEP_OUTLIERS = Call(
    "quire_keep_outliers",
    "gates whole",
    "num_tokens size whole_size gate_stride whole_stride dtype num_threads",
    "deviations",
)
HEAD_LINEAR = Call(
    "quire_head_linear",
    "x weight out",
    "num_tokens heads in_features out_features token_stride head_stride dtype num_threads",
)
ROTATE_AND_STORE_LATENT = Call(
    "quire_rotate_and_store_latent",
    "q latent weight cos sin out cache slots",
    "num_tokens heads rank rotary_dim turned_dim q_token_stride q_head_stride latent_stride page_stride row_stride "
    "block_size is_interleaved dtype weight_dtype cache_dtype num_threads",
    "eps largest",
)
LATENT_ATTENTION = Call(
    "quire_latent_attention",
    "q q_rotated out cache query_lens seq_lens block_tables lse",
    "q_token_stride q_head_stride rotated_token_stride rotated_head_stride num_requests table_stride page_stride "
    "row_stride block_size entry_size heads rank rotary_dim dtype cache_dtype num_threads",
    "scale",
    part="latent",
)
ATTEND_ROWS = Call(
    "quire_attend_rows",
    "q out parts sinks",
    "num_parts num_tokens heads size q_token_stride q_head_stride dtype cache_dtype num_threads",
    "scale",
    part="latent",
)
STORE_ROWS = Call(
    "quire_store_rows",
    "x cache slots",
    "num_tokens size x_stride page_stride row_stride block_size dtype cache_dtype num_threads",
    "largest",
    part="latent",
)
SELECT_TOKENS = Call(
    "quire_select_tokens",
    "q weights cache out counts query_lens seq_lens block_tables",
    "q_token_stride q_head_stride weights_stride num_requests table_stride page_stride row_stride block_size "
    "entry_size heads size top_k gives_positions dtype cache_dtype num_threads",
    "scale",
    part="latent",
)
DRAW = Call("quire_draw", "logits starts positions token_ids usable", "num_rows size stride dtype num_threads")
LIKELIEST = Call("quire_likeliest", "logits token_ids usable", "num_rows size stride dtype num_threads")
APPLY_BITMASK = Call("quire_apply_bitmask", "logits rows bitmask", "count num_rows size stride dtype num_threads")
READ_MEMORY = Call("quire_read_memory", "memory result", "num_bytes num_threads")
MULTIPLY = Call("quire_multiply", "result operations", "num_pieces dtype num_threads", "start")
