// The products of words that widened.h describes.
#pragma once

#include "widened.h"

#if defined(QUIRE_HAS_PAIRS)  // and so wherever there are words of any kind

#include <array>
#include <utility>

namespace quire {
namespace widened {

constexpr long WORDS_AHEAD = 4096;                // bytes from the codes that are read to those that are prefetched
constexpr int LEAST_ROWS = (MOST_ROWS + 1) / 2;  // of a tile that is not alone

// Rows of a tile, from some block on: see `Blocks`.
template <class X> struct WordRows {
    const int32_t *words, *starts;
    const float *factors, *sums;
    WordRows(const uint8_t* tile, const Blocks<X>& blocks, int rows)
        : words((const int32_t*)tile), starts((const int32_t*)(tile + blocks.starts_at(rows))),
          factors((const float*)(tile + blocks.factors_at(rows))), sums((const float*)(tile + blocks.sums_at(rows))) {}
    void advance(long num_words, long num_blocks) {
        words += num_words, starts += num_blocks, factors += num_blocks, sums += num_blocks;
    }
    // A block's sums before its products.
    template <int ROWS> inline __attribute__((always_inline)) void start(typename X::Sum (&sum)[ROWS][2]) const {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) {
            if constexpr (X::HAS_STARTS) sum[row][0] = (typename X::Sum)(starts[row] - Ints{});
            else sum[row][0] = typename X::Sum{};
            sum[row][1] = sum[row][0];
        }
    }
};

// Scales and offsets of a group, of two vectors of outputs.
struct Scales {
    Floats scale[2], offset[2];
};

// A part of a panel as words, for more tiles: some blocks, whose steps are at most MOST_STEPS.
template <class X> struct Kept {
    static constexpr long MOST_WORDS = MOST_STEPS / X::STEPS;
    typename X::Codes codes[MOST_WORDS][2];
    Scales scales[MOST_WORDS];  // of each block
    long num_words[MOST_WORDS];
    long num_blocks;
};

inline Floats as_floats(Floats x) { return x; }
inline Floats as_floats(Ints x) { return __builtin_convertvector(x, Floats); }
#if defined(QUIRE_HAS_SAFE_QUADS)
inline Floats as_floats(SumPairs x) {
    return as_floats((Ints)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(1)));
}
#endif

// Adds a block's own sums to `sums`, [ROWS][PANEL].
template <class X, int ROWS>
inline __attribute__((always_inline)) void add_block(const typename X::Sum (&sum)[ROWS][2], const Scales& scales,
                                                     bool has_offsets, const WordRows<X>& x, float* sums) {
    const Floats scale[2] = {scales.scale[0], scales.scale[1]};
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++) {
        Floats factor[2] = {scale[0], scale[1]};
        if constexpr (X::HAS_FACTORS) {
            const Floats own = fill(x.factors[row]);
            factor[0] *= own, factor[1] *= own;
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            float* to = sums + (row * 2 + half) * LANES;
            Floats total = multiply_add(as_floats(sum[row][half]), factor[half], load(to));
            if (has_offsets) total = multiply_add(fill(x.sums[row]), scales.offset[half], total);
            store(to, total);
        }
    }
    asm("" : : : "memory");  // GCC would keep all sums on the stack as well, and store twice as much
}

// Calls body with each of the numbers 0, STEPS, .. below STEPS * sizeof...(I) as an integral_constant.
template <int STEPS, class Body, int... I>
inline __attribute__((always_inline)) void for_steps(Body body, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, STEPS * I>()), ...);
}

// sums [ROWS][PANEL] += x times `count` blocks of a panel, from `at` on. If KEEPS, the blocks are written to `kept`.
template <class C, class X, int ROWS, bool KEEPS>
void multiply_blocks(const Layout<C>& weight, const uint8_t* panel, BlockAt<X> at, long count, WordRows<X> x,
                     float* sums, Kept<X>* kept) {
    using Codes = typename X::Codes;
    const C codec = weight.codec;
    constexpr int WORDS = C::UNIT / X::STEPS;
    const bool has_offsets = weight.adds_offsets();
    Codes(*keep)[2] = KEEPS ? kept->codes : nullptr;
    for (long block = 0; block < count; block++, at.advance()) {
        const uint8_t* group = panel + at.group * weight.group_bytes();
        const uint8_t* units = group + weight.header() + at.first / C::UNIT * C::BYTES;
        const long num_units = at.steps() / C::UNIT;
        typename X::Sum sum[ROWS][2];
        x.template start<ROWS>(sum);
        for (long unit = 0; unit < num_units; unit++, units += C::BYTES, x.words += WORDS * ROWS) {
            for (long line = 0; line < C::BYTES; line += 64) __builtin_prefetch(units + line + WORDS_AHEAD);
            const typename C::Unit codes = C::load(units);
            for_steps<X::STEPS>([&](auto first) __attribute__((always_inline)) {
                constexpr int WORD = decltype(first)::value / X::STEPS;
                Codes words[2];
                codec.template in_words<WORD>(codes, words);
                if constexpr (KEEPS) keep[0][0] = words[0], keep[0][1] = words[1], keep++;
#pragma GCC unroll 12
                for (int row = 0; row < ROWS; row++) {
                    const Ints factor = x.words[WORD * ROWS + row] - Ints{};
                    sum[row][0] = add_products(sum[row][0], factor, words[0]);
                    sum[row][1] = add_products(sum[row][1], factor, words[1]);
                }
            }, std::make_integer_sequence<int, WORDS>());
        }
        Scales scales;
        weight.load_scales(group, scales.scale, scales.offset);
        if constexpr (KEEPS) kept->scales[block] = scales, kept->num_words[block] = num_units * WORDS;
        add_block<X, ROWS>(sum, scales, has_offsets, x, sums);
        x.advance(0, ROWS);
    }
    if constexpr (KEEPS) kept->num_blocks = count;
}

