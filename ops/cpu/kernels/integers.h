// Rows of x as integers of 16 bits, and the products of integers.
//
// The inputs of a weight's group, or up to MOST_INPUTS of them, are a block. For each block a row has a power of two, 2^k,
// so that q = x / 2^k has 15 bits and a sign. A bfloat16 of at least 1/128 of its block's largest number stays what it is,
// and a float16 of at least 1/16. Others are rounded by at most 2^-15 of the largest, which is less than the type itself
// rounds there. Sums within a block are exact: 128 products of 16 and 8 bits fit into 32.
#pragma once

#include "vector.h"

#include <algorithm>
#include <limits>

// AVX without AVX2 has vectors of eight floats, but none of as many integers.
#if defined(QUIRE_HAS_AVX512) || defined(__AVX2__) || (defined(__SSE2__) && !defined(__AVX__))
#define QUIRE_HAS_PAIRS 1
#endif

namespace quire {
namespace widened {

constexpr long MOST_INPUTS = 128;  // of a block; a multiple of each codec's unit

// How inputs fall into blocks. Each group begins with a unit of the codec, and zeros fill its last one.
struct Blocks {
    long groups, group, padded;  // padded: inputs of a group with its zeros
    long per_group() const { return (padded + MOST_INPUTS - 1) / MOST_INPUTS; }
    long inputs() const { return groups * padded; }
    long count() const { return groups * per_group(); }
    // A tile of rows is {pairs of inputs [inputs / 2][rows], powers of two [count][rows], sums of the block [count][rows]}.
    long row_bytes() const { return inputs() * 2 + count() * 8; }
    long powers_at(long rows) const { return inputs() * 2 * rows; }
    long sums_at(long rows) const { return powers_at(rows) + count() * 4 * rows; }
};

// Walks over the blocks.
struct BlockAt {
    const Blocks& blocks;
    long group, first;  // its first input, in the group
    long steps() const { return std::min(MOST_INPUTS, blocks.padded - first); }
    void advance() {
        if ((first += MOST_INPUTS) >= blocks.padded) first = 0, group++;
    }
};

// One row's numbers of a block: the `count` numbers of `from`, or those at order[i] of it unless order is null. Writes
// steps / 2 pairs, each `rows` after the one before, the power of two, and the sum of what the pairs stand for.
template <class T>
void pack_block(const T* from, const int64_t* order, long count, long steps, int rows, uint32_t* pairs, float* power,
                float* sum) {
    T ordered[MOST_INPUTS];
    if (order) {
        for (long i = 0; i < count; i++) ordered[i] = from[order[i]];
        from = ordered;
    }
    Ints most{}, total{};
    for (long i = 0; i < count; i += LANES) {
        const Ints bits = bits_as<Ints>(load(from + i, count - i)) & 0x7fffffff;
        most = bits > most ? bits : most;  // as magnitudes are ordered; the greatest are no numbers
    }
    int32_t exponent = 15;  // of a power of two that is a normal number
    for (int i = 0; i < LANES; i++) exponent = std::max(exponent, most[i] >> 23);
    const bool is_finite = exponent != 255;
    const float factor = is_finite ? bits_as<float>((268 - exponent) << 23) : 0;
    *power = is_finite ? bits_as<float>((exponent - 14) << 23) : std::numeric_limits<float>::quiet_NaN();
    alignas(64) int32_t numbers[MOST_INPUTS + LANES] = {};
    const Floats magic = fill(12582912.0f);  // 1.5 * 2^23: rounds to integers
    for (long i = 0; i < count; i += LANES) {
        const Ints rounded = bits_as<Ints>(load(from + i, count - i) * factor + magic) - bits_as<Ints>(magic);
        const Ints most_of_16_bits = Ints{} + 32767, limited = rounded < most_of_16_bits ? rounded : most_of_16_bits;
        total += limited;
        std::memcpy(numbers + i, &limited, sizeof(limited));
    }
    for (long i = 0; i < steps; i += 2)
        pairs[i / 2 * rows] = (uint32_t)(numbers[i] & 0xffff) | (uint32_t)numbers[i + 1] << 16;
    int32_t all = 0;
    for (int i = 0; i < LANES; i++) all += total[i];
    *sum = *power * (float)all;
}

// Writes row `row` of a tile. Number i of the row is that at order[i] of `from`, unless order is null.
template <class T>
void pack_integers(const T* from, const int64_t* order, const Blocks& blocks, int row, int rows, uint8_t* tile) {
    uint32_t* pairs = (uint32_t*)tile + row;
    float *power = (float*)(tile + blocks.powers_at(rows)) + row, *sum = (float*)(tile + blocks.sums_at(rows)) + row;
    for (BlockAt at{blocks, 0, 0}; at.group < blocks.groups; at.advance()) {
        const long input = at.group * blocks.group + at.first;
        const long count = std::min(MOST_INPUTS, blocks.group - at.first);
        pack_block(order ? from : from + input, order ? order + input : nullptr, count, at.steps(), rows, pairs, power,
                   sum);
        pairs += at.steps() / 2 * rows, power += rows, sum += rows;
    }
}

// A pair of neighbouring inputs of LANES outputs.
typedef int16_t Pairs __attribute__((vector_size(4 * LANES)));

#if defined(QUIRE_HAS_PAIRS)
// Adds to each sum the two products of a pair.
inline __attribute__((always_inline)) Ints add_products(Ints sum, Ints x, Pairs weight) {
#if defined(QUIRE_HAS_AVX512_VNNI)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)weight);
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

}  // namespace widened
}  // namespace quire
