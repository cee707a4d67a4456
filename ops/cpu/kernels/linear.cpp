// Linear layers in bfloat16: x [rows, in] times weight [out, in], summed in float32.
//
// Weights are stored in panels (panels.h). Rows are cut into tiles; a tile's sums stay in registers while it is
// multiplied by a panel. Few rows are bound by memory, so the next panel is prefetched while one panel is multiplied by
// all tiles. Many rows are bound by arithmetic, and reuse what is in cache: with AMX many tiles share a part of a
// panel; otherwise each tile is multiplied by several panels in turn, which also writes a row's outputs side by side.
//
// Each output is summed over the steps in order, in any tile. So a row's result depends neither on the number of
// rows nor on the number of threads.

#include "amx.h"
#include "elements.h"
#include "kernels.h"
#include "processor.h"
#include "threads.h"
#include "vector.h"

#if defined(QUIRE_HAS_AMX)
#include "panels_amx.h"
#define QUIRE_HAS_PANELS 1
#elif defined(QUIRE_HAS_AVX512_BF16)
#include "panels_avx512.h"
#define QUIRE_HAS_PANELS 1
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>

namespace quire {

#if defined(QUIRE_HAS_PANELS)
namespace {

constexpr long MOST_PANELS = 8;  // most panels that a thread takes at once
constexpr long WORDS_AHEAD = 4096;  // of one tile: distance between reads and prefetches of pairs

inline long count_steps(long in_features) { return round_up(ceil_div(in_features, 2), DEPTH); }

// A gated layer's panel has 16 gates and their 16 ups.
inline long count_panels(long out_features, bool is_gated) {
    return is_gated ? ceil_div(out_features / 2, PANEL / 2) : ceil_div(out_features, PANEL);
}

// Rows in tiles of nearly the same size.
struct Tiling {
    long rows;
    int count;
    explicit Tiling(long rows) : rows(rows), count((int)ceil_div(rows, MOST_ROWS)) {}
    long start(int tile) const { return tile * (rows / count) + std::min<long>(tile, rows % count); }
    int size(int tile) const { return (int)(rows / count + (tile < rows % count)); }
};

// Panels [first, end), taken by one thread: many at the beginning, one at a time when few are left.
struct Span {
    long first, end;
};

Span take(std::atomic<long>& taken, long num_panels, long most, long num_threads) {
    long first = taken.load(), count;
    do {
        if (first >= num_panels) return {num_panels, num_panels};
        count = std::clamp((num_panels - first) / (2 * num_threads), 1L, most);
    } while (!taken.compare_exchange_weak(first, first + count));
    return {first, first + count};
}

// Some of a call's rows, from first_row on. `packed` is their packed x, tile by tile, or null if x is read in place.
struct Block {
    const LinearCall& call;
    long first_row;
    const uint32_t* packed;
    Tiling tiles;
    long steps, num_panels;

    const uint32_t* panel(long index, long step) const {
        return reinterpret_cast<const uint32_t*>(call.panels) + (index * steps + step) * PANEL;
    }

    long group_size() const {
        if (tiles.count <= FEW_TILES || steps > most_steps(tiles.count)) return 1;
        return std::clamp(GROUP_PAIRS / (steps * PANEL), 1L, MOST_PANELS);
    }

    // Computes all rows' outputs of panels [first, end), and prefetches the panels from `next` on, which come
    // afterwards.
    void compute(long first, long end, long next, float* sums, Multiplier& multiply) const {
        const long num_outputs = call.out_features / (call.is_gated ? 2 : 1), width = call.is_gated ? LINE : PANEL;
        const long most = most_steps(tiles.count);
        for (long step = 0; step < steps; step += most) {
            const long count = std::min(most, steps - step), after = step + count;
            const bool is_last = after == steps;
            const long lines = 2 * std::min(most, is_last ? steps : steps - after);  // to prefetch for the next part
            const long share = ceil_div(lines, tiles.count), rate = ceil_div(share, std::max(1L, count / 4));
            const bool is_near = has_deep_first_cache();
            for (int tile = 0; tile < tiles.count; tile++)
                for (long index = first; index < end; index++) {
                    const long later = is_last ? next + index - first : index;
                    const bool is_any_left = later < num_panels && tile * share < lines;
                    const uint32_t* ahead = is_near && tiles.count == 1
                                                ? panel(index, step) + WORDS_AHEAD
                                                : panel(later, is_last ? 0 : after) + tile * share * LINE;
                    const long row = tiles.start(tile), column = index * width;
                    const Work work{
                        packed ? (const void*)(packed + (tile * steps + step) * PACKED_ROWS)
                               : call.x + (first_row + row) * call.x_stride + 2 * step,
                        call.x_stride * (long)sizeof(BFloat16), (bool)packed, panel(index, step), count,
                        is_any_left ? ahead : nullptr, is_any_left ? rate : 0, is_near, sums + row * PANEL,
                        step == 0, is_last,
                        call.out + (first_row + row) * num_outputs + column, num_outputs,
                        call.bias ? call.bias + column : nullptr,
                        call.bias ? call.bias + column + (call.is_gated ? num_outputs : LINE) : nullptr,
                        num_outputs - column, (bool)call.is_gated, call.activation,
                    };
                    multiply(work, tiles.size(tile));
                }
        }
    }

