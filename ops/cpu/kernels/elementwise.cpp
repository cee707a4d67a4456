// Norms, rotation, activation and the cache's writes in one pass over memory each: loaded once, computed in float32,
// rounded where torch's formula in `quire.ops.eager` rounds, stored once. See `quire.ops.Backend` for their meaning.
//
// Every function returns 0, or 1 if this machine's build has no code for the dtype: nothing is written then.

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace quire {
namespace {

constexpr long WORTH_A_THREAD = 1 << 14;  // elements below which calling other threads costs more than they save

constexpr long SINES = 64;  // elements that take as long as a sine and a cosine

// body(i) for i in [0, count), on all threads if there are `elements` enough.
template <class Body> void parallel(long count, long elements, long num_threads, Body body) {
    for_each(count, elements > WORTH_A_THREAD ? num_threads : 1, body);
}

template <class T> void normalise(const T* x, const T* weight, T* out, long size, float eps) {
    Floats squares{};
    for (long i = 0; i < size; i += LANES) {
        Floats part = load(x + i, size - i);
        squares += part * part;
    }
    const float inverse = 1 / std::sqrt(sum(squares) / size + eps);
    for (long i = 0; i < size; i += LANES) {
        Floats scaled = rounded<T>(load(x + i, size - i) * inverse);
        store(out + i, scaled * load(weight + i, size - i), size - i);
    }
}

// cos and sin hold each angle twice, sin's first half negated: out = x * cos + (halves of x exchanged) * sin.
template <class T> void rotate(const T* x, const T* cos, const T* sin, T* out, long head_dim, long rotary_dim) {
    const long half = rotary_dim / 2;
    for (long i = 0; i < half; i += LANES) {
        const long count = half - i;
        Floats first = load(x + i, count), second = load(x + half + i, count);
        Floats new_first = first * load(cos + i, count) + second * load(sin + i, count);
        Floats new_second = second * load(cos + half + i, count) + first * load(sin + half + i, count);
        store(out + i, new_first, count);
        store(out + half + i, new_second, count);
    }
    std::memcpy(out + rotary_dim, x + rotary_dim, (head_dim - rotary_dim) * sizeof(T));
}

// NaN becomes 0, what is beyond `largest` becomes it.
template <class T, class Cache> void store_finite(const T* x, Cache* to, long size, float largest) {
    for (long i = 0; i < size; i += LANES) {
        Floats value = load(x + i, size - i);
        value = value == value ? value : Floats{};
        value = value > largest ? fill(largest) : value;
        value = value < -largest ? fill(-largest) : value;
        store(to + i, value, size - i);
    }
}

}  // namespace
}  // namespace quire

using namespace quire;

// Rows of x [rows, row_bytes] at index [count] → out, dense. 1 if there is no such row.
extern "C" int quire_take_rows(
    const void* x, const int64_t* index, void* out, long rows, long count, long row_bytes) {
    for (long i = 0; i < count; i++) {
        if (index[i] < 0 || index[i] >= rows) return 1;
        std::memcpy((char*)out + i * row_bytes, (const char*)x + index[i] * row_bytes, row_bytes);
    }
    return 0;
}

// positions [num_tokens], frequencies [half] → cos and sin [num_tokens, 2 * half], dense, as `rotate` reads them.
extern "C" int quire_rotation(
    const int64_t* positions, const float* frequencies, void* cos, void* sin, long num_tokens, long half, double scale,
    long dtype, long num_threads) {
    return with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel(num_tokens, num_tokens * half * SINES, num_threads, [&](long token) {
            T *c = (T*)cos + token * 2 * half, *s = (T*)sin + token * 2 * half;
            for (long i = 0; i < half; i += LANES) {
                const long count = std::min<long>(LANES, half - i);
                Floats cosines{}, sines{};
                for (long lane = 0; lane < count; lane++) {
                    const float angle = (float)positions[token] * frequencies[i + lane];
                    cosines[lane] = std::cos(angle) * (float)scale;
                    sines[lane] = std::sin(angle) * (float)scale;
                }
                store(c + i, cosines, count), store(c + half + i, cosines, count);
                store(s + i, -sines, count), store(s + half + i, sines, count);
            }
        });
    });
}

// x [num_tokens, heads, size] with strides, weight [heads, size] with a stride of 0 or size → out, dense.
extern "C" int quire_rms_norm(
    const void* x, const void* weight, void* out, long num_tokens, long heads, long size, long token_stride,
    long head_stride, long weight_stride, double eps, long dtype, long num_threads) {
    return with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel(num_tokens, num_tokens * heads * size, num_threads, [&](long token) {
            for (long head = 0; head < heads; head++)
                normalise((const T*)x + token * token_stride + head * head_stride,
                          (const T*)weight + head * weight_stride, (T*)out + (token * heads + head) * size, size,
                          (float)eps);
        });
    });
}

// residual += x; out = norm(residual); all [num_tokens, size], dense.
extern "C" int quire_add_rms_norm(
    const void* x, void* residual, const void* weight, void* out, long num_tokens, long size, double eps, long dtype,
    long num_threads) {
    return with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel(num_tokens, num_tokens * size, num_threads, [&](long token) {
            const T* from = (const T*)x + token * size;
            T* to = (T*)residual + token * size;
            for (long i = 0; i < size; i += LANES)
                store(to + i, load(to + i, size - i) + load(from + i, size - i), size - i);
            normalise((const T*)to, (const T*)weight, (T*)out + token * size, size, (float)eps);
        });
    });
}

