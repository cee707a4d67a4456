// The products of attention on processors with AMX. See attention.cpp for the whole.
//
// An instruction adds 32 products to each of 16 x 16 sums, always in the same order: whichever factor comes first, and
// whether there are 16 rows or one, a sum has the same bits. So few rows and many may use it in different ways.
#pragma once

#include "amx.h"
#include "tiles.h"

namespace quire {

#if defined(QUIRE_HAS_AMX)

struct TiledPair : Pair {};  // a pair that is multiplied by these instructions
template <> constexpr int ELEMENTS<TiledPair> = 2;
template <> constexpr int ROWS_AT_ONCE<TiledPair> = 16;
template <> constexpr int KEYS_AT_ONCE<TiledPair> = 32;
template <> constexpr bool QUERIES_IN_COLUMNS<TiledPair> = true;
template <> struct RegistersOf<TiledPair> { using type = TileRegisters; };

// Values [begin, end) of a tile → packed [pairs of values][stride], with zeros up to a multiple of 32 values.
inline void pack_pairs(const Operands<BFloat16>& tile, long begin, long end, TiledPair* packed, long stride) {
    const auto [keys, values, count, head_dim, ahead] = tile;
    alignas(64) static const BFloat16 zeros[SPAN] = {};
    for (long i = begin; i < begin + round_up(end - begin, 32); i += 2, packed += stride) {
        const bool has_first = i < end, has_second = i + 1 < end;
        if (has_first) tile.fetch_ahead(has_second ? 2 : 1, 0, head_dim);
        const BFloat16 *first = has_first ? values[i] : zeros, *second = has_second ? values[i + 1] : zeros;
        for (long d = 0; d < head_dim; d += SPAN) {
            const Two two = units_of(packed, first + has_first * d, second + has_second * d);
            std::memcpy(packed + d, &two, sizeof(two));
        }
    }
}

inline void pack_values(const Operands<BFloat16>& tile, TiledPair* packed, long stride) {
    pack_pairs(tile, 0, tile.count, packed, stride);
}

inline void scale_rows(long rows, float* c, long stride, long width, const float* keep) {
    for (long row = 0; row < rows; row++) {
        if (keep[row] == 1) continue;
        for (long n = 0; n < width; n += LANES) store(c + row * stride + n, load(c + row * stride + n) * keep[row]);
    }
}

// Up to 16 rows. Columns from `column` on: N vectors of them.
template <int N>
inline void multiply_columns(const TiledPair* a, long a_stride, const TiledPair* b, long b_stride, long steps, float* c,
                             long c_stride, bool is_added) {
    if (is_added) {
        _tile_loadd(0, c, c_stride * 4);
        if constexpr (N > 1) _tile_loadd(1, c + LANES, c_stride * 4);
        if constexpr (N > 2) _tile_loadd(2, c + 2 * LANES, c_stride * 4);
        if constexpr (N > 3) _tile_loadd(3, c + 3 * LANES, c_stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long t = 0; t < steps; t += 16, b += 16 * b_stride) {
        _tile_loadd(4, a + t, a_stride * 4);
        _tile_loadd(5, b, b_stride * 4);
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (N > 1) {
            _tile_loadd(6, b + LANES, b_stride * 4);
            _tile_dpbf16ps(1, 4, 6);
        }
        if constexpr (N > 2) {
            _tile_loadd(7, b + 2 * LANES, b_stride * 4);
            _tile_dpbf16ps(2, 4, 7);
        }
        if constexpr (N > 3) {
            _tile_loadd(5, b + 3 * LANES, b_stride * 4);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, c, c_stride * 4);
    if constexpr (N > 1) _tile_stored(1, c + LANES, c_stride * 4);
    if constexpr (N > 2) _tile_stored(2, c + 2 * LANES, c_stride * 4);
    if constexpr (N > 3) _tile_stored(3, c + 3 * LANES, c_stride * 4);
}

inline void multiply(TileRegisters& registers, long rows, const TiledPair* a, long a_stride, const TiledPair* b,
                     long b_stride, long steps, float* c, long c_stride, long width, const float* keep) {
    registers.shape(rows, [&](int tile) { return tile < 5 ? TileShape{rows} : TileShape{}; });
    if (keep) scale_rows(rows, c, c_stride, width, keep);
    long column = 0;
    for (; column + 4 * LANES <= width; column += 4 * LANES)
        multiply_columns<4>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, keep);
    for (; column < width; column += LANES)
        multiply_columns<1>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, keep);
}

// Tile 0: sums of 16 keys; 1: the keys; 2: queries. 3: sums of 16 dimensions; 4: weights; 5: values.
template <int ROWS> void shape_few(TileRegisters& registers) {
    registers.shape(-ROWS, [](int tile) {
        if (tile == 0 || tile == 2) return TileShape{16, 4 * ROWS};
        return tile == 3 || tile == 4 ? TileShape{ROWS} : TileShape{};
    });
}

// See `multiply_keys` in tiles.h; but queries are [units of head_dim][ROWS].
template <int ROWS>
void multiply_keys(TileRegisters& registers, const TiledPair* queries, long, const Operands<BFloat16>& tile, long begin,
                   long end, float* scores, TiledPair* scratch) {
    const auto [keys, values, count, head_dim, ahead] = tile;
    shape_few<ROWS>(registers);
    for (long column = begin; column < end; column += LANES) {
        const BFloat16* from = keys[column];
        if (keys.offsets[column + LANES - 1] - keys.offsets[column] != (LANES - 1) * head_dim) {
            BFloat16* copy = reinterpret_cast<BFloat16*>(scratch);
            for (long i = 0; i < LANES; i++)
                std::memcpy(copy + i * head_dim, keys[column + i], head_dim * sizeof(BFloat16));
            from = copy;
        }
        tile.fetch_ahead(std::min<long>(LANES, count - column), 0, head_dim);
        _tile_zero(0);
        for (long d = 0; d < head_dim; d += 2 * LANES) {
            _tile_loadd(1, from + d, head_dim * sizeof(BFloat16));
            _tile_loadd(2, queries + d / 2 * ROWS, 4 * ROWS);
            _tile_dpbf16ps(0, 1, 2);
        }
        alignas(64) float sums[LANES][ROWS];
        _tile_stored(0, sums, 4 * ROWS);
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < LANES; i++) scores[row * KEYS + column + i] = sums[i][row];
    }
}

template <int ROWS>
void multiply_values(TileRegisters& registers, const TiledPair* weights, long weights_stride,
                     const Operands<BFloat16>& tile, long begin, long end, float* out, long out_stride,
                     const float* keep, TiledPair* scratch) {
    const long head_dim = tile.head_dim;
    shape_few<ROWS>(registers);
    if (keep) scale_rows(ROWS, out, out_stride, head_dim, keep);
    for (; begin < end; begin += 32) {
        pack_pairs(tile, begin, std::min(begin + 32, end), scratch, head_dim);
        _tile_loadd(4, weights + begin / 2, weights_stride * 4);
        for (long d = 0; d < head_dim; d += LANES) {
            _tile_loadd(3, out + d, out_stride * 4);
            _tile_loadd(5, scratch + d, head_dim * 4);
            _tile_dpbf16ps(3, 4, 5);
            _tile_stored(3, out + d, out_stride * 4);
        }
    }
}

#endif

}  // namespace quire
