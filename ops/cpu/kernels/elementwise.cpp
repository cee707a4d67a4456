// Norms, rotation, activation and writes to the KV cache, each in one pass over memory: numbers are loaded once,
// computed in float32, rounded where the torch formula in `quire.ops.eager` rounds, and stored once.
// `quire.ops.backend` defines the operations.
//
// Every function returns 0, or 1 if this machine's build has no code for the dtype; nothing is then written.

#include "elements.h"
#include "rows.h"
#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace quire {
namespace {

constexpr long SINES = 64;  // a sine and a cosine take as long as this many elements

}  // namespace
}  // namespace quire

using namespace quire;

// out = rows of x at index, times `scale`. Returns 1 if an index is out of range.
extern "C" int quire_take_rows(const TakeRowsCall* call) {
    const long row_bytes = call->row_bytes;
    for (long i = 0; i < call->count; i++) {
        const long row = call->index[i];
        if (row < 0 || row >= call->rows) return 1;
        std::memcpy((char*)call->out + i * row_bytes, (const char*)call->x + row * row_bytes, row_bytes);
    }
    if (call->scale == 1) return 0;
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        T* out = (T*)call->out;
        const long size = call->count * row_bytes / (long)sizeof(T);
        for (long i = 0; i < size; i += LANES) store(out + i, load(out + i, size - i) * (float)call->scale, size - i);
    });
}

// A part of each row of out = x
extern "C" int quire_copy_columns(const CopyColumnsCall* call) {
    parallel(call->num_tokens, call->num_tokens * call->row_bytes, call->num_threads, [&](long token) {
        std::memcpy((char*)call->out + token * call->out_stride, (const char*)call->x + token * call->x_stride,
                    call->row_bytes);
    });
    return 0;
}

// positions, frequencies → cos and sin in the layout that `rotate` reads.
extern "C" int quire_rotation(const RotationCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long half = call->half;
        const float scale = (float)call->scale;
        parallel(call->num_tokens, call->num_tokens * half * SINES, call->num_threads, [&](long token) {
            T *c = (T*)call->cos + token * 2 * half, *s = (T*)call->sin + token * 2 * half;
            for (long i = 0; i < half; i += LANES) {
                const long count = std::min<long>(LANES, half - i);
                Floats cosines{}, sines{};
                for (long lane = 0; lane < count; lane++) {
                    const float angle = (float)call->positions[token] * call->frequencies[i + lane];
                    cosines[lane] = std::cos(angle) * scale;
                    sines[lane] = std::sin(angle) * scale;
                }
                store(c + i, cosines, count), store(c + half + i, cosines, count);
                store(s + i, -sines, count), store(s + half + i, sines, count);
            }
        });
    });
}

// out = norm(x)
extern "C" int quire_rms_norm(const RmsNormCall* call) {
    const bool is_float = call->weight_dtype == FLOAT32;
    if (!is_float && call->weight_dtype != call->dtype) return 1;
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long heads = call->heads, size = call->size;
        parallel(call->num_tokens, call->num_tokens * heads * size, call->num_threads, [&](long token) {
            for (long head = 0; head < heads; head++)
                normalize((const T*)call->x + token * call->token_stride + head * call->head_stride,
                          call->weight, is_float, head * call->weight_stride,
                          (T*)call->out + (token * heads + head) * size, size, (float)call->eps);
        });
    });
}

// residual += x; out = norm(residual)
extern "C" int quire_add_rms_norm(const AddRmsNormCall* call) {
    const bool is_float = call->weight_dtype == FLOAT32;
    if (!is_float && call->weight_dtype != call->dtype) return 1;
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long size = call->size;
        parallel(call->num_tokens, call->num_tokens * size, call->num_threads, [&](long token) {
            const T* from = (const T*)call->x + token * size;
            T* to = (T*)call->residual + token * size;
            for_vectors(size, [&](long i, auto count) __attribute__((always_inline)) {
                store(to + i, load(to + i, count) + load(from + i, count), count);
            });
            normalize((const T*)to, call->weight, is_float, 0, (T*)call->out + token * size, size, (float)call->eps);
        });
    });
}

// out = x, rotated
extern "C" int quire_rotary(const RotaryCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long heads = call->heads, head_dim = call->head_dim, rotary_dim = call->rotary_dim;
        parallel(call->num_tokens, call->num_tokens * heads * head_dim, call->num_threads, [&](long token) {
            for (long head = 0; head < heads; head++)
                rotate((const T*)call->x + token * call->token_stride + head * call->head_stride,
                       (const T*)call->cos + token * rotary_dim, (const T*)call->sin + token * rotary_dim,
                       (T*)call->out + (token * heads + head) * head_dim, head_dim, rotary_dim);
        });
    });
}

