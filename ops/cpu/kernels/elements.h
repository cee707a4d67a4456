// What elementwise kernels do to one row. See elementwise.cpp.
#pragma once

#include "threads.h"
#include "vector.h"

#include <cmath>
#include <cstring>
#include <type_traits>

namespace quire {

constexpr long WORTH_A_THREAD = 1 << 14;  // elements below which waking other threads costs more than they save

// Calls body(i) for i in [0, count), on all threads if `elements` are worth it.
template <class Body> void parallel(long count, long elements, long num_threads, Body body) {
    for_each(count, elements > WORTH_A_THREAD ? num_threads : 1, body);
}

// Calls body(i, count) for each vector of `size` elements. `count` is a constant but for a last vector that is not whole.
template <class Body> inline __attribute__((always_inline)) void for_vectors(long size, Body body) {
    long i = 0;
    for (; i + LANES <= size; i += LANES) body(i, std::integral_constant<long, LANES>());
    if (i < size) body(i, size - i);
}

// out = x * inverse, rounded to the weight's type, times the weight.
template <class T, class Weight> void scale(const T* x, float inverse, const Weight* weight, T* out, long size) {
    for_vectors(size, [&](long i, auto count) __attribute__((always_inline)) {
        store(out + i, rounded<Weight>(load(x + i, count) * inverse) * load(weight + i, count), count);
    });
}

// In four sums, so that an addition need not wait for the one before it.
template <class T> float sum_of_squares(const T* x, long size) {
    Floats sums[4] = {};
    long i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            const Floats numbers = load(x + i + part * LANES);
            sums[part] = multiply_add(numbers, numbers, sums[part]);
        }
    for (; i < size; i += LANES) {
        const Floats numbers = load(x + i, size - i);
        sums[0] = multiply_add(numbers, numbers, sums[0]);
    }
    return sum(sums[0] + sums[1] + (sums[2] + sums[3]));
}

// The weight's elements are T, or float if `is_float`; its element `first` belongs to x[0].
template <class T>
void normalize(const T* x, const void* weight, bool is_float, long first, T* out, long size, float eps) {
    const float inverse = 1 / std::sqrt(sum_of_squares(x, size) / size + eps);
    if (is_float) scale(x, inverse, (const float*)weight + first, out, size);
    else scale(x, inverse, (const T*)weight + first, out, size);
}

// out = x * cos + (x with its halves exchanged) * sin. cos and sin hold each angle twice; sin's first half is negated.
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

// Rotates x: the pairs (2i, 2i + 1) of its first rotary_dim elements go to (i, i + rotary_dim / 2) of out.
template <class T> const T* halves(const T* x, T* out, long head_dim, long rotary_dim) {
    const long half = rotary_dim / 2;
    for (long i = 0; i < half; i++) out[i] = x[2 * i], out[half + i] = x[2 * i + 1];
    std::memcpy(out + rotary_dim, x + rotary_dim, (head_dim - rotary_dim) * sizeof(T));
    return out;
}

// x with NaN replaced by 0, and clamped to [-largest, largest].
inline Floats finite(Floats x, float largest) {
    x = x == x ? x : Floats{};
    x = x > largest ? fill(largest) : x;
    return x < -largest ? fill(-largest) : x;
}

template <class T, class Cache> void store_finite(const T* x, Cache* to, long size, float largest) {
    for_vectors(size, [&](long i, auto count) __attribute__((always_inline)) {
        store(to + i, finite(load(x + i, count), largest), count);
    });
}

}  // namespace quire
