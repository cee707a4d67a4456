// The layout of weights for linear.cpp, and the arguments of a product with a panel.
//
// A weight is [panel][step][32] pairs: a panel has 32 outputs, a step two neighbouring inputs. In a gated layer
// (arXiv:2002.05202) a panel's lower half are gates and its upper half their ups. So the activation and the product of
// the two are computed on the sums, and only the result is written.
#pragma once

#include "vector.h"

#if defined(QUIRE_HAS_AVX512_BF16)

#include <algorithm>

namespace quire {

constexpr long PANEL = 32;  // outputs
constexpr long LINE = 16;   // pairs in a cache line

inline long ceil_div(long value, long by) { return (value + by - 1) / by; }

// row[i][j] → row[j][i]
inline void transpose(__m512i row[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        row[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        row[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        row[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        row[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int half = 0; half < 16; half += 8)
        for (int i = 0; i < 4; i++) {
            t[half + i] = _mm512_shuffle_i32x4(row[half + i], row[half + i + 4], 0x88);
            t[half + i + 4] = _mm512_shuffle_i32x4(row[half + i], row[half + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        row[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        row[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// Writes up to 16 rows of `size` inputs as pairs: to[step * to_stride + row], with zeros for rows past `count` and
// inputs past `size`. The number of steps is rounded up to a multiple of `depth`, 1 or 16.
inline void interleave(const BFloat16* from, long stride, long count, long size, uint32_t* to, long to_stride,
                       long depth) {
    constexpr long AHEAD = 8 * 2 * LINE;
    for (long first = 0; first < size; first += 2 * LINE) {
        const long left = size - first;
        const __mmask32 mask = left >= 2 * LINE ? ~0u : (1u << left) - 1;
        __m512i row[16];
        for (int i = 0; i < 16; i++) {
            const BFloat16* at = from + i * stride + first;
            if (i < count) _mm_prefetch(at + AHEAD, _MM_HINT_T0);
            row[i] = i < count ? _mm512_maskz_loadu_epi16(mask, at) : _mm512_setzero_si512();
        }
        transpose(row);
        const long steps = std::min(LINE, round_up(ceil_div(left, 2), depth));
        for (long i = 0; i < steps; i++) _mm512_store_si512(to + (first / 2 + i) * to_stride, row[i]);
    }
}

// One task of a Multiplier: some rows times one panel, or times a part of the panel's steps.
struct Work {
    const void* x;
    long x_stride;  // bytes; used if x is not packed
    bool is_packed;
    const uint32_t* panel;
    long steps;
    const uint32_t* fetch;  // cache lines to prefetch meanwhile: `fetch_rate` every four steps
    long fetch_rate;
    bool is_near;  // they are prefetched into the first cache; with AMX always into the second
    float* sums;  // [rows][32]: read unless this is the panel's first part; undefined after the last part
    bool is_first, is_last;
    BFloat16* out;  // the last part adds the bias, if any, and writes `count` outputs of each row
    long out_stride;
    const BFloat16 *low_bias, *high_bias;  // of the panel's two halves, or null
    long count;
    bool is_gated;
    long activation;  // of the gates
};

inline __m512 load_some(const BFloat16* from, __mmask16 mask) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16);
}

inline Floats rounded(__m512 x) {
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16);
}

// Turns the sums of a Work's rows into outputs: adds the bias, activates gates, and stores.
class Outputs {
public:
    explicit Outputs(const Work& work)
        : work(work), mask(work.count >= PANEL ? ~0u : (1u << work.count) - 1), has_bias(work.low_bias) {
        if (!has_bias) return;
        low_bias = load_some(work.low_bias, (__mmask16)mask);
        high_bias = load_some(work.high_bias, (__mmask16)(work.is_gated ? mask : mask >> 16));
    }

    __attribute__((always_inline)) void write(int row, __m512 low, __m512 high) const {
        if (has_bias) low += low_bias, high += high_bias;
        BFloat16* to = work.out + row * work.out_stride;
        if (work.is_gated) {  // both rounded first, as `quire_activate_and_mul` would compute it
            const __m512 product = (__m512)gated(rounded(low), rounded(high), work.activation);
            return _mm256_mask_storeu_epi16(to, (__mmask16)mask, (__m256i)_mm512_cvtneps_pbh(product));
        }
        _mm512_mask_storeu_epi16(to, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }

private:
    const Work& work;
    const __mmask32 mask;
    const bool has_bias;
    __m512 low_bias, high_bias;
};

}  // namespace quire
#endif
