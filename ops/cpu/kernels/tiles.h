// The small matrix products of attention, with vectors, and packing of their operands. See attention.h.
#pragma once

#include "pages.h"
#include "rows.h"
#include "vector.h"

#include <algorithm>
#include <type_traits>

namespace quire {

constexpr int COLUMNS = LANES == 16 ? 4 : 2;  // vectors of columns: BLOCK * COLUMNS accumulators

struct NoRegisters {};

template <class Unit> struct KeepOf { using type = float; };  // what becomes of a row's sums so far
template <class Unit> struct SumOf { using type = Floats; };  // of products

struct Pair { uint32_t bits; };  // two bfloat16: an even index in the lower half, the next index in the upper half

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

// Loads LANES units of a key from its element `first` on, with zeros past `head_dim`.
template <class Cache> inline Words units(const float*, const Cache* key, long first, long head_dim) {
    return bits_as<Words>(load(at(key, first), head_dim - first));
}

inline Words units(const Pair*, const BFloat16* key, long first, long head_dim) {
    if (head_dim - first >= 2 * LANES) return read<Words>(key + first);
    BFloat16 padded[2 * LANES] = {};
    std::memcpy(padded, key + first, (head_dim - first) * sizeof(BFloat16));
    return read<Words>(padded);
}

#if defined(QUIRE_HAS_AVX512_BF16)
// 2 * LANES codes as bfloat16, exactly; what is below the normal numbers of the codes' type becomes 0.
template <int EXPONENT> inline Words widen(const Float8Code<EXPONENT>* from) {
    constexpr int MANTISSA = 7 - EXPONENT, BIAS = (1 << (EXPONENT - 1)) - 1, SHIFT = 7 - MANTISSA;
    const __m512i codes = _mm512_cvtepi8_epi16(read<__m256i>(from));
    const __mmask32 normal = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x80 - (1 << MANTISSA)));
    const __m512i mask = _mm512_set1_epi16((short)(0x8000 | 0x7f << SHIFT));
    const __m512i bits = _mm512_and_si512(_mm512_slli_epi16(codes, SHIFT), mask);
    return (Words)_mm512_maskz_add_epi16(normal, bits, _mm512_set1_epi16((127 - BIAS) << 7));
}

template <int EXPONENT>
inline Words units(const Pair*, const Float8Code<EXPONENT>* key, long first, long head_dim) {
    if (head_dim - first >= 2 * LANES) return widen(key + first);
    Float8Code<EXPONENT> padded[2 * LANES] = {};
    std::memcpy(padded, key + first, head_dim - first);
    return widen(padded);
}
#endif

template <class Unit> constexpr int ELEMENTS = 1;  // elements of a unit
template <> constexpr int ELEMENTS<Pair> = 2;
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

// Loads LANES units of LANES keys, from element `first` and key `column` on, transposed: each vector has one unit of
// all keys. WHOLE: no unit is past head_dim.
template <class Unit, bool WHOLE, class Cache>
inline void take_keys(const Operands<Cache>& tile, long column, long first, Words (&block)[LANES]) {
    const auto [keys, values, count, head_dim, ahead] = tile;
    constexpr const Unit* unit = nullptr;
    constexpr long WIDTH = LANES * ELEMENTS<Unit>;
    const long whole = WHOLE ? first + WIDTH : head_dim, row = row_size<Cache>(head_dim);
    // Most often the keys are neighbours on a page.
    if (keys.are_neighbours[column / LANES]) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) block[i] = units(unit, keys[column] + i * row, first, whole);
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) block[i] = units(unit, keys[column + i], first, whole);
    }
    tile.fetch_ahead(std::min<long>(LANES, count - column), first, first + WIDTH);
    transpose(block);
}

// Packs keys as [units of head_dim][KEYS]. Columns are filled up to a multiple of LANES; the scores of the extra
// columns are not used.
template <class Unit, class Cache> void pack_keys(const Operands<Cache>& tile, Unit* packed) {
    constexpr long WIDTH = LANES * ELEMENTS<Unit>;
    for (long column = 0; column < tile.count; column += LANES) {
        for (long first = 0; first < tile.head_dim; first += WIDTH) {
            Words block[LANES];
            take_keys<Unit, false>(tile, column, first, block);
            Unit* to = packed + first / ELEMENTS<Unit> * KEYS + column;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) std::memcpy(to + i * KEYS, &block[i], sizeof(block[i]));
        }
    }
}