// sums [ROWS][PANEL] += x times the blocks of `kept`. Meanwhile `fetch` bytes from `ahead` on are prefetched for each word.
template <class X, int ROWS>
void multiply_kept(const Kept<X>& kept, bool has_offsets, WordRows<X> x, float* sums, const uint8_t* ahead,
                   long fetch) {
    const typename X::Codes(*codes)[2] = kept.codes;
    for (long block = 0; block < kept.num_blocks; block++, x.advance(0, ROWS)) {
        typename X::Sum sum[ROWS][2];
        x.template start<ROWS>(sum);
        for (long i = 0; i < kept.num_words[block]; i++, codes++, x.words += ROWS, ahead += fetch) {
            for (int line = 0; line < X::STEPS / 2; line++) __builtin_prefetch(ahead + line * 64);
            const typename X::Codes low = codes[0][0], high = codes[0][1];
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; row++) {
                const Ints factor = x.words[row] - Ints{};
                sum[row][0] = add_products(sum[row][0], factor, low);
                sum[row][1] = add_products(sum[row][1], factor, high);
            }
        }
        add_block<X, ROWS>(sum, kept.scales[block], has_offsets, x, sums);
    }
}

template <class C, class X> using MultiplyBlocks = void (*)(const Layout<C>&, const uint8_t*, BlockAt<X>, long,
                                                            WordRows<X>, float*, Kept<X>*);
template <class X> using MultiplyKept = void (*)(const Kept<X>&, bool, WordRows<X>, float*, const uint8_t*, long);

template <class C, class X, bool KEEPS, int LEAST, int... I>
constexpr std::array<MultiplyBlocks<C, X>, sizeof...(I)> block_functions(std::integer_sequence<int, I...>) {
    return {multiply_blocks<C, X, LEAST + I, KEEPS>...};
}

template <class X, int LEAST, int... I>
constexpr std::array<MultiplyKept<X>, sizeof...(I)> kept_functions(std::integer_sequence<int, I...>) {
    return {multiply_kept<X, LEAST + I>...};
}

// Functions for 1, or LEAST_ROWS, to MOST_ROWS rows.
template <class C, class X>
constexpr auto WIDEN = block_functions<C, X, false, 1>(std::make_integer_sequence<int, MOST_ROWS>());
using Many = std::make_integer_sequence<int, MOST_ROWS - LEAST_ROWS + 1>;
template <class C, class X> constexpr auto KEEP = block_functions<C, X, true, LEAST_ROWS>(Many());
template <class X> constexpr auto TAKE_KEPT = kept_functions<X, LEAST_ROWS>(Many());

// See `Weight::multiply`.
template <class C, class X>
void multiply_words(X, const Layout<C>& weight, const uint8_t* panel, int count, const uint8_t* x, const Tiles& tiles,
                    float* sums) {
    const Blocks<X> blocks = weight.template blocks<X>();
    const long row_bytes = blocks.row_bytes(), stride = weight.panel_bytes();
    const bool keeps = tiles.count > 1;
    const long most_steps = keeps ? MOST_STEPS : blocks.words() * X::STEPS;
    std::fill_n(sums, count * tiles.rows * PANEL, 0.0f);
    alignas(64) Kept<X> kept;
    BlockAt<X> at{blocks, 0, 0};
    for (long first = 0, num_words = 0; at.group < blocks.groups;) {
        BlockAt<X> end = at;
        long steps = 0, num_blocks = 0;
        for (; end.group < blocks.groups && steps + end.steps() <= most_steps; end.advance(), num_blocks++)
            steps += end.steps();
        for (int i = 0; i < count; i++) {
            const uint8_t* own = panel + i * stride;
            // The next part: of the next panel, or behind this one.
            const uint8_t* ahead = i + 1 < count ? weight.find(own + stride, at.group * weight.group + at.first)
                                                 : weight.find(panel, end.group * weight.group + end.first);
            for (long tile = 0; tile < tiles.count; tile++) {
                const int rows = tiles.size(tile);
                WordRows<X> part(x + tiles.start(tile) * row_bytes, blocks, rows);
                part.advance(num_words * rows, first * rows);
                float* to = sums + (i * tiles.rows + tiles.start(tile)) * PANEL;
                if (!keeps) WIDEN<C, X>[rows - 1](weight, own, at, num_blocks, part, to, nullptr);
                else if (tile == 0) KEEP<C, X>[rows - LEAST_ROWS](weight, own, at, num_blocks, part, to, &kept);
                else TAKE_KEPT<X>[rows - LEAST_ROWS](kept, weight.adds_offsets(), part, to, ahead,
                                                     tile == 1 ? X::STEPS * C::BYTES / C::UNIT : 0);
            }
        }
        at.group = end.group, at.first = end.first, first += num_blocks, num_words += steps / X::STEPS;
    }
}

}  // namespace widened
}  // namespace quire
#endif
