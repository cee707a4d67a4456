// Blocks of tiled_products.h with ARM's matrix products (i8mm). One instruction multiplies two rows by two outputs, eight
// inputs deep.
#pragma once

#include "word_products.h"

#if defined(QUIRE_HAS_ARM_MATRICES)

namespace quire {
namespace quantized {

// Up to 12 rows, in pairs, and a panel's four pairs of outputs have 24 sums of four.
class TileMultiplier {
public:
    static constexpr int MOST_ROWS = 12;

    explicit TileMultiplier(const Blocks<InQuads>&) {}

    // Turns two words of eight outputs into both words of each output, for `num_words` words.
    static void arrange(Quads (*codes)[2], long num_words) {
        for (long word = 0; word < num_words; word += 2, codes += 2) {
            const int32x4x2_t low = zipped(codes[0][0], codes[1][0]), high = zipped(codes[0][1], codes[1][1]);
            codes[0][0] = (Quads)low.val[0], codes[0][1] = (Quads)low.val[1];
            codes[1][0] = (Quads)high.val[0], codes[1][1] = (Quads)high.val[1];
        }
    }

    void prepare(int) {}

    // sums [rows][PANEL] = x times `num_words` words of a panel; rows of x are row_bytes apart.
    void multiply(const uint8_t* x, long row_bytes, int rows, const Quads* codes, long num_words,
                  Ints (*sums)[2]) const {
        for (int row = 0; row < rows;) {
            const int left = rows - row;
            const auto* from = (const int8_t*)x + row * row_bytes;
            if (left >= 12) multiply<6>(from, row_bytes, 12, codes, num_words, sums + row), row += 12;
            else if (left >= 5) multiply<3>(from, row_bytes, std::min(left, 6), codes, num_words, sums + row), row += 6;
            else if (left >= 3) multiply<2>(from, row_bytes, left, codes, num_words, sums + row), row += 4;
            else multiply<1>(from, row_bytes, left, codes, num_words, sums + row), row += 2;
        }
    }

private:
    static int32x4x2_t zipped(Quads first, Quads second) { return vzipq_s32((int32x4_t)first, (int32x4_t)second); }

    // The last one of an odd number of rows takes both places of its pair.
    template <int PAIRS>
    static void multiply(const int8_t* x, long row_bytes, int rows, const Quads* codes, long num_words, Ints (*sums)[2]) {
        const int8_t* at[2 * PAIRS];
        for (int row = 0; row < 2 * PAIRS; row++) at[row] = x + std::min(row, rows - 1) * row_bytes;
        int32x4_t total[PAIRS][4];
#pragma GCC unroll 6
        for (int pair = 0; pair < PAIRS; pair++)
            for (int i = 0; i < 4; i++) total[pair][i] = vdupq_n_s32(0);
        for (long word = 0; word < num_words; word += 2, codes += 4) {
#pragma GCC unroll 6
            for (int pair = 0; pair < PAIRS; pair++) {
                const int8x16_t two = vcombine_s8(vld1_s8(at[2 * pair] + 4 * word), vld1_s8(at[2 * pair + 1] + 4 * word));
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) total[pair][i] = vmmlaq_s32(total[pair][i], two, (int8x16_t)codes[i]);
            }
        }
        for (int row = 0; row < rows; row++)
            for (int half = 0; half < 2; half++) {
                const int32x4_t* pairs = &total[row / 2][2 * half];
                const int64x2_t first = (int64x2_t)pairs[0], second = (int64x2_t)pairs[1];
                sums[row][half] = (Ints)(row % 2 ? vzip2q_s64(first, second) : vzip1q_s64(first, second));
            }
    }
};

}  // namespace quantized
}  // namespace quire
#endif
