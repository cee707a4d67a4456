// The small matrix products of attention, with vectors, and packing of their operands. See attention.h.
#pragma once

#include "pages.h"
#include "rows.h"
#include "units.h"
#include "vector.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace quire {

constexpr int SUMS = 8;  // of rows and columns of keys in place that are in registers at once
constexpr int COLUMNS = LANES == 16 ? 4 : 2;  // vectors of columns: BLOCK * COLUMNS accumulators

// Bytes of keys, and values, that are fetched at once: few where memory is the limit, many where instructions are.
template <class Cache> constexpr long AT_ONCE = IS_CODED<Cache> ? 2048 : 512;
template <class Cache> constexpr long values_at_once(long size) {  // of a row of `size` elements
    return std::max<long>(8, AT_ONCE<Cache> / (elements<Cache>(size) * (long)sizeof(Cache)));
}

struct NoRegisters {};

template <class Unit> struct KeepOf { using type = float; };  // what becomes of a row's sums so far
template <class Unit> struct SumOf { using type = Floats; };  // of products

inline Floats add_product(Floats total, float a, const float* b) { return multiply_add(fill(a), load(b), total); }
inline Floats add_product(Floats total, float a, Words b) {
    return multiply_add(fill(a), bits_as<Floats>(b), total);
}

#if defined(QUIRE_HAS_AVX512_BF16)
inline Floats add_product(Floats total, Pair a, const Pair* b) {
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(a.bits), (__m512bh)read<__m512i>(b));
}

inline Floats add_product(Floats total, Pair a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(a.bits), (__m512bh)b);
}
#endif

inline void begin_sum(Floats& total, const float* c, const float* keep) { total = keep ? *keep * load(c) : Floats{}; }
inline void end_sum(Floats total, float* c, const float*) { store(c, total); }

// c[row][column] = keep[row] * c[row][column] + sum over t of a[row][t] * b[t][column], for ROWS rows and N vectors of
// columns. If `keep` is null, c is overwritten.
template <int ROWS, int N, class Unit, class Keep>
inline void multiply_block(
    const Unit* a, long a_stride, const Unit* b, long b_stride, long steps, float* c, long c_stride,
    const Keep* keep) {
    typename SumOf<Unit>::type total[ROWS][N];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            begin_sum(total[row][n], c + row * c_stride + n * LANES, keep ? keep + row : nullptr);
    for (long t = 0; t < steps; t++)
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++)
                total[row][n] = add_product(total[row][n], a[row * a_stride + t], b + t * b_stride + n * LANES);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            end_sum(total[row][n], c + row * c_stride + n * LANES, keep ? keep + row : nullptr);
}

// Calls body with `rows`, 1 to MOST, as a compile-time constant.
template <int MOST, class Body> inline void with_rows(long rows, Body body) {
    if constexpr (MOST > 1)
        if (rows < MOST) return with_rows<MOST - 1>(rows, body);
    body(std::integral_constant<int, MOST>());
}

template <int ROWS, class Unit, class Keep>
void multiply_rows(const Unit* a, long a_stride, const Unit* b, long b_stride, long steps, float* c, long c_stride,
                   long width, const Keep* keep) {
    long column = 0;
    for (; column + COLUMNS * LANES <= width; column += COLUMNS * LANES)
        multiply_block<ROWS, COLUMNS>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, keep);
    if (column == width) return;
    // All that are left at once, because a sum waits for the one before.
    with_rows<COLUMNS - 1>((width - column) / LANES, [&](auto constant) {
        multiply_block<ROWS, constant()>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, keep);
    });
}

// `width` is a multiple of LANES; `rows` at most BLOCK.
template <class Unit>
void multiply(NoRegisters, long rows, const Unit* a, long a_stride, const Unit* b, long b_stride, long steps, float* c,
              long c_stride, long width, const typename KeepOf<Unit>::type* keep) {
    with_rows<BLOCK>(rows, [&](auto constant) {
        multiply_rows<constant()>(a, a_stride, b, b_stride, steps, c, c_stride, width, keep);
    });
}

// A vector whose lane i is lane `of(i)` of a, or from LANES on of b.
template <class Of, int... I> inline Words pick_lanes(Words a, Words b, Of of, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, of(I)...);
#else
    return __builtin_shuffle(a, b, (Ints){of(I)...});
#endif
}

