// Products of float32 rows with panels of narrower weights, which become float32 in registers.
//
// A weight lies in panels of two vectors of outputs: [panel][in][PANEL]. Some rows make a tile, whose sums stay in
// registers while a part of a panel passes by; few rows take several panels at once instead, because a sum must wait
// for the one before. Each output is one chain of sums over the inputs, in order, whatever the tile: a row's result
// does not depend on how many rows there are, nor on the number of threads.
#pragma once

#include "vector.h"

#include <algorithm>
#include <array>
#include <utility>

namespace quire {
namespace widened {

constexpr long PANEL = 2 * LANES;                  // outputs
constexpr int MOST_ROWS = LANES == 16 ? 12 : 5;    // of a tile: twice as many sums leave registers for the rest
constexpr long MOST_TILES = 8;                     // that take a part of a panel from the first cache
constexpr long MOST_STEPS = 256;                   // of such a part: 16 KB or less
constexpr int MOST_GROUP = 4;                      // panels that a tile takes at once
constexpr int GROUP_SUMS = LANES == 16 ? 16 : 8;   // vectors of sums that need not wait for each other

// Panels that a tile of so many rows takes at once.
constexpr int group_of(int rows) { return std::clamp(GROUP_SUMS / (2 * rows), 1, MOST_GROUP); }

inline Floats widen(const int8_t* from) {
#if defined(QUIRE_HAS_AVX512)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    return __builtin_convertvector(__builtin_convertvector(read<Bytes>(from), Ints), Floats);
#endif
}

// The two vectors of a panel's step.
template <class W> inline void load_step(const W* from, Floats& low, Floats& high) { load_pair(from, low, high); }
inline void load_step(const int8_t* from, Floats& low, Floats& high) { low = widen(from), high = widen(from + LANES); }

// The place of an output within a step. `load_pair` takes every second bfloat16.
template <class W> constexpr long place(long output) { return output; }
template <> constexpr long place<BFloat16>(long output) {
    return output < LANES ? 2 * output : 2 * (output - LANES) + 1;
}

// sums [ROWS][GROUP][PANEL] += x [steps][ROWS] times GROUP panels, each [steps][PANEL] and `stride` numbers apart.
template <class W, int ROWS, int GROUP>
void multiply(const float* x, const W* panel, long stride, long steps, bool is_first, float* sums) {
    Floats sum[ROWS][2 * GROUP];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
        for (int i = 0; i < 2 * GROUP; i++)
            sum[row][i] = is_first ? Floats{} : load(sums + (row * 2 * GROUP + i) * LANES);
    for (long step = 0; step < steps; step++) {
        Floats weight[2 * GROUP];
#pragma GCC unroll 16
        for (int i = 0; i < GROUP; i++) load_step(panel + i * stride + step * PANEL, weight[2 * i], weight[2 * i + 1]);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const Floats factor = fill(x[step * ROWS + row]);
#pragma GCC unroll 16
            for (int i = 0; i < 2 * GROUP; i++) sum[row][i] += factor * weight[i];
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
        for (int i = 0; i < 2 * GROUP; i++) store(sums + (row * 2 * GROUP + i) * LANES, sum[row][i]);
}

template <class W> using Multiply = void (*)(const float*, const W*, long, long, bool, float*);

template <class W, bool IS_GROUP, int... I>
constexpr std::array<Multiply<W>, sizeof...(I)> for_rows(std::integer_sequence<int, I...>) {
    return {multiply<W, I + 1, IS_GROUP ? group_of(I + 1) : 1>...};
}

// Functions for 1 to MOST_ROWS rows, at index rows - 1: with one panel, and with `group_of(rows)`.
template <class W> constexpr auto ONE_PANEL = for_rows<W, false>(std::make_integer_sequence<int, MOST_ROWS>());
template <class W> constexpr auto A_GROUP = for_rows<W, true>(std::make_integer_sequence<int, MOST_ROWS>());

// Rows in tiles of nearly the same size.
struct Tiles {
    long rows, count;
    explicit Tiles(long rows) : rows(rows), count((rows + MOST_ROWS - 1) / MOST_ROWS) {}
    long start(long tile) const { return tile * (rows / count) + std::min(tile, rows % count); }
    int size(long tile) const { return (int)(rows / count + (tile < rows % count)); }
    int group() const { return count == 1 ? group_of((int)rows) : 1; }
};

// Panels in groups, and the rest one by one: the tasks of a product.
struct Groups {
    long panels, size;
    long count() const { return panels / size + panels % size; }
    long first(long task) const { return task < panels / size ? task * size : panels - (count() - task); }
    int panels_of(long task) const { return task < panels / size ? (int)size : 1; }
};

constexpr long MOST_SUMS = std::max(MOST_TILES * MOST_ROWS, (long)MOST_GROUP * 2) * PANEL;

// The sums of a few tiles with `group` panels from `panel` on. Tile by tile, x lies as [inputs][rows of the tile]; the
// sums are [MOST_ROWS][group][PANEL] a tile. A group is taken by one tile alone.
template <class W>
void multiply_tiles(const float* x, const Tiles& tiles, const W* panel, long inputs, int group, float* sums) {
    const auto& functions = group == 1 ? ONE_PANEL<W> : A_GROUP<W>;
    const long most = tiles.count == 1 ? inputs : MOST_STEPS;
    for (long step = 0; step < inputs; step += most)
        for (long tile = 0; tile < tiles.count; tile++)
            functions[tiles.size(tile) - 1](
                x + tiles.start(tile) * inputs + step * tiles.size(tile), panel + step * PANEL, inputs * PANEL,
                std::min(most, inputs - step), step == 0, sums + tile * MOST_ROWS * PANEL);
}

// Writes row `row` of a tile, [size][rows of the tile].
template <class T> void pack_row(const T* from, long size, int row, int rows, float* to) {
    for (long first = 0; first < size; first += LANES) {
        const long count = std::min<long>(LANES, size - first);
        float part[LANES];
        store(part, load(from + first, count));
        for (long i = 0; i < count; i++) to[(first + i) * rows + row] = part[i];
    }
}

}  // namespace widened
}  // namespace quire
