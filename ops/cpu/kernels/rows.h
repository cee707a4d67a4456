// The rows of a KV cache: the elements of one token and head, unquantized, or as low-bit codes with a shared scale
// (`quire.ops.cache_rows`).
#pragma once

#include "elements.h"
#include "vector.h"

#include <algorithm>
#include <cstring>

namespace quire {

struct Int8Code { int8_t bits; };
struct TwoInt4Codes { uint8_t bits; };  // in two's complement, the lower half first
template <int EXPONENT> struct Float8Code { uint8_t bits; };  // 8-bit floats with EXPONENT bits of exponent
using E4M3 = Float8Code<4>;
using E5M2 = Float8Code<5>;

// The values by which Python passes the dtypes of caches: those of `Dtype`, and these.
enum CacheDtype { INT8_CODES = 3, E4M3_CODES = 4, E5M2_CODES = 5, INT4_CODES = 6 };

// Like `with_type`, for the types of a cache's codes.
template <class Body> inline int with_codes(long dtype, Body body) {
    switch (dtype) {
        case INT8_CODES: return body(static_cast<Int8Code*>(nullptr)), 0;
        case E4M3_CODES: return body(static_cast<E4M3*>(nullptr)), 0;
        case E5M2_CODES: return body(static_cast<E5M2*>(nullptr)), 0;
        case INT4_CODES: return body(static_cast<TwoInt4Codes*>(nullptr)), 0;
        default: return 1;
    }
}

// The same for all types of a cache.
template <class Body> inline int with_cache_type(long dtype, Body body) {
    return with_codes(dtype, body) ? with_type(dtype, body) : 0;
}

// What is special about a type's rows. LARGEST is the greatest code, 0 if there is no scale.
template <class Cache> struct RowOf { static constexpr float LARGEST = 0; };
template <> struct RowOf<Int8Code> { static constexpr float LARGEST = 127; };
template <> struct RowOf<TwoInt4Codes> { static constexpr float LARGEST = 7; };
template <> struct RowOf<E4M3> { static constexpr float LARGEST = 448; };
template <> struct RowOf<E5M2> { static constexpr float LARGEST = 57344; };

template <class Cache> constexpr bool IS_CODED = RowOf<Cache>::LARGEST > 0;
template <class Cache> constexpr long NUMBERS = 1;  // in an element
template <> constexpr long NUMBERS<TwoInt4Codes> = 2;

// Elements of `size` values, without their scale, and of a row with it.
template <class Cache> constexpr long elements(long size) { return (size + NUMBERS<Cache> - 1) / NUMBERS<Cache>; }
template <class Cache> constexpr long row_size(long head_dim) {
    return elements<Cache>(head_dim) + (IS_CODED<Cache> ? (long)sizeof(float) : 0);
}

// Number `first` of a row; it is even where an element holds two.
template <class Cache> inline const Cache* at(const Cache* row, long first) { return row + first / NUMBERS<Cache>; }

template <class Cache> inline float scale_of(const Cache* row, long head_dim) {
    return read<float>(row + elements<Cache>(head_dim));
}

constexpr float SMALLEST_TOP = 1e-30f;  // smaller magnitudes count as zeros, so that inverses are finite

typedef uint8_t Octets __attribute__((vector_size(LANES)));

inline Ints codes_of(const Int8Code* from) {
#if defined(QUIRE_HAS_AVX512)
    return (Ints)_mm512_cvtepi8_epi32(read<__m128i>(from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    typedef int8_t Few __attribute__((vector_size(LANES)));
    return __builtin_convertvector(read<Few>(from), Ints);
#endif
}

// Every lane gets the word that its half byte is in, and shifts out what is above and below.
inline Ints codes_of(const TwoInt4Codes* from) {
    Ints words, lefts;
#if defined(QUIRE_HAS_AVX512)
    const __m512i octets = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)from));
    words = (Ints)_mm512_or_si512(octets, _mm512_slli_epi64(octets, 32));
    for (int i = 0; i < LANES; i++) lefts[i] = 28 - 4 * (i % 2);
#else
    int32_t word = 0;
    std::memcpy(&word, from, LANES / 2);
    words = word - Ints{};
    for (int i = 0; i < LANES; i++) lefts[i] = 28 - 4 * i;
#endif
    return words << lefts >> 28;
}

inline Floats load(const Int8Code* from) { return __builtin_convertvector(codes_of(from), Floats); }
inline Floats load(const TwoInt4Codes* from) { return __builtin_convertvector(codes_of(from), Floats); }