template <class Of> inline Words pick_lanes(Words a, Words b, Of of) {
    return pick_lanes(a, b, of, std::make_integer_sequence<int, LANES>());
}

// The lower, or UPPER, words of each 128 bits of a and b in turns.
template <bool UPPER> inline Words interleave_words(Words a, Words b) {
    return pick_lanes(a, b, [](int i) { return i / 4 * 4 + 2 * UPPER + i % 4 / 2 + i % 2 * LANES; });
}

// The even, or ODD, 128 bits of a and then of b.
template <bool ODD> inline Words take_blocks(Words a, Words b) {
    return pick_lanes(a, b, [](int i) { return (i / 4 * 2 + ODD) * 4 + i % 4; });
}

// Exchanges a bit of the index of rows of words for one of the index of columns. Of the latter the lowest two bits are
// within 128 bits, where words are moved faster.
template <int BIT> inline void exchange(Words (&rows)[LANES]) {
    each<LANES>([&](auto constant) {
        constexpr int i = constant();
        if constexpr (!(i & BIT)) {
            const Words a = rows[i], b = rows[i + BIT];
            rows[i] = BIT < 4 ? interleave_words<false>(a, b) : take_blocks<false>(a, b);
            rows[i + BIT] = BIT < 4 ? interleave_words<true>(a, b) : take_blocks<true>(a, b);
        }
    });
}

// Transposes LANES x LANES words.
inline void transpose(Words (&rows)[LANES]) {
    exchange<2>(rows), exchange<1>(rows);
    if constexpr (LANES > 4) exchange<4>(rows);
    if constexpr (LANES > 8) exchange<8>(rows);
}

template <class Unit> constexpr int ROWS_AT_ONCE = BLOCK;   // most rows of `multiply`
template <class Unit> constexpr int ROWS_IN_PLACE = BLOCK;  // most rows of `multiply_keys` and `multiply_values`
template <class Unit> constexpr int KEYS_AT_ONCE = LANES;   // keys whose weights are multiplied by values at once
template <class Unit> constexpr bool QUERIES_IN_COLUMNS = false;  // the layout of queries for `multiply_keys`
template <class Unit> struct RegistersOf { using type = NoRegisters; };

// One head's keys, or values, of a tile: rows in their pages.
template <class Cache> struct Rows {
    const Cache* head;  // on page 0
    const long* offsets;
    const bool* are_neighbours;  // see Tile
    const Cache* operator[](long i) const { return head + offsets[i]; }
};

// One head's keys and values of a tile, and the prefetcher of the pages after them.
template <class Cache> struct Operands {
    Rows<Cache> keys, values;
    long count, head_dim;
    Ahead<Cache>* ahead;

    // To be called when elements [first, last) of `rows` rows are read; prefetches as much.
    __attribute__((always_inline)) void fetch_ahead(long rows, long first, long last) const {
        const long end = last < head_dim ? elements<Cache>(last) : row_size<Cache>(head_dim);
        ahead->advance(rows * (end - elements<Cache>(first)) * (long)sizeof(Cache));
    }
};

// Elements of a key in LANES words of it.
template <class Unit, class Cache> constexpr long WORDS_WIDTH = LANES * UNITS_OF_WORD<Unit, Cache> * ELEMENTS<Unit>;

// Loads LANES words of LANES keys, from element `first` and key `column` on, and calls put(i, words) with word i of all
// keys. WHOLE: no word is past head_dim.
template <class Unit, bool WHOLE, class Cache, class Put>
__attribute__((always_inline)) inline void take_keys(const Operands<Cache>& tile, long column, long first, Put put) {
    constexpr long FETCHED = std::max(WORDS_WIDTH<Unit, Cache>, AT_ONCE<Cache> / (LANES * (long)sizeof(Cache)));
    if (first % FETCHED == 0) tile.fetch_ahead(std::min<long>(LANES, tile.count - column), first, first + FETCHED);
    const long whole = WHOLE ? first + WORDS_WIDTH<Unit, Cache> : tile.head_dim;
    Words block[LANES];
    each<LANES>([&](auto i) { block[i] = words_of<Unit>(tile.keys[column + i], first, whole); });
    transpose(block);
    each<LANES>([&](auto i) { put(i, block[i]); });
}

