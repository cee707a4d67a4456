// Rows of x as words of several inputs: int16, int8 or bfloat16. And the products of words.
//
// The inputs of a weight's group, or up to MOST_INPUTS of them, are a block. A block's sums of integers are exact: they fit
// into 32 bits, and those of 8 bits into a float32's mantissa. So a row's results do not depend on other rows.
//
// 16 bits (InPairs): for each block a row has a power of two, 2^k, so that q = x / 2^k has 15 bits and a sign. A bfloat16
// of at least 1/128 of its block's largest number stays what it is, and a float16 of at least 1/16. Others are rounded by
// at most 2^-15 of the largest, which is less than the type itself rounds there.
//
// 8 bits (InQuads): q = x * (127 / m) rounded to even, where m is the block's largest magnitude, and q has the value
// q * (m / 127). One instruction multiplies four of them, in twice as many products as with 16 bits. On x86-64 it takes
// weights without signs, codes + MIDDLE, so a block's sums begin at -MIDDLE times the sum of its q. ARM's takes codes, and
// the sums are the same. AVX2's own gives sums of two products in 16 bits. Those of 32 inputs fit there with 4-bit
// codes.
//
// With AVX512-VNNI and no AMX-INT8 few instructions should follow a block's sums. So m / 127 is rounded up to a number of
// STEPS_AN_OCTAVE between powers of two, (1 + j / 4) * 2^k. A block's sums begin at the bits of its origin, the float32
// 1.5 * 2^(23 + k), less what is said above: as a last digit of such a float32 is 2^k, the bits are those of the origin
// plus 2^k times the sum, exactly. The weight's scales times 1 + j / 4 are the same for all rows.
//
// With 8-bit codes (InSafeQuads) each such sum is widened to 32 bits, and only two products have to fit. So m is
// the largest sum of two values of one sign that one instruction adds: two q of one sign are at most 128 together, and
// 128 * 255 is less than 2^15. A value that is large compared to its neighbour keeps all 8 bits.
//
// bfloat16 (InBFloats): x stays what it is, codes become bfloat16, and sums are float32, in the order of the inputs.
#pragma once

#include "bytes.h"
#include "vector.h"

#include <algorithm>

// AVX without AVX2 has vectors of eight floats, but none of as many integers.
#if defined(QUIRE_HAS_AVX512) || defined(__AVX2__) || (defined(__SSE2__) && !defined(__AVX__))
#define QUIRE_HAS_PAIRS 1
#endif
#if defined(__AVX2__) && !defined(QUIRE_HAS_AVX512) && !defined(QUIRE_HAS_AVX_VNNI)
#define QUIRE_HAS_SAFE_QUADS 1
#endif
#if defined(QUIRE_HAS_AVX512_BF16)
#define QUIRE_HAS_BFLOATS 1
#endif
#if defined(QUIRE_HAS_PAIRS) || defined(QUIRE_HAS_QUADS)
#define QUIRE_HAS_WORDS 1
#endif

