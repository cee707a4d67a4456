// The small matrix products of attention, with AMX. See attention.h.
//
// An instruction adds 32 products to each of 16 x 16 sums, always in the same order. A sum has the same bits whichever
// factor comes first, and for 16 rows as for one. So few rows and many rows may use the instruction in different ways.
#pragma once

#include "amx.h"
#include "tiles.h"

namespace quire {

#if defined(QUIRE_HAS_AMX)

struct TiledPair : Pair {};  // a pair for these instructions
template <> constexpr int ELEMENTS<TiledPair> = 2;
template <> constexpr int ROWS_AT_ONCE<TiledPair> = 16;
template <> constexpr int ROWS_IN_PLACE<TiledPair> = 8;
template <> constexpr int KEYS_AT_ONCE<TiledPair> = 32;
template <> constexpr bool QUERIES_IN_COLUMNS<TiledPair> = true;
template <> struct RegistersOf<TiledPair> { using type = TileRegisters; };

// Stores the n-th vector of a row's weights. A pair has the weights of a key and of the 16th key after it, so that a
// decode step can read 16 neighbouring values in place.
inline void store_weights(TiledPair* row, long n, Floats x) {
    TiledPair* to = row + n / 2 * LANES;
    const Words bits = (Words)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x));
    const Words pairs = n % 2 ? read<Words>(to) | bits << 16 : bits;
    std::memcpy(to, &pairs, sizeof(pairs));
}

// Packs values as [pairs of values][stride], with zeros up to a multiple of 32 values.
inline void pack_values(const Operands<BFloat16>& tile, TiledPair* packed, long stride) {
    const auto [keys, values, count, head_dim, ahead] = tile;
    alignas(64) static const BFloat16 zeros[SPAN] = {};
    for (long start = 0; start < count; start += 2 * LANES) {
        for (long i = start; i < start + LANES; i++, packed += stride) {
            const bool has_first = i < count, has_second = i + LANES < count;
            if (has_first) tile.fetch_ahead(has_second ? 2 : 1, 0, head_dim);
            const BFloat16 *first = has_first ? values[i] : zeros, *second = has_second ? values[i + LANES] : zeros;
            for (long d = 0; d < head_dim; d += SPAN) {
                const Two two = units_of(packed, first + has_first * d, second + has_second * d);
                std::memcpy(packed + d, &two, sizeof(two));
            }
        }
    }
}

// The lower, or UPPER, halves of a and b in turns.
template <bool UPPER> inline Words interleave_halves(Words a, Words b) {
    return pick_lanes(a, b, [](int i) { return UPPER * LANES / 2 + i / 2 + i % 2 * LANES; });
}

inline void scale_rows(long rows, float* c, long stride, long width, const float* keep) {
    for (long row = 0; row < rows; row++) {
        if (keep[row] == 1) continue;
        for (long n = 0; n < width; n += LANES) store(c + row * stride + n, load(c + row * stride + n) * keep[row]);
    }
}

// `multiply` for up to 16 rows and N vectors of columns.
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

// Returns 16 keys, or values, from `begin` on as one matrix: in place if they are neighbours, else a copy in `scratch`.
// Rows from `end` on are zero.
inline const BFloat16* neighbours(const Rows<BFloat16>& rows, long begin, long end, long head_dim, TiledPair* scratch) {
    if (begin + LANES <= end && rows.are_neighbours[begin / LANES]) return rows[begin];
    BFloat16* copy = reinterpret_cast<BFloat16*>(scratch);
    std::memset(copy, 0, LANES * head_dim * sizeof(BFloat16));
    for (long i = begin; i < std::min(begin + LANES, end); i++)
        std::memcpy(copy + (i - begin) * head_dim, rows[i], head_dim * sizeof(BFloat16));
    return copy;
}

// Tile registers for few rows. 0: sums of 16 keys; 1: keys; 2: queries.
// 3: sums of 32 dimensions; 4: weights; 5: values.
template <int ROWS> void shape_few(TileRegisters& registers) {
    registers.shape(-ROWS, [](int tile) {
        if (tile == 0 || tile == 2) return TileShape{16, 4 * ROWS};
        return tile == 3 || tile == 4 ? TileShape{2 * ROWS} : TileShape{};
    });
}

