// Layer norm, sums, factors, activations without a gate, and merged attention; see elementwise.cpp for how they round.
// `quire.ops.backend` defines the operations.
//
// Every function returns 0, or 1 if this machine's build has no code for the dtype; nothing is then written.

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace quire {
namespace {

constexpr long PIECE = 1 << 13;  // elements that one thread takes at a time
constexpr long MAX_PARTS = 64;   // of attention

// x[i] = body(x[i], i) for all elements, LANES at a time.
template <class T, class Body> void map(T* x, long size, long num_threads, Body body) {
    const long pieces = (size + PIECE - 1) / PIECE;
    for_each(pieces, pieces > 2 ? num_threads : 1, [&](long piece) {
        const long end = std::min(size, (piece + 1) * PIECE);
        for (long i = piece * PIECE; i < end; i += LANES) store(x + i, body(load(x + i, end - i), i, end - i), end - i);
    });
}

// Elements of a weight or bias from `first` on; `missing` if there is none.
template <class T> Floats parameter(const void* values, bool is_float, long first, long count, float missing) {
    if (!values) return fill(missing);
    return is_float ? load((const float*)values + first, count) : load((const T*)values + first, count);
}

// The sum of body(i, count) over a row of `size` elements, in four sums, so that an addition need not wait for the one
// before it.
template <class Body> float sum_of(long size, Body body) {
    Floats sums[4] = {};
    long i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int part = 0; part < 4; part++) sums[part] += body(i + part * LANES, LANES);
    for (; i < size; i += LANES) sums[0] += body(i, size - i);
    return sum(sums[0] + sums[1] + (sums[2] + sums[3]));
}

// out = norm(x), of a row, by a call's weight and bias.
template <class T, class Call> void normalize(const Call& call, const T* x, T* out, long first_weight) {
    const long size = call.size;
    const bool is_float = call.weight_dtype == FLOAT32;
    const float mean = sum_of(size, [&](long i, long count) { return load(x + i, count); }) / size;
    const float variance = sum_of(size, [&](long i, long count) {
        Floats part = load(x + i, count) - mean;
        for (long lane = count; lane < LANES; lane++) part[lane] = 0;
        return part * part;
    }) / size;
    const float inverse = 1 / std::sqrt(variance + (float)call.eps);
    for (long i = 0; i < size; i += LANES) {
        const long count = size - i;
        const Floats normal = (load(x + i, count) - mean) * inverse;
        const Floats weight = parameter<T>(call.weight, is_float, first_weight + i, count, 1);
        store(out + i, normal * weight + parameter<T>(call.bias, is_float, i, count, 0), count);
    }
}

// Merges one head of one token.
template <class T> void merge_head(const MergeAttentionCall& call, long token, long head) {
    const auto sum_of = [&](long part) { return ((const float*)call.sums[part])[token * call.sum_stride + head]; };
    float most = -INFINITY, total = 0, shares[MAX_PARTS];
    for (long part = 0; part < call.num_parts; part++) most = std::max(most, sum_of(part));
    for (long part = 0; part < call.num_parts; part++) {
        shares[part] = exp2(fill((sum_of(part) - most) * (float)M_LOG2E))[0];
        total += shares[part];
    }
    const long size = call.head_dim, place = token * call.out_stride + head * size;
    T* out = (T*)call.out + (token * call.num_heads + head) * size;
    for (long i = 0; i < size; i += LANES) {
        Floats merged{};
        for (long part = 0; part < call.num_parts; part++)
            if (sum_of(part) != -INFINITY)  // else the part's outputs mean nothing
                merged += load((const T*)call.outs[part] + place + i, size - i) * (shares[part] / total);
        store(out + i, merged, size - i);
    }
}

}  // namespace
}  // namespace quire

using namespace quire;

// out = (x - mean) / deviation * weight + bias
extern "C" int quire_layer_norm(const LayerNormCall* call) {
    if (call->weight_dtype != FLOAT32 && call->weight_dtype != call->dtype) return 1;
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long heads = call->heads, size = call->size;
        for_each(call->num_tokens, call->num_tokens * heads * size > 2 * PIECE ? call->num_threads : 1, [&](long token) {
            for (long head = 0; head < heads; head++)
                normalize<T>(*call, (const T*)call->x + token * call->token_stride + head * call->head_stride,
                             (T*)call->out + (token * heads + head) * size, head * call->weight_stride);
        });
    });
}

// residual += x; out = (residual - mean) / deviation * weight + bias
extern "C" int quire_add_layer_norm(const AddLayerNormCall* call) {
    if (call->weight_dtype != FLOAT32 && call->weight_dtype != call->dtype) return 1;
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long size = call->size;
        for_each(call->num_tokens, call->num_tokens * size > 2 * PIECE ? call->num_threads : 1, [&](long token) {
            const T* from = (const T*)call->x + token * size;
            T* to = (T*)call->residual + token * size;
            for (long i = 0; i < size; i += LANES) store(to + i, load(to + i, size - i) + load(from + i, size - i), size - i);
            normalize<T>(*call, to, (T*)call->out + token * size, 0);
        });
    });
}

// residual += x
extern "C" int quire_add(const AddCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* x = (const T*)call->x;
        map((T*)call->residual, call->size, call->num_threads,
            [&](Floats residual, long i, long count) { return residual + load(x + i, count); });
    });
}

// x = cap(x * factor)
extern "C" int quire_scale(const ScaleCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const float factor = (float)call->factor, cap = (float)call->softcap;
        map((T*)call->x, call->size, call->num_threads, [&](Floats x, long, long) {
            return cap ? tanh(x * factor * (1 / cap)) * cap : x * factor;
        });
    });
}

// x = activate(x)
extern "C" int quire_activate(const ActivateCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long activation = call->activation;
        map((T*)call->x, call->size, call->num_threads,
            [&](Floats x, long, long) { return activate(x, activation); });
    });
}

// out = outs, weighted by the softmax of sums over the parts
extern "C" int quire_merge_attention(const MergeAttentionCall* call) {
    if (call->num_parts > MAX_PARTS) return 1;
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long heads = call->num_heads, size = call->num_tokens * heads * call->head_dim;
        for_each(call->num_tokens, size > 2 * PIECE ? call->num_threads : 1, [&](long token) {
            for (long head = 0; head < heads; head++) merge_head<T>(*call, token, head);
        });
    });
}
