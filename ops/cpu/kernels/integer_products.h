// The products of integers that widened.h describes.
#pragma once

#include "widened.h"

#if defined(QUIRE_HAS_PAIRS)

#include <array>
#include <utility>

namespace quire {
namespace widened {

constexpr int LEAST_ROWS = (MOST_ROWS + 1) / 2;  // of a tile that is not alone

// Rows of a tile, from some block on: see `Blocks`.
struct IntegerRows {
    const int32_t* pairs;
    const float *powers, *sums;
    IntegerRows(const uint8_t* tile, const Blocks& blocks, int rows)
        : pairs((const int32_t*)tile), powers((const float*)(tile + blocks.powers_at(rows))),
          sums((const float*)(tile + blocks.sums_at(rows))) {}
};

// Scales and offsets of a group, of two vectors of outputs.
struct Scales {
    Floats scale[2], offset[2];
};

// A part of a panel as integers, for more tiles: some blocks, whose steps are at most MOST_STEPS.
struct Kept {
    Pairs pairs[MOST_STEPS / 2][2];
    Scales scales[MOST_STEPS / 2];  // of each block
    long num_pairs[MOST_STEPS / 2];
    long num_blocks;
};

// Adds a block's sums of integers to `sums`, [ROWS][PANEL].
template <int ROWS>
inline __attribute__((always_inline)) void add_block(const Ints (&sum)[ROWS][2], const Scales& scales, bool has_offsets,
                                                     const float* powers, const float* x_sums, float* sums) {
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            float* to = sums + (row * 2 + half) * LANES;
            const Floats number = __builtin_convertvector(sum[row][half], Floats);
            Floats total = multiply_add(number, scales.scale[half] * powers[row], load(to));
            if (has_offsets) total = multiply_add(fill(x_sums[row]), scales.offset[half], total);
            store(to, total);
        }
}

// Calls body with each of the numbers 0, 2, .. below 2 * sizeof...(I) as an integral_constant.
template <class Body, int... I>
inline __attribute__((always_inline)) void for_even(Body body, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, 2 * I>()), ...);
}

// sums [ROWS][PANEL] += x times `count` blocks of a panel, from `at` on. If KEEPS, the blocks are written to `kept`.
template <class C, int ROWS, bool KEEPS>
void multiply_blocks(const Layout<C>& weight, const uint8_t* panel, BlockAt at, long count, IntegerRows x, float* sums,
                     Kept* kept) {
    const bool has_offsets = weight.adds_offsets();
    Pairs(*keep)[2] = KEEPS ? kept->pairs : nullptr;
    for (long block = 0; block < count; block++, at.advance(), x.powers += ROWS, x.sums += ROWS) {
        const uint8_t* group = panel + at.group * weight.group_bytes();
        const uint8_t* units = group + weight.header() + at.first / C::UNIT * C::BYTES;
        const long num_units = at.steps() / C::UNIT;
        Ints sum[ROWS][2] = {};
        for (long unit = 0; unit < num_units; unit++, units += C::BYTES, x.pairs += C::UNIT / 2 * ROWS) {
            for (long line = 0; line < C::BYTES; line += 64) __builtin_prefetch(units + line + AHEAD);
            const typename C::Unit codes = C::load(units);
            for_even([&](auto first) __attribute__((always_inline)) {
                constexpr int PAIR = decltype(first)::value / 2;
                Pairs pairs[2];
                C::template pairs<2 * PAIR>(codes, pairs);
                if constexpr (KEEPS) keep[0][0] = pairs[0], keep[0][1] = pairs[1], keep++;
#pragma GCC unroll 12
                for (int row = 0; row < ROWS; row++) {
                    const Ints factor = x.pairs[PAIR * ROWS + row] - Ints{};
                    sum[row][0] = add_products(sum[row][0], factor, pairs[0]);
                    sum[row][1] = add_products(sum[row][1], factor, pairs[1]);
                }
            }, std::make_integer_sequence<int, C::UNIT / 2>());
        }
        Scales scales;
        weight.load_scales(group, scales.scale, scales.offset);
        if constexpr (KEEPS) kept->scales[block] = scales, kept->num_pairs[block] = at.steps() / 2;
        add_block<ROWS>(sum, scales, has_offsets, x.powers, x.sums, sums);
    }
    if constexpr (KEEPS) kept->num_blocks = count;
}

