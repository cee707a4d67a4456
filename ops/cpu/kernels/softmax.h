// The online softmax: turns scores into weights, tile by tile, and merges the sums of splits. See attention.h.
//
// A row's softmax starts again at every multiple of SPLIT keys, and its splits are merged in one fixed order. So
// threads may divide a long context among them, and the result does not depend on how they do.
#pragma once

#include "pages.h"
#include "tiles.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

namespace quire {

// The n-th vector of a row's weights.
inline void store_weights(float* row, long n, Floats x) { store(row + n * LANES, x); }
inline void store_weights(Pair* row, long n, Floats x) { store(reinterpret_cast<BFloat16*>(row) + n * LANES, x); }

// Some rows of a tile whose scores become weights at once: the ends of their maxima and the factors of their sums are
// chains of instructions that take no longer for four rows than for one.
template <class Unit> struct Softening {
    long num;             // rows, up to BLOCK
    const float* scores;  // [num][KEYS]
    float scale;          // of scores, with the factor log2(e); it is positive
    float* most;          // [num]: greatest score so far
    Floats* total;        // [num]: sums of weights so far, by lane
    Unit* weights;        // [num][KEYS in units]
    long begin[BLOCK] = {}, end[BLOCK] = {};  // the keys that each row sees
    float keep[LANES] = {};                   // [num]: what rescales the row's sums so far to the new `most`

    // Turns scores into weights 2^(score * scale - most). Keys that are not seen get the weight 0, below `width`.
    void run(long width) {
        bool all = true;
        for (long i = 0; i < num; i++) all &= begin[i] == 0 && end[i] == KEYS;
        if (all) run<true>(KEYS);
        else run<false>(width);
    }

private:
    // Inlined, because calls make long prompts a percent slower.
    template <bool ALL> __attribute__((always_inline)) void run(long width) {
        const Floats hidden = fill(-INFINITY);
        Floats highest[BLOCK];
        for (long i = 0; i < BLOCK; i++) highest[i] = hidden;
        for (long i = 0; i < num; i++)
            for (long n = 0; n < width; n += LANES)
                highest[i] = greater(seen<ALL>(i, n, load(scores + i * KEYS + n), hidden), highest[i]);
        float now[LANES], less[LANES] = {};
        store(now, largest(highest[0], highest[1], highest[2], highest[3]) * scale);
        for (long i = 0; i < num; i++) {
            const float before = most[i];
            most[i] = now[i] > before ? now[i] : before;
            less[i] = most[i] == before ? 0 : before - most[i];
        }
        store(keep, exp2(load(less)));
        for (long i = 0; i < num; i++) {
            Floats added{};
            for (long n = 0; n < width; n += LANES) {
                const Floats x = load(scores + i * KEYS + n);
                const Floats weight = seen<ALL>(i, n, exp2(multiply_add(x, fill(scale), fill(-most[i]))), Floats{});
                added += weight;
                store_weights(weights + i * KEYS / ELEMENTS<Unit>, n / LANES, weight);
            }
            total[i] = multiply_add(total[i], fill(keep[i]), added);
        }
    }

    // x, or `otherwise` in the lanes of keys that row i does not see.
    template <bool ALL> Floats seen(long i, long n, Floats x, Floats otherwise) const {
        if constexpr (ALL) return x;
        Ints lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        const Ints key = lane + (int)n;
        return (key >= (int)begin[i]) & (key < (int)end[i]) ? x : otherwise;
    }
};

// Scales, caps and biases the scores of one row and tile. `offset` is the first key's position less the query's. Not
// inlined, so that forms without it keep their code.
__attribute__((noinline)) inline void bend(float* scores, long width, float scale, float softcap, float slope,
                                           long offset) {
    Floats distance;
    for (int i = 0; i < LANES; i++) distance[i] = (float)(offset + i);
    for (long n = 0; n < width; n += LANES, distance += (float)LANES) {
        Floats x = load(scores + n) * scale;
        if (softcap) x = tanh(x * (1 / softcap)) * softcap;
        store(scores + n, x + distance * slope);
    }
}

// Adds the biases of the keys' distances, `biases` [2 * reach + 1], to the scores of one row and tile. `offset` is as for
// `bend`.
__attribute__((noinline)) inline void bias_by_distance(float* scores, long width, const float* biases, long reach,
                                                       long offset) {
    for (long n = 0; n < width; n += LANES) {
        const long first = offset + n;
        Floats bias;
        if (first >= -reach && first + LANES - 1 <= reach) {
            bias = load(biases + reach + first);
        } else {
            for (int i = 0; i < LANES; i++) bias[i] = biases[reach + std::min(std::max(first + i, -reach), reach)];
        }
        store(scores + n, load(scores + n) + bias);
    }
}

// 1 / sum → 1 / (sum + the weight of a sink), for weights 2^(score - most) and a sink as a natural logarithm.
inline float with_sink(float share, float most, float sink) {
    const float above = sink * (float)M_LOG2E - most;
    if (above > 0) {  // the greatest score is the sink: weights are scaled down to it
        const float less = exp2(fill(-above))[0];
        return less / (less / share + 1);
    }
    return 1 / (1 / share + exp2(fill(above))[0]);
}

// Floats of one row's sums: the greatest score, the sum of the weights, and from LANES on the weighted values, whose
// order may be that of `place_of_value` (tiles.h).
inline long sums_size(long head_dim) { return LANES + round_up(head_dim, 4 * LANES); }

// Adds a later split to `sums`. Not inlined, so that it rounds in the same way for all callers.
__attribute__((noinline)) inline void merge(float* sums, const float* split, long head_dim) {
    if (split[1] == 0) return;  // the row sees none of its keys
    const long size = sums_size(head_dim);
    if (sums[1] == 0) return void(std::memcpy(sums, split, size * sizeof(float)));
    const float most = std::max(sums[0], split[0]);
    const float keep = exp2(fill(sums[0] - most))[0], share = exp2(fill(split[0] - most))[0];
    sums[0] = most;
    sums[1] = sums[1] * keep + split[1] * share;
    for (long d = LANES; d < size; d += LANES) store(sums + d, load(sums + d) * keep + load(split + d) * share);
}

// The splits of a few queries whose keys several items divide among them. The last item that is done merges the splits.
struct Shared {
    std::atomic<long> items_left{0};
    long first_split = 0, num_splits = 0, split_size = 0;
    std::unique_ptr<float[]> sums;  // [num_splits][heads * rows][sums_size]

    float* sums_of(long split) const { return sums.get() + (split - first_split) * split_size; }
};

inline std::vector<Shared> shared_of(const AttentionCall& call, const std::vector<Item>& items) {
    long count = 0;
    for (const Item& item : items) count = std::max(count, item.shared + 1);
    std::vector<Shared> all(count);
    for (const Item& item : items) {
        if (item.shared < 0) continue;
        Shared& shared = all[item.shared];
        const long first = item.first_key / SPLIT, end = (item.end_key - 1) / SPLIT + 1;
        const bool is_first = shared.items_left.fetch_add(1) == 0;
        const long last = is_first ? end : std::max(end, shared.first_split + shared.num_splits);
        shared.first_split = is_first ? first : std::min(first, shared.first_split);
        shared.num_splits = last - shared.first_split;
        shared.split_size = item.num_heads * item.num_queries * call.group * sums_size(call.head_dim);
    }
    for (Shared& shared : all) shared.sums.reset(new float[shared.num_splits * shared.split_size]);
    return all;
}

}  // namespace quire
