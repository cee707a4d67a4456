// The small matrix products of attention, with vectors, and packing of their operands. See attention.h.
#pragma once

#include "pages.h"
#include "rows.h"
#include "units.h"
#include "vector.h"

#include <algorithm>
#include <type_traits>

namespace quire {

constexpr int SUMS = 8;  // of rows and columns of keys in place that are in registers at once
constexpr int COLUMNS = LANES == 16 ? 4 : 2;  // vectors of columns: BLOCK * COLUMNS accumulators

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
    for (int row = 0; row < ROWS; row++)
        for (int n = 0; n < N; n++)
            begin_sum(total[row][n], c + row * c_stride + n * LANES, keep ? keep + row : nullptr);
    for (long t = 0; t < steps; t++)
        for (int row = 0; row < ROWS; row++)
            for (int n = 0; n < N; n++)
                total[row][n] = add_product(total[row][n], a[row * a_stride + t], b + t * b_stride + n * LANES);
    for (int row = 0; row < ROWS; row++)
        for (int n = 0; n < N; n++)
            end_sum(total[row][n], c + row * c_stride + n * LANES, keep ? keep + row : nullptr);
}

template <int ROWS, class Unit, class Keep>
void multiply_rows(const Unit* a, long a_stride, const Unit* b, long b_stride, long steps, float* c, long c_stride,
                   long width, const Keep* keep) {
    long column = 0;
    for (; column + COLUMNS * LANES <= width; column += COLUMNS * LANES)
        multiply_block<ROWS, COLUMNS>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, keep);
    for (; column < width; column += LANES)
        multiply_block<ROWS, 1>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, keep);
}

// Calls body with `rows`, 1 to MOST, as a compile-time constant.
template <int MOST, class Body> inline void with_rows(long rows, Body body) {
    if constexpr (MOST > 1)
        if (rows < MOST) return with_rows<MOST - 1>(rows, body);
    body(std::integral_constant<int, MOST>());
}

// `width` is a multiple of LANES; `rows` at most BLOCK.
template <class Unit>
void multiply(NoRegisters, long rows, const Unit* a, long a_stride, const Unit* b, long b_stride, long steps, float* c,
              long c_stride, long width, const typename KeepOf<Unit>::type* keep) {
    with_rows<BLOCK>(rows, [&](auto constant) {
        multiply_rows<constant()>(a, a_stride, b, b_stride, steps, c, c_stride, width, keep);
    });
}

// Interleaves the elements of the lower, or UPPER, halves of a and b.
template <bool UPPER> inline Words interleave(Words a, Words b) {
    constexpr int S = UPPER ? LANES / 2 : 0, L = LANES;
#if defined(__clang__)
#define QUIRE_SHUFFLE(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define QUIRE_SHUFFLE(...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif
#if defined(QUIRE_HAS_AVX512)
    return QUIRE_SHUFFLE(S, S + L, S + 1, S + L + 1, S + 2, S + L + 2, S + 3, S + L + 3, S + 4, S + L + 4, S + 5,
                         S + L + 5, S + 6, S + L + 6, S + 7, S + L + 7);
#elif defined(__AVX__)
    return QUIRE_SHUFFLE(S, S + L, S + 1, S + L + 1, S + 2, S + L + 2, S + 3, S + L + 3);
#else
    return QUIRE_SHUFFLE(S, S + L, S + 1, S + L + 1);
#endif
#undef QUIRE_SHUFFLE
}

