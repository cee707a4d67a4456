// The kernels that Python calls, and their arguments. The .cpp files that define the kernels say what they compute.
//
// `quire.ops.cpu.calls` has the same fields in the same order, eight bytes each: pointers, then integers, then floats.
// Strides count elements; the last dimension of every tensor is dense. A dtype is one of `Dtype`, an activation one of
// `Activation` (vector.h). A kernel returns 0 if it ran.
#pragma once

#include <cstdint>

namespace quire {

struct BFloat16;

// The chunks that a query sees: its own, the one before, or all earlier than that one.
enum Chunks { OWN, PREVIOUS, EARLIER };

struct AttentionCall {
    const void* q;         // [num_tokens, num_kv_heads * group, head_dim]
    void* out;             // like q, dense
    const void* kv_cache;  // [num_blocks, 2, num_kv_heads, block_size, row_size], blocks page_stride apart
    const int64_t* query_lens;    // [num_rows]
    const int64_t* seq_lens;      // [num_rows]
    const int32_t* block_tables;  // [num_rows, table_stride]
    const int64_t* prefix_spans;  // [num_rows, 2], or null; not with chunks
    const float *sinks, *slopes;  // [num_kv_heads * group], or null
    const float* distance_bias;   // [num_kv_heads * group, 2 * reach + 1], or null
    float* lse;                   // [num_tokens, num_kv_heads * group], or null
    int64_t q_token_stride, q_head_stride, num_requests, table_stride, page_stride, block_size;
    int64_t num_kv_heads, group, head_dim, row_size;
    int64_t window, chunk;  // 0: none
    int64_t span_window;    // of tokens in a prefix span; 0: they see all of it
    int64_t chunks;         // one of `Chunks`
    int64_t reach;          // greatest distance that has a separate bias
    int64_t q_dtype, kv_dtype, num_threads;
    double scale, softcap;  // softcap 0: none
};

struct LinearCall {
    const BFloat16 *x, *panels, *bias;  // x's rows are x_stride apart; bias may be null
    BFloat16* out;                      // [rows, out_features, or half as many if gated], dense
    int64_t rows, x_stride, in_features, out_features, is_gated, activation, num_threads;
};

struct TakePanelRowsCall {
    const uint32_t* panels;  // from quire_pack_panels, not gated
    const int64_t* index;    // [count]
    BFloat16* out;           // [count, in_features], dense
    int64_t count, out_features, in_features, num_threads;
    double scale;            // of the rows
};

struct PackPanelsCall {
    const BFloat16* weight;  // [out_features, in_features], rows `stride` apart, [gates | ups] if gated
    uint32_t* panels;        // 64-byte aligned
    int64_t out_features, in_features, stride, is_gated, num_threads;
};

// How a weight [out_features, in_features] is kept in the panels of quantized_panels.h.
struct WeightForm {
    int64_t out_features, in_features;
    int64_t group;        // inputs that share a scale
    int64_t codec;        // one of `CodecNumber` (codecs.h)
    int64_t scale_dtype;  // of scales and offsets
    int64_t has_offsets;
    int64_t is_gated;     // [gates | ups]
};

struct PackQuantizedCall {
    const void* codes;               // [out_features, in_features], or half as many bytes for codes of four bits; dense
    const void *scales, *offsets;    // [out_features, in_features / group], dense, or null
    uint8_t* panels;                 // as many bytes as quire_quantized_size says
    WeightForm form;
    int64_t flip, num_threads;       // codes of four bits are packed as code ^ flip
};

struct QuantizedLinearCall {
    const void* x;         // [rows, in_features], rows x_stride apart
    const uint8_t* panels; // from quire_pack_quantized
    const float* table;    // what the codec needs, or null
    const int64_t* order;  // [in_features]: see pack_tile (quantized_panels.h); or null
    const void* bias;      // [out_features] of x's type, or null
    void* out;             // [rows, out_features, or half as many if gated], dense
    int64_t rows, x_stride;
    WeightForm form;
    int64_t activation;  // of gates, or of all outputs, or NO_ACTIVATION
    int64_t dtype;
    int64_t x_bits;  // see with_weight (quantized_panels.h)
    int64_t num_threads;
};

struct TakeQuantizedRowsCall {
    const uint8_t* panels; // from quire_pack_quantized, not gated
    const float* table;    // what the codec needs, or null
    const int64_t* order;  // [in_features]: a row's number i is that at order[i] of `out`; or null
    const int64_t* index;  // [count]
    void* out;             // [count, in_features], dense
    int64_t count;
    WeightForm form;
    int64_t dtype, num_threads;  // dtype: of out
    double scale;                // of the rows, once they are rounded to `dtype`
};

struct RouteCall {
    const void* x;                          // [rows, hidden], rows x_stride apart
    const float *weight, *bias, *correction;  // [num_experts, hidden], dense; [num_experts], or null
    const float* shares;                      // [num_experts], or null
    int64_t* ids;                           // [rows, top_k]
    float* weights;                         // [rows, top_k]
    int64_t rows, x_stride, hidden, num_experts, top_k;
    int64_t score;  // 0: softmax, 1: sigmoid, 2: sparse mixer
    int64_t renormalize, num_groups, top_groups, group_best, dtype, num_threads;
    double floor, scale, distance;
};

struct ExpertsCall {
    const void* x;                              // [rows, hidden], rows x_stride apart
    // Of all experts, from quire_pack_quantized. If gates and ups are packed apart, gate_up are the gates; else up is null.
    const uint8_t *gate_up, *up, *down;
    const float *gate_up_table, *up_table, *down_table;  // what their codecs need, or null
    const int64_t *gate_up_order, *up_order;    // [num_experts, hidden]: see pack_tile (quantized_panels.h); or null
    const int64_t* down_order;                  // [num_experts, size], or null
    const float *gate_up_bias, *down_bias;      // [num_experts, outputs], or null
    const int64_t* ids;                         // [rows, top_k], dense
    const float* weights;                       // [rows, top_k], dense
    // Low-rank weights of adapters, of the type of x, dense: of adapter n's expert e, number n * num_experts + e has
    // [num_parts * rank, inputs] and [rank, outputs], where gates and ups are two parts. Null: there are none.
    const void *gate_up_a, *gate_up_b, *down_a, *down_b;
    const int64_t *adapters, *ranks;            // [rows], or -1; [num_adapters * num_experts], at most `rank`
    void* out;                                  // [rows, hidden], dense
    int64_t rows, x_stride, hidden, size, num_experts, top_k, activation, rank;
    WeightForm gate_up_form;  // not gated: `size` outputs an expert
    WeightForm up_form;
    WeightForm down_form;
    int64_t dtype;                                   // of x and out
    int64_t gate_up_x_bits, up_x_bits, down_x_bits;  // see with_weight (quantized_panels.h)
    int64_t weighs_inputs;  // weights multiply what the first layer reads, not the sums
    int64_t num_threads;
};

struct TakeRowsCall {
    const void* x;         // [rows, row_bytes], dense
    const int64_t* index;  // [count]
    void* out;             // [count, row_bytes], dense
    int64_t rows, count, row_bytes;
    int64_t dtype;  // of x and out; unused if scale is 1
    double scale;
};

struct CopyColumnsCall {
    const void* x;  // [num_tokens, row_bytes]; strides are bytes
    void* out;      // the first column that is written
    int64_t num_tokens, row_bytes, x_stride, out_stride, num_threads;
};

struct RotationCall {
    const int64_t* positions;  // [num_tokens]
    const float* frequencies;  // [half]
    void *cos, *sin;           // [num_tokens, 2 * half], dense
    int64_t num_tokens, half, dtype, num_threads;
    double scale;
};

struct RmsNormCall {
    const void *x, *weight;  // [num_tokens, heads, size], [heads, size] with a stride of 0 or size
    void* out;               // like x, dense
    int64_t num_tokens, heads, size, token_stride, head_stride, weight_stride;
    int64_t dtype, weight_dtype;  // weight_dtype is dtype or float32
    int64_t num_threads;
    double eps;
};

struct AddRmsNormCall {
    const void* x;  // [num_tokens, size], dense, as are residual and out
    void* residual;
    const void* weight;  // [size]
    void* out;
    int64_t num_tokens, size, dtype, weight_dtype, num_threads;  // as in RmsNormCall
    double eps;
};

struct LayerNormCall {
    const void *x, *weight, *bias;  // as in RmsNormCall, but weight and bias [size] may be null
    void* out;                      // like x, dense
    int64_t num_tokens, heads, size, token_stride, head_stride, weight_stride;
    int64_t dtype, weight_dtype;  // weight_dtype, of the bias too, is dtype or float32
    int64_t num_threads;
    double eps;
};

struct AddLayerNormCall {
    const void* x;  // [num_tokens, size], dense, as are residual and out
    void* residual;
    const void *weight, *bias;  // [size], or null
    void* out;
    int64_t num_tokens, size, dtype, weight_dtype, num_threads;  // as in LayerNormCall
    double eps;
};

struct AddCall {
    const void* x;   // [size]
    void* residual;  // [size]
    int64_t size, dtype, num_threads;
};

struct ScaleCall {
    void* x;  // [size]
    int64_t size, dtype, num_threads;
    double factor, softcap;  // softcap 0: none
};

struct ActivateCall {
    void* x;  // [size]
    int64_t size, activation, dtype, num_threads;
};

// Addresses of num_parts tensors: [num_tokens, num_heads, head_dim], and of floats [num_tokens, num_heads].
struct MergeAttentionCall {
    const int64_t *outs, *sums;
    void* out;  // [num_tokens, num_heads, head_dim], dense
    int64_t num_parts, num_tokens, num_heads, head_dim;
    int64_t out_stride, sum_stride;  // of a part's tokens; a token's elements are dense
    int64_t dtype, num_threads;
};

struct RotaryCall {
    const void *x, *cos, *sin;  // [num_tokens, heads, head_dim]; [num_tokens, rotary_dim], dense
    void* out;                  // like x, dense
    int64_t num_tokens, heads, head_dim, rotary_dim, token_stride, head_stride, dtype, num_threads;
};

struct ActivateAndMulCall {
    const void* x;  // [num_tokens, 2 * size] = [gate | up]
    void* out;      // [num_tokens, size], dense
    int64_t num_tokens, size, token_stride, activation, dtype, num_threads;
};

struct WriteCacheCall {
    const void *k, *v;     // [num_tokens, heads, head_dim]
    void* cache;           // [pages, 2, heads, block_size, head_dim], pages page_stride apart
    const int64_t* slots;  // [num_tokens]
    const float* scales;   // [2, heads] of keys and values, or null: each row has its own scale
    int64_t num_tokens, heads, head_dim, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    int64_t page_stride, block_size;
    int64_t dtype, cache_dtype, num_threads;
    double largest;  // the cache holds this instead of infinity
};

struct RotateAndStoreCall {
    const void* heads;      // [num_tokens, num_heads + 2 * num_kv_heads, head_dim] = [queries | keys | values]
    const void* weight;     // [num_heads + num_kv_heads, head_dim], or null for no norm
    const void *cos, *sin;  // [num_tokens, rotary_dim], dense
    void *out, *cache;      // [num_tokens, num_heads, head_dim], dense; as in WriteCacheCall
    const int64_t* slots;   // [num_tokens]
    const float* scales;    // as in WriteCacheCall
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, token_stride, page_stride;
    int64_t block_size, is_interleaved, dtype, weight_dtype, cache_dtype, num_threads;
    double eps, largest;
};

// The calls of recurrent operations have the step's rows: slots [num_rows], starts [num_rows + 1] among its tokens, and
// is_new [num_rows].

struct CausalConv1dCall {
    const void *x, *weight, *bias;  // [num_tokens, channels]; [width, channels] and [channels], dense; bias may be null
    void *state, *out;              // [num_slots, width - 1, channels]; [num_tokens, channels], dense
    const int64_t *slots, *starts;
    const bool* is_new;
    int64_t num_rows, channels, width, x_stride, is_silu, dtype, num_threads;
};

struct SelectiveScanCall {
    const void *x, *dt, *b, *c, *gate;  // [num_tokens, channels]; b and c: [num_tokens, size]
    const float *dt_bias, *a, *d;       // [channels]; a: [size, channels], dense
    float* state;                       // [num_slots, size, channels], dense
    void* out;                          // [num_tokens, channels], dense
    const int64_t *slots, *starts;
    const bool* is_new;
    int64_t num_rows, channels, size, x_stride, dt_stride, b_stride, c_stride, gate_stride, dtype, num_threads;
};

struct WkvCall {
    const void *k, *v;               // [num_tokens, channels]
    const float *first, *log_decay;  // [channels]
    float* state;                    // [num_slots, 3, channels], dense
    void* out;                       // [num_tokens, channels], dense
    const int64_t *slots, *starts;
    const bool* is_new;
    int64_t num_rows, channels, k_stride, v_stride, dtype, num_threads;
};

struct MlstmCall {
    const void *q, *k, *v;     // [num_tokens, heads, key_dim]; v: [num_tokens, heads, value_dim]; dense heads
    const void *add, *keep;    // [num_tokens, heads]
    float* state;              // [num_slots, heads, key_dim + 1, value_dim + 1], dense
    void* out;                 // [num_tokens, heads, value_dim], dense
    const int64_t *slots, *starts;
    const bool* is_new;
    int64_t num_rows, heads, key_dim, value_dim, q_stride, k_stride, v_stride, add_stride, keep_stride;
    int64_t dtype, num_threads;
    double eps;
};

struct OuterProductsCall {
    const void *q, *k, *v;        // [num_tokens, key_heads, key_dim]; v: [num_tokens, heads, value_dim]; dense heads
    const void *dt, *beta;        // [num_tokens, heads, decays], dense heads; [num_tokens, heads]; both may be null
    const float *dt_bias, *a, *d;  // [heads, decays], [heads], [heads]; d may be null
    float* state;                 // [num_slots, heads, key_dim, value_dim], dense
    void* out;                    // [num_tokens, heads, value_dim], dense
    const int64_t *slots, *starts;
    const bool* is_new;
    int64_t num_rows, heads, key_heads, key_dim, value_dim;
    int64_t decays;  // of a head: 1, or one for each of key_dim channels
    int64_t q_stride, k_stride, v_stride, dt_stride, beta_stride, dtype, num_threads;
    double dt_low, dt_high, least_log_decay, beta_scale;  // least_log_decay 0: none
};

struct RgLruCall {
    const void *x, *input_gate, *decay_gate;              // [num_tokens, channels]
    const float *input_bias, *decay_bias, *log_decay;     // [channels]
    float* state;                                         // [num_slots, channels], dense
    void* out;                                            // like x, dense
    const int64_t *slots, *starts;                        // [num_rows]; [num_rows + 1]
    const bool* is_new;                                   // [num_rows]
    int64_t num_rows, channels, x_stride, input_stride, decay_stride, dtype, num_threads;
};

struct GatedRmsNormCall {
    const void *x, *gate;  // [num_tokens, groups, size], dense but for the tokens
    const void* weight;    // [groups, size] with a stride of 0 or size
    void* out;             // like x, dense
    int64_t num_tokens, groups, size, x_stride, gate_stride, weight_stride, is_gate_first;
    int64_t activation;  // as in MultiplyGateCall
    int64_t dtype, num_threads;
    double eps;
};

struct MultiplyGateCall {
    const void *x;     // [num_tokens, size]
    const void *gate;  // [num_tokens, num_gates], each for size / num_gates neighbours
    void* out;         // like x, dense
    int64_t num_tokens, size, num_gates, x_stride, gate_stride;
    int64_t activation;  // of the gate; 0: silu, 1: sigmoid, 2: none, 3: softplus
    int64_t dtype, num_threads;
};

struct MatchMagnitudeCall {
    const void *x, *like;  // [num_tokens, size]
    void* out;             // like x, dense
    int64_t num_tokens, size, x_stride, like_stride, dtype, num_threads;
    double floor;  // of the mean square of x
};

struct PredictStreamsCall {
    const void *streams, *coefficients;  // [num_streams, num_tokens, size], dense; [num_tokens, num_streams^2]
    void* out;                           // like streams
    int64_t num_streams, num_tokens, size, coefficient_stride, dtype, num_threads;
};

struct CorrectStreamsCall {
    const void *streams, *activated, *coefficients;  // as above; [num_tokens, size]; [num_tokens, num_streams]
    void* out;                                       // like streams
    int64_t num_streams, num_tokens, size, activated_stride, coefficient_stride, active, dtype, num_threads;
};

struct AddToOthersCall {
    void* streams;  // [num_streams, num_tokens, size], dense
    const void* x;  // [num_tokens, size]
    int64_t num_streams, num_tokens, size, x_stride, dtype, num_threads;
};

struct KeepOutliersCall {
    void* gates;        // [num_tokens, size]
    const void* whole;  // [num_tokens, whole_size]
    int64_t num_tokens, size, whole_size, gate_stride, whole_stride, dtype, num_threads;
    double deviations;
};

struct AddLowRankCall {
    const void *x, *a, *b;  // [num_tokens, in_features]; [num_adapters, num_parts * rank, in_features] and
                            // [num_adapters, rank, out_features], both dense
    const int64_t *rows, *ends;  // [num_tokens], each token's adapter or -1; [num_parts], the end of each part's outputs
    const int64_t* ranks;        // [num_adapters], of each adapter, at most `rank`; null: all have that
    const float *factors, *shifts;  // [num_adapters, out_features], dense; both are null or neither is
    void* out;                      // [num_tokens, out_features]
    void* gated;  // [num_tokens, out_features / 2], dense: the activation of the sums, which are gates and ups, two
                  // parts of one size; null: the sums are written to `out`
    int64_t num_tokens, in_features, out_features, num_parts, rank, x_stride, out_stride, activation, dtype, num_threads;
};

struct HeadLinearCall {
    const void *x, *weight;  // [num_tokens, heads, in_features]; [heads, in_features, out_features], dense
    void* out;               // [num_tokens, heads, out_features], dense
    int64_t num_tokens, heads, in_features, out_features, token_stride, head_stride, dtype, num_threads;
};

struct RotateAndStoreLatentCall {
    const void* q;          // [num_tokens, heads, rotary_dim]
    const void* latent;     // [num_tokens, rank + rotary_dim]
    const void* weight;     // [rank]
    const void *cos, *sin;  // [num_tokens, turned_dim], dense
    void *out, *cache;      // like q, dense; [pages, block_size, a row of rank elements and one of rotary_dim (rows.h)]
    const int64_t* slots;   // [num_tokens]
    int64_t num_tokens, heads, rank, rotary_dim, turned_dim, q_token_stride, q_head_stride, latent_stride;
    int64_t page_stride, row_stride, block_size, is_interleaved, dtype, weight_dtype, cache_dtype, num_threads;
    double eps, largest;
};

struct LatentAttentionCall {
    const void *q, *q_rotated;  // [num_tokens, heads, rank], [num_tokens, heads, rotary_dim]
    void* out;                  // like q, dense
    const void* cache;          // as in RotateAndStoreLatentCall
    const int64_t* query_lens;    // [num_requests]; null: 1 each
    const int64_t* seq_lens;      // [num_requests]
    const int32_t* block_tables;  // [num_requests, table_stride]; an entry names `entry_size` tokens
    float* lse;                   // [num_tokens, heads], or null
    int64_t q_token_stride, q_head_stride, rotated_token_stride, rotated_head_stride, num_requests, table_stride;
    int64_t page_stride, row_stride, block_size;
    int64_t entry_size;  // block_size: entries are pages; 1: they are slots
    int64_t heads, rank, rotary_dim, dtype, cache_dtype, num_threads;
    double scale;
};

// Rows of one cache that each token sees.
struct SeenRows {
    const void* cache;      // [pages, block_size, a row of size elements]
    const int32_t* slots;   // [num_tokens, most], dense
    const int64_t* counts;  // [num_tokens]: how many slots are seen
    int64_t most, page_stride, row_stride, block_size;
};

struct AttendRowsCall {
    const void* q;          // [num_tokens, heads, size]
    void* out;              // like q, dense
    const SeenRows* parts;  // [num_parts], one after the other
    const float* sinks;     // [heads]
    int64_t num_parts, num_tokens, heads, size, q_token_stride, q_head_stride, dtype, cache_dtype, num_threads;
    double scale;
};

struct StoreRowsCall {
    const void* x;         // [num_tokens, size]
    void* cache;           // [pages, block_size, a row of size elements]
    const int64_t* slots;  // [num_tokens]
    int64_t num_tokens, size, x_stride, page_stride, row_stride, block_size, dtype, cache_dtype, num_threads;
    double largest;
};

struct SelectTokensCall {
    const void *q, *weights;      // [num_tokens, heads, size], [num_tokens, heads]
    const void* cache;            // [pages, block_size, a row of size elements]
    int32_t* out;                 // [num_tokens, top_k] slots, or positions, dense
    int64_t* counts;              // [num_tokens]
    const int64_t* query_lens;    // query_lens, seq_lens, block_tables and entry_size are as in LatentAttentionCall
    const int64_t* seq_lens;
    const int32_t* block_tables;
    int64_t q_token_stride, q_head_stride, weights_stride, num_requests, table_stride, page_stride, row_stride;
    int64_t block_size, entry_size, heads, size, top_k, gives_positions, dtype, cache_dtype, num_threads;
    double scale;
};

struct DrawCall {
    const void* logits;        // [num_rows, size], rows `stride` apart
    const uint64_t* starts;    // [num_rows]
    const int64_t* positions;  // [num_rows]
    int64_t* token_ids;        // [num_rows]
    bool* usable;              // [num_rows]
    int64_t num_rows, size, stride, dtype, num_threads;
};

struct LikeliestCall {
    const void* logits;  // logits, token_ids and usable are as in DrawCall
    int64_t* token_ids;
    bool* usable;
    int64_t num_rows, size, stride, dtype, num_threads;
};

struct ApplyBitmaskCall {
    void* logits;             // as in DrawCall
    const int64_t* rows;      // [count]
    const uint32_t* bitmask;  // [count, size / 32, rounded up], dense
    int64_t count, num_rows, size, stride, dtype, num_threads;
};

struct ReadMemoryCall {
    const void* memory;  // [num_bytes]; a rest of less than 256 KB is not read
    int64_t* result;     // changed by all of memory
    int64_t num_bytes, num_threads;
};

struct MultiplyCall {
    float* result;
    int64_t* operations;  // how many multiplications and additions were done
    int64_t num_pieces;
    int64_t dtype;  // float32; or bfloat16 or int8 (rows.h), for the instructions that multiply these, if there are some
    int64_t num_threads;
    double start;
};

}  // namespace quire

