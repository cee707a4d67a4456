// Layer norm, sums, factors, and activations without a gate; see elementwise.cpp for how they round.
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

template <class T> void normalise(const LayerNormCall& call, const T* x, T* out, long first_weight) {
    const long size = call.size;
    const bool is_float = call.weight_dtype == FLOAT32;
    Floats total{}, squares{};
    for (long i = 0; i < size; i += LANES) total += load(x + i, size - i);
    const float mean = sum(total) / size;
    for (long i = 0; i < size; i += LANES) {
        Floats part = load(x + i, size - i) - mean;
        for (long lane = size - i; lane < LANES; lane++) part[lane] = 0;
        squares += part * part;
    }
    const float inverse = 1 / std::sqrt(sum(squares) / size + (float)call.eps);
    for (long i = 0; i < size; i += LANES) {
        const long count = size - i;
        const Floats normal = (load(x + i, count) - mean) * inverse;
        const Floats weight = parameter<T>(call.weight, is_float, first_weight + i, count, 1);
        store(out + i, normal * weight + parameter<T>(call.bias, is_float, i, count, 0), count);
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
                normalise<T>(*call, (const T*)call->x + token * call->token_stride + head * call->head_stride,
                             (T*)call->out + (token * heads + head) * size, head * call->weight_stride);
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
