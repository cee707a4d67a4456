// Blocks of tiled_products.h with AMX. One instruction multiplies 16 rows by 16 outputs, up to 64 inputs deep.
#pragma once

#include "amx.h"
#include "word_products.h"

#if defined(QUIRE_HAS_AMX_INT8)

namespace quire {
namespace quantized {

// Up to 32 rows and a panel's 32 outputs have four tiles of sums. Tile registers 0 and 1: sums of the upper rows, low and
// high; 2 and 3: of the lower rows; 4 and 5: x; 6 and 7: the panel.
class TileMultiplier {
public:
    static constexpr int TILE_ROWS = 16, MOST_ROWS = 2 * TILE_ROWS;

    explicit TileMultiplier(const Blocks<InQuads>& blocks) : depth(tile_depth(blocks)) {}

    static void arrange(Quads (*)[2], long) {}

    void prepare(int rows) {
        registers.shape(rows, [&](int tile) {
            const long upper = std::min(rows, TILE_ROWS), lower = std::max(rows - TILE_ROWS, 1);
            if (tile < 4) return TileShape{tile < 2 ? upper : lower};
            return tile < 6 ? TileShape{tile == 4 ? upper : lower, 4 * depth} : TileShape{depth};
        });
    }

    // sums [rows][PANEL] = x times `num_words` words of a panel; rows of x are row_bytes apart.
    void multiply(const uint8_t* x, long row_bytes, int rows, const Quads* codes, long num_words,
                  Ints (*sums)[2]) const {
        if (rows > TILE_ROWS) multiply<true>(x, row_bytes, codes, num_words, sums);
        else multiply<false>(x, row_bytes, codes, num_words, sums);
    }

private:
    const long depth;
    TileRegisters registers;

    template <bool IS_TALL>
    void multiply(const uint8_t* x, long row_bytes, const Quads* codes, long num_words, Ints (*sums)[2]) const {
        constexpr long WIDTH = PANEL * 4;  // bytes of a word of all outputs, and of a row of sums
        const long lower = TILE_ROWS * row_bytes;
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (IS_TALL) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (long word = 0; word < num_words; word += depth, x += depth * 4, codes += depth * 2) {
            _tile_loadd(4, x, row_bytes);
            _tile_loadd(6, codes, WIDTH);
            _tile_loadd(7, codes + 1, WIDTH);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            if constexpr (IS_TALL) {
                _tile_loadd(5, x + lower, row_bytes);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0], WIDTH);
        _tile_stored(1, sums[0] + 1, WIDTH);
        if constexpr (IS_TALL) {
            _tile_stored(2, sums[TILE_ROWS], WIDTH);
            _tile_stored(3, sums[TILE_ROWS] + 1, WIDTH);
        }
    }
};

}  // namespace quantized
}  // namespace quire
#endif
