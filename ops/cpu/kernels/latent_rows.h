// Scores of a few rows against keys that all of them share, and the sums of the keys' values, tile by tile.
//
// A row is a query of one head. A tile's keys are dequantized to float32 once for all rows, codes with their scales, and laid
// out twice: as values, [KEYS][size], and transposed, as keys, in panels. Then scores = queries * keys and out += weights *
// values are the same small matrix product (tiles.h). Each row is computed on its own, so its result does not depend on
// the others.
#pragma once

#include "rows.h"
#include "softmax.h"
#include "tiles.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>

namespace quire {

template <class T> void widen(const T* from, long count, float* to) {
    for (long i = 0; i < count; i += LANES) store(to + i, load(from + i, count - i), count - i);
}

template <class Cache> void widen_row(const void* from, long size, float* to) {
    const Cache* row = static_cast<const Cache*>(from);
    if constexpr (IS_CODED<Cache>) {
        const Floats scale = fill(scale_of(row, size));
        for (long i = 0; i < size; i += LANES) store(to + i, load(at(row, i), size - i) * scale, size - i);
    } else {
        widen(row, size, to);
    }
}

// Reads the rows of a cache whose type is known when it runs: products do not depend on it, so they are compiled once.
struct RowReader {
    void (*widen)(const void* row, long size, float* to);
    long (*bytes)(long size);  // of a row of `size` elements
    long element_bytes;

    // What lies in a slot of a cache. Strides are in elements.
    const char* at(const void* cache, long slot, long block_size, long page_stride, long row_stride) const {
        const long place = slot / block_size * page_stride + slot % block_size * row_stride;
        return static_cast<const char*>(cache) + place * element_bytes;
    }
};

// Returns 0, or 1 if this machine's build has no such type.
inline int find_reader(long cache_dtype, RowReader& reader) {
    return with_cache_type(cache_dtype, [&](auto* type) {
        using Cache = std::remove_pointer_t<decltype(type)>;
        reader = {widen_row<Cache>, [](long size) { return row_size<Cache>(size) * (long)sizeof(Cache); }, sizeof(Cache)};
    });
}

class LatentRows {
public:
    static constexpr long FEWEST = 8;  // for fewer rows, laying out a tile takes as long as the products
    const long size, rank;             // elements of a key; how many of them, from the first on, are its value

    LatentRows(long num_rows, long size, long rank)
        : size(size), rank(rank), stride(round_up(size, 4 * LANES)), out_stride(sums_size(rank) - LANES) {
        const long sizes[] = {num_rows * stride, KEYS * stride, KEYS * stride, num_rows * KEYS, num_rows * KEYS,
                              num_rows * out_stride, num_rows, num_rows, num_rows * LANES};
        float** const parts[] = {&queries, &values, &keys, &scores, &weights, &out, &keep, &most, &total};
        long count = 0;
        for (long part : sizes) count += round_up(part, 16);
        memory.reset(static_cast<float*>(std::aligned_alloc(64, count * sizeof(float))));
        float* next = memory.get();
        for (int i = 0; i < 9; next += round_up(sizes[i], 16), i++) *parts[i] = next;
    }

    // Sets elements [first, first + count) of a row's query.
    template <class T> void take_query(long row, const T* from, long count, long first = 0) {
        widen(from, count, queries + row * stride + first);
    }

    // Sets elements [first, first + count) of a key, which are one row of a cache.
    void take_key(long key, const RowReader& reader, const char* row, long count, long first = 0) {
        reader.widen(row, count, values + key * stride + first);
    }

    // To be called when a tile's `count` keys have been taken. The scores of more keys, up to a multiple of LANES, mean
    // nothing.
    void transpose_keys(long count) {
        for (long column = 0; column < count; column += LANES)
            for (long d = 0; d < size; d += LANES) {
                float* panel = keys + column / PANEL * PANEL * stride + column % PANEL;
                Words block[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) block[i] = read<Words>(values + (column + i) * stride + d);
                transpose(block);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) std::memcpy(panel + (d + i) * PANEL, &block[i], sizeof(Words));
            }
    }

    // The scores of rows [first, first + num), before they are scaled.
    void score(long first, long num, long count) {
        multiply_all(num, queries + first * stride, stride, keys, PANEL, stride, size, scores + first * KEYS, KEYS,
                     round_up(count, LANES), nullptr);
    }

    const float* scores_of(long row) const { return scores + row * KEYS; }

    // Begins the softmaxes of all rows.
    void start(long num_rows) {
        std::fill_n(most, num_rows, -INFINITY);
        std::fill_n(total, num_rows * LANES, 0.0f);
        std::fill_n(out, num_rows * out_stride, 0.0f);
    }

    // Turns the scores of rows [first, end) into weights; a row sees keys [0, seen_by(row)) of the tile's `count`. `scale`
    // includes log2(e).
    template <class SeenBy> void soften(long first, long end, long count, float scale, SeenBy seen_by) {
        for (long row = first; row < end; row += BLOCK) {
            const long num = std::min<long>(BLOCK, end - row);
            Floats sums[BLOCK];
            Softening<float> softening{num, scores + row * KEYS, scale, most + row, sums, weights + row * KEYS};
            for (long i = 0; i < num; i++) softening.end[i] = seen_by(row + i), sums[i] = load(total + (row + i) * LANES);
            softening.run(round_up(count, LANES));
            for (long i = 0; i < num; i++) keep[row + i] = softening.keep[i], store(total + (row + i) * LANES, sums[i]);
        }
    }

    // Adds the weighted values of a tile to the sums of rows [first, first + num).
    void add_values(long first, long num, long count) {
        multiply_all(num, weights + first * KEYS, KEYS, values, stride, 1, count, out + first * out_stride, out_stride,
                     out_stride, keep + first);
    }

    // Writes a row's sums as softmax.h has them.
    void write_sums(long row, float* to) const {
        to[0] = most[row], to[1] = sum(load(total + row * LANES));
        std::memcpy(to + LANES, out + row * out_stride, out_stride * sizeof(float));
    }

private:
    static constexpr int TOGETHER = 6;               // rows whose sums are in registers at once, in two vectors each
    static constexpr long PANEL = COLUMNS * LANES;   // keys whose elements lie together, so that they stay in the L1 cache

    const long stride, out_stride;
    std::unique_ptr<float, decltype(&std::free)> memory{nullptr, &std::free};
    float *queries, *values, *keys, *scores, *weights, *out, *keep, *most, *total;

    // `multiply` for any number of rows, one panel after another. A column of `b` is `column_stride` after the one before,
    // between panels.
    static void multiply_all(long rows, const float* a, long a_stride, const float* b, long b_stride, long column_stride,
                             long steps, float* c, long c_stride, long width, const float* keep) {
        for (long column = 0; column < width; column += PANEL)
            for (long row = 0; row < rows; row += TOGETHER)
                with_rows<TOGETHER>(std::min<long>(TOGETHER, rows - row), [&](auto constant) {
                    multiply_rows<constant()>(a + row * a_stride, a_stride, b + column * column_stride, b_stride, steps,
                                              c + row * c_stride + column, c_stride, std::min(PANEL, width - column),
                                              keep ? keep + row : nullptr);
                });
    }
};

}  // namespace quire