// Packs keys as [units of head_dim][KEYS]. Columns are filled up to a multiple of LANES; the scores of the extra
// columns are not used.
template <class Unit, class Cache> void pack_keys(const Operands<Cache>& tile, Unit* packed) {
    constexpr long WIDTH = WORDS_WIDTH<Unit, Cache>, COUNT = UNITS_OF_WORD<Unit, Cache>;
    for (long column = 0; column < tile.count; column += LANES) {
        for (long first = 0; first < tile.head_dim; first += WIDTH) {
            Unit* to = packed + first / ELEMENTS<Unit> * KEYS + column;
            take_keys<Unit, false>(tile, column, first, [&](int i, Words words) {
                each<UNITS_OF_WORD<Unit, Cache>>([&](auto n) {
                    const Words unit = unit_at<Unit, Cache, n()>(words);
                    std::memcpy(to + (i * COUNT + n) * KEYS, &unit, sizeof(unit));
                });
            });
        }
    }
}

// Scores of N * LANES keys, from `column` on, for ROWS rows. `scratch` takes their words, [words of head_dim][N *
// LANES].
template <int ROWS, int N, class Unit, class Cache>
inline void multiply_columns(const Unit* queries, long stride, const Operands<Cache>& tile, long column,
                             float* scores, uint32_t* scratch) {
    constexpr long WIDTH = WORDS_WIDTH<Unit, Cache>, COUNT = UNITS_OF_WORD<Unit, Cache>;
    constexpr long IN_WORD = COUNT * ELEMENTS<Unit>;
    const long head_dim = tile.head_dim;
    for (long n = 0; n < N; n++)
        for (long first = 0; first < head_dim; first += WIDTH) {
            uint32_t* to = scratch + (first / IN_WORD * N + n) * LANES;
            const auto put = [&](int i, Words words) { std::memcpy(to + i * N * LANES, &words, sizeof(words)); };
            if (first + WIDTH <= head_dim) take_keys<Unit, true>(tile, column + n * LANES, first, put);
            else take_keys<Unit, false>(tile, column + n * LANES, first, put);
        }
    Floats total[ROWS][N] = {};
    const long num_words = head_dim / IN_WORD;
    for (long i = 0; i < num_words; i++, queries += COUNT)
        each<UNITS_OF_WORD<Unit, Cache>>([&](auto k) {
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                const Words unit = unit_at<Unit, Cache, k()>(read<Words>(scratch + (i * N + n) * LANES));
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; row++)
                    total[row][n] = add_product(total[row][n], queries[row * stride + k], unit);
            }
        });
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(scores + row * KEYS + column + n * LANES, total[row][n]);
}

// The same for all keys from `column` on, at most N columns at a time.
template <int ROWS, int N, class Unit, class Cache>
void multiply_columns_to(const Unit* queries, long stride, const Operands<Cache>& tile, long column,
                         float* scores, uint32_t* scratch) {
    for (; column + (N - 1) * LANES < tile.count; column += N * LANES)
        multiply_columns<ROWS, N>(queries, stride, tile, column, scores, scratch);
    if constexpr (N > 1) multiply_columns_to<ROWS, N / 2>(queries, stride, tile, column, scores, scratch);
}

// `multiply` by the tile's keys, which are not packed. A sum waits for the one before, so several columns of keys take
// turns. head_dim is a multiple of SPAN.
template <int ROWS, class Unit, class Cache>
void multiply_keys(NoRegisters, const Unit* queries, long stride, const Operands<Cache>& tile, float* scores,
                   Unit* scratch) {
    constexpr int N = std::min(KEYS / LANES, SUMS / (ROWS == 3 ? 4 : ROWS));
    multiply_columns_to<ROWS, N>(queries, stride, tile, 0, scores, reinterpret_cast<uint32_t*>(scratch));
}

