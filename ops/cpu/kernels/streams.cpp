// Several residual streams (AltUp) and sparse gates; see elementwise.cpp for how they round. `quire.ops.streams` defines
// the operations.
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

constexpr long WORTH_A_THREAD = 1 << 14;  // elements

// Calls body(token) for all tokens, each of `size` elements.
template <class Body> void for_tokens(long num_tokens, long size, long num_threads, Body body) {
    for_each(num_tokens, num_tokens * size > WORTH_A_THREAD ? num_threads : 1, body);
}

template <class T> float one(const T* from) { return load(from, 1)[0]; }

// The vector from `i` on of a row of `size` elements, with zeros past its end.
template <class T> Floats part(const T* row, long i, long size) {
    Floats x = load(row + i, size - i);
    for (long lane = size - i; lane < LANES; lane++) x[lane] = 0;
    return x;
}

// The mean of (x - centre)^2 over a row.
template <class T> float mean_square(const T* row, long size, float centre = 0) {
    Floats squares{};
    for (long i = 0; i < size; i += LANES) {
        Floats x = load(row + i, size - i) - centre;
        for (long lane = size - i; lane < LANES; lane++) x[lane] = 0;
        squares += x * x;
    }
    return sum(squares) / size;
}

}  // namespace
}  // namespace quire

using namespace quire;

// out = x * rms(like) / rms(x)
extern "C" int quire_match_magnitude(const MatchMagnitudeCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long size = call->size;
        for_tokens(call->num_tokens, size, call->num_threads, [&](long token) {
            const T *x = (const T*)call->x + token * call->x_stride, *like = (const T*)call->like + token * call->like_stride;
            const float square = x == like ? 1 : std::max(mean_square(x, size), (float)call->floor);
            const float factor = x == like ? 1 : std::sqrt(mean_square(like, size) / square);
            T* out = (T*)call->out + token * size;
            for (long i = 0; i < size; i += LANES) store(out + i, load(x + i, size - i) * factor, size - i);
        });
    });
}

// out[i] = streams[i] + sum of coefficients[i, j] * streams[j]
extern "C" int quire_predict_streams(const PredictStreamsCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long count = call->num_streams, size = call->size, stride = call->num_tokens * size;
        for_tokens(call->num_tokens, count * size, call->num_threads, [&](long token) {
            const T* streams = (const T*)call->streams + token * size;
            const T* coefficients = (const T*)call->coefficients + token * call->coefficient_stride;
            for (long to = 0; to < count; to++) {
                T* out = (T*)call->out + to * stride + token * size;
                for (long i = 0; i < size; i += LANES) {
                    Floats total = load(streams + to * stride + i, size - i);
                    for (long from = 0; from < count; from++)
                        total += load(streams + from * stride + i, size - i) * one(coefficients + to * count + from);
                    store(out + i, total, size - i);
                }
            }
        });
    });
}

// out[i] = streams[i] + (1 + coefficients[i]) * (activated - streams[active])
extern "C" int quire_correct_streams(const CorrectStreamsCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long count = call->num_streams, size = call->size, stride = call->num_tokens * size;
        for_tokens(call->num_tokens, count * size, call->num_threads, [&](long token) {
            const T* streams = (const T*)call->streams + token * size;
            const T* activated = (const T*)call->activated + token * call->activated_stride;
            const T* coefficients = (const T*)call->coefficients + token * call->coefficient_stride;
            for (long to = 0; to < count; to++) {
                const float factor = 1 + one(coefficients + to);
                T* out = (T*)call->out + to * stride + token * size;
                for (long i = 0; i < size; i += LANES) {
                    const Floats news =
                        load(activated + i, size - i) - load(streams + call->active * stride + i, size - i);
                    store(out + i, load(streams + to * stride + i, size - i) + news * factor, size - i);
                }
            }
        });
    });
}

// streams[i] += x for i > 0
extern "C" int quire_add_to_others(const AddToOthersCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long size = call->size, others = call->num_streams - 1;
        for_tokens(call->num_tokens * others, size, call->num_threads, [&](long row) {
            const T* x = (const T*)call->x + row % call->num_tokens * call->x_stride;
            T* stream = (T*)call->streams + (call->num_tokens + row) * size;
            for (long i = 0; i < size; i += LANES)
                store(stream + i, load(stream + i, size - i) + load(x + i, size - i), size - i);
        });
    });
}

// gates = relu(gates - mean(whole) - deviations * deviation(whole))
extern "C" int quire_keep_outliers(const KeepOutliersCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long size = call->size, whole_size = call->whole_size;
        for_tokens(call->num_tokens, whole_size, call->num_threads, [&](long token) {
            const T* whole = (const T*)call->whole + token * call->whole_stride;
            Floats total{};
            for (long i = 0; i < whole_size; i += LANES) total += part(whole, i, whole_size);
            const float mean = sum(total) / whole_size;
            const float cutoff = mean + (float)call->deviations * std::sqrt(mean_square(whole, whole_size, mean));
            T* gates = (T*)call->gates + token * call->gate_stride;
            for (long i = 0; i < size; i += LANES) store(gates + i, relu(load(gates + i, size - i) - cutoff), size - i);
        });
    });
}