// out = the activation of gates and their ups
extern "C" int quire_activate_and_mul(const ActivateAndMulCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long size = call->size;
        parallel(call->num_tokens, call->num_tokens * size, call->num_threads, [&](long token) {
            const T *gate = (const T*)call->x + token * call->token_stride, *up = gate + size;
            T* to = (T*)call->out + token * size;
            for_vectors(size, [&](long i, auto count) __attribute__((always_inline)) {
                store(to + i, gated(load(gate + i, count), load(up + i, count), call->activation), count);
            });
        });
    });
}

// Stores k and v, made finite, in the cache at slots[token].
extern "C" int quire_write_cache(const WriteCacheCall* call) {
    int failed = 0;
    int unknown = with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        failed = with_cache_type(call->cache_dtype, [&](auto* cache_type) {
            using Cache = std::remove_pointer_t<decltype(cache_type)>;
            const long heads = call->heads, head_dim = call->head_dim, block_size = call->block_size;
            const long row = row_size<Cache>(head_dim), half = heads * block_size * row;
            const float largest = (float)call->largest, *scales = call->scales;
            parallel(call->num_tokens, 2 * call->num_tokens * heads * head_dim, call->num_threads, [&](long token) {
                const long slot = call->slots[token];
                Cache* to = (Cache*)call->cache + slot / block_size * call->page_stride + slot % block_size * row;
                const T* key = (const T*)call->k + token * call->k_token_stride;
                const T* value = (const T*)call->v + token * call->v_token_stride;
                for (long head = 0; head < heads; head++, to += block_size * row) {
                    const float *of_key = scales ? scales + head : nullptr, *of_value = scales ? of_key + heads : nullptr;
                    store_row(key + head * call->k_head_stride, to, head_dim, largest, of_key);
                    store_row(value + head * call->v_head_stride, to + half, head_dim, largest, of_value);
                }
            });
        });
    });
    return unknown | failed;
}

// Normalizes queries and keys, if there is a weight, and rotates them. Writes queries to out, and keys and values to
// the cache as quire_write_cache does.
extern "C" int quire_rotate_and_store(const RotateAndStoreCall* call) {
    constexpr long MAX_HEAD_DIM = 1024;
    const long head_dim = call->head_dim;
    const bool is_float = call->weight_dtype == FLOAT32;
    if (head_dim > MAX_HEAD_DIM || (!is_float && call->weight_dtype != call->dtype)) return 1;
    int failed = 0;
    int unknown = with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        failed = with_cache_type(call->cache_dtype, [&](auto* cache_type) {
            using Cache = std::remove_pointer_t<decltype(cache_type)>;
            const long num_heads = call->num_heads, num_kv_heads = call->num_kv_heads;
            const long block_size = call->block_size, rotary_dim = call->rotary_dim;
            const long row = row_size<Cache>(head_dim), half = num_kv_heads * block_size * row;
            const long all = num_heads + 2 * num_kv_heads;
            const float eps = (float)call->eps, largest = (float)call->largest;
            parallel(call->num_tokens, call->num_tokens * all * head_dim, call->num_threads, [&](long token) {
                const T* from = (const T*)call->heads + token * call->token_stride;
                const T *c = (const T*)call->cos + token * rotary_dim, *s = (const T*)call->sin + token * rotary_dim;
                const long slot = call->slots[token];
                T* query = (T*)call->out + token * num_heads * head_dim;
                Cache* to = (Cache*)call->cache + slot / block_size * call->page_stride + slot % block_size * row;
                T normal[MAX_HEAD_DIM], pairs[MAX_HEAD_DIM], key[MAX_HEAD_DIM];
                for (long head = 0; head < num_heads + num_kv_heads; head++, from += head_dim) {
                    const bool is_query = head < num_heads;
                    if (call->weight) normalize(from, call->weight, is_float, head * head_dim, normal, head_dim, eps);
                    const T* x = call->weight ? normal : from;
                    if (call->is_interleaved) x = halves(x, pairs, head_dim, rotary_dim);
                    rotate(x, c, s, is_query ? query : key, head_dim, rotary_dim);
                    if (is_query) {
                        query += head_dim;
                        continue;
                    }
                    const float* of_key = call->scales ? call->scales + (head - num_heads) : nullptr;
                    store_row(key, to, head_dim, largest, of_key);
                    store_row(from + num_kv_heads * head_dim, to + half, head_dim, largest,
                              of_key ? of_key + num_kv_heads : nullptr);
                    to += block_size * row;
                }
            });
        });
    });
    return unknown | failed;
}
