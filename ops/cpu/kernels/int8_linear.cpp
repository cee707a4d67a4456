// Linear layers whose weights are one byte each: x [rows, in] times weight [out, in] int8, times a scale for each output.
//
// Bytes become float32 in registers, and sums are float32, so that the only rounding is that of the result. A weight lies
// in panels of two vectors of outputs: [panel][in][PANEL]. Some rows make a tile, whose sums stay in registers while a
// part of a panel passes by; few rows take several panels at once instead, because a sum must wait for the one before.
// Many rows come in blocks, whose x stays in the second cache while all panels pass by.
//
// Each output is one chain of sums over the inputs, in order, whatever the tile: a row's result does not depend on how
// many rows there are, nor on the number of threads.

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <type_traits>

namespace quire {
namespace {

constexpr long PANEL = 2 * LANES;                  // outputs
constexpr int MOST_ROWS = LANES == 16 ? 12 : 5;    // of a tile: twice as many sums leave registers for the rest
constexpr long MOST_TILES = 8;                     // of a block: they take a part of a panel from the first cache
constexpr long BLOCK_FLOATS = 128 << 10;           // of a block's x, unless that is one tile: 512 KB
constexpr long MOST_STEPS = 256;                   // of such a part: 8 KB
constexpr int MOST_GROUP = 4;                      // panels that few rows take at once

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

// sums [ROWS][GROUP][PANEL] += x [steps][ROWS] times GROUP panels, each [steps][PANEL] and `stride` bytes apart.
template <int ROWS, int GROUP>
void multiply(const float* x, const int8_t* panel, long stride, long steps, bool is_first, float* sums) {
    Floats sum[ROWS][2 * GROUP];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
        for (int i = 0; i < 2 * GROUP; i++)
            sum[row][i] = is_first ? Floats{} : load(sums + (row * 2 * GROUP + i) * LANES);
    for (long step = 0; step < steps; step++) {
        Floats weight[2 * GROUP];
#pragma GCC unroll 16
        for (int i = 0; i < 2 * GROUP; i++) weight[i] = widen(panel + i / 2 * stride + step * PANEL + i % 2 * LANES);
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

typedef void (*Multiply)(const float*, const int8_t*, long, long, bool, float*);

// By rows of a tile, from 1.
constexpr Multiply ONE_PANEL[] = {
    multiply<1, 1>, multiply<2, 1>, multiply<3, 1>, multiply<4, 1>, multiply<5, 1>,
#if defined(QUIRE_HAS_AVX512)
    multiply<6, 1>, multiply<7, 1>, multiply<8, 1>, multiply<9, 1>, multiply<10, 1>, multiply<11, 1>, multiply<12, 1>,
#endif
};
// With as many panels as there are registers for.
constexpr Multiply A_GROUP[] = {
    multiply<1, MOST_GROUP>,
#if defined(QUIRE_HAS_AVX512)
    multiply<2, MOST_GROUP>,
#endif
};

// A block's rows in tiles of nearly the same size; tile by tile, x lies as [in][rows of the tile] float32.
struct Tiles {
    long rows, count;
    explicit Tiles(long rows) : rows(rows), count((rows + MOST_ROWS - 1) / MOST_ROWS) {}
    long start(long tile) const { return tile * (rows / count) + std::min(tile, rows % count); }
    int size(long tile) const { return (int)(rows / count + (tile < rows % count)); }
};

template <class T> void pack_rows(const T* x, long stride, int rows, long in_features, float* to) {
    for (int row = 0; row < rows; row++)
        for (long first = 0; first < in_features; first += LANES) {
            const long count = std::min<long>(LANES, in_features - first);
            float part[LANES];
            store(part, load(x + row * stride + first, count));
            for (long i = 0; i < count; i++) to[(first + i) * rows + row] = part[i];
        }
}

// The product for a block of rows, from first_row on. Their x is given as `Tiles` says.
struct Product {
    const Int8LinearCall& call;
    long first_row;
    float* x;
    Tiles tiles;

    bool has_groups() const { return tiles.count == 1 && tiles.rows <= (long)(sizeof(A_GROUP) / sizeof(*A_GROUP)); }

    // The outputs of `group` panels from `first` on.
    template <class T> void compute(long first, int group) const {
        alignas(64) float sums[MOST_TILES * MOST_ROWS * PANEL];
        static_assert(MOST_TILES * MOST_ROWS >= 2 * MOST_GROUP, "room for a group");
        const long stride = call.in_features * PANEL;
        const int8_t* panel = call.panels + first * stride;
        const Multiply* multiply = group == 1 ? ONE_PANEL : A_GROUP;
        const long most = tiles.count == 1 ? call.in_features : MOST_STEPS;
        for (long step = 0; step < call.in_features; step += most)
            for (long tile = 0; tile < tiles.count; tile++)
                multiply[tiles.size(tile) - 1](
                    x + tiles.start(tile) * call.in_features + step * tiles.size(tile), panel + step * PANEL, stride,
                    std::min(most, call.in_features - step), step == 0, sums + tile * MOST_ROWS * PANEL);
        for (long tile = 0; tile < tiles.count; tile++)
            for (int row = 0; row < tiles.size(tile); row++)
                write<T>(first, group, tiles.start(tile) + row, sums + (tile * MOST_ROWS + row * group) * PANEL);
    }

    template <class T> void write(long first, int group, long row, const float* sums) const {
        const T* bias = static_cast<const T*>(call.bias);
        T* out = static_cast<T*>(call.out) + (first_row + row) * call.out_features;
        const long end = std::min((first + group) * PANEL, call.out_features);
        for (long at = first * PANEL; at < end; at += LANES, sums += LANES) {
            const long count = std::min<long>(LANES, end - at);
            const Floats scaled = load(sums) * load(call.scales + at, count);
            store(out + at, bias ? scaled + load(bias + at, count) : scaled, count);
        }
    }

    template <class T> void compute_all() const {
        for_each(tiles.count, call.num_threads, [&](long tile) {
            const T* rows = static_cast<const T*>(call.x) + (first_row + tiles.start(tile)) * call.x_stride;
            pack_rows(rows, call.x_stride, tiles.size(tile), call.in_features, x + tiles.start(tile) * call.in_features);
        });
        const long panels = (call.out_features + PANEL - 1) / PANEL;
        if (!has_groups()) return for_each(panels, call.num_threads, [&](long i) { compute<T>(i, 1); });
        const long groups = panels / MOST_GROUP;
        for_each(groups + panels % MOST_GROUP, call.num_threads, [&](long i) {
            if (i < groups)
                compute<T>(i * MOST_GROUP, MOST_GROUP);
            else
                compute<T>(groups * MOST_GROUP + i - groups, 1);
        });
    }
};

}  // namespace
}  // namespace quire

using namespace quire;

// Bytes of a packed weight.
extern "C" long quire_int8_panels_size(long out_features, long in_features) {
    return round_up(out_features, PANEL) * in_features;
}

extern "C" int quire_pack_int8_panels(const PackInt8PanelsCall* call) {
    const long out_features = call->out_features, in_features = call->in_features;
    for_each(round_up(out_features, PANEL) / PANEL, call->num_threads, [=](long panel) {
        int8_t* to = call->panels + panel * in_features * PANEL;
        for (long output = 0; output < PANEL; output++) {
            const long row = panel * PANEL + output;
            for (long step = 0; step < in_features; step++)
                to[step * PANEL + output] = row < out_features ? call->weight[row * in_features + step] : 0;
        }
    });
    return 0;
}

// 0; 1 if this machine's build does not take x's type; 2 if there is no memory.
extern "C" int quire_int8_linear(const Int8LinearCall* call) {
    const long in_features = std::max<long>(1, call->in_features);
    const long most = std::clamp(BLOCK_FLOATS / (MOST_ROWS * in_features), 1L, MOST_TILES) * MOST_ROWS;
    const long num_blocks = (call->rows + most - 1) / most;
    const long num_floats = std::min<long>(call->rows, most) * in_features;
    const std::unique_ptr<float, decltype(&std::free)> x(
        (float*)std::aligned_alloc(64, round_up((num_floats + 1) * sizeof(float), 64)), &std::free);
    if (!x) return 2;
    return with_type(call->dtype, [&](auto* type) {
        for (long i = 0, first = 0; i < num_blocks; i++) {
            const Tiles tiles(call->rows / num_blocks + (i < call->rows % num_blocks));
            Product{*call, first, x.get(), tiles}.compute_all<std::remove_pointer_t<decltype(type)>>();
            first += tiles.rows;
        }
    });
}
