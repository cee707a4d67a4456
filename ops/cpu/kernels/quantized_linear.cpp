// Linear layers with weights of any kind that codecs.h knows: x [rows, in] times weight [out, in], plus a bias.
//
// Products are those of quantized_panels.h. Many rows come in blocks; each block passes over all panels once.

#include "packing.h"

#include <cstdlib>
#include <memory>

namespace quire {
namespace quantized {
namespace {

// The product for a block of rows, from first_row on. Their x is given tile by tile.
struct Product {
    const QuantizedLinearCall& call;
    const Weight& weight;
    long first_row;
    uint8_t* x;
    Tiles tiles;

    // The outputs of `count` panels from `first` on.
    void compute(long first, int count) const {
        alignas(64) float sums[MOST_SUMS];
        weight.multiply(call.panels + first * weight.panel_bytes(), count, x, tiles, sums);
        with_type(call.dtype, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            for (int i = 0; i < count; i++)
                if (call.form.is_gated) write_gated<T>(first + i, sums + i * tiles.rows * PANEL);
                else write_panel<T>(first + i, sums + i * tiles.rows * PANEL);
        });
    }

    // The outputs of a panel from its sums, [rows][PANEL]. What is activated is rounded first, as for `quire_activate`.
    template <class T> void write_panel(long panel, const float* sums) const {
        const long outputs = call.form.out_features, at = panel * PANEL, left = std::min(outputs - at, PANEL);
        const T* bias = static_cast<const T*>(call.bias);
        T* out = static_cast<T*>(call.out) + first_row * outputs + at;
        const bool is_activated = call.activation != NO_ACTIVATION;
        Floats added[2] = {};
        if (bias)
            for (int half = 0; half < 2 && half * LANES < left; half++)
                added[half] = load(bias + at + half * LANES, left - half * LANES);
        for (long row = 0; row < tiles.rows; row++, sums += PANEL, out += outputs) {
            __builtin_prefetch(out + PANEL, 1);  // the next panel's: rows' outputs are far apart
            Floats low = load(sums), high = load(sums + LANES);
            if (bias) low += added[0], high += added[1];
            if (is_activated) {
                low = activate(rounded<T>(low), call.activation);
                high = activate(rounded<T>(high), call.activation);
            }
            if (left == PANEL) {
                store_pair(out, low, high);
                continue;
            }
            store(out, low, left);
            if (left > LANES) store(out + LANES, high, left - LANES);
        }
    }

    // The same for gates and their ups. Both are rounded first, as `quire_activate_and_mul` would compute it.
    template <class T> void write_gated(long panel, const float* sums) const {
        const long outputs = call.form.out_features / 2, at = panel * LANES, left = std::min<long>(LANES, outputs - at);
        const T* bias = static_cast<const T*>(call.bias);
        T* out = static_cast<T*>(call.out) + first_row * outputs + at;
        for (long row = 0; row < tiles.rows; row++, sums += PANEL, out += outputs) {
            __builtin_prefetch(out + LANES, 1);
            Floats gate = load(sums), up = load(sums + LANES);
            if (bias) gate += load(bias + at, left), up += load(bias + outputs + at, left);
            store(out, gated(rounded<T>(gate), rounded<T>(up), call.activation), left);
        }
    }

    void compute_all() const {
        const long bytes = weight.row_bytes(), row_size = call.x_stride * (call.dtype == FLOAT32 ? 4 : 2);
        for_each(tiles.count, call.num_threads, [&](long tile) {
            const long start = tiles.start(tile);
            const auto* rows = (const uint8_t*)call.x + (first_row + start) * row_size;
            const void* from[MOST_ROWS];
            for (int row = 0; row < tiles.size(tile); row++) from[row] = rows + row * row_size;
            weight.pack_tile(from, call.dtype, call.order, tiles.size(tile), x + start * bytes);
        });
        const Groups groups(weight.num_panels(), tiles, bytes, call.num_threads);
        for_each(groups.count(), call.num_threads,
                 [&](long task) { compute(groups.first(task), groups.panels_of(task)); });
    }
};

}  // namespace
}  // namespace quantized
}  // namespace quire

using namespace quire;
using namespace quire::quantized;

extern "C" int quire_has_fused_vectors() {
#if defined(QUIRE_HAS_AVX512) || (defined(__AVX2__) && defined(__FMA__))
    return 1;
#else
    return 0;
#endif
}

// See with_weight (quantized_panels.h): the fewest bits of x for integer weights.
extern "C" int quire_least_activation_bits() {
#if defined(QUIRE_HAS_QUADS)
    return 8;
#elif defined(QUIRE_HAS_PAIRS)
    return 16;
#else
    return 32;
#endif
}

// Bytes of a packed weight; 0 if this machine's build does not take its codec or the type of its scales.
extern "C" long quire_quantized_size(const PackQuantizedCall* call) {
    const float no_table[16] = {};
    long size = 0;
    if (with_type(call->form.scale_dtype, [](auto*) {})) return 0;
    with_weight(call->form, no_table, 32, 1,
                [&](const Weight& weight) { size = weight.num_panels() * weight.panel_bytes(); });
    return size;
}

extern "C" int quire_pack_quantized(const PackQuantizedCall* call) {
    return with_codec(call->form.codec,
                      [&](auto* codec) { Packing<std::remove_pointer_t<decltype(codec)>>(*call).pack_all(); });
}

// 0; 1 if this machine's build does not take x's type; 2 if there is no memory.
extern "C" int quire_quantized_linear(const QuantizedLinearCall* call) {
    if (with_type(call->dtype, [](auto*) {})) return 1;
    const long num_blocks = (call->rows + MOST_BLOCK - 1) / MOST_BLOCK;
    bool has_memory = true;
    const int unknown = with_weight(call->form, call->table, call->x_bits, call->rows, [&](const Weight& weight) {
        const long bytes = std::min(call->rows, MOST_BLOCK) * weight.row_bytes();
        const std::unique_ptr<uint8_t, decltype(&std::free)> x(
            (uint8_t*)std::aligned_alloc(64, round_up(bytes + 1, 64)), &std::free);
        if (!x) return void(has_memory = false);
        const long rows = round_up((call->rows + num_blocks - 1) / num_blocks, BLOCK_STEP);
        for (long first = 0; first < call->rows; first += rows) {
            const Tiles tiles(std::min(rows, call->rows - first), weight.passes_of_tile());
            Product{*call, weight, first, x.get(), tiles}.compute_all();
        }
    });
    return unknown ? unknown : has_memory ? 0 : 2;
}
