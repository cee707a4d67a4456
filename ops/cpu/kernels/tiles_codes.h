// The small matrix products of attention on integer codes: keys, values, queries and weights as int16. See attention.h.
//
// Products of integers are summed without rounding. So their order is free: a query is multiplied along a key in place,
// nothing is transposed, and packed rows and rows in place have the same sums. A query has a separate step (value = code *
// step); so have the weights of a row and tile, which contain the scales of the values.
#pragma once

#include "tiles.h"

#include <type_traits>

namespace quire {

struct CodePair { uint32_t bits; };  // two int16: an even index in the lower half, the next index in the upper half
template <> constexpr int ELEMENTS<CodePair> = 2;

// What becomes of a row's sums so far, and the step of its weights in a tile.
struct KeepAndStep { float keep, step; };
template <> struct KeepOf<CodePair> { using type = KeepAndStep; };
template <> struct SumOf<CodePair> { using type = Ints; };

template <class Cache> constexpr bool IS_WHOLE = false;  // true if codes are integers of up to eight bits
template <> constexpr bool IS_WHOLE<Int8Code> = true;
template <> constexpr bool IS_WHOLE<TwoInt4Codes> = true;

constexpr float LARGEST_FIXED = 32767;
typedef int16_t Fixed __attribute__((vector_size(4 * LANES)));

inline void store_fixed(int16_t* to, Ints codes) {
    typedef int16_t Few __attribute__((vector_size(2 * LANES)));
    const Few few = __builtin_convertvector(codes, Few);
    std::memcpy(to, &few, sizeof(few));
}

// Adds a * b for both int16 of each lane.
inline Ints add_product(Ints total, Words a, Words b) {
#if defined(QUIRE_HAS_AVX512) && defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)total, (__m512i)a, (__m512i)b);
#elif defined(QUIRE_HAS_AVX512)
    return total + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return total + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX__)
    return total + (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    const Ints x = bits_as<Ints>(a), y = bits_as<Ints>(b);
    return total + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

inline Ints add_product(Ints total, CodePair a, const CodePair* b) {
    return add_product(total, a.bits - Words{}, read<Words>(b));
}

inline void begin_sum(Ints& total, const float*, const KeepAndStep*) { total = Ints{}; }

inline void end_sum(Ints total, float* c, const KeepAndStep* keep) {
    const Floats sum = __builtin_convertvector(total, Floats);
    store(c, keep ? multiply_add(sum, fill(keep->step), load(c) * keep->keep) : sum);
}

// Codes in place: WIDENED vectors of int16 from CHUNK neighbouring codes. Those of four bits are first those of even
// dimensions, then those of odd ones.

template <class Cache> constexpr int WIDENED = NUMBERS<Cache>;
template <> constexpr int IN_TURNS<CodePair, Int8Code> = WIDENED<Int8Code>;
template <> constexpr int IN_TURNS<CodePair, TwoInt4Codes> = WIDENED<TwoInt4Codes>;
template <class Cache> constexpr long CHUNK = 2 * LANES * NUMBERS<Cache>;

inline void widen(const Int8Code* from, Fixed (&to)[1]) {
#if defined(QUIRE_HAS_AVX512)  // one instruction, which GCC 12 does not find for the conversion below
    to[0] = (Fixed)_mm512_cvtepi8_epi16(read<__m256i>(from));
#elif defined(__AVX2__)
    to[0] = (Fixed)_mm256_cvtepi8_epi16(read<__m128i>(from));
#else
    typedef int8_t Codes __attribute__((vector_size(2 * LANES)));
    to[0] = __builtin_convertvector(read<Codes>(from), Fixed);
#endif
}

inline void widen(const TwoInt4Codes* from, Fixed (&to)[2]) {
    Fixed both[1];
    widen(reinterpret_cast<const Int8Code*>(from), both);
    to[0] = both[0] << 12 >> 12, to[1] = both[0] >> 4;
}

// The chunk at number `first` of a row, or a copy with zeros past its end.
template <class Cache>
inline const Cache* chunk(const Cache* row, long first, long head_dim, Cache (&copy)[2 * LANES]) {
    if (head_dim - first >= CHUNK<Cache>) return at(row, first);
    std::memset(copy, 0, sizeof(copy));
    std::memcpy(copy, at(row, first), elements<Cache>(head_dim - first));
    return copy;
}

// Codes in pairs, as they are packed.

inline Words units(const CodePair*, const Int8Code* key, long first, long head_dim) {
    Int8Code copy[2 * LANES];
    Fixed codes[1];
    widen(chunk(key, first, head_dim, copy), codes);
    return bits_as<Words>(codes[0]);
}

inline Words units(const CodePair*, const TwoInt4Codes* key, long first, long head_dim) {
    TwoInt4Codes padded[LANES] = {};
    const TwoInt4Codes* from = at(key, first);
    if (head_dim - first < 2 * LANES) {
        std::memcpy(padded, from, elements<TwoInt4Codes>(head_dim - first));
        from = padded;
    }
    const Ints both = codes_of(reinterpret_cast<const Int8Code*>(from));
    return bits_as<Words>(both << 12 & (int)0xffff0000) | bits_as<Words>(both << 28 >> 28 & 0xffff);
}

template <class Cache> inline Two units_of(const CodePair*, const Cache* even, const Cache* odd) {
    const auto pairs = [&](long first) {
        return bits_as<Words>(codes_of(at(even, first)) & 0xffff) | bits_as<Words>(codes_of(at(odd, first)) << 16);
    };
    return {pairs(0), pairs(LANES)};
}

// Where number d of a query is, for products with keys in place.
template <class Cache> inline long place_of_query(long d) {
    const long start = d / CHUNK<Cache> * CHUNK<Cache>, in = d - start;
    return start + in % WIDENED<Cache> * 2 * LANES + in / WIDENED<Cache>;
}

// The words of a and b in turns, of the first or second four of each eight.
template <bool UPPER> inline Words pair_up(Fixed a, Fixed b) {
#if defined(QUIRE_HAS_AVX512)
    const __m512i x = (__m512i)a, y = (__m512i)b;
    return (Words)(UPPER ? _mm512_unpackhi_epi16(x, y) : _mm512_unpacklo_epi16(x, y));
#elif defined(__AVX2__)
    const __m256i x = (__m256i)a, y = (__m256i)b;
    return (Words)(UPPER ? _mm256_unpackhi_epi16(x, y) : _mm256_unpacklo_epi16(x, y));
#elif defined(__SSE2__) && !defined(__AVX__)
    return (Words)(UPPER ? _mm_unpackhi_epi16((__m128i)a, (__m128i)b) : _mm_unpacklo_epi16((__m128i)a, (__m128i)b));
#else
    Fixed pairs;
    for (int i = 0; i < LANES; i++) {
        const int word = i / 4 * 8 + i % 4 + (UPPER ? 4 : 0);
        pairs[2 * i] = a[word], pairs[2 * i + 1] = b[word];
    }
    return bits_as<Words>(pairs);
#endif
}

// Of each 128 bits of four vectors the sums: a's, b's, c's, d's.
inline Ints sums_of_four(Ints a, Ints b, Ints c, Ints d) {
#if defined(QUIRE_HAS_AVX512)
    const auto pair = [](__m512i x, __m512i y) {
        return _mm512_add_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
    };
    const __m512i low = pair((__m512i)a, (__m512i)b), high = pair((__m512i)c, (__m512i)d);
    return (Ints)_mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
#elif defined(__AVX2__)
    const __m256i low = _mm256_hadd_epi32((__m256i)a, (__m256i)b), high = _mm256_hadd_epi32((__m256i)c, (__m256i)d);
    return (Ints)_mm256_hadd_epi32(low, high);
#else
    Ints sums;
    for (int i = 0; i < LANES; i += 4)
        for (int k = 0; k < 4; k++) {
            const Ints& x = k == 0 ? a : k == 1 ? b : k == 2 ? c : d;
            sums[i + k] = x[i] + x[i + 1] + x[i + 2] + x[i + 3];
        }
    return sums;
#endif
}

// The sums over all 128 bits, of LANES keys.
inline Ints sums_of_all(const Ints (&fours)[LANES / 4]) {
#if defined(QUIRE_HAS_AVX512)
    const auto pair = [](__m512i x, __m512i y) {
        return _mm512_add_epi32(_mm512_shuffle_i32x4(x, y, 0x88), _mm512_shuffle_i32x4(x, y, 0xdd));
    };
    return (Ints)pair(pair((__m512i)fours[0], (__m512i)fours[1]), pair((__m512i)fours[2], (__m512i)fours[3]));
#elif defined(__AVX2__)
    const __m256i x = (__m256i)fours[0], y = (__m256i)fours[1];
    return (Ints)_mm256_add_epi32(_mm256_permute2x128_si256(x, y, 0x20), _mm256_permute2x128_si256(x, y, 0x31));
#else
    Ints sums;
    for (int i = 0; i < LANES; i++) {
        sums[i] = 0;
        for (int part = i % 4; part < LANES; part += 4) sums[i] += fours[i / 4][part];
    }
    return sums;
#endif
}

// Packs a query as integers, in the order of keys in place or unchanged, and returns its step.
template <class Cache, class Query> float fix_query(const Query* q, long head_dim, bool in_place, CodePair* packed) {
    Floats most{};
    for (long d = 0; d < head_dim; d += LANES) {
        const Floats x = load(q + d, head_dim - d);
        most = greater(most, greater(x, -x));
    }
    const float top = largest(most);
    // Sums of products fit 32 bits.
    const float limit = std::min(LARGEST_FIXED, std::floor(2147483647.0f / (RowOf<Cache>::LARGEST + 1) / head_dim));
    const float inverse = top < SMALLEST_TOP ? 0 : limit / top;
    int16_t* to = reinterpret_cast<int16_t*>(packed);
    std::memset(to, 0, round_up(head_dim, 4 * LANES) * sizeof(int16_t));
    for (long d = 0; d < head_dim; d += LANES) {
        const Ints codes = whole(load(q + d, head_dim - d) * inverse);
        if (WIDENED<Cache> == 1 || !in_place) {
            store_fixed(to + d, codes);
            continue;
        }
        for (long i = 0; i < std::min<long>(LANES, head_dim - d); i++)
            to[place_of_query<Cache>(d + i)] = (int16_t)codes[i];
    }
    return top / limit;
}

// Packs a row's weights in a tile, times the values' scales, and returns their step. They are not negative.
inline float fix_weights(float* weights, const float* scales, long width, CodePair* packed) {
    Floats most{};
    for (long i = 0; i < width; i += LANES) {
        const Floats scaled = load(weights + i) * load(scales + i);
        most = greater(most, scaled);
        store(weights + i, scaled);
    }
    const float top = largest(most), inverse = top < SMALLEST_TOP ? 0 : LARGEST_FIXED / top;
    for (long i = 0; i < width; i += LANES)
        store_fixed(reinterpret_cast<int16_t*>(packed) + i, whole(load(weights + i) * inverse));
    return top / LARGEST_FIXED;
}

// See `multiply_keys` in tiles.h; here queries are in the order of `place_of_query`.
template <int ROWS, class Cache>
void multiply_keys(NoRegisters, const CodePair* queries, long stride, const Operands<Cache>& tile, float* scores,
                   CodePair*) {
    const long head_dim = tile.head_dim;
    for (long column = 0; column < tile.count; column += LANES) {
        Ints fours[ROWS][LANES / 4];
#pragma GCC unroll 4
        for (int four = 0; four < LANES / 4; four++) {
            const long key = column + 4 * four;
            const Cache* keys[4] = {tile.keys[key], tile.keys[key + 1], tile.keys[key + 2], tile.keys[key + 3]};
            if (key < tile.count) tile.fetch_ahead(std::min(4L, tile.count - key), 0, head_dim);
            Ints total[ROWS][4] = {};
            for (long first = 0; first < head_dim; first += CHUNK<Cache>) {
                Words query[ROWS][WIDENED<Cache>];
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
                    for (int i = 0; i < WIDENED<Cache>; i++)
                        query[row][i] = read<Words>(queries + row * stride + first / 2 + i * LANES);
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) {
                    Cache copy[2 * LANES];
                    Fixed codes[WIDENED<Cache>];
                    widen(chunk(keys[k], first, head_dim, copy), codes);
#pragma GCC unroll 4
                    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
                        for (int i = 0; i < WIDENED<Cache>; i++)
                            total[row][k] = add_product(total[row][k], bits_as<Words>(codes[i]), query[row][i]);
                }
            }
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++)
                fours[row][four] = sums_of_four(total[row][0], total[row][1], total[row][2], total[row][3]);
        }
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++)
            store(scores + row * KEYS + column, __builtin_convertvector(sums_of_all(fours[row]), Floats));
    }
}

