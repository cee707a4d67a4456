// The kernels that Python calls, by name, through `quire.ops.cpu.launches`. What they do stands where they are defined.
#pragma once

#include <cstdint>

namespace quire {
struct AttentionCall;
struct LinearCall;
}  // namespace quire

extern "C" {
int quire_attention(const quire::AttentionCall* call);
int quire_linear(const quire::LinearCall* call);
int quire_take_rows(const void* x, const int64_t* index, void* out, long rows, long count, long row_bytes);
int quire_rotation(const int64_t* positions, const float* frequencies, void* cos, void* sin, long num_tokens, long half,
                   double scale, long dtype, long num_threads);
int quire_rms_norm(const void* x, const void* weight, void* out, long num_tokens, long heads, long size,
                   long token_stride, long head_stride, long weight_stride, double eps, long dtype, long num_threads);
int quire_add_rms_norm(const void* x, void* residual, const void* weight, void* out, long num_tokens, long size,
                       double eps, long dtype, long num_threads);
int quire_rotary(const void* x, const void* cos, const void* sin, void* out, long num_tokens, long heads, long head_dim,
                 long rotary_dim, long token_stride, long head_stride, long dtype, long num_threads);
int quire_silu_and_mul(const void* x, void* out, long num_tokens, long size, long token_stride, long dtype,
                       long num_threads);
int quire_write_cache(const void* k, const void* v, void* cache, const int64_t* slots, long num_tokens, long heads,
                      long head_dim, long k_token_stride, long k_head_stride, long v_token_stride, long v_head_stride,
                      long block_size, double largest, long dtype, long cache_dtype, long num_threads);
int quire_rotate_and_store(const void* heads, const void* weight, const void* cos, const void* sin, void* out,
                           void* cache, const int64_t* slots, long num_tokens, long num_heads, long num_kv_heads,
                           long head_dim, long rotary_dim, long token_stride, long block_size, double eps,
                           double largest, long dtype, long cache_dtype, long num_threads);
int quire_draw(const void* logits, const uint64_t* starts, const int64_t* positions, int64_t* token_ids, bool* usable,
               long num_rows, long size, long stride, long dtype, long num_threads);
int quire_likeliest(const void* logits, int64_t* token_ids, bool* usable, long num_rows, long size, long stride,
                    long dtype, long num_threads);
int quire_apply_bitmask(void* logits, const int64_t* rows, const uint32_t* bitmask, long count, long num_rows,
                        long size, long stride, long dtype, long num_threads);
}