// Packs values as [units of count][stride], with zeros past `head_dim` and past the last value.
template <class Unit, class Cache> void pack_values(const Operands<Cache>& tile, Unit* packed, long stride) {
    const auto [keys, values, count, head_dim, ahead] = tile;
    constexpr long E = ELEMENTS<Unit>;
    static const Cache zeros[SPAN] = {};
    for (long i = 0; i < count; i += E) {
        tile.fetch_ahead(E, 0, head_dim);
        for (long d = 0; d < head_dim; d += SPAN) {
            const Cache* rows[2] = {at(values[i], d), i + 1 < count ? at(values[i + E - 1], d) : zeros};
            Cache padded[2][SPAN];
            if (head_dim - d < SPAN)
                for (int k = 0; k < 2; k++) {
                    std::memset(padded[k], 0, sizeof(padded[k]));
                    std::memcpy(padded[k], rows[k], elements<Cache>(head_dim - d) * sizeof(Cache));
                    rows[k] = padded[k];
                }
            const Two two = units_of(packed, rows[0], rows[1]);
            Unit* to = packed + i / E * stride + d;  // one vector at a time, because GCC copies two through memory
            std::memcpy(to, &two.lower, sizeof(two.lower));
            std::memcpy(to + LANES, &two.upper, sizeof(two.upper));
        }
    }
}

// out = keep * out + weights * values of a tile, for ROWS rows and N pieces of dimensions from `d` on, of each piece TAKEN
// vectors from the FIRST on.
template <int ROWS, int N, int FIRST, int TAKEN, bool IS_HALF, class Unit, class Cache>
inline void multiply_values_block(const Unit* weights, long weights_stride, const Operands<Cache>& tile, long d,
                                  float* out, long out_stride, const float* keep) {
    const auto [keys, values, count, head_dim, ahead] = tile;
    using Values = InPlace<Unit, Cache>;
    constexpr long E = ELEMENTS<Unit>, PIECE = Values::WIDTH * LANES;
    constexpr long FETCHED = values_at_once<Cache>(N * PIECE);
    constexpr int VECTORS = N * TAKEN;
    static const Cache zeros[N * PIECE] = {};
    Floats total[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; n++) total[row][n] = keep[row] * load(out + row * out_stride + (FIRST + n) * LANES);
    for (long i = 0; i < count; i += E) {
        // For several values at once, because the call that finds the next page has the sums leave the registers.
        if (FIRST == 0 && i % FETCHED == 0) tile.fetch_ahead(std::min(FETCHED, count - i), d, d + N * PIECE);
        const Cache* first = at(values[i], d);
        const Cache* second = i + 1 < count ? at(values[i + E - 1], d) : zeros;
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            Words units[Values::WIDTH];
            Values::template take<IS_HALF>(at(first, n * PIECE), at(second, n * PIECE), units);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) {
                const Unit weight = weights[row * weights_stride + i / E];
#pragma GCC unroll 4
                for (int k = 0; k < TAKEN; k++) {
                    Floats& sum = total[row][n * TAKEN + k];
                    sum = add_product(sum, weight, units[FIRST + k]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; n++) store(out + row * out_stride + (FIRST + n) * LANES, total[row][n]);
}

// `multiply` by values that are not packed, for so few rows that packing does not pay. head_dim is a multiple of SPAN.
template <int ROWS, class Unit, class Cache>
void multiply_values(NoRegisters, const Unit* weights, long weights_stride, const Operands<Cache>& tile, float* out,
                     long out_stride, const float* keep, Unit*) {
    constexpr int WIDTH = InPlace<Unit, Cache>::WIDTH, N = std::max(1, COLUMNS * (ROWS <= BLOCK / 2 ? 2 : 1) / WIDTH);
    constexpr int TAKEN = std::min(WIDTH, BLOCK * COLUMNS / (ROWS == 3 ? 4 : ROWS));
    constexpr long PIECE = WIDTH * LANES;
    const auto add = [&](auto pieces, auto is_half, long d) {
        each<WIDTH / TAKEN>([&](auto part) {
            multiply_values_block<ROWS, pieces(), part() * TAKEN, TAKEN, is_half()>(weights, weights_stride, tile, d, out + d,
                                                                                   out_stride, keep);
        });
    };
    long d = 0;
    for (; d + N * PIECE <= tile.head_dim; d += N * PIECE) add(std::integral_constant<int, N>(), std::false_type(), d);
    if constexpr (N > 2)
        for (; d + 2 * PIECE <= tile.head_dim; d += 2 * PIECE)
            add(std::integral_constant<int, 2>(), std::false_type(), d);
    for (; d + PIECE <= tile.head_dim; d += PIECE) add(std::integral_constant<int, 1>(), std::false_type(), d);
    if constexpr (PIECE > SPAN)
        if (d < tile.head_dim) add(std::integral_constant<int, 1>(), std::true_type(), d);
}

}  // namespace quire
