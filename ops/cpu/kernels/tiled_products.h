// Products of integers of 8 bits by instructions that multiply matrices, for many rows: see `TiledWeight`.
//
// A block's sums are exact. So they and the results from them equal those of word_products.h, which serves few rows.
// A part of a panel is dequantized once, into the first cache, for all rows.
#pragma once

#include "tiled_amx.h"
#include "tiled_arm.h"

#if defined(QUIRE_HAS_TILED_QUADS)

namespace quire {
namespace quantized {

// Widens `count` blocks of a panel, from `at` on, for all rows.
template <class C>
void widen_blocks(const Layout<C>& weight, const uint8_t* panel, BlockAt<InQuads> at, long count, Kept<InQuads>& kept) {
    constexpr int WORDS = C::UNIT / InQuads::STEPS;
    const C codec = weight.codec;
    Quads(*to)[2] = kept.codes;
    for (long block = 0; block < count; block++, at.advance()) {
        const uint8_t* group = panel + at.group * weight.group_bytes();
        const uint8_t* units = group + weight.header() + at.first / C::UNIT * C::BYTES;
        const long num_units = at.steps() / C::UNIT;
        for (long unit = 0; unit < num_units; unit++, units += C::BYTES) {
            for (long line = 0; line < C::BYTES; line += 64) __builtin_prefetch(units + line + KEPT_AHEAD);
            const typename C::Unit codes = C::load(units);
            for_steps<InQuads::STEPS>([&](auto first) __attribute__((always_inline)) {
                codec.template in_words<decltype(first)::value / InQuads::STEPS>(codes, *to++);
            }, std::make_integer_sequence<int, WORDS>());
        }
        weight.load_scales(group, kept.scales[block].scale[0], kept.scales[block].offset);
        kept.num_words[block] = num_units * WORDS;
    }
    kept.num_blocks = count;
    TileMultiplier::arrange(kept.codes, to - kept.codes);
}

// One row of x: see `Blocks`, with one row to a tile.
struct TiledRow {
    const float *factors, *sums;
    const int32_t* starts;
    TiledRow(const uint8_t* row, const Blocks<InQuads>& blocks)
        : factors((const float*)(row + blocks.factors_at(1))), sums((const float*)(row + blocks.sums_at(1))),
          starts((const int32_t*)(row + blocks.starts_at(1))) {}

    // Adds a block's own sums to `to`, [PANEL].
    void add_block(long block, const Ints (&own)[2], const Scales<InQuads>& scales, bool has_offsets, float* to) const {
        for (int half = 0; half < 2; half++, to += LANES) {
            Ints sum = own[half];
            if constexpr (InQuads::HAS_STARTS) sum += starts[block];
            Floats total = multiply_add(as_floats(sum), scales.scale[0][half] * factors[block], load(to));
            if (has_offsets) total = multiply_add(fill(sums[block]), scales.offset[half], total);
            store(to, total);
        }
    }
};

// See `Weight::multiply`; each row of x is a separate tile, row_bytes from the next.
template <class C>
void multiply_tiled(const Layout<C>& weight, const uint8_t* panel, int count, const uint8_t* x, long row_bytes, long rows,
                    float* sums) {
    const Blocks<InQuads> blocks = weight.template blocks<InQuads>();
    std::fill_n(sums, count * rows * PANEL, 0.0f);
    alignas(64) Kept<InQuads> kept;
    alignas(64) Ints products[TileMultiplier::MOST_ROWS][2];
    TileMultiplier multiplier(blocks);
    BlockAt<InQuads> at{blocks, 0, 0};
    for (long first = 0, first_word = 0; at.group < blocks.groups;) {
        BlockAt<InQuads> end = at;
        long steps = 0, num_blocks = 0;
        for (; end.group < blocks.groups && steps + end.steps() <= MOST_STEPS; end.advance(), num_blocks++)
            steps += end.steps();
        for (int i = 0; i < count; i++) {
            widen_blocks(weight, panel + i * weight.panel_bytes(), at, num_blocks, kept);
            for (long row = 0; row < rows; row += TileMultiplier::MOST_ROWS) {
                const int size = (int)std::min<long>(TileMultiplier::MOST_ROWS, rows - row);
                multiplier.prepare(size);
                const uint8_t* own = x + row * row_bytes;
                for (long block = 0, word = 0; block < num_blocks; word += kept.num_words[block++]) {
                    multiplier.multiply(own + (first_word + word) * 4, row_bytes, size, kept.codes[word],
                                        kept.num_words[block], products);
                    for (int r = 0; r < size; r++)
                        TiledRow(own + r * row_bytes, blocks)
                            .add_block(first + block, products[r], kept.scales[block], weight.adds_offsets(),
                                       sums + (i * rows + row + r) * PANEL);
                }
            }
        }
        at.group = end.group, at.first = end.first, first += num_blocks, first_word += steps / InQuads::STEPS;
    }
}

}  // namespace quantized
}  // namespace quire
#endif