// Transposes LANES x LANES words: each round moves one bit of the row index to the column index.
inline void transpose(Words (&rows)[LANES]) {
#pragma GCC unroll 8
    for (int size = 1; size < LANES; size *= 2) {
        Words mixed[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = interleave<false>(rows[i], rows[i + LANES / 2]);
            mixed[2 * i + 1] = interleave<true>(rows[i], rows[i + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = mixed[i];
    }
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

// Loads LANES words of LANES keys, from element `first` and key `column` on, transposed: each vector has one word of
// all keys. WHOLE: no word is past head_dim.
template <class Unit, bool WHOLE, class Cache>
inline void take_keys(const Operands<Cache>& tile, long column, long first, Words (&block)[LANES]) {
    const auto [keys, values, count, head_dim, ahead] = tile;
    constexpr long WIDTH = WORDS_WIDTH<Unit, Cache>;
    const long whole = WHOLE ? first + WIDTH : head_dim, row = row_size<Cache>(head_dim);
    // Most often the keys are neighbours on a page.
    if (keys.are_neighbours[column / LANES]) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) block[i] = words_of<Unit>(keys[column] + i * row, first, whole);
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) block[i] = words_of<Unit>(keys[column + i], first, whole);
    }
    transpose(block);
}

// Packs keys as [units of head_dim][KEYS]. Columns are filled up to a multiple of LANES; the scores of the extra
// columns are not used.
template <class Unit, class Cache> void pack_keys(const Operands<Cache>& tile, Unit* packed) {
    constexpr long WIDTH = WORDS_WIDTH<Unit, Cache>, COUNT = UNITS_OF_WORD<Unit, Cache>;
    for (long column = 0; column < tile.count; column += LANES) {
        for (long first = 0; first < tile.head_dim; first += WIDTH) {
            tile.fetch_ahead(std::min<long>(LANES, tile.count - column), first, first + WIDTH);
            Words block[LANES];
            take_keys<Unit, false>(tile, column, first, block);
            Unit* to = packed + first / ELEMENTS<Unit> * KEYS + column;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                each_unit<Unit, Cache>(block[i], [&](Words unit, int n) {
                    std::memcpy(to + (i * COUNT + n) * KEYS, &unit, sizeof(unit));
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
            tile.fetch_ahead(std::min((long)LANES, tile.count - column - n * LANES), first, first + WIDTH);
            Words block[LANES];
            if (first + WIDTH <= head_dim) take_keys<Unit, true>(tile, column + n * LANES, first, block);
            else take_keys<Unit, false>(tile, column + n * LANES, first, block);
            uint32_t* to = scratch + (first / IN_WORD * N + n) * LANES;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) std::memcpy(to + i * N * LANES, &block[i], sizeof(block[i]));
        }
    Floats total[ROWS][N] = {};
    const long num_words = head_dim / IN_WORD;
    for (long i = 0; i < num_words; i++, queries += COUNT)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            each_unit<Unit, Cache>(read<Words>(scratch + (i * N + n) * LANES), [&](Words unit, int k) {
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; row++)
                    total[row][n] = add_product(total[row][n], queries[row * stride + k], unit);
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
            Cache padded[2][SPAN] = {};
            if (head_dim - d < SPAN)
                for (int k = 0; k < 2; k++) {
                    std::memcpy(padded[k], rows[k], elements<Cache>(head_dim - d) * sizeof(Cache));
                    rows[k] = padded[k];
                }
            const Two two = units_of(packed, rows[0], rows[1]);
            std::memcpy(packed + i / E * stride + d, &two, sizeof(two));
        }
    }
}

// out = keep * out + weights * values of a tile, for ROWS rows and N pieces of dimensions from `d` on.
template <int ROWS, int N, bool IS_HALF, class Unit, class Cache>
inline void multiply_values_block(const Unit* weights, long weights_stride, const Operands<Cache>& tile, long d,
                                  float* out, long out_stride, const float* keep) {
    const auto [keys, values, count, head_dim, ahead] = tile;
    using Values = InPlace<Unit, Cache>;
    constexpr long E = ELEMENTS<Unit>, FETCHED = 8, PIECE = Values::WIDTH * LANES;
    constexpr int VECTORS = N * Values::WIDTH;
    static const Cache zeros[N * PIECE] = {};
    Floats total[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; n++) total[row][n] = keep[row] * load(out + row * out_stride + n * LANES);
    for (long i = 0; i < count; i += E) {
        // For several values at once, because the call that finds the next page has the sums leave the registers.
        if (i % FETCHED == 0) tile.fetch_ahead(std::min(FETCHED, count - i), d, d + N * PIECE);
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
                for (int k = 0; k < Values::WIDTH; k++) {
                    Floats& sum = total[row][n * Values::WIDTH + k];
                    sum = add_product(sum, weight, units[k]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; n++) store(out + row * out_stride + n * LANES, total[row][n]);
}

// `multiply` by values that are not packed, for so few rows that packing does not pay. head_dim is a multiple of SPAN.
template <int ROWS, class Unit, class Cache>
void multiply_values(NoRegisters, const Unit* weights, long weights_stride, const Operands<Cache>& tile, float* out,
                     long out_stride, const float* keep, Unit*) {
    constexpr int WIDTH = InPlace<Unit, Cache>::WIDTH, N = std::max(1, COLUMNS * (ROWS <= BLOCK / 2 ? 2 : 1) / WIDTH);
    constexpr long PIECE = WIDTH * LANES;
    const auto add = [&](auto pieces, auto is_half, long d) {
        multiply_values_block<ROWS, pieces(), is_half()>(weights, weights_stride, tile, d, out + d, out_stride, keep);
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