namespace quire {
namespace quantized {

// Neighbouring inputs of LANES outputs: two, or four.
typedef int16_t Pairs __attribute__((vector_size(4 * LANES)));
#if defined(QUIRE_HAS_SIGNED_QUADS)
typedef int8_t Quads __attribute__((vector_size(4 * LANES)));
#else
typedef uint8_t Quads __attribute__((vector_size(4 * LANES)));
#endif
typedef Pairs SumPairs;  // of LANES outputs: those of the first and of the last two products of each quad
typedef uint16_t BFloats __attribute__((vector_size(4 * LANES)));

// The kinds of words.
struct InPairs {
    using Codes = Pairs;
    using Sum = Ints;
    static constexpr int STEPS = 2;            // in a word
    static constexpr long MOST_INPUTS = 128;   // of a block; a multiple of each codec's unit
    static constexpr bool HAS_FACTORS = true;   // x is a block's factor times its integers
    static constexpr bool HAS_STARTS = false;   // sums begin at 0
    static constexpr bool HAS_ORIGINS = false;  // sums are integers or float32
};
struct InQuads {
    using Codes = Quads;
#if defined(QUIRE_HAS_SAFE_QUADS)
    using Sum = SumPairs;
    static constexpr long MOST_INPUTS = 32;
#else
    using Sum = Ints;
    static constexpr long MOST_INPUTS = 128;  // whose sum has 22 bits and a sign
#endif
    static constexpr int STEPS = 4;
#if defined(QUIRE_HAS_SIGNED_QUADS)
    static constexpr bool HAS_STARTS = false;
#else
    static constexpr bool HAS_STARTS = true;
#endif
#if defined(QUIRE_HAS_AVX512_VNNI) && !defined(QUIRE_HAS_AMX_INT8)  // whose sums begin at 0
    static constexpr bool HAS_ORIGINS = true;
#else
    static constexpr bool HAS_ORIGINS = false;
#endif
    static constexpr bool HAS_FACTORS = !HAS_ORIGINS;
    static constexpr float REACH = 127;  // what the block's `extent` becomes
};
#if defined(QUIRE_HAS_SAFE_QUADS)
struct InSafeQuads {  // with 8-bit codes
    using Codes = Quads;
    using Sum = Ints;
    static constexpr long MOST_INPUTS = 128;
    static constexpr int STEPS = 4;
    static constexpr bool HAS_FACTORS = true, HAS_STARTS = true, HAS_ORIGINS = false;
    static constexpr float REACH = 63.5f;
};
#endif
struct InBFloats {
    using Codes = BFloats;
    using Sum = Floats;
    static constexpr int STEPS = 2;
    static constexpr long MOST_INPUTS = 256;
    static constexpr bool HAS_FACTORS = false, HAS_STARTS = false, HAS_ORIGINS = false;
};
constexpr int STEPS_AN_OCTAVE = 4;

// How inputs fall into blocks. Each group begins with a unit of the codec, and zeros fill its last one.
template <class X> struct Blocks {
    long groups, group, padded;  // padded: inputs of a group with its zeros
    long per_group() const { return (padded + X::MOST_INPUTS - 1) / X::MOST_INPUTS; }
    long words() const { return groups * padded / X::STEPS; }
    long count() const { return groups * per_group(); }
    // A tile of rows is {words of inputs [words][rows], sums of the values of a block's words [count][rows], and if there
    // are some, factors or origins [count][rows], starts of sums [count][rows], j of origins [count][rows]}.
    long row_bytes() const {
        return (words() + count() * (1 + (X::HAS_FACTORS || X::HAS_ORIGINS) + X::HAS_STARTS + X::HAS_ORIGINS)) * 4;
    }
    long sums_at(long rows) const { return words() * 4 * rows; }
    long factors_at(long rows) const { return sums_at(rows) + count() * 4 * rows; }
    long starts_at(long rows) const { return factors_at(rows) + count() * 4 * rows; }
    long parts_at(long rows) const { return starts_at(rows) + count() * 4 * rows; }
};

// Walks over the blocks.
template <class X> struct BlockAt {
    const Blocks<X>& blocks;
    long group, first;  // its first input, in the group
    long steps() const { return std::min(X::MOST_INPUTS, blocks.padded - first); }
    long inputs() const { return std::min(X::MOST_INPUTS, blocks.group - first); }
    void advance() {
        if ((first += X::MOST_INPUTS) >= blocks.padded) first = 0, group++;
    }
};

#if defined(QUIRE_HAS_PAIRS)
// Adds to each sum the two products of a pair.
inline __attribute__((always_inline)) Ints add_products(Ints sum, Ints x, Pairs weight) {
#if defined(QUIRE_HAS_AVX512_VNNI)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)weight);
#elif defined(QUIRE_HAS_AVX_VNNI)
    return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)weight);
#else
#if defined(QUIRE_HAS_AVX512)
    sum += (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)weight);
#elif defined(__AVX2__)
    sum += (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)weight);
#else
    sum += (Ints)_mm_madd_epi16((__m128i)x, (__m128i)weight);
#endif
    asm("" : "+v"(sum));  // GCC would add the products of several pairs first, for which there are not registers enough
    return sum;
#endif
}
#endif

#if defined(QUIRE_HAS_QUADS)
// Adds to each sum the four products of a quad, or to each of its two sums two products.
inline __attribute__((always_inline)) InQuads::Sum add_products(InQuads::Sum sum, Ints x, Quads weight) {
#if defined(QUIRE_HAS_AVX512_VNNI)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, (__m512i)x);
#elif defined(QUIRE_HAS_AVX_VNNI)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weight, (__m256i)x);
#elif defined(QUIRE_HAS_SIGNED_QUADS)
    return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)weight, (int8x16_t)x);
#else
    sum += (SumPairs)_mm256_maddubs_epi16((__m256i)weight, (__m256i)x);
    asm("" : "+x"(sum));  // as above
    return sum;
#endif
}
#endif

#if defined(QUIRE_HAS_SAFE_QUADS)
// The same in sums of 32 bits.
inline __attribute__((always_inline)) Ints add_products(Ints sum, Ints x, Quads weight) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)weight, (__m256i)x);
    sum += (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    asm("" : "+x"(sum));  // as above
    return sum;
}
#endif

#if defined(QUIRE_HAS_BFLOATS)
// Adds to each sum the two products of a pair.
inline __attribute__((always_inline)) Floats add_products(Floats sum, Ints x, BFloats weight) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weight);
}
#endif

}  // namespace quantized
}  // namespace quire
