// Rows of x as words of several inputs: integers of 16 or 8 bits, or bfloat16. And the products of words.
//
// The inputs of a weight's group, or up to MOST_INPUTS of them, are a block. A block's sums of integers are exact: they fit
// into 32 bits, and those of 8 bits into a float32's digits. So a row's numbers do not depend on what is computed beside it.
//
// 16 bits (InPairs): for each block a row has a power of two, 2^k, so that q = x / 2^k has 15 bits and a sign. A bfloat16
// of at least 1/128 of its block's largest number stays what it is, and a float16 of at least 1/16. Others are rounded by
// at most 2^-15 of the largest, which is less than the type itself rounds there.
//
// 8 bits (InQuads): q = x * (127 / m) rounded to even, where m is the block's largest magnitude, and q stands for
// q * (m / 127). One instruction multiplies four of them, in twice as many products as with 16 bits. On x86-64 it takes
// weights without signs, codes + MIDDLE, so a block's sums begin at -MIDDLE times the sum of its q. ARM's takes codes, and
// the sums are the same. AVX2's own gives sums of two products in 16 bits. Those of 32 inputs fit there beside codes of four
// bits.
//
// With AVX512-VNNI and no AMX-INT8 few instructions should follow a block's sums. So m / 127 is rounded up to a number of
// STEPS_AN_OCTAVE between powers of two, (1 + j / 4) * 2^k. A block's sums begin at the bits of its origin, the float32
// 1.5 * 2^(23 + k), less what is said above: as a last digit of such a float32 is 2^k, the bits are those of the origin
// plus 2^k times the sum, exactly. The weight's scales times 1 + j / 4 are the same for all rows.
//
// Beside codes of eight bits (InSafeQuads) each such sum is widened to 32 bits, and only two products have to fit. So m is
// the largest sum of two numbers of one sign that one instruction adds: two q of one sign are at most 128 together, and
// 128 * 255 is less than 2^15. A number that is large beside its neighbour keeps all 8 bits.
//
// bfloat16 (InBFloats): x stays what it is, codes become bfloat16, and sums are float32, in the order of the inputs.
#pragma once

