// Packs rows of x as words, which words.h describes.
#pragma once

#include "bytes.h"
#include "words.h"

#include <array>
#include <limits>
#include <type_traits>

namespace quire {
namespace quantized {

// The places of one row's block in a tile of `rows` rows.
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
#elif defined(__AVX2__)
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#else
    int32_t most = x[0];
    for (int i = 1; i < LANES; i++) most = std::max(most, x[i]);
    return most;
#endif
}

// The bits of the largest magnitude of `count` values; infinities and NaN count as greatest.
template <class T> int32_t largest_bits(const T* from, long count) {
    Ints most{};
    for (long i = 0; i < count; i += LANES) {
        const Ints bits = bits_as<Ints>(load(from + i, count - i)) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return largest(most);
}

constexpr int32_t NOT_FINITE = 255 << 23;
constexpr int MOST_PACKED = 8;     // blocks that are packed at once
constexpr long PACKED_INPUTS = 256;  // the most of their inputs; while they are packed, as many are prefetched

// The inputs of a block, and with the zeros behind them.
struct BlockSize { long inputs, steps; };

// Writes the `count` elements of a block of `steps` as int16. Defined where the processor has products of them.
template <class C, class T> void pack_block(InPairs, const T* from, long count, long steps, const PlaceInTile& to);

#if defined(QUIRE_HAS_PAIRS)
// Two vectors as int16, in order; numbers out of its range become the nearest.
inline Pairs in_shorts(Ints first, Ints second) {
#if defined(QUIRE_HAS_AVX512)
    const __m512i in_turns = _mm512_packs_epi32((__m512i)first, (__m512i)second);
    return (Pairs)_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), in_turns);
#elif defined(__AVX2__)
    return (Pairs)_mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)first, (__m256i)second), 0xd8);
#else
    return (Pairs)_mm_packs_epi32((__m128i)first, (__m128i)second);
#endif
}

template <class C, class T> void pack_block(InPairs, const T* from, long count, long steps, const PlaceInTile& to) {
    const int32_t largest = largest_bits(from, count);
    const int32_t exponent = std::max(largest >> 23, 15);  // of a power of two that is a normal number
    const bool is_finite = largest < NOT_FINITE;
    const float inverse = is_finite ? bits_as<float>((268 - exponent) << 23) : 0;
    *to.factor = is_finite ? bits_as<float>((exponent - 14) << 23) : std::numeric_limits<float>::quiet_NaN();
    const Floats magic = fill(12582912.0f);  // 1.5 * 2^23: rounds to integers
    const auto rounded = [&](long i) __attribute__((always_inline)) {
        const Floats x = i < count ? load(from + i, count - i) : Floats{};
        return bits_as<Ints>(x * inverse + magic) - bits_as<Ints>(magic);
    };
    Ints total{};
    uint32_t* word = to.words;
    for (long i = 0; i < steps; i += 2 * LANES) {
        const Pairs pairs = in_shorts(rounded(i), rounded(i + LANES));
        total = add_products(total, Ints{} + 0x00010001, pairs);
        uint32_t words[LANES];
        std::memcpy(words, &pairs, sizeof(words));
        const long left = std::min<long>(LANES, (steps - i) / 2);
        if (left == LANES)
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++, word += to.rows) *word = words[k];
        else
            for (long k = 0; k < left; k++, word += to.rows) *word = words[k];
    }
    *to.sum = *to.factor * (float)sum(total);
}
#endif

// Two calls pack blocks of up to LANES rows of a tile as quads. Defined where the processor has products of them.
template <class C, class X, class T>
void pack_quads(X, const T* const* from, const BlockSize* blocks, int count, int rows, PlaceInTile to);
template <class C, class X> void finish_block(X, long steps, int rows, const PlaceInTile& to);

#if defined(QUIRE_HAS_QUADS)
// The bits of what becomes X::REACH; those of no finite number are the greatest.
template <class T> int32_t extent_bits(InQuads, const T* from, long count) { return largest_bits(from, count); }

#if defined(QUIRE_HAS_SAFE_QUADS)
// Half of the largest sum of two values of one sign that meet in one instruction: with codes of eight bits the first and
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
    Floats inverse, step, factor;  // multiplies elements; the value of an integer 1; factor, or origin
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

