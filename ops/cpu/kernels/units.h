// Units: what one multiply-add instruction of attention takes per lane, and how keys and values become units. See
// attention.h.
#pragma once

#include "pages.h"
#include "rows.h"
#include "vector.h"

#include <cstring>
#include <type_traits>

namespace quire {

struct Pair { uint32_t bits; };  // two bfloat16: an even index in the lower half, the next index in the upper half

template <class Unit> constexpr int ELEMENTS = 1;  // elements of a unit
template <> constexpr int ELEMENTS<Pair> = 2;

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

// Keys whose elements are narrower than a unit's are transposed as words of several units, each of which is then
// unpacked: so there is less to transpose, and no lane is moved to be unpacked. UNITS_OF_WORD: units in such a word.
template <class Unit, class Cache> constexpr int UNITS_OF_WORD = 1;
template <> constexpr int UNITS_OF_WORD<float, BFloat16> = 2;
template <> constexpr int UNITS_OF_WORD<float, Half> = 2;
template <int EXPONENT> constexpr int UNITS_OF_WORD<float, Float8Code<EXPONENT>> = 4;
#if defined(QUIRE_HAS_AVX512_BF16)
template <int EXPONENT> constexpr int UNITS_OF_WORD<Pair, Float8Code<EXPONENT>> = 2;
#endif

// Unit N of each word.
template <int N> inline Words unit_of(const float*, const BFloat16*, Words words) {
    return N == 0 ? words << 16 : words & 0xffff0000;
}

// The sign, exponent and mantissa of floats of BITS bits, the N-th in each word, at float32's places. The
// exponent's bias stays: that of float32 is greater by 128 - 2^(EXPONENT - 1).
template <int BITS, int EXPONENT, int N> inline Words unpacked_at(Words words) {
    constexpr uint32_t MASK = 0x80000000u | ((1u << (BITS - 1)) - 1) << (24 - BITS + EXPONENT);
    return bits_as<Words>(bits_as<Ints>(words << (32 - BITS * (N + 1))) >> (8 - EXPONENT)) & MASK;
}

template <int N> inline Words unit_of(const float*, const Half*, Words words) {
    return bits_as<Words>(bits_as<Floats>(unpacked_at<16, 5, N>(words)) * 0x1p112f);
}

// Codes of fp8 keep their exponent's bias as units, so that few instructions widen them. Queries and weights are
// multiplied by LIFT, so that no product is too small for float32, and sums of products by what is left to make up for.
template <class Cache> constexpr float LIFT = 1;
template <class Cache> constexpr float UNLIFT = 1;
template <int EXPONENT> constexpr float LIFT<Float8Code<EXPONENT>> = 0x1p64f;
template <> constexpr float UNLIFT<E4M3> = 0x1p56f;
template <> constexpr float UNLIFT<E5M2> = 0x1p48f;

template <int N, int EXPONENT> inline Words unit_of(const float*, const Float8Code<EXPONENT>*, Words words) {
    return unpacked_at<8, EXPONENT, N>(words);
}

#if defined(QUIRE_HAS_AVX512_BF16)
// Codes in the upper halves of 16 bits as bfloat16. A product takes subnormal ones as 0.
template <int EXPONENT> inline Words bfloats_of(__m512i codes) {
    const __m512i mask = _mm512_set1_epi16((short)(0x8000 | 0x7f << EXPONENT));
    return (Words)_mm512_and_si512(_mm512_srai_epi16(codes, 8 - EXPONENT), mask);
}

template <int N, int EXPONENT> inline Words unit_of(const Pair*, const Float8Code<EXPONENT>*, Words words) {
    constexpr char Z = -1, A = 2 * N, B = 2 * N + 1;
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(
        Z, A, Z, B, Z, 4 + A, Z, 4 + B, Z, 8 + A, Z, 8 + B, Z, 12 + A, Z, 12 + B));
    return bfloats_of<EXPONENT>(_mm512_shuffle_epi8((__m512i)words, order));
}
#endif

// Half of a vector, and zeros.
inline Words read_half(const void* from) {
#if defined(QUIRE_HAS_AVX512)
    return (Words)_mm512_zextsi256_si512(read<__m256i>(from));
#elif defined(__AVX2__)
    return (Words)_mm256_zextsi128_si256(read<__m128i>(from));
#else
    Words half{};
    std::memcpy(&half, from, sizeof(half) / 2);
    return half;
#endif
}

// Loads LANES words of a key from its element `first` on, with zeros past `head_dim`.
template <class Unit, class Cache> inline Words words_of(const Cache* key, long first, long head_dim) {
    constexpr long WIDTH = sizeof(Words) / sizeof(Cache);
    if constexpr (UNITS_OF_WORD<Unit, Cache> == 1) {
        return units(static_cast<const Unit*>(nullptr), key, first, head_dim);
    } else {
        if (head_dim - first >= WIDTH) return read<Words>(key + first);
        if (head_dim - first == WIDTH / 2) return read_half(key + first);
        Cache padded[WIDTH] = {};
        std::memcpy(padded, key + first, (head_dim - first) * sizeof(Cache));
        return read<Words>(padded);
    }
}

