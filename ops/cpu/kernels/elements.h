// What elementwise kernels do to one row. See elementwise.cpp.
#pragma once

#include "threads.h"
#include "vector.h"

#include <cmath>
#include <cstring>

namespace quire {

constexpr long WORTH_A_THREAD = 1 << 14;  // elements below which waking other threads costs more than they save

// Calls body(i) for i in [0, count), on all threads if `elements` are worth it.
template <class Body> void parallel(long count, long elements, long num_threads, Body body) {
    for_each(count, elements > WORTH_A_THREAD ? num_threads : 1, body);
}

// out = x * inverse, rounded to the weight's type, times the weight.
template <class T, class Weight> void scale(const T* x, float inverse, const Weight* weight, T* out, long size) {
    for (long i = 0; i < size; i += LANES) {
        Floats scaled = rounded<Weight>(load(x + i, size - i) * inverse);
        store(out + i, scaled * load(weight + i, size - i), size - i);
    }
}

// The weight's elements are T, or float if `is_float`; its element `first` belongs to x[0].
template <class T>
void normalise(const T* x, const void* weight, bool is_float, long first, T* out, long size, float eps) {
    Floats squares{};
    for (long i = 0; i < size; i += LANES) {
        Floats part = load(x + i, size - i);
        squares += part * part;
    }
    const float inverse = 1 / std::sqrt(sum(squares) / size + eps);
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

// x with the pairs (2i, 2i + 1) of its first rotary_dim numbers at (i, i + rotary_dim / 2), written into out.
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
    for (long i = 0; i < size; i += LANES) store(to + i, finite(load(x + i, size - i), largest), size - i);
}

}  // namespace quire