// N chunks of `multiply_values`, from dimension d on.
template <int ROWS, int N, class Cache>
inline void multiply_chunks(const CodePair* weights, long stride, const Operands<Cache>& tile, long d, float* out,
                            long out_stride, const KeepAndStep* keep) {
    constexpr int WIDTH = 2 * WIDENED<Cache>;  // vectors of a chunk
    constexpr long FETCHED = values_at_once<Cache>(N * CHUNK<Cache>);  // values: see multiply_values_block
    Ints total[ROWS][N * WIDTH] = {};
    for (long i = 0; i < tile.count; i += 2) {  // an odd value's neighbour is any value, whose weight is 0
        if (i % FETCHED == 0) tile.fetch_ahead(std::min(FETCHED, tile.count - i), d, d + N * CHUNK<Cache>);
        const Cache *first = tile.values[i], *second = tile.values[i + 1];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            Cache copies[2][2 * LANES];
            Fixed even[WIDENED<Cache>], odd[WIDENED<Cache>];
            widen(chunk(first, d + n * CHUNK<Cache>, tile.head_dim, copies[0]), even);
            widen(chunk(second, d + n * CHUNK<Cache>, tile.head_dim, copies[1]), odd);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++) {
                const Words weight = weights[row * stride + i / 2].bits - Words{};
#pragma GCC unroll 2
                for (int k = 0; k < WIDENED<Cache>; k++) {
                    Ints &lower = total[row][n * WIDTH + k], &upper = total[row][n * WIDTH + WIDENED<Cache> + k];
                    lower = add_product(lower, pair_up<false>(even[k], odd[k]), weight);
                    upper = add_product(upper, pair_up<true>(even[k], odd[k]), weight);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int n = 0; n < N * WIDTH; n++) end_sum(total[row][n], out + row * out_stride + n * LANES, keep + row);
}

// See `multiply_values` in tiles.h. `out` is in the order of `place_of_value`.
template <int ROWS, class Cache>
void multiply_values(NoRegisters, const CodePair* weights, long stride, const Operands<Cache>& tile, float* out,
                     long out_stride, const KeepAndStep* keep, CodePair*) {
    constexpr int N = std::max(1, COLUMNS / WIDENED<Cache> / (ROWS <= BLOCK / 2 ? 1 : 2));
    long d = 0;
    for (; d + N * CHUNK<Cache> <= tile.head_dim; d += N * CHUNK<Cache>)
        multiply_chunks<ROWS, N>(weights, stride, tile, d, out + d, out_stride, keep);
    for (; d < tile.head_dim; d += CHUNK<Cache>)
        multiply_chunks<ROWS, 1>(weights, stride, tile, d, out + d, out_stride, keep);
}

}  // namespace quire
