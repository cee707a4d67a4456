// The products that quantized_panels.h describes.
#pragma once

#include "quantized_panels.h"

#include <array>
#include <utility>

namespace quire {
namespace quantized {

// sums [GROUP][ROWS][PANEL] += x [steps][ROWS] times steps [step, end) of GROUP neighbouring panels, as `part_end` makes
// them, or all. If KEEPS, the dequantized values are written to `kept`, [steps][PANEL].
template <class C, int ROWS, int GROUP, bool KEEPS>
void multiply_codes(const Layout<C>& weight, const uint8_t* panel, long step, long end, const float* x, float* sums,
                    float* kept) {
    const C codec = weight.codec;
    const long stride = weight.panel_bytes();
    Floats sum[GROUP][ROWS][2] = {}, scale[GROUP][2], offset[GROUP][2];
    if (step)
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) sum[0][row][half] = load(sums + (row * 2 + half) * LANES);
    while (step < end) {
        const long in_group = step % weight.group, stop = std::min(end, step - in_group + weight.group);
        const uint8_t* start = panel + step / weight.group * weight.group_bytes();
        if constexpr (C::IS_SCALED)
            for (int i = 0; i < GROUP; i++) weight.load_scales(start + i * stride, scale[i], offset[i]);
        const uint8_t* units = start + weight.header() + in_group / C::UNIT * C::BYTES;
        // The first `count` steps of a unit of each panel.
        const auto multiply = [&](long count) __attribute__((always_inline)) {
            typename C::Unit unit[GROUP];
            if constexpr (GROUP == 1) __builtin_prefetch(units + AHEAD);
#pragma GCC unroll 4
            for (int i = 0; i < GROUP; i++) unit[i] = C::load(units + i * stride);
            const auto widen = [&](auto first) __attribute__((always_inline)) {
                Floats numbers[GROUP][C::AT_ONCE][2];
#pragma GCC unroll 4
                for (int i = 0; i < GROUP; i++) codec.template widen<decltype(first)::value>(unit[i], numbers[i]);
#pragma GCC unroll 2
                for (int part = 0; part < C::AT_ONCE; part++) {
                    const int at = first + part;
                    if (at >= count) return;
#pragma GCC unroll 4
                    for (int i = 0; i < GROUP; i++) {
                        Floats low = numbers[i][part][0], high = numbers[i][part][1];
                        if constexpr (C::IS_SCALED) {
                            low = multiply_add(low, scale[i][0], offset[i][0]);
                            high = multiply_add(high, scale[i][1], offset[i][1]);
                        }
                        if constexpr (KEEPS) store(kept + at * PANEL, low), store(kept + at * PANEL + LANES, high);
#pragma GCC unroll 12
                        for (int row = 0; row < ROWS; row++) {
                            const Floats factor = fill(x[at * ROWS + row]);
                            sum[i][row][0] = multiply_add(factor, low, sum[i][row][0]);
                            sum[i][row][1] = multiply_add(factor, high, sum[i][row][1]);
                        }
                    }
                }
            };
            for_unit<C>(widen, std::make_integer_sequence<int, C::UNIT / C::AT_ONCE>());
            units += C::BYTES, x += count * ROWS;
            if constexpr (KEEPS) kept += count * PANEL;
        };
        for (; step + C::UNIT <= stop; step += C::UNIT) multiply(C::UNIT);
        if constexpr (C::UNIT > 1)
            if (step < stop) multiply(stop - step);
        step = stop;
    }
#pragma GCC unroll 4
    for (int i = 0; i < GROUP; i++)
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) store(sums + ((i * ROWS + row) * 2 + half) * LANES, sum[i][row][half]);
}

