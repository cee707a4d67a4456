// Rows times panels on processors with AVX512-BF16. One instruction multiplies a pair of x by 16 pairs of the panel.
//
// Up to 14 rows have 28 vectors of sums, which stay in registers for the whole panel.
#pragma once

#include "panels.h"

#if defined(QUIRE_HAS_AVX512_BF16)

#include <array>
#include <utility>

namespace quire {

constexpr int MOST_ROWS = 14;           // most rows of a Work: 28 sums, two weights and x fit 32 registers
constexpr int PACKED_ROWS = 16;         // rows of a packed x
constexpr long DEPTH = 1;               // the number of a panel's steps is a multiple of it
constexpr long MOST_TILES = 72;         // most tiles of rows that share a panel in cache
constexpr long GROUP_PAIRS = 96 << 10;  // pairs of the panels that take turns: 384 KB
constexpr int FEW_TILES = 8;            // up to this number, one panel at a time was measured to be best

inline long most_tiles(long) { return MOST_TILES; }

// Steps of a panel at once: 192 KB.
inline long most_steps(int) { return 1536; }

inline bool may_multiply() { return true; }

// Whether x is read in place: packing does not pay for few rows or few outputs. x is packed if its rows end with half a
// pair, or if most rows of a Work map to one set of the L1 cache.
inline bool is_read_in_place(long rows, long in_features, long out_features, long stride) {
    if (in_features % 2) return false;
    return rows <= 8 || (out_features <= 2048 && stride * sizeof(BFloat16) % 4096);
}

// Packs rows of `size` inputs as [step][16 rows].
inline void pack_rows(const BFloat16* from, long stride, long count, long size, uint32_t* to) {
    interleave(from, stride, count, size, to, PACKED_ROWS, DEPTH);
}

// The pairs of a packed x.
struct Packed {
    const uint32_t* x;
    static Packed at(const void* x, long) { return {(const uint32_t*)x}; }
    uint32_t pair(int row, int step) const { return x[step * PACKED_ROWS + row]; }
    void advance(long steps) { x += steps * PACKED_ROWS; }
};

// The pairs of an x that is read in place: [row][step], rows `stride` bytes apart.
struct Plain {
    const char *x[4];  // rows 0, 4, 8 and 12: an address has room for one base and one index
    long stride, three;
    static Plain at(const void* x, long stride) {
        const char* from = (const char*)x;
        return {{from, from + 4 * stride, from + 8 * stride, from + 12 * stride}, stride, 3 * stride};
    }
    uint32_t pair(int row, int step) const {
        return read<uint32_t>(x[row / 4] + (row % 4 == 3 ? three : row % 4 * stride) + 4 * step);
    }
    void advance(long steps) {
        for (const char*& from : x) from += 4 * steps;
    }
};

template <class Pairs, int ROWS> void multiply(const Work& work) {
    Pairs pairs = Pairs::at(work.x, work.x_stride);
    const uint32_t *panel = work.panel, *fetch = work.fetch;
    __m512 low[ROWS], high[ROWS];
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++) {
        low[r] = work.is_first ? _mm512_setzero_ps() : _mm512_load_ps(work.sums + r * PANEL);
        high[r] = work.is_first ? _mm512_setzero_ps() : _mm512_load_ps(work.sums + r * PANEL + LINE);
    }
    if (work.is_last) {  // rows' outputs are far apart, so their cache lines are prefetched for writing
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; r++) __builtin_prefetch(work.out + r * work.out_stride, 1);
    }
    auto step = [&](int i) __attribute__((always_inline)) {
        const __m512bh first = (__m512bh)_mm512_load_si512(panel + i * PANEL);
        const __m512bh second = (__m512bh)_mm512_load_si512(panel + i * PANEL + LINE);
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; r++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)pairs.pair(r, i));
            low[r] = _mm512_dpbf16_ps(low[r], first, pair);
            high[r] = _mm512_dpbf16_ps(high[r], second, pair);
        }
    };
    long left = work.steps;
    for (const long rate = work.fetch_rate; left >= 4; left -= 4, pairs.advance(4), panel += 4 * PANEL) {
        if (work.is_near)
            for (long i = 0; i < rate; i++, fetch += LINE) _mm_prefetch(fetch, _MM_HINT_T0);
        else
            for (long i = 0; i < rate; i++, fetch += LINE) _mm_prefetch(fetch, _MM_HINT_T1);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) step(i);
    }
    for (; left > 0; left--, pairs.advance(1), panel += PANEL) step(0);
    if (!work.is_last) {
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; r++) {
            _mm512_store_ps(work.sums + r * PANEL, low[r]);
            _mm512_store_ps(work.sums + r * PANEL + LINE, high[r]);
        }
        return;
    }
    const Outputs outputs(work);
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++) outputs.write(r, low[r], high[r]);
}

using Multiply = decltype(&multiply<Plain, 1>);

template <class Pairs, int... I> constexpr std::array<Multiply, MOST_ROWS> for_rows(std::integer_sequence<int, I...>) {
    return {multiply<Pairs, I + 1>...};
}

// Functions for 1 to MOST_ROWS rows, at index rows - 1.
constexpr auto MULTIPLY_PLAIN = for_rows<Plain>(std::make_integer_sequence<int, MOST_ROWS>());
constexpr auto MULTIPLY_PACKED = for_rows<Packed>(std::make_integer_sequence<int, MOST_ROWS>());

struct Multiplier {
    void operator()(const Work& work, int rows) const {
        (work.is_packed ? MULTIPLY_PACKED : MULTIPLY_PLAIN)[rows - 1](work);
    }
};

}  // namespace quire
#endif