// See `multiply_keys` in tiles.h; here queries are [units of head_dim][ROWS].
template <int ROWS>
void multiply_keys(TileRegisters& registers, const TiledPair* queries, long, const Operands<BFloat16>& tile,
                   float* scores, TiledPair* scratch) {
    const long head_dim = tile.head_dim, end = tile.count;
    alignas(64) float sums[KEYS][ROWS];
    shape_few<ROWS>(registers);
    for (long column = 0; column < end; column += LANES) {
        const BFloat16* keys = neighbours(tile.keys, column, end, head_dim, scratch);
        _tile_zero(0);
        for (long d = 0; d < head_dim; d += SPAN) {
            tile.fetch_ahead(std::min<long>(LANES, end - column), d, d + SPAN);
            _tile_loadd(1, keys + d, head_dim * sizeof(BFloat16));
            _tile_loadd(2, queries + d / 2 * ROWS, 4 * ROWS);
            _tile_dpbf16ps(0, 1, 2);
        }
        _tile_stored(0, sums[column], 4 * ROWS);
    }
    for (int row = 0; row < ROWS; row++)
        for (long i = 0; i < round_up(end, LANES); i++) scores[row * KEYS + i] = sums[i][row];
}

// See `multiply_values` in tiles.h. An instruction takes pairs of keys, but values in place are [keys][head_dim]. So a
// pair is two dimensions of one key, and each row has two rows of weights: one with zeros for odd dimensions, one with
// zeros for even dimensions. An instruction on packed values sums first keys and second keys of pairs separately, and
// adds the two sums at its end; here they are added in the same order.
template <int ROWS>
void multiply_values(TileRegisters& registers, const TiledPair* weights, long weights_stride,
                     const Operands<BFloat16>& tile, float* out, long out_stride, const float* keep,
                     TiledPair* scratch) {
    const long head_dim = tile.head_dim, end = tile.count;
    float* sums = reinterpret_cast<float*>(scratch);  // [2][head_dim / SPAN][ROWS][2][LANES]
    const long half_size = ROWS * head_dim;
    shape_few<ROWS>(registers);
    scale_rows(ROWS, out, out_stride, head_dim, keep);
    for (long begin = 0; begin < end; begin += 2 * LANES) {
        Words shares[2][ROWS][2];
        for (int row = 0; row < ROWS; row++) {
            const Words pairs = read<Words>(weights + row * weights_stride + begin / 2);
            shares[0][row][0] = pairs & 0xffff, shares[0][row][1] = pairs << 16;
            shares[1][row][0] = pairs >> 16, shares[1][row][1] = pairs & 0xffff0000;
        }
        for (int half = 0; half < 2; half++) {
            const long first = begin + half * LANES, count = std::clamp<long>(end - first, 0, LANES);
            const BFloat16* values = neighbours(tile.values, first, end, head_dim, scratch + 2 * half_size);
            _tile_loadd(4, shares[half], 64);
            for (long d = 0; d < head_dim; d += SPAN) {
                tile.fetch_ahead(count, d, d + SPAN);
                _tile_zero(3);
                _tile_loadd(5, values + d, head_dim * sizeof(BFloat16));
                _tile_dpbf16ps(3, 4, 5);
                _tile_stored(3, sums + half * half_size + d * ROWS, 64);
            }
        }
        for (long d = 0; d < head_dim; d += SPAN) {
            for (int row = 0; row < ROWS; row++) {
                const float *first = sums + d * ROWS + row * SPAN, *second = first + half_size;
                const Words even = bits_as<Words>(load(first) + load(second));
                const Words odd = bits_as<Words>(load(first + LANES) + load(second + LANES));
                float* to = out + row * out_stride + d;
                store(to, load(to) + bits_as<Floats>(interleave_halves<false>(even, odd)));
                store(to + LANES, load(to + LANES) + bits_as<Floats>(interleave_halves<true>(even, odd)));
            }
        }
    }
}

#endif

}  // namespace quire
