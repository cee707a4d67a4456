// Linear layers whose weights are one byte each: x [rows, in] times weight [out, in] int8, times a scale for each output.
//
// Bytes become float32 in registers (widened.h), and sums are float32, so that the only rounding is that of the result.
// Many rows come in blocks, whose x stays in the second cache while all panels pass by.

#include "kernels.h"
#include "threads.h"
#include "widened.h"

#include <cstdlib>
#include <memory>
#include <type_traits>

namespace quire {
namespace {

using namespace widened;

constexpr long BLOCK_FLOATS = 128 << 10;  // of a block's x, unless that is one tile: 512 KB

// The product for a block of rows, from first_row on. Their x is given tile by tile.
struct Product {
    const Int8LinearCall& call;
    long first_row;
    float* x;
    Tiles tiles;

    // The outputs of `group` panels from `first` on.
    template <class T> void compute(long first, int group) const {
        alignas(64) float sums[MOST_SUMS];
        multiply_tiles(x, tiles, call.panels + first * call.in_features * PANEL, call.in_features, group, sums);
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
            for (int row = 0; row < tiles.size(tile); row++)
                pack_row(rows + row * call.x_stride, call.in_features, row, tiles.size(tile),
                         x + tiles.start(tile) * call.in_features);
        });
        const Groups groups{(call.out_features + PANEL - 1) / PANEL, tiles.group()};
        for_each(groups.count(), call.num_threads,
                 [&](long task) { compute<T>(groups.first(task), groups.panels_of(task)); });
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