extern "C" {
int quire_attention(const quire::AttentionCall* call);
int quire_attention_of_codes(const quire::AttentionCall* call);
int quire_linear(const quire::LinearCall* call);
int quire_pack_panels(const quire::PackPanelsCall* call);
int quire_take_panel_rows(const quire::TakePanelRowsCall* call);
int quire_quantized_linear(const quire::QuantizedLinearCall* call);
int quire_pack_quantized(const quire::PackQuantizedCall* call);
int quire_take_quantized_rows(const quire::TakeQuantizedRowsCall* call);
int quire_route(const quire::RouteCall* call);
int quire_experts(const quire::ExpertsCall* call);
int quire_take_rows(const quire::TakeRowsCall* call);
int quire_copy_columns(const quire::CopyColumnsCall* call);
int quire_rotation(const quire::RotationCall* call);
int quire_rms_norm(const quire::RmsNormCall* call);
int quire_add_rms_norm(const quire::AddRmsNormCall* call);
int quire_layer_norm(const quire::LayerNormCall* call);
int quire_add_layer_norm(const quire::AddLayerNormCall* call);
int quire_add(const quire::AddCall* call);
int quire_scale(const quire::ScaleCall* call);
int quire_activate(const quire::ActivateCall* call);
int quire_merge_attention(const quire::MergeAttentionCall* call);
int quire_rotary(const quire::RotaryCall* call);
int quire_activate_and_mul(const quire::ActivateAndMulCall* call);
int quire_write_cache(const quire::WriteCacheCall* call);
int quire_rotate_and_store(const quire::RotateAndStoreCall* call);
int quire_causal_conv1d(const quire::CausalConv1dCall* call);
int quire_selective_scan(const quire::SelectiveScanCall* call);
int quire_mlstm(const quire::MlstmCall* call);
int quire_wkv(const quire::WkvCall* call);
int quire_outer_products(const quire::OuterProductsCall* call);
int quire_rg_lru(const quire::RgLruCall* call);
int quire_gated_rms_norm(const quire::GatedRmsNormCall* call);
int quire_multiply_gate(const quire::MultiplyGateCall* call);
int quire_match_magnitude(const quire::MatchMagnitudeCall* call);
int quire_predict_streams(const quire::PredictStreamsCall* call);
int quire_correct_streams(const quire::CorrectStreamsCall* call);
int quire_add_to_others(const quire::AddToOthersCall* call);
int quire_keep_outliers(const quire::KeepOutliersCall* call);
int quire_add_low_rank(const quire::AddLowRankCall* call);
int quire_head_linear(const quire::HeadLinearCall* call);
int quire_rotate_and_store_latent(const quire::RotateAndStoreLatentCall* call);
int quire_latent_attention(const quire::LatentAttentionCall* call);
int quire_attend_rows(const quire::AttendRowsCall* call);
int quire_store_rows(const quire::StoreRowsCall* call);
int quire_select_tokens(const quire::SelectTokensCall* call);
int quire_draw(const quire::DrawCall* call);
int quire_likeliest(const quire::LikeliestCall* call);
int quire_apply_bitmask(const quire::ApplyBitmaskCall* call);
int quire_read_memory(const quire::ReadMemoryCall* call);
int quire_multiply(const quire::MultiplyCall* call);
}