#include "bytes.h"
#include "vector.h"

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>

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
namespace widened {

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
struct InSafeQuads {  // beside codes of eight bits
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
    // A tile of rows is {words of inputs [words][rows], sums of what a block's words stand for [count][rows], and if there
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
    void advance() {
        if ((first += X::MOST_INPUTS) >= blocks.padded) first = 0, group++;
    }
};

// Where one row's numbers of a block go in a tile of `rows` rows.
struct PlaceInTile {
    uint32_t* words;
    float *factor, *sum;  // factor, or origin
    int32_t *start, *part;
    int rows;
    PlaceInTile of_row(int row) const { return {words + row, factor + row, sum + row, start + row, part + row, rows}; }
    void advance(long num_words) {
        words += num_words * rows, factor += rows, sum += rows, start += rows, part += rows;
    }
};

inline int32_t largest(Ints x) {
#if defined(QUIRE_HAS_AVX512)
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t most = x[0];
    for (int i = 1; i < LANES; i++) most = std::max(most, x[i]);
    return most;
#endif
}

// The bits of the largest magnitude of `count` numbers; those of no finite number are the greatest.
template <class T> int32_t largest_bits(const T* from, long count) {
    Ints most{};
    for (long i = 0; i < count; i += LANES) {
        const Ints bits = bits_as<Ints>(load(from + i, count - i)) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return largest(most);
}

inline int32_t sum(Ints x) {
#if defined(QUIRE_HAS_AVX512)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}

constexpr int32_t NOT_FINITE = 255 << 23;
constexpr long X_AHEAD = 256;  // bytes from the numbers of a row that are packed to those that are prefetched

// Writes the `count` numbers of a block of `steps` as integers of 16 bits.
template <class C, class T> void pack_block(InPairs, const T* from, long count, long steps, const PlaceInTile& to) {
    const int32_t largest = largest_bits(from, count);
    const int32_t exponent = std::max(largest >> 23, 15);  // of a power of two that is a normal number
    const bool is_finite = largest < NOT_FINITE;
    const float inverse = is_finite ? bits_as<float>((268 - exponent) << 23) : 0;
    *to.factor = is_finite ? bits_as<float>((exponent - 14) << 23) : std::numeric_limits<float>::quiet_NaN();
    alignas(64) int32_t numbers[InPairs::MOST_INPUTS + LANES] = {};
    Ints total{};
    const Floats magic = fill(12582912.0f);  // 1.5 * 2^23: rounds to integers
    for (long i = 0; i < count; i += LANES) {
        const Ints rounded = bits_as<Ints>(load(from + i, count - i) * inverse + magic) - bits_as<Ints>(magic);
        const Ints most_of_16_bits = Ints{} + 32767, limited = rounded < most_of_16_bits ? rounded : most_of_16_bits;
        total += limited;
        std::memcpy(numbers + i, &limited, sizeof(limited));
    }
    for (long i = 0; i < steps; i += 2)
        to.words[i / 2 * to.rows] = (uint32_t)(numbers[i] & 0xffff) | (uint32_t)numbers[i + 1] << 16;
    *to.sum = *to.factor * (float)sum(total);
}

// Two calls pack a block of up to LANES rows of a tile as quads. Defined where the processor has products of them.
template <class C, class X, class T>
void pack_quads(X, const T* const* from, long count, long steps, int rows, const PlaceInTile& to);
template <class C, class X> void finish_block(X, long steps, int rows, const PlaceInTile& to);

#if defined(QUIRE_HAS_QUADS)
// The bits of what becomes X::REACH; those of no finite number are the greatest.
template <class T> int32_t extent_bits(InQuads, const T* from, long count) { return largest_bits(from, count); }

#if defined(QUIRE_HAS_SAFE_QUADS)
// Half of the largest sum of two numbers of one sign that meet in one instruction: with codes of eight bits the first and
// the third number of a quad, and the second and the fourth.
template <class T> int32_t extent_bits(InSafeQuads, const T* from, long count) {
    Ints most{};
    for (long i = 0; i < count; i += LANES) {
        const Floats x = load(from + i, count - i) * 0.5f;
        for (const Floats part : {x < 0 ? Floats{} : x, x > 0 ? Floats{} : x}) {  // NaN stays NaN
            const Floats sum = part + (Floats)_mm256_permute_ps((__m256)part, 0x4e);
            const Ints bits = bits_as<Ints>(sum) & 0x7fffffff;
            most = bits > most ? bits : most;
        }
    }
    return largest(most);
}
#endif

// The scales of a block of LANES rows, a row in each lane.
template <class X> struct QuadScales {
    Floats inverse, step, factor;  // by which numbers are multiplied; what an integer of 1 stands for; factor, or origin
    Ints part{};

    // From the rows' `extent_bits`.
    explicit QuadScales(Ints bits) {
        const Ints least = Ints{} + (15 << 23);  // 2^-112, whose inverse is a normal number
        const Floats extent = bits_as<Floats>(bits > least ? bits : least);
        const Floats nan = fill(std::numeric_limits<float>::quiet_NaN());
        if constexpr (X::HAS_ORIGINS) {
            constexpr int32_t ONE = 127 << 23, ORIGIN = 0x4b400000, PART = (1 << 23) / STEPS_AN_OCTAVE;
            const auto is_small = bits < (Ints{} + (237 << 23));  // 2^110: the origin is a finite number
            const Ints rounded_up = (bits_as<Ints>(extent / X::REACH) + (PART - 1)) & -PART;
            const Ints steps = is_small ? rounded_up : Ints{} + ONE, power = (steps & 255 << 23) - ONE;
            part = steps / PART % STEPS_AN_OCTAVE;
            const Floats lower = part == 0 ? fill(1) : fill(1 / 1.25f), upper = part == 2 ? fill(1 / 1.5f) : fill(1 / 1.75f);
            inverse = is_small ? (part < 2 ? lower : upper) * bits_as<Floats>(ONE - power) : Floats{};
            step = bits_as<Floats>(steps);
            factor = is_small ? bits_as<Floats>(power + ORIGIN) : nan;
        } else {
            const auto is_finite = bits < (Ints{} + NOT_FINITE);
            inverse = is_finite ? X::REACH / extent : Floats{};
            step = factor = is_finite ? extent / X::REACH : nan;
        }
    }
};

// Writes the `count` numbers of a block of `steps` times `inverse` as integers of 8 bits, in the order of the codec's quads.
template <class C, class T, class Steps>
inline __attribute__((always_inline)) void put_quads(const T* from, Steps count, Steps steps, float inverse,
                                                     uint32_t* to, long stride) {
    alignas(16) static constexpr auto ORDER = C::quad_order();
#pragma GCC unroll 2
    for (long i = 0; i < steps; i += 16) {
        const Bytes16 rounded = shuffled(in_bytes(from + i, count - i, inverse), ORDER.data());
        uint32_t quads[4];
        std::memcpy(quads, &rounded, sizeof(quads));
#pragma GCC unroll 4
        for (long word = 0, words = std::min<long>(4, (steps - i) / 4); word < words; word++, to += stride)
            *to = quads[word];
    }
}

// Writes the words and scales of a block, and `step` where its sums go. If `count` and `steps` are types of constants,
// loops are unrolled.
template <class C, class X, class T, class Steps>
void put_block(X, const T* const* from, Steps count, Steps steps, int rows, const PlaceInTile& to) {
    alignas(64) int32_t bits[LANES] = {};
    alignas(64) float inverses[LANES];
    for (int row = 0; row < rows; row++) bits[row] = extent_bits(X(), from[row], count);
    const QuadScales<X> scales(read<Ints>(bits));
    store(inverses, scales.inverse);
    for (int row = 0; row < rows; row++)
        put_quads<C>(from[row], count, steps, inverses[row], to.words + row, to.rows);
    store(to.factor, scales.factor, rows), store(to.sum, scales.step, rows);
    if constexpr (X::HAS_ORIGINS) store(to.part, scales.part, rows);
}

template <class C, class X, class T>
void pack_quads(X x, const T* const* from, long count, long steps, int rows, const PlaceInTile& to) {
    using Common = std::integral_constant<long, 32>;  // numbers of a block of most formats
    if (count == Common() && steps == Common()) put_block<C>(x, from, Common(), Common(), rows, to);
    else put_block<C>(x, from, count, steps, rows, to);
}

// The sums of the first and of the last pairs of all quads.
inline Pairs sums_of_pairs(Words quads) {
#if defined(QUIRE_HAS_SIGNED_QUADS)
    return (Pairs)vpaddlq_s8((int8x16_t)quads);
#elif defined(QUIRE_HAS_AVX512)
    return (Pairs)_mm512_maddubs_epi16(_mm512_set1_epi8(1), (__m512i)quads);
#else
    return (Pairs)_mm256_maddubs_epi16(_mm256_set1_epi8(1), (__m256i)quads);
#endif
}

// Adds what follows from a block's words. They are loaded some time after they were stored, because a load of what several
// stores wrote waits for them.
template <class C, class X> void finish_block(X, long steps, int rows, const PlaceInTile& to) {
    Pairs pairs{};
    for (long i = 0; i < steps / X::STEPS; i++)
        pairs += sums_of_pairs(bits_as<Words>(load((const float*)to.words + i * to.rows, rows)));
    const Ints first = bits_as<Ints>(pairs) << 16 >> 16, last = bits_as<Ints>(pairs) >> 16, all = first + last;
    if constexpr (X::HAS_ORIGINS) store(to.start, bits_as<Ints>(load(to.factor, rows)) - C::MIDDLE * all, rows);
    else if constexpr (!X::HAS_STARTS) {}
    else if constexpr (std::is_same_v<typename X::Sum, Ints>) store(to.start, -C::MIDDLE * all, rows);
    else store(to.start, (-C::MIDDLE * first & 0xffff) | -C::MIDDLE * last << 16, rows);
    store(to.sum, load(to.sum, rows) * __builtin_convertvector(all, Floats), rows);
}
#endif

#if defined(QUIRE_HAS_BFLOATS)
// The same as bfloat16.
template <class C, class T> void pack_block(InBFloats, const T* from, long count, long steps, const PlaceInTile& to) {
    Floats total{};
    for (long i = 0; i < steps; i += LANES) {
        alignas(32) BFloat16 numbers[LANES];
        store(numbers, i < count ? load(from + i, count - i) : Floats{});
        total += load(numbers);
        for (long word = 0, words = std::min<long>(LANES / 2, (steps - i) / 2); word < words; word++)
            to.words[(i / 2 + word) * to.rows] = read<uint32_t>(numbers + 2 * word);
    }
    *to.sum = quire::sum(total);
}
#endif

// Packs up to LANES rows of a tile, from row `first` on: those at `from`.
template <class X, class C, class T>
void pack_rows(const T* const* from, const int64_t* order, const Blocks<X>& blocks, int first, int count, int rows,
               uint8_t* tile) {
    constexpr bool ARE_QUADS = X::STEPS == 4;
    const PlaceInTile begin{(uint32_t*)tile + first,
                            (float*)(tile + blocks.factors_at(rows)) + first,
                            (float*)(tile + blocks.sums_at(rows)) + first,
                            (int32_t*)(tile + blocks.starts_at(rows)) + first,
                            (int32_t*)(tile + blocks.parts_at(rows)) + first,
                            rows};
    PlaceInTile to = begin;
    for (BlockAt<X> at{blocks, 0, 0}; at.group < blocks.groups; at.advance()) {
        const long input = at.group * blocks.group + at.first, size = std::min(X::MOST_INPUTS, blocks.group - at.first);
        T ordered[LANES][X::MOST_INPUTS];
        const T* own[LANES];
        for (int row = 0; row < count; row++) {
            own[row] = order ? ordered[row] : from[row] + input;
            if (!order) __builtin_prefetch((const char*)own[row] + X_AHEAD);  // of more rows than a processor would follow
            if (order)
                for (long i = 0; i < size; i++) ordered[row][i] = from[row][order[input + i]];
        }
        if constexpr (ARE_QUADS) pack_quads<C>(X(), own, size, at.steps(), count, to);
        else
            for (int row = 0; row < count; row++) pack_block<C>(X(), own[row], size, at.steps(), to.of_row(row));
        to.advance(at.steps() / X::STEPS);
    }
    if constexpr (ARE_QUADS) {
        to = begin;
        for (BlockAt<X> at{blocks, 0, 0}; at.group < blocks.groups; at.advance()) {
            finish_block<C>(X(), at.steps(), count, to);
            to.advance(at.steps() / X::STEPS);
        }
    }
}

// Writes a tile of the rows at `from`. Number i of a row is that at order[i] there, unless order is null.
template <class X, class C, class T>
void pack_words(const T* const* from, const int64_t* order, const Blocks<X>& blocks, int rows, uint8_t* tile) {
    for (int first = 0; first < rows; first += LANES)
        pack_rows<X, C>(from + first, order, blocks, first, std::min(LANES, rows - first), rows, tile);
}

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

}  // namespace widened
}  // namespace quire