// Unit N of each word.
template <class Unit, class Cache, int N> inline Words unit_at(Words words) {
    if constexpr (UNITS_OF_WORD<Unit, Cache> == 1) return words;
    else return unit_of<N>(static_cast<const Unit*>(nullptr), static_cast<const Cache*>(nullptr), words);
}

// Calls body with 0, 1, .. below COUNT as compile-time constants, so that the compiler sees no loop.
template <int COUNT, int N = 0, class Body> __attribute__((always_inline)) inline void each(Body body) {
    body(std::integral_constant<int, N>());
    if constexpr (N + 1 < COUNT) each<COUNT, N + 1>(body);
}

struct Two { Words lower, upper; };

template <class Cache> inline Two units_of(const float*, const Cache* value, const Cache*) {
    return {bits_as<Words>(load(value)), bits_as<Words>(load(at(value, LANES)))};
}

template <int EXPONENT>
inline Two units_of(const float*, const Float8Code<EXPONENT>* value, const Float8Code<EXPONENT>*) {
    constexpr uint32_t MASK = 0x80000000u | 0x7fu << (16 + EXPONENT);
    const auto widened = [](const Float8Code<EXPONENT>* from) {
        return bits_as<Words>(codes_of(reinterpret_cast<const Int8Code*>(from))) << (16 + EXPONENT) & MASK;
    };
    return {widened(value), widened(value + LANES)};
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
    const auto widened = [](const Float8Code<EXPONENT>* from) {
        return (__m512i)bfloats_of<EXPONENT>(_mm512_slli_epi16(_mm512_cvtepi8_epi16(read<__m256i>(from)), 8));
    };
    return in_pairs(widened(even), widened(odd));
}
#endif

// Sums of values in place may be in another order than dimensions: a word of a row of values has IN_TURNS neighbouring
// numbers, and vectors of pairs are words of two rows in turns, every other four of each eight. 0: they are in order.
template <class Unit, class Cache> constexpr int IN_TURNS = 0;
template <> constexpr int IN_TURNS<float, BFloat16> = 2;
template <int EXPONENT> constexpr int IN_TURNS<float, Float8Code<EXPONENT>> = 4;
#if defined(QUIRE_HAS_AVX512_BF16)
template <int EXPONENT> constexpr int IN_TURNS<Pair, Float8Code<EXPONENT>> = 2;
#endif

// Where dimension d is among such sums.
template <class Unit, class Cache> inline long place_of_value(long d) {
    constexpr long NUMBERS = IN_TURNS<Unit, Cache>, E = ELEMENTS<Unit>, CHUNK = E * LANES * NUMBERS;
    const long start = d / CHUNK * CHUNK, in = d - start, word = in / NUMBERS, number = in % NUMBERS;
    return start + (word / 4 % E * NUMBERS + number) * LANES + word / (4 * E) * 4 + word % 4;
}

// Units of values in place, of WIDTH vectors, or if IS_HALF of half as many and zeros.
template <class Unit, class Cache> struct InPlace {
    static constexpr int WIDTH = 2;
    template <bool IS_HALF> static void take(const Cache* first, const Cache* second, Words (&to)[WIDTH]) {
        const Two two = units_of(static_cast<const Unit*>(nullptr), first, second);
        to[0] = two.lower, to[1] = two.upper;
    }
};

template <> struct InPlace<float, BFloat16> {
    static constexpr int WIDTH = 2;
    template <bool> static void take(const BFloat16* row, const BFloat16*, Words (&to)[WIDTH]) {
        const Words words = read<Words>(row);
        to[0] = words << 16, to[1] = words & 0xffff0000;
    }
};

template <int EXPONENT> struct InPlace<float, Float8Code<EXPONENT>> {
    static constexpr int WIDTH = 4;
    using Cache = Float8Code<EXPONENT>;
    template <bool IS_HALF> static void take(const Cache* row, const Cache*, Words (&to)[WIDTH]) {
        typedef int16_t Halves __attribute__((vector_size(4 * LANES)));
        const Halves codes = bits_as<Halves>(IS_HALF ? read_half(row) : read<Words>(row));
        const auto bfloats = [](Halves upper) {
            return bits_as<Words>(upper >> (8 - EXPONENT) & (int16_t)(0x8000 | 0x7f << EXPONENT));
        };
        const Words even = bfloats(codes << 8), odd = bfloats(codes);
        to[0] = even << 16, to[1] = odd << 16, to[2] = even & 0xffff0000, to[3] = odd & 0xffff0000;
    }
};

#if defined(QUIRE_HAS_AVX512_BF16)
template <int EXPONENT> struct InPlace<Pair, Float8Code<EXPONENT>> {
    static constexpr int WIDTH = 4;
    using Cache = Float8Code<EXPONENT>;
    template <bool IS_HALF> static void take(const Cache* first, const Cache* second, Words (&to)[WIDTH]) {
        const auto row = [](const Cache* from) { return (__m512i)(IS_HALF ? read_half(from) : read<Words>(from)); };
        const __m512i even = row(first), odd = row(second);
        const __m512i words[2] = {_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd)};
        for (int half = 0; half < 2; half++) {
            to[2 * half] = bfloats_of<EXPONENT>(_mm512_slli_epi16(words[half], 8));
            to[2 * half + 1] = bfloats_of<EXPONENT>(words[half]);
        }
    }
};
#endif

}  // namespace quire
