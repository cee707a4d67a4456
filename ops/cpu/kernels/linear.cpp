// Linear layers in bfloat16: x [rows, in] times weight [out, in], whose sums are float32, on processors with AVX512-BF16.
//
// A weight lies in panels of 32 outputs: [panel][step][32] pairs, one step being two neighbouring inputs, so that one
// instruction takes a pair of x times 16 pairs of the panel. Up to 14 rows make a tile; its 28 vectors of sums stay in
// registers while the panel passes by. Few rows are bound by memory, so while a panel serves one tile after another, the
// next is fetched into the cache. Many rows are bound by arithmetic: several panels take turns on each tile then, which
// keeps both in cache and writes a row's outputs side by side.
//
// Each output is one chain of sums over the steps, in order, whatever the tile: a row's result does not depend on how
// many rows there are, nor on the number of threads.
//
// In a gated layer (arXiv:2002.05202) a panel holds gates in its lower half and what they are for in its upper: silu and
// product happen where the sums are, and only their result is written.

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <utility>

// Processors with AMX multiply faster in it than here.
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(__AMX_BF16__)
#define QUIRE_HAS_PANELS 1
#endif

namespace quire {

// The ctypes structure of the same name in panels.py.
struct LinearCall {
    const BFloat16 *x, *panels, *bias;  // x's rows are x_stride apart; bias may be null
    BFloat16* out;                      // [rows, out_features, or half as many if gated], dense
    int64_t rows, x_stride, in_features, out_features, is_gated, num_threads;
};

#if defined(QUIRE_HAS_PANELS)
namespace {

constexpr long PANEL = 32;              // outputs
constexpr long LINE = 16;               // pairs in a cache line
constexpr int MOST_ROWS = 14;           // of a tile: with two weights and one x, all 32 registers
constexpr long MOST_TILES = 72;         // read while a panel is in cache
constexpr long MOST_STEPS = 1536;       // of a panel at once: 192 KB
constexpr long GROUP_PAIRS = 96 << 10;  // of panels that take turns: 384 KB
constexpr long MOST_PANELS = 8;         // that a thread takes at once
constexpr int FEW_TILES = 8;            // up to here one panel at a time measures best

inline long ceil_div(long value, long by) { return (value + by - 1) / by; }

// A gated layer's panel has 16 gates and the 16 other outputs that they are for.
inline long count_panels(long out_features, bool is_gated) {
    return is_gated ? ceil_div(out_features / 2, PANEL / 2) : ceil_div(out_features, PANEL);
}

// Rows in tiles of nearly the same size.
struct Tiling {
    long rows;
    int count;
    explicit Tiling(long rows) : rows(rows), count((int)ceil_div(rows, MOST_ROWS)) {}
    long start(int tile) const { return tile * (rows / count) + std::min<long>(tile, rows % count); }
    int size(int tile) const { return (int)(rows / count + (tile < rows % count)); }
};

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

// Up to 16 rows of `size` → pairs: to[step * to_stride + row], zero for rows past `count` and inputs past `size`.
void interleave(const BFloat16* from, long stride, long count, long size, uint32_t* to, long to_stride) {
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
        const long steps = std::min(LINE, ceil_div(left, 2));
        for (long i = 0; i < steps; i++) _mm512_store_si512(to + (first / 2 + i) * to_stride, row[i]);
    }
}

// A tile's x in pairs: as packed, [step][16 rows].
struct Packed {
    const uint32_t* x;
    static Packed at(const void* x, long) { return {(const uint32_t*)x}; }
    uint32_t pair(int row, int step) const { return x[step * LINE + row]; }
    void advance(long steps) { x += steps * LINE; }
};

// Or as it came: [row][step], rows `stride` bytes apart.
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

inline Floats load_all(__m256bh from) {
    return bits_as<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)from), 16));
}

inline Floats load_some(const BFloat16* from, __mmask16 mask) {
    return load_all((__m256bh)_mm256_maskz_loadu_epi16(mask, from));
}

// A tile's rows times one panel, or a part of its steps.
struct Work {
    const void* x;
    long x_stride;  // bytes
    const uint32_t* panel;
    long steps;
    const uint32_t* fetch;  // cache lines to fetch meanwhile, so many every four steps
    long fetch_rate;
    float* sums;  // [rows][32]: read unless this is the first part, written unless it is the last
    bool is_first, is_last;
    BFloat16* out;  // the last part adds the bias, if any, and writes `count` outputs of each row
    long out_stride;
    const BFloat16 *low_bias, *high_bias;  // of either half of the panel, or null
    long count;
    bool is_gated;
};