template <int EXPONENT> inline Floats load(const Float8Code<EXPONENT>* from) {
    constexpr int MANTISSA = 7 - EXPONENT, BIAS = (1 << (EXPONENT - 1)) - 1;
#if defined(QUIRE_HAS_FLOAT16) && (defined(QUIRE_HAS_AVX512) || defined(__AVX2__))
    // The bits of a float16 whose exponent has another bias.
    const Floats factor = fill((float)(1 << (15 - BIAS)));
    const int16_t mask = (int16_t)(0x8000 | (0x7f << (10 - MANTISSA)));
#if defined(QUIRE_HAS_AVX512)
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(read<__m128i>(from)), 10 - MANTISSA);
    const Floats halves = (Floats)_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(mask)));
#else
    const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from)), 10 - MANTISSA);
    const Floats halves = (Floats)_mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16(mask)));
#endif
    return halves * factor;
#else
    const Words codes = __builtin_convertvector(read<Octets>(from), Words);
    const Words bits = (codes & 0x7f) << (23 - MANTISSA) | (codes & 0x80) << 24;
    return bits_as<Floats>(bits) * bits_as<float>((uint32_t)(254 - BIAS) << 23);
#endif
}

inline Floats load(const TwoInt4Codes* from, long count) {
    if (count >= LANES) return load(from);
    TwoInt4Codes padded[LANES / 2] = {};
    std::memcpy(padded, from, elements<TwoInt4Codes>(count));
    return load(padded);
}

// Rounds to integers, ties to even; the magnitudes are below 2^22.
inline Ints whole(Floats x) {
    const Floats magic = fill(12582912.0f);  // 1.5 * 2^23
    return bits_as<Ints>(x + magic) - bits_as<Ints>(magic);
}

// Quantizes LANES values that do not exceed the greatest code.
inline Ints encode(const Int8Code*, Floats x) { return whole(x); }
inline Ints encode(const TwoInt4Codes*, Floats x) { return whole(x); }

template <int EXPONENT> inline Ints encode(const Float8Code<EXPONENT>*, Floats x) {
    constexpr int MANTISSA = 7 - EXPONENT, BIAS = (1 << (EXPONENT - 1)) - 1, CUT = 23 - MANTISSA;
    const Words bits = bits_as<Words>(x), magnitude = bits & 0x7fffffff;
    const Words rounded = (magnitude + ((1 << (CUT - 1)) - 1) + (magnitude >> CUT & 1)) >> CUT;
    const Ints normal = bits_as<Ints>(rounded) - ((127 - BIAS) << MANTISSA);
    const Ints small = whole(bits_as<Floats>(magnitude) * (float)(1 << (BIAS - 1 + MANTISSA)));
    const Ints least = Ints{} + ((128 - BIAS) << 23);  // the smallest normal number, 2^(1 - BIAS)
    const Ints code = bits_as<Ints>(magnitude) < least ? small : normal;
    return code | bits_as<Ints>(bits >> 24 & 0x80);
}

template <class Cache> inline void store_codes(Cache* to, Ints codes, long count) {
    uint8_t octets[LANES];
    const Octets all = __builtin_convertvector(codes, Octets);
    std::memcpy(octets, &all, LANES);
    std::memcpy(to, octets, std::min<long>(count, LANES));
}

inline void store_codes(TwoInt4Codes* to, Ints codes, long count) {
    for (long i = 0; i < std::min<long>(count, LANES); i += 2)
        to[i / 2].bits = (uint8_t)((codes[i] & 15) | (codes[i + 1] & 15) << 4);
}

// Stores `size` values as one row, with NaN replaced by 0, and clamped to [-largest, largest]. A quantized row has the
// scale `fixed`, and is clamped to its greatest code; if that is null, the scale fits the row's greatest magnitude.
template <class T, class Cache>
void store_row(const T* x, Cache* to, long size, float largest, const float* fixed = nullptr) {
    if constexpr (!IS_CODED<Cache>) {
        store_finite(x, to, size, largest);
    } else if (constexpr float CODE = RowOf<Cache>::LARGEST; fixed) {
        for (long i = 0; i < size; i += LANES)
            store_codes(to + i / NUMBERS<Cache>, encode(to, finite(load(x + i, size - i) / *fixed, CODE)), size - i);
        std::memcpy(to + elements<Cache>(size), fixed, sizeof(*fixed));
    } else {
        Floats most{};
        for (long i = 0; i < size; i += LANES) {
            const Floats value = finite(load(x + i, size - i), largest);
            most = greater(most, greater(value, -value));
        }
        const float top = quire::largest(most);
        const float scale = top < SMALLEST_TOP ? 0 : top / CODE, inverse = top < SMALLEST_TOP ? 0 : CODE / top;
        for (long i = 0; i < size; i += LANES)
            store_codes(to + i / NUMBERS<Cache>, encode(to, finite(load(x + i, size - i), largest) * inverse), size - i);
        std::memcpy(to + elements<Cache>(size), &scale, sizeof(scale));
    }
}

}  // namespace quire
