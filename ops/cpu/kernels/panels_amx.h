// Rows times panels on processors with AMX. One instruction multiplies 16 rows by 16 outputs, 32 inputs deep.
//
// Up to 32 rows and a panel's 32 outputs have four tiles of sums, which stay in registers for a part of the panel. A
// tile of x is read in place, or from [16 steps][32 rows][16 pairs] if it is packed.
//
// Four products take four tiles of inputs. Loading keeps up with multiplying only if half of these tiles come from the
// L1 cache. So x is loaded with streaming loads, which leave the part of the panel in L1.
#pragma once

#include "amx.h"
#include "panels.h"

#if defined(QUIRE_HAS_AMX)

namespace quire {

constexpr int MOST_ROWS = 32;           // most rows of a Work
constexpr int PACKED_ROWS = 32;         // rows of a packed x
constexpr long DEPTH = 16;              // steps of an instruction; the number of a panel's steps is a multiple of it
constexpr long MOST_TILES = 24;         // most tiles of rows that share a panel in cache
constexpr long GROUP_PAIRS = 0;         // panels do not take turns
constexpr int FEW_TILES = MOST_TILES;

// Most tiles of rows whose x fits the L2 cache: 1.5 MB.
inline long most_tiles(long steps) { return std::clamp((384L << 10) / (PACKED_ROWS * steps), 4L, MOST_TILES); }

// Steps of a panel at once: 32 KB if several tiles read them from the L1 cache.
inline long most_steps(int num_tiles) { return num_tiles == 1 ? 1536 : 256; }

inline bool may_multiply() { return may_use_tiles(); }

// Whether x is read in place: for few rows, and only if no instruction reads past the end of a row.
inline bool is_read_in_place(long rows, long in_features, long, long) {
    return in_features % (2 * DEPTH) == 0 && rows <= 16;
}

// Packs up to 32 rows of `size` inputs, with zeros for inputs past `size`.
inline void pack_rows(const BFloat16* from, long stride, long count, long size, uint32_t* to) {
    for (long first = 0; first < size; first += 2 * DEPTH, to += DEPTH * PACKED_ROWS)
        for (long row = 0; row < count; row++) {
            const __mmask32 mask = size - first >= 2 * DEPTH ? ~0u : (1u << (size - first)) - 1;
            _mm512_store_si512(to + row * LINE, _mm512_maskz_loadu_epi16(mask, from + row * stride + first));
        }
}

class Multiplier {
public:
    void operator()(const Work& work, int rows) {
        registers.shape(rows, [&](int tile) {
            const bool is_upper = tile < 2 || tile == 4, is_lower = tile == 2 || tile == 3 || tile == 5;
            return is_upper ? TileShape{std::min(rows, 16)} : is_lower ? TileShape{std::max(rows - 16, 1)} : TileShape{};
        });
        const bool is_whole = work.is_first && work.is_last;
        if (rows <= 16) multiply<false, false>(work, rows);
        else is_whole ? multiply<true, false>(work, rows) : multiply<true, true>(work, rows);
        if (!work.is_last) return;
        const Outputs outputs(work);
        for (int r = 0; r < rows; r++)
            outputs.write(r, _mm512_load_ps(work.sums + r * PANEL), _mm512_load_ps(work.sums + r * PANEL + LINE));
    }

private:
    TileRegisters registers;

    // Tile registers 0 and 1: sums of the upper rows, low and high; 2 and 3: of the lower rows; 4 and 5: x; 6 and 7:
    // the panel. IS_SHARED: many tiles of rows share a part of the panel.
    template <bool IS_TALL, bool IS_SHARED> static void multiply(const Work& work, int rows) {
        constexpr long WIDTH = PANEL * 4, LOWER = 16;  // bytes of a step and of a row of sums; first of the lower rows
        if (work.is_first) {
            _tile_zero(0);
            _tile_zero(1);
            if constexpr (IS_TALL) {
                _tile_zero(2);
                _tile_zero(3);
            }
        } else {
            _tile_loadd(0, work.sums, WIDTH);
            _tile_loadd(1, work.sums + LINE, WIDTH);
            if constexpr (IS_TALL) {
                _tile_loadd(2, work.sums + LOWER * PANEL, WIDTH);
                _tile_loadd(3, work.sums + LOWER * PANEL + LINE, WIDTH);
            }
        }
        const long stride = work.is_packed ? 64 : work.x_stride, advance = work.is_packed ? PACKED_ROWS * 64 : 64;
        const char* x = static_cast<const char*>(work.x);
        const uint32_t *panel = work.panel, *fetch = work.fetch;
        alignas(64) char nowhere[64];
        int row = work.is_last ? 0 : rows;  // the next row whose outputs are prefetched
        for (long left = work.steps; left > 0; left -= DEPTH, x += advance, panel += DEPTH * PANEL) {
            for (long i = 0; i < work.fetch_rate * (DEPTH / 4); i++, fetch += LINE) _mm_prefetch(fetch, _MM_HINT_T1);
            if constexpr (IS_SHARED) {
                for (int i = 0; i < 4 && row < rows; i++, row++)
                    _mm_prefetch(work.out + row * work.out_stride, _MM_HINT_T1);
                // A store of a tile takes 1,000 cycles more if the last one was some 3,000 cycles ago.
                if (left % (8 * DEPTH) == 0) _tile_stored(7, nowhere, 0);
                _tile_stream_loadd(4, x, stride);
            } else {
                _tile_loadd(4, x, stride);
                if constexpr (IS_TALL) _tile_loadd(5, x + LOWER * stride, stride);
            }
            _tile_loadd(6, panel, WIDTH);
            _tile_loadd(7, panel + LINE, WIDTH);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (IS_SHARED) _tile_stream_loadd(5, x + LOWER * stride, stride);
            if constexpr (IS_TALL) {
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, work.sums, WIDTH);
        _tile_stored(1, work.sums + LINE, WIDTH);
        if constexpr (IS_TALL) {
            _tile_stored(2, work.sums + LOWER * PANEL, WIDTH);
            _tile_stored(3, work.sums + LOWER * PANEL + LINE, WIDTH);
        }
    }
};

}  // namespace quire
#endif