// silu(low) * high, both rounded first: what `quire_silu_and_mul` makes of the outputs.
inline __m256i gate(__m512 low, __m512 high) {
    const Floats g = load_all(_mm512_cvtneps_pbh(low)), up = load_all(_mm512_cvtneps_pbh(high));
    return (__m256i)_mm512_cvtneps_pbh((__m512)(silu(g) * up));
}

template <class Pairs, int ROWS> void multiply(const Work& work) {
    Pairs pairs = Pairs::at(work.x, work.x_stride);
    const uint32_t *panel = work.panel, *fetch = work.fetch;
    __m512 low[ROWS], high[ROWS];
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++) {
        low[r] = work.is_first ? _mm512_setzero_ps() : _mm512_load_ps(work.sums + r * PANEL);
        high[r] = work.is_first ? _mm512_setzero_ps() : _mm512_load_ps(work.sums + r * PANEL + LINE);
    }
    if (work.is_last) {  // a row's outputs are far from the next one's: memory is told early where they will go
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
    const __mmask32 mask = work.count >= PANEL ? ~0u : (1u << work.count) - 1;
    if (work.low_bias) {
        const __m512 low_bias = (__m512)load_some(work.low_bias, (__mmask16)mask);
        const __m512 high_bias = (__m512)load_some(work.high_bias, (__mmask16)(work.is_gated ? mask : mask >> 16));
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; r++) low[r] += low_bias, high[r] += high_bias;
    }
    if (work.is_gated) {
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; r++)
            _mm256_mask_storeu_epi16(work.out + r * work.out_stride, (__mmask16)mask, gate(low[r], high[r]));
        return;
    }
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++)
        _mm512_mask_storeu_epi16(work.out + r * work.out_stride, mask, (__m512i)_mm512_cvtne2ps_pbh(high[r], low[r]));
}

using Multiply = decltype(&multiply<Plain, 1>);

template <class Pairs, int... I> constexpr std::array<Multiply, MOST_ROWS> for_rows(std::integer_sequence<int, I...>) {
    return {multiply<Pairs, I + 1>...};
}

// By rows - 1.
constexpr auto MULTIPLY_PLAIN = for_rows<Plain>(std::make_integer_sequence<int, MOST_ROWS>());
constexpr auto MULTIPLY_PACKED = for_rows<Packed>(std::make_integer_sequence<int, MOST_ROWS>());

// Panels `first` to `end`, taken by one thread: many at first, one at a time when few are left.
struct Span {
    long first, end;
};

Span take(std::atomic<long>& taken, long num_panels, long most, long num_threads) {
    long first = taken.load(), count;
    do {
        if (first >= num_panels) return {num_panels, num_panels};
        count = std::clamp((num_panels - first) / (2 * num_threads), 1L, most);
    } while (!taken.compare_exchange_weak(first, first + count));
    return {first, first + count};
}

// Some of a call's rows, from first_row on. Their x is packed [tile][step][16 rows] if `packed` is given.
struct Block {
    const LinearCall& call;
    long first_row;
    const uint32_t* packed;
    Tiling tiles;
    long steps, num_panels;

    const uint32_t* panel(long index, long step) const {
        return reinterpret_cast<const uint32_t*>(call.panels) + (index * steps + step) * PANEL;
    }

    long group_size() const {
        if (tiles.count <= FEW_TILES || steps > MOST_STEPS) return 1;
        return std::clamp(GROUP_PAIRS / (steps * PANEL), 1L, MOST_PANELS);
    }

    // All rows' outputs of panels [first, end); panels from `next` on come afterwards.
    void compute(long first, long end, long next, float* sums) const {
        const long num_outputs = call.out_features / (call.is_gated ? 2 : 1), width = call.is_gated ? LINE : PANEL;
        for (long step = 0; step < steps; step += MOST_STEPS) {
            const long count = std::min(MOST_STEPS, steps - step), after = step + count;
            const bool is_last = after == steps;
            const long lines = 2 * std::min(MOST_STEPS, is_last ? steps : steps - after);  // of what comes afterwards
            const long share = ceil_div(lines, tiles.count), rate = ceil_div(share, std::max(1L, count / 4));
            for (int tile = 0; tile < tiles.count; tile++)
                for (long index = first; index < end; index++) {
                    const long later = is_last ? next + index - first : index;
                    const bool is_any_left = later < num_panels && tile * share < lines;
                    const long row = tiles.start(tile), column = index * width;
                    const Work work{
                        packed ? (const void*)(packed + (tile * steps + step) * LINE)
                               : call.x + (first_row + row) * call.x_stride + 2 * step,
                        call.x_stride * (long)sizeof(BFloat16), panel(index, step), count,
                        is_any_left ? panel(later, is_last ? 0 : after) + tile * share * LINE : nullptr,
                        is_any_left ? rate : 0, sums + row * PANEL, step == 0, is_last,
                        call.out + (first_row + row) * num_outputs + column, num_outputs,
                        call.bias ? call.bias + column : nullptr,
                        call.bias ? call.bias + column + (call.is_gated ? num_outputs : LINE) : nullptr,
                        num_outputs - column, (bool)call.is_gated,
                    };
                    (packed ? MULTIPLY_PACKED : MULTIPLY_PLAIN)[tiles.size(tile) - 1](work);
                }
        }
    }