// x [num_tokens, heads, head_dim] with strides, cos and sin [num_tokens, rotary_dim], dense → out, dense.
extern "C" int quire_rotary(
    const void* x, const void* cos, const void* sin, void* out, long num_tokens, long heads, long head_dim,
    long rotary_dim, long token_stride, long head_stride, long dtype, long num_threads) {
    return with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel(num_tokens, num_tokens * heads * head_dim, num_threads, [&](long token) {
            for (long head = 0; head < heads; head++)
                rotate((const T*)x + token * token_stride + head * head_stride, (const T*)cos + token * rotary_dim,
                       (const T*)sin + token * rotary_dim, (T*)out + (token * heads + head) * head_dim, head_dim,
                       rotary_dim);
        });
    });
}

// x [num_tokens, 2 * size] = [gate | up], rows token_stride apart → out [num_tokens, size], dense.
extern "C" int quire_silu_and_mul(
    const void* x, void* out, long num_tokens, long size, long token_stride, long dtype, long num_threads) {
    return with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel(num_tokens, num_tokens * size, num_threads, [&](long token) {
            const T *gate = (const T*)x + token * token_stride, *up = gate + size;
            T* to = (T*)out + token * size;
            for (long i = 0; i < size; i += LANES) {
                Floats g = load(gate + i, size - i);
                store(to + i, silu(g) * load(up + i, size - i), size - i);
            }
        });
    });
}

// k and v [num_tokens, heads, head_dim] with strides → cache [pages, 2, heads, block_size, head_dim], dense, at
// slots[token], finite.
extern "C" int quire_write_cache(
    const void* k, const void* v, void* cache, const int64_t* slots, long num_tokens, long heads, long head_dim,
    long k_token_stride, long k_head_stride, long v_token_stride, long v_head_stride, long block_size, double largest,
    long dtype, long cache_dtype, long num_threads) {
    int failed = 0;
    int unknown = with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        failed = with_type(cache_dtype, [&](auto* cache_type) {
            using Cache = std::remove_pointer_t<decltype(cache_type)>;
            const long half = heads * block_size * head_dim;
            parallel(num_tokens, 2 * num_tokens * heads * head_dim, num_threads, [&](long token) {
                Cache* page = (Cache*)cache + slots[token] / block_size * 2 * half;
                Cache* to = page + slots[token] % block_size * head_dim;
                const T *key = (const T*)k + token * k_token_stride, *value = (const T*)v + token * v_token_stride;
                for (long head = 0; head < heads; head++, to += block_size * head_dim) {
                    store_finite(key + head * k_head_stride, to, head_dim, (float)largest);
                    store_finite(value + head * v_head_stride, to + half, head_dim, (float)largest);
                }
            });
        });
    });
    return unknown | failed;
}

// heads [num_tokens, num_heads + 2 * num_kv_heads, head_dim] = [queries | keys | values], rows token_stride apart: queries
// and keys normalised (weight [num_heads + num_kv_heads, head_dim], or null for none) and rotated; queries → out, dense,
// keys and values → cache as in quire_write_cache.
extern "C" int quire_rotate_and_store(
    const void* heads, const void* weight, const void* cos, const void* sin, void* out, void* cache,
    const int64_t* slots, long num_tokens, long num_heads, long num_kv_heads, long head_dim, long rotary_dim,
    long token_stride, long block_size, double eps, double largest, long dtype, long cache_dtype, long num_threads) {
    constexpr long MAX_HEAD_DIM = 1024;
    if (head_dim > MAX_HEAD_DIM) return 1;
    int failed = 0;
    int unknown = with_type(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        failed = with_type(cache_dtype, [&](auto* cache_type) {
            using Cache = std::remove_pointer_t<decltype(cache_type)>;
            const long half = num_kv_heads * block_size * head_dim, all = num_heads + 2 * num_kv_heads;
            parallel(num_tokens, num_tokens * all * head_dim, num_threads, [&](long token) {
                const T *from = (const T*)heads + token * token_stride, *scale = (const T*)weight;
                const T *c = (const T*)cos + token * rotary_dim, *s = (const T*)sin + token * rotary_dim;
                T* query = (T*)out + token * num_heads * head_dim;
                Cache* to = (Cache*)cache + slots[token] / block_size * 2 * half + slots[token] % block_size * head_dim;
                T normal[MAX_HEAD_DIM], key[MAX_HEAD_DIM];
                for (long head = 0; head < num_heads + num_kv_heads; head++, from += head_dim) {
                    const bool is_query = head < num_heads;
                    if (scale) normalise(from, scale + head * head_dim, normal, head_dim, (float)eps);
                    rotate(scale ? normal : from, c, s, is_query ? query : key, head_dim, rotary_dim);
                    if (is_query) {
                        query += head_dim;
                        continue;
                    }
                    store_finite(key, to, head_dim, (float)largest);
                    store_finite(from + num_kv_heads * head_dim, to + half, head_dim, (float)largest);
                    to += block_size * head_dim;
                }
            });
        });
    });
    return unknown | failed;
}