// Writes the `count` elements of a block of `steps` times `inverse` as int8, in the order of the codec's quads.
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

// Calls body(count, steps) of a block. For the block sizes of most formats, they are types of constants, so
// that loops are unrolled.
template <class Body> inline __attribute__((always_inline)) void with_common(long count, long steps, Body body) {
    using Common = std::integral_constant<long, 32>;
    if (count == Common() && steps == Common()) body(Common(), Common());
    else body(count, steps);
}

// Writes the words and scales of some blocks, and `step` where their sums go. Each of these loops goes over all blocks, so that
// no vector is loaded right after its elements were stored one by one, which stalls.
template <class C, class X, class T>
void pack_quads(X, const T* const* from, const BlockSize* blocks, int count, int rows, PlaceInTile to) {
    alignas(64) int32_t bits[MOST_PACKED][LANES] = {};
    alignas(64) float inverses[MOST_PACKED][LANES];
    long first = 0;
    for (int i = 0; i < count; first += blocks[i++].inputs)
        with_common(blocks[i].inputs, blocks[i].steps, [&](auto count, auto) {
            for (int row = 0; row < rows; row++) bits[i][row] = extent_bits(X(), from[row] + first, count);
        });
    PlaceInTile at = to;
    for (int i = 0; i < count; at.advance(blocks[i++].steps / X::STEPS)) {
        const QuadScales<X> scales(read<Ints>(bits[i]));
        store(inverses[i], scales.inverse);
        store(at.factor, scales.factor, rows), store(at.sum, scales.step, rows);
        if constexpr (X::HAS_ORIGINS) store(at.part, scales.part, rows);
    }
    first = 0;
    for (int i = 0; i < count; first += blocks[i].inputs, to.advance(blocks[i++].steps / X::STEPS))
        with_common(blocks[i].inputs, blocks[i].steps, [&](auto count, auto steps) {
            for (int row = 0; row < rows; row++)
                put_quads<C>(from[row] + first, count, steps, inverses[i][row], to.words + row, to.rows);
        });
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
    *to.sum = sum(total);
}
#endif

// Packs up to LANES rows of a tile, from row `first` on: those at `from`.
template <class X, class C, class T>
void pack_rows(const T* const* from, const int64_t* order, const Blocks<X>& blocks, int first, int count, int rows,
               uint8_t* tile) {
    constexpr bool ARE_QUADS = X::STEPS == 4;
    static_assert(X::MOST_INPUTS <= PACKED_INPUTS);
    const PlaceInTile begin{(uint32_t*)tile + first,
                            (float*)(tile + blocks.factors_at(rows)) + first,
                            (float*)(tile + blocks.sums_at(rows)) + first,
                            (int32_t*)(tile + blocks.starts_at(rows)) + first,
                            (int32_t*)(tile + blocks.parts_at(rows)) + first,
                            rows};
    PlaceInTile to = begin;
    long input = 0;
    for (BlockAt<X> at{blocks, 0, 0}; at.group < blocks.groups;) {
        BlockSize some[MOST_PACKED];
        int num = 0;
        long size = 0;
        for (; num < MOST_PACKED && at.group < blocks.groups && size + at.inputs() <= PACKED_INPUTS; at.advance()) {
            some[num++] = {at.inputs(), at.steps()};
            size += at.inputs();
        }
        T ordered[LANES][PACKED_INPUTS];
        const T* own[LANES];
        for (int row = 0; row < count; row++) {
            own[row] = order ? ordered[row] : from[row] + input;
            if (order)
                for (long i = 0; i < size; i++) ordered[row][i] = from[row][order[input + i]];
            else  // they are more streams than a processor would follow
                for (long i = size; i < 2 * size; i += 64 / sizeof(T)) __builtin_prefetch(own[row] + i);
        }
        if constexpr (ARE_QUADS) pack_quads<C>(X(), own, some, num, count, to);
        long first = 0;
        for (int i = 0; i < num; i++) {
            if constexpr (!ARE_QUADS)
                for (int row = 0; row < count; row++)
                    pack_block<C>(X(), own[row] + first, some[i].inputs, some[i].steps, to.of_row(row));
            first += some[i].inputs;
            to.advance(some[i].steps / X::STEPS);
        }
        input += size;
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

}  // namespace quantized
}  // namespace quire