    void compute_all(std::atomic<long>& taken) const {
        alignas(64) float sums[MOST_TILES * MOST_ROWS * PANEL];
        const long group = group_size(), most = group > 1 ? group : MOST_PANELS;
        Span span = take(taken, num_panels, most, call.num_threads);
        while (span.first < span.end) {
            const Span following = take(taken, num_panels, most, call.num_threads);
            for (long first = span.first; first < span.end; first += group) {
                const long end = std::min(first + group, span.end);
                compute(first, end, end < span.end ? end : following.first, sums);
            }
            span = following;
        }
    }
};

// Whether x is read where it is: for few rows or few outputs packing does not pay. Never where the last pair is half a
// pair, nor where most rows of a tile compete for one set of the first cache.
bool is_read_in_place(const LinearCall& call) {
    if (call.in_features % 2) return false;
    return call.rows <= 8 || (call.out_features <= 2048 && call.x_stride * sizeof(BFloat16) % 4096);
}

int linear(const LinearCall& call) {
    const long steps = ceil_div(call.in_features, 2);
    const long num_panels = count_panels(call.out_features, call.is_gated);
    const long num_blocks = ceil_div(call.rows, MOST_TILES * MOST_ROWS);
    const long num_tiles = std::min(ceil_div(call.rows, MOST_ROWS), MOST_TILES);
    std::unique_ptr<uint32_t, decltype(&std::free)> packed(nullptr, &std::free);
    if (!is_read_in_place(call)) {
        packed.reset((uint32_t*)std::aligned_alloc(64, std::max(1L, num_tiles * steps) * 64));
        if (!packed) return 2;
    }
    for (long i = 0, first = 0; i < num_blocks; i++) {
        const Tiling tiles(call.rows / num_blocks + (i < call.rows % num_blocks));
        const Block block{call, first, packed.get(), tiles, steps, num_panels};
        std::atomic<long> taken{0};
        if (packed)
            for_each(tiles.count, call.num_threads, [&](long tile) {
                interleave(call.x + (first + tiles.start(tile)) * call.x_stride, call.x_stride, tiles.size(tile),
                           call.in_features, packed.get() + tile * steps * LINE, LINE);
            });
        in_team(call.num_threads, [&] { block.compute_all(taken); });
        first += tiles.rows;
    }
    return 0;
}

}  // namespace
#endif
}  // namespace quire

using namespace quire;

// Elements of a packed weight; 0 if this machine's build has no code for it.
extern "C" long quire_panels_size(long out_features, long in_features, long is_gated) {
#if defined(QUIRE_HAS_PANELS)
    return count_panels(out_features, is_gated) * PANEL * round_up(in_features, 2);
#else
    return 0;
#endif
}

// weight [out, in], rows `stride` apart, [gates | others] if gated → panels, 64-byte aligned.
extern "C" int quire_pack_panels(
    const BFloat16* weight, uint32_t* panels, long out_features, long in_features, long stride, long is_gated,
    long num_threads) {
#if defined(QUIRE_HAS_PANELS)
    const long steps = ceil_div(in_features, 2), half = PANEL / 2;
    for_each(2 * count_panels(out_features, is_gated), num_threads, [=](long i) {
        const long first = is_gated ? i % 2 * (out_features / 2) + i / 2 * half : i * half;
        const long end = is_gated && i % 2 == 0 ? out_features / 2 : out_features;
        interleave(weight + first * stride, stride, std::clamp(end - first, 0L, half), in_features,
                   panels + i / 2 * steps * PANEL + i % 2 * half, PANEL);
    });
    return 0;
#else
    return 1;
#endif
}

// 0; 1 if this machine's build has no code for it; 2 if there is no memory.
extern "C" int quire_linear(const LinearCall* call) {
#if defined(QUIRE_HAS_PANELS)
    return linear(*call);
#else
    return 1;
#endif
}