// sums [ROWS][PANEL] += x [steps][ROWS] times panel [steps][PANEL]. Meanwhile `fetch` bytes from `ahead` on are
// prefetched for each step.
template <int ROWS>
void multiply_tile(const float* x, const float* panel, long steps, bool is_first, float* sums, const uint8_t* ahead,
                   long fetch) {
    Floats sum[ROWS][2];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) sum[row][i] = is_first ? Floats{} : load(sums + (row * 2 + i) * LANES);
    for (long step = 0; step < steps; step++, x += ROWS, panel += PANEL, ahead += fetch) {
        __builtin_prefetch(ahead);
        const Floats low = load(panel), high = load(panel + LANES);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) {
            const Floats factor = fill(x[row]);
            sum[row][0] = multiply_add(factor, low, sum[row][0]);
            sum[row][1] = multiply_add(factor, high, sum[row][1]);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) store(sums + (row * 2 + i) * LANES, sum[row][i]);
}

using MultiplyTile = void (*)(const float*, const float*, long, bool, float*, const uint8_t*, long);
template <class C> using MultiplyCodes = void (*)(const Layout<C>&, const uint8_t*, long, long, const float*, float*,
                                                  float*);

template <int... I> constexpr std::array<MultiplyTile, sizeof...(I)> tile_functions(std::integer_sequence<int, I...>) {
    return {multiply_tile<I + 1>...};
}

template <class C, int... I>
constexpr std::array<MultiplyCodes<C>, sizeof...(I)> code_functions(std::integer_sequence<int, I...>) {
    return {multiply_codes<C, I + 1, 1, true>...};
}

// Functions for 1 to MOST_ROWS rows, at index rows - 1.
constexpr auto TILES = tile_functions(std::make_integer_sequence<int, MOST_ROWS>());
template <class C> constexpr auto CODES = code_functions<C>(std::make_integer_sequence<int, MOST_ROWS>());

// See `Weight::multiply`. All tiles read float32 where it is.
template <class C>
void multiply_panels(const Layout<C>& weight, const uint8_t* panel, int count, const float* x, const Tiles& tiles,
                     float* sums) {
    const long inputs = weight.inputs;
    if (tiles.rows == 1 && count == group_of(1))
        return multiply_codes<C, 1, group_of(1), false>(weight, panel, 0, inputs, x, sums, nullptr);
    if (tiles.rows == 2 && count == group_of(2))
        return multiply_codes<C, 2, group_of(2), false>(weight, panel, 0, inputs, x, sums, nullptr);
    constexpr bool IS_WHOLE = std::is_same_v<C, Plain<float>>;  // a panel is what would be kept of it
    alignas(64) float kept[IS_WHOLE ? 1 : MOST_STEPS * PANEL];
    const long stride = weight.panel_bytes();
    for (long step = 0, end; step < inputs; step = end) {
        end = std::min(weight.part_end(step), inputs);
        for (int i = 0; i < count; i++) {
            const uint8_t* own = panel + i * stride;
            // The next part: of the next panel, or behind this one.
            const uint8_t* ahead = i + 1 < count ? weight.find(own + stride, step) : weight.find(panel, end);
            for (long tile = 0; tile < tiles.count; tile++) {
                const int rows = tiles.size(tile);
                const float* part = x + tiles.start(tile) * inputs + step * rows;
                float* to = sums + (i * tiles.rows + tiles.start(tile)) * PANEL;
                if constexpr (IS_WHOLE) {
                    const auto* steps = (const float*)own + step * PANEL;
                    const uint8_t* next = tile == 0 ? (const uint8_t*)steps + AHEAD : ahead;
                    TILES[rows - 1](part, steps, end - step, step == 0, to, next, tile < 2 ? C::BYTES : 0);
                } else if (tile == 0) {
                    CODES<C>[rows - 1](weight, own, step, end, part, to, kept);
                } else {
                    TILES[rows - 1](part, kept, end - step, step == 0, to, ahead, tile == 1 ? C::BYTES / C::UNIT : 0);
                }
            }
        }
    }
}

}  // namespace quantized
}  // namespace quire