// sums [ROWS][PANEL] += x times the blocks of `kept`. Meanwhile `fetch` bytes from `ahead` on are prefetched for each pair.
template <int ROWS>
void multiply_kept(const Kept& kept, bool has_offsets, IntegerRows x, float* sums, const uint8_t* ahead, long fetch) {
    const Pairs(*pairs)[2] = kept.pairs;
    for (long block = 0; block < kept.num_blocks; block++, x.powers += ROWS, x.sums += ROWS) {
        Ints sum[ROWS][2] = {};
        for (long i = 0; i < kept.num_pairs[block]; i++, pairs++, x.pairs += ROWS, ahead += fetch) {
            __builtin_prefetch(ahead);
            const Pairs low = pairs[0][0], high = pairs[0][1];
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; row++) {
                const Ints factor = x.pairs[row] - Ints{};
                sum[row][0] = add_products(sum[row][0], factor, low);
                sum[row][1] = add_products(sum[row][1], factor, high);
            }
        }
        add_block<ROWS>(sum, kept.scales[block], has_offsets, x.powers, x.sums, sums);
    }
}

template <class C> using MultiplyBlocks = void (*)(const Layout<C>&, const uint8_t*, BlockAt, long, IntegerRows, float*,
                                                   Kept*);
using MultiplyKept = void (*)(const Kept&, bool, IntegerRows, float*, const uint8_t*, long);

template <class C, bool KEEPS, int LEAST, int... I>
constexpr std::array<MultiplyBlocks<C>, sizeof...(I)> block_functions(std::integer_sequence<int, I...>) {
    return {multiply_blocks<C, LEAST + I, KEEPS>...};
}

template <int LEAST, int... I>
constexpr std::array<MultiplyKept, sizeof...(I)> kept_functions(std::integer_sequence<int, I...>) {
    return {multiply_kept<LEAST + I>...};
}

// Functions for 1, or LEAST_ROWS, to MOST_ROWS rows.
template <class C>
constexpr auto WIDEN = block_functions<C, false, 1>(std::make_integer_sequence<int, MOST_ROWS>());
using Many = std::make_integer_sequence<int, MOST_ROWS - LEAST_ROWS + 1>;
template <class C> constexpr auto KEEP = block_functions<C, true, LEAST_ROWS>(Many());
constexpr auto TAKE_KEPT = kept_functions<LEAST_ROWS>(Many());

// See `Weight::multiply`.
template <class C>
void multiply_integers(const Layout<C>& weight, const uint8_t* panel, int count, const uint8_t* x, const Tiles& tiles,
                       float* sums) {
    const Blocks blocks = weight.blocks();
    const long row_bytes = blocks.row_bytes(), stride = weight.panel_bytes();
    const bool keeps = tiles.count > 1;
    const long most_steps = keeps ? MOST_STEPS : blocks.inputs();
    std::fill_n(sums, count * tiles.rows * PANEL, 0.0f);
    alignas(64) Kept kept;
    BlockAt at{blocks, 0, 0};
    for (long first = 0, num_pairs = 0; at.group < blocks.groups;) {
        BlockAt end = at;
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
                IntegerRows part(x + tiles.start(tile) * row_bytes, blocks, rows);
                part.pairs += num_pairs * rows, part.powers += first * rows, part.sums += first * rows;
                float* to = sums + (i * tiles.rows + tiles.start(tile)) * PANEL;
                if (!keeps) WIDEN<C>[rows - 1](weight, own, at, num_blocks, part, to, nullptr);
                else if (tile == 0) KEEP<C>[rows - LEAST_ROWS](weight, own, at, num_blocks, part, to, &kept);
                else TAKE_KEPT[rows - LEAST_ROWS](kept, weight.adds_offsets(), part, to, ahead,
                                                  tile == 1 ? 2 * C::BYTES / C::UNIT : 0);
            }
        }
        at.group = end.group, at.first = end.first, first += num_blocks, num_pairs += steps / 2;
    }
}

}  // namespace widened
}  // namespace quire
#endif
