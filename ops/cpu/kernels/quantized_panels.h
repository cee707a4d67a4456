// Products of rows with panels of quantized weights.
//
// Weights are dequantized to float32 in registers, and x is converted, too. Or both become words of several inputs
// (words.h), if the codec and the processor support them and the call allows so few bits of x. Each block's sum then
// becomes float32.
//
// A weight is stored in panels of PANEL outputs: [panel][group]{scales [PANEL], offsets [PANEL], units}. One or two rows
// take several panels at once, because a sum must wait for the one before. More rows form tiles: the first one stores the
// part of a panel that it dequantizes in a buffer, for the others to read from the L1 cache.
//
// An element of the weight is code * scale + offset, rounded once. Each output is one chain of sums over the inputs, or
// over the blocks, in order, for any tile. So a row's result depends neither on the number of rows nor on that of threads.
#pragma once

#include "amx.h"
#include "codecs.h"
#include "kernels.h"
#include "word_rows.h"

#include <algorithm>
#include <functional>

namespace quire {
namespace quantized {

#if defined(QUIRE_HAS_AVX512) || defined(__aarch64__)
constexpr int MOST_ROWS = 12;                             // of a tile: registers, of 32, for twice as many sums
#else
constexpr int MOST_ROWS = LANES == 8 ? 6 : 5;             // of 16
#endif
constexpr long MOST_BLOCK = LANES == 16 ? 192 : 96;               // rows that take a dequantized part of a panel
constexpr long BLOCK_STEP = 48;                                   // rows of full passes, and of full tiles of AMX
constexpr long MOST_STEPS = 256;                                  // of such a part: 16 KB, or 32 KB with AVX-512
constexpr long MOST_PANELS = 8;                                   // of a task
constexpr long BLOCK_BYTES = 128 << 10;                           // of x, which the L2 cache holds together with a panel
constexpr int GROUP_SUMS = LANES == 16 ? 16 : 8;                  // vectors of sums that need not wait for each other
constexpr int FEW_ROWS = 2;
constexpr long AHEAD = 1024;  // bytes from what is read of one panel to what is prefetched

// Passes of a tile's rows. Where blocks end with few instructions, a pass has so few rows that their float32 sums stay in
// registers as well.
template <class X> constexpr int PASSES = X::HAS_ORIGINS ? 2 : 1;

// Panels that one or two rows take at once.
constexpr int group_of(int rows) { return std::clamp(GROUP_SUMS / (2 * rows), 1, 4); }

// How a packed weight lies in memory.
template <class C> struct Layout {
    C codec;
    long inputs, group;  // inputs, and those of a group
    long dtype;          // of scales and offsets
    bool has_offsets;

    long scale_bytes() const { return C::IS_SCALED ? PANEL * (dtype == FLOAT32 ? 4 : 2) : 0; }
    bool adds_offsets() const { return has_offsets || codec.adds_offset(); }
    long header() const { return scale_bytes() * (has_offsets ? 2 : 1); }
    long group_bytes() const { return header() + (group + C::UNIT - 1) / C::UNIT * C::BYTES; }
    long panel_bytes() const { return inputs / group * group_bytes(); }

    // The scales and offsets of a group.
    void load_scales(const uint8_t* from, Floats scale[2], Floats offset[2]) const {
        for (int half = 0; half < 2; half++) {
            with_type(dtype, [&](auto* type) {
                const auto* at = (decltype(type))from + half * LANES;
                scale[half] = load(at);
                offset[half] = has_offsets ? load(at + PANEL) : Floats{};
            });
            codec.adjust(scale[half], offset[half]);
        }
    }

    template <class X> Blocks<X> blocks() const { return {inputs / group, group, round_up(group, C::UNIT)}; }

    // The end of the part that begins at `step`: within a group or at its end.
    long part_end(long step) const {
        const long end = step + MOST_STEPS, rest = group - step % group;
        if (rest > MOST_STEPS) return end;
        return step + rest + (end - step - rest) / group * group;
    }

    // Where `step`, the first of a unit, lies in a panel. A group's first step lies at the group's scales.
    const uint8_t* find(const uint8_t* panel, long step) const {
        const long in_group = step % group;
        return panel + step / group * group_bytes() + (in_group ? header() + in_group / C::UNIT * C::BYTES : 0);
    }
};

// Rows in passes of nearly the same size, as few as there can be, and some neighbouring passes in a tile. The last tile may
// have fewer passes.
struct Tiles {
    long rows, in_tile, passes, count, least, num_larger;  // least: rows of a pass; the first num_larger have one more
    Tiles(long rows, long in_tile)
        : rows(rows), in_tile(in_tile), passes((rows * in_tile + MOST_ROWS - 1) / MOST_ROWS),
          count((passes + in_tile - 1) / in_tile), least(rows / passes), num_larger(rows % passes) {}
    long start(long tile) const {
        const long pass = std::min(tile * in_tile, passes);
        return pass * least + std::min(pass, num_larger);
    }
    int size(long tile) const { return (int)(start(tile + 1) - start(tile)); }
};

// Panels in groups, the tasks of a product. The last group may be smaller.
struct Groups {
    long panels, size;
    Groups(long panels, const Tiles& tiles, long row_bytes, long num_threads) : panels(panels), size(1) {
        if (tiles.rows <= FEW_ROWS) size = group_of((int)tiles.rows);
        else if (tiles.rows * row_bytes > BLOCK_BYTES) size = std::clamp(panels / (4 * num_threads), 1L, MOST_PANELS);
    }
    long count() const { return (panels + size - 1) / size; }
    long first(long task) const { return task * size; }
    int panels_of(long task) const { return (int)std::min(size, panels - task * size); }
};

constexpr long MOST_SUMS = MOST_PANELS * MOST_BLOCK * PANEL;

// Writes row `row` of a tile, [size][rows of the tile]; its number i is that at order[i] of `from`, unless order is null.
template <class T> void pack_row(const T* from, const int64_t* order, long size, int row, int rows, float* to) {
    for (long first = 0; first < size; first += LANES) {
        const long count = std::min<long>(LANES, size - first);
        T given[LANES];
        float part[LANES];
        if (order)
            for (long i = 0; i < count; i++) given[i] = from[order[first + i]];
        store(part, load(order ? given : from + first, count));
        for (long i = 0; i < count; i++) to[(first + i) * rows + row] = part[i];
    }
}

// Defined in products.h, word_products.h and tiled_products.h: see `Weight::multiply`.
template <class C>
void multiply_panels(const Layout<C>& weight, const uint8_t* panel, int count, const float* x, const Tiles& tiles,
                     float* sums);
template <class C, class X>
void multiply_words(X, const Layout<C>& weight, const uint8_t* panel, int count, const uint8_t* x,
                       const Tiles& tiles, float* sums);
template <class C>
void multiply_tiled(const Layout<C>& weight, const uint8_t* panel, int count, const uint8_t* x, long row_bytes, long rows,
                    float* sums);

// A packed weight of any codec.
struct Weight {
    const WeightForm form;
    explicit Weight(const WeightForm& form) : form(form) {}
    // In a gated layer (arXiv:2002.05202) a panel's lower half are gates, its upper half their ups.
    long num_panels() const {
        return form.is_gated ? (form.out_features / 2 + LANES - 1) / LANES : (form.out_features + PANEL - 1) / PANEL;
    }
    virtual long panel_bytes() const = 0;
    // Of x, whose tiles follow one another.
    virtual long row_bytes() const = 0;
    virtual long passes_of_tile() const { return 1; }  // see PASSES
    // Writes a tile of x, of up to MOST_ROWS rows. Number i of a row is that at order[i] of `from`, unless order is null.
    virtual void pack_tile(const void* const* from, long dtype, const int64_t* order, int rows, uint8_t* tile) const = 0;
    // sums [count][rows][PANEL] of `count` panels from `panel` on.
    virtual void multiply(const uint8_t* panel, int count, const uint8_t* x, const Tiles& tiles, float* sums) const = 0;
};

template <class C> struct CodedWeight : Weight {
    const Layout<C> layout;
    CodedWeight(const WeightForm& form, const float* table)
        : Weight(form),
          layout{C(table), form.in_features, form.group, form.scale_dtype, form.has_offsets != 0} {}
    long panel_bytes() const override { return layout.panel_bytes(); }
    long row_bytes() const override { return layout.inputs * (long)sizeof(float); }
    void pack_tile(const void* const* from, long dtype, const int64_t* order, int rows, uint8_t* tile) const override {
        with_type(dtype, [&](auto* type) {
            for (int row = 0; row < rows; row++)
                quantized::pack_row((decltype(type))from[row], order, layout.inputs, row, rows, (float*)tile);
        });
    }
    void multiply(const uint8_t* panel, int count, const uint8_t* x, const Tiles& tiles, float* sums) const override {
        multiply_panels(layout, panel, count, (const float*)x, tiles, sums);
    }
};

// The same with x in words of kind X.
template <class C, class X> struct WordWeight final : CodedWeight<C> {
    using CodedWeight<C>::CodedWeight, CodedWeight<C>::layout;
    const Blocks<X> blocks = layout.template blocks<X>();
    long row_bytes() const override { return blocks.row_bytes(); }
    long passes_of_tile() const override { return PASSES<X>; }
    void pack_tile(const void* const* from, long dtype, const int64_t* order, int rows, uint8_t* tile) const override {
        with_type(dtype, [&](auto* type) {
            pack_words<X, C>((std::remove_pointer_t<decltype(type)> const* const*)from, order, blocks, rows, tile);
        });
    }
    void multiply(const uint8_t* panel, int count, const uint8_t* x, const Tiles& tiles, float* sums) const override {
        multiply_words(X(), layout, panel, count, x, tiles, sums);
    }
};

#if defined(QUIRE_HAS_TILED_QUADS)
#if defined(QUIRE_HAS_AMX_INT8)
constexpr long LEAST_TILED_ROWS = 16;  // fewer rows do not fill a tile register

// Words of each row that one instruction takes; 0 if blocks are no multiples of that.
inline long tile_depth(const Blocks<InQuads>& blocks) { return blocks.padded == 32 ? 8 : blocks.padded % 64 ? 0 : 16; }
#else
constexpr long LEAST_TILED_ROWS = 4;
inline long tile_depth(const Blocks<InQuads>& blocks) { return blocks.padded % 8 ? 0 : 2; }
inline bool may_use_tiles() { return true; }
#endif

// The same with x in quads, for many rows. Each row is a separate tile, so that an instruction takes any neighbours. The
// bytes of a row are an odd number of cache lines: at some even ones many rows would share a few places in the cache.
template <class C> struct TiledWeight final : CodedWeight<C> {
    using CodedWeight<C>::CodedWeight, CodedWeight<C>::layout;
    const Blocks<InQuads> blocks = layout.template blocks<InQuads>();
    static bool suits(const WeightForm& form, long rows) {
        const Blocks<InQuads> blocks{1, form.group, round_up(form.group, C::UNIT)};
        return rows >= LEAST_TILED_ROWS && tile_depth(blocks) && may_use_tiles();
    }
    long row_bytes() const override { return round_up(blocks.row_bytes(), 64) | 64; }
    void pack_tile(const void* const* from, long dtype, const int64_t* order, int rows, uint8_t* tile) const override {
        with_type(dtype, [&](auto* type) {
            const auto* const* row = (std::remove_pointer_t<decltype(type)> const* const*)from;
            for (int i = 0; i < rows; i++)
                pack_words<InQuads, C>(row + i, order, blocks, 1, tile + i * row_bytes());
        });
    }
    void multiply(const uint8_t* panel, int count, const uint8_t* x, const Tiles& tiles, float* sums) const override {
        multiply_tiled(layout, panel, count, x, row_bytes(), tiles.rows, sums);
    }
};
#endif

// Calls body with the weight of a form, and returns 0. Returns 1, without a call, if this machine's build has no such
// codec. If `x_bits` is 32, x becomes float32. Otherwise it becomes integers of 8 or 16 bits for integer codes, and
// bfloat16 for other codes; or a wider type, if there are no instructions for these. Products have about `rows` rows;
// other instructions give the same results for more. `body` is no template, so that it is compiled once.
int with_weight(const WeightForm& form, const float* table, long x_bits, long rows,
                const std::function<void(const Weight&)>& body);

}  // namespace quantized
}  // namespace quire