// `multiply` by keys [begin, end) of the tile that are not packed: each block is transposed and used in registers. For
// few rows that is faster than to store packed blocks and load them again. head_dim is a multiple of SPAN.
template <int ROWS, class Unit, class Cache>
void multiply_keys(NoRegisters, const Unit* queries, long stride, const Operands<Cache>& tile, long begin, long end,
                   float* scores, Unit*) {
    const long head_dim = tile.head_dim;
    constexpr long WIDTH = LANES * ELEMENTS<Unit>;
    for (long column = begin; column < end; column += LANES) {
        Floats total[ROWS] = {};
        for (long first = 0; first < head_dim; first += WIDTH) {
            Words block[LANES];
            take_keys<Unit, true>(tile, column, first, block);
            const Unit* query = queries + first / ELEMENTS<Unit>;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; row++)
                    total[row] = add_product(total[row], query[row * stride + i], block[i]);
        }
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) store(scores + row * KEYS + column, total[row]);
    }
}

struct Two { Words lower, upper; };

template <class Cache> inline Two units_of(const float*, const Cache* value, const Cache*) {
    return {bits_as<Words>(load(value)), bits_as<Words>(load(at(value, LANES)))};
}

#if defined(QUIRE_HAS_AVX512_BF16)
inline Two in_pairs(__m512i a, __m512i b) {
    typedef uint16_t Elements __attribute__((vector_size(64)));
    constexpr Elements lower = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    return {(Words)_mm512_permutex2var_epi16(a, (__m512i)lower, b),
            (Words)_mm512_permutex2var_epi16(a, (__m512i)(lower + 16), b)};
}

inline Two units_of(const Pair*, const BFloat16* even, const BFloat16* odd) {
    return in_pairs(read<__m512i>(even), read<__m512i>(odd));
}

template <int EXPONENT>
inline Two units_of(const Pair*, const Float8Code<EXPONENT>* even, const Float8Code<EXPONENT>* odd) {
    return in_pairs((__m512i)widen(even), (__m512i)widen(odd));
}
#endif

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

// out = keep * out + weights * values [begin, end) of a tile, for ROWS rows and N spans of dimensions from `d` on. If
// `keep` is null, out is not scaled.
template <int ROWS, int N, class Unit, class Cache>
inline void multiply_values_block(const Unit* weights, long weights_stride, const Operands<Cache>& tile, long begin,
                                  long end, long d, float* out, long out_stride, const float* keep) {
    const auto [keys, values, count, head_dim, ahead] = tile;
    constexpr long E = ELEMENTS<Unit>;
    static const Cache zeros[N * SPAN] = {};
    Floats total[ROWS][2 * N];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int n = 0; n < 2 * N; n++)
            total[row][n] = (keep ? keep[row] : 1) * load(out + row * out_stride + n * LANES);
    for (long i = begin; i < end; i += E) {
        const Cache* first = at(values[i], d);
        const Cache* second = i + 1 < count ? at(values[i + E - 1], d) : zeros;
        tile.fetch_ahead(E, d, d + N * SPAN);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const Two two = units_of(static_cast<const Unit*>(nullptr), at(first, n * SPAN), at(second, n * SPAN));
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) {
                const Unit weight = weights[row * weights_stride + i / E];
                total[row][2 * n] = add_product(total[row][2 * n], weight, two.lower);
                total[row][2 * n + 1] = add_product(total[row][2 * n + 1], weight, two.upper);
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int n = 0; n < 2 * N; n++) store(out + row * out_stride + n * LANES, total[row][n]);
}

// `multiply` by values that are not packed, for so few rows that packing does not pay. head_dim is a multiple of SPAN.
template <int ROWS, class Unit, class Cache>
void multiply_values(NoRegisters, const Unit* weights, long weights_stride, const Operands<Cache>& tile, long begin,
                     long end, float* out, long out_stride, const float* keep, Unit*) {
    constexpr int N = COLUMNS / 2 * (ROWS <= BLOCK / 2 ? 2 : 1);
    long d = 0;
    for (; d + N * SPAN <= tile.head_dim; d += N * SPAN)
        multiply_values_block<ROWS, N>(weights, weights_stride, tile, begin, end, d, out + d, out_stride, keep);
    if constexpr (N > 2)
        for (; d + 2 * SPAN <= tile.head_dim; d += 2 * SPAN)
            multiply_values_block<ROWS, 2>(weights, weights_stride, tile, begin, end, d, out + d, out_stride, keep);
    for (; d < tile.head_dim; d += SPAN)
        multiply_values_block<ROWS, 1>(weights, weights_stride, tile, begin, end, d, out + d, out_stride, keep);
}

}  // namespace quire