    void compute_all(std::atomic<long>& taken) const {
        alignas(64) float sums[MOST_TILES * MOST_ROWS * PANEL];
        Multiplier multiply;
        const long group = group_size(), most = group > 1 ? group : MOST_PANELS;
        Span span = take(taken, num_panels, most, call.num_threads);
        while (span.first < span.end) {
            const Span following = take(taken, num_panels, most, call.num_threads);
            for (long first = span.first; first < span.end; first += group) {
                const long end = std::min(first + group, span.end);
                compute(first, end, end < span.end ? end : following.first, sums, multiply);
            }
            span = following;
        }
    }
};

int linear(const LinearCall& call) {
    const long steps = count_steps(call.in_features);
    const long num_panels = count_panels(call.out_features, call.is_gated);
    const long most = most_tiles(std::max(1L, steps)), num_blocks = ceil_div(call.rows, most * MOST_ROWS);
    const long num_tiles = std::min(ceil_div(call.rows, MOST_ROWS), most);
    std::unique_ptr<uint32_t, decltype(&std::free)> packed(nullptr, &std::free);
    if (!is_read_in_place(call.rows, call.in_features, call.out_features, call.x_stride)) {
        packed.reset((uint32_t*)std::aligned_alloc(64, std::max(1L, num_tiles * steps) * 4 * PACKED_ROWS));
        if (!packed) return 2;
    }
    for (long i = 0, first = 0; i < num_blocks; i++) {
        const Tiling tiles(call.rows / num_blocks + (i < call.rows % num_blocks));
        const Block block{call, first, packed.get(), tiles, steps, num_panels};
        std::atomic<long> taken{0};
        if (packed)
            for_each(tiles.count, call.num_threads, [&](long tile) {
                pack_rows(call.x + (first + tiles.start(tile)) * call.x_stride, call.x_stride, tiles.size(tile),
                          call.in_features, packed.get() + tile * steps * PACKED_ROWS);
            });
        in_team(call.num_threads, [&] { block.compute_all(taken); });
        first += tiles.rows;
    }
    return 0;
}

}  // namespace
#endif
}  // namespace quire

using namespace quire;

// Number of elements of a packed weight; 0 if this machine's build has no code for panels, -1 if the system forbids it.
extern "C" long quire_panels_size([[maybe_unused]] long out_features, [[maybe_unused]] long in_features,
                                  [[maybe_unused]] long is_gated) {
#if defined(QUIRE_HAS_PANELS)
    if (!may_multiply()) return -1;
    return count_panels(out_features, is_gated) * PANEL * 2 * count_steps(in_features);
#else
    return 0;
#endif
}

extern "C" int quire_pack_panels([[maybe_unused]] const PackPanelsCall* call) {
#if defined(QUIRE_HAS_PANELS)
    const long out_features = call->out_features, in_features = call->in_features;
    const long steps = count_steps(in_features), half = PANEL / 2;
    const bool is_gated = call->is_gated;
    for_each(2 * count_panels(out_features, is_gated), call->num_threads, [=](long i) {
        const long first = is_gated ? i % 2 * (out_features / 2) + i / 2 * half : i * half;
        const long end = is_gated && i % 2 == 0 ? out_features / 2 : out_features;
        interleave(call->weight + first * call->stride, call->stride, std::clamp(end - first, 0L, half), in_features,
                   call->panels + i / 2 * steps * PANEL + i % 2 * half, PANEL, DEPTH);
    });
    return 0;
#else
    return 1;
#endif
}

// Rows of a packed weight, of which a panel has one pair a step. Returns 1 if an index is out of range, or this machine's
// build has no code for panels.
extern "C" int quire_take_panel_rows([[maybe_unused]] const TakePanelRowsCall* call) {
#if defined(QUIRE_HAS_PANELS)
    const long size = call->in_features, steps = count_steps(size);
    for (long i = 0; i < call->count; i++)
        if (call->index[i] < 0 || call->index[i] >= call->out_features) return 1;
    parallel(call->count, call->count * size * LINE, call->num_threads, [=](long i) {
        const long row = call->index[i];
        const uint32_t* pairs = call->panels + row / PANEL * steps * PANEL + row % PANEL;
        BFloat16* out = call->out + i * size;
        for (long step = 0; step < size / 2; step++) std::memcpy(out + 2 * step, pairs + step * PANEL, 4);
        if (size % 2) std::memcpy(out + size - 1, pairs + size / 2 * PANEL, 2);
        if (call->scale != 1)
            for (long at = 0; at < size; at += LANES)
                store(out + at, load(out + at, size - at) * (float)call->scale, size - at);
    });
    return 0;
#else
    return 1;
#endif
}

// Returns 0; 1 if this machine's build has no code for panels; 2 if there is no memory.
extern "C" int quire_linear([[maybe_unused]] const LinearCall* call) {
#if defined(QUIRE_HAS_PANELS)
    return linear(*call);
#else
    return 1;
#endif
}
