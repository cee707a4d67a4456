// Mixture of experts: a gated layer and the layer after it, for each token those of its own experts.
//
// The pairs of a token and one of its experts are sorted by expert. An expert's pairs become the rows of two products
// with its panels (widened.h), so that only panels of experts with rows are read, each once if its rows are few. Sums,
// activations and what the second layer reads are float32: the only rounding is that of the result.
//
// The outputs of a token's experts are kept apart and added in the token's own order. So a token's result depends
// neither on the other tokens nor on the number of threads.

#include "kernels.h"
#include "threads.h"
#include "widened.h"

#include <cstdlib>
#include <memory>
#include <type_traits>
#include <vector>

namespace quire {
namespace {

using namespace widened;

constexpr long MOST_BYTES = 48L << 20;  // of working memory; the allocator keeps so much (memory.py)

inline long count_panels(long out_features, bool is_gated) {
    return is_gated ? (out_features / 2 + LANES - 1) / LANES : (out_features + PANEL - 1) / PANEL;
}

// Neighbouring pairs of one expert, [first, first + tiles.rows) in the sorted order.
struct Block {
    long expert, first;
    Tiles tiles;
};

// The tasks of one product: the panels of each block, in groups.
class Tasks {
public:
    Tasks(const std::vector<Block>& blocks, long num_panels) : num_panels(num_panels) {
        long end = 0;
        for (const Block& block : blocks) ends.push_back(end += groups(block).count());
    }

    long count() const { return ends.empty() ? 0 : ends.back(); }

    // Calls body(block, first panel, number of panels).
    template <class Body> void run(const std::vector<Block>& blocks, long task, Body body) const {
        const long index = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
        const Groups all = groups(blocks[index]);
        const long own = task - (ends[index] - all.count());
        body(blocks[index], all.first(own), all.panels_of(own));
    }

private:
    Groups groups(const Block& block) const { return {num_panels, block.tiles.group()}; }

    long num_panels;
    std::vector<long> ends;
};

// Some of a call's tokens, from first_token on. T is the type of x, W that of the weights.
template <class T, class W> struct Tokens {
    const ExpertsCall& call;
    long first_token, count;
    float* rows;   // [pairs][hidden]: first x, tile by tile [hidden][rows of the tile]; then outputs, in the pairs' order
    float* inner;  // [pairs][size], tile by tile [size][rows of the tile]
    std::vector<int32_t> order;  // pairs by expert
    std::vector<Block> blocks;

    void sort() {
        const long pairs = count * call.top_k;
        const int64_t* ids = call.ids + first_token * call.top_k;
        std::vector<long> starts(call.num_experts + 1);
        for (long pair = 0; pair < pairs; pair++) starts[ids[pair] + 1]++;
        for (long expert = 0; expert < call.num_experts; expert++) {
            starts[expert + 1] += starts[expert];
            for (long first = starts[expert], end = starts[expert + 1]; first < end;) {
                const long rows = std::min(end - first, MOST_TILES * MOST_ROWS);
                blocks.push_back({expert, first, Tiles(rows)});
                first += rows;
            }
        }
        order.resize(pairs);
        for (long pair = 0; pair < pairs; pair++) order[starts[ids[pair]]++] = (int32_t)pair;
    }

    // Calls body(tile, row in the tile, rows of the tile, the tile's first place in `order`) for each pair of a block.
    template <class Body> void for_pairs(const Block& block, Body body) const {
        for (long tile = 0; tile < block.tiles.count; tile++)
            for (int row = 0; row < block.tiles.size(tile); row++)
                body(tile, row, block.tiles.size(tile), block.first + block.tiles.start(tile));
    }

    void pack() const {
        for_each((long)blocks.size(), call.num_threads, [&](long i) {
            for_pairs(blocks[i], [&](long, int row, int size, long first) {
                const long token = first_token + order[first + row] / call.top_k;
                pack_row((const T*)call.x + token * call.x_stride, call.hidden, row, size, rows + first * call.hidden);
            });
        });
    }

    void compute_inner() const {
        const long num_panels = count_panels(2 * call.size, true);
        const Tasks tasks(blocks, num_panels);
        for_each(tasks.count(), call.num_threads, [&](long task) {
            tasks.run(blocks, task, [&](const Block& block, long panel, int group) {
                alignas(64) float sums[MOST_SUMS];
                const W* panels = (const W*)call.gate_up + (block.expert * num_panels + panel) * call.hidden * PANEL;
                multiply_tiles(rows + block.first * call.hidden, block.tiles, panels, call.hidden, group, sums);
                for_pairs(block, [&](long tile, int row, int size, long first) {
                    const float* at = sums + (tile * MOST_ROWS + row * group) * PANEL;
                    for (int i = 0; i < group; i++)
                        activate_gates(block.expert, (panel + i) * LANES, at + i * PANEL,
                                       inner + first * call.size + row, size);
                });
            });
        });
    }

    // Writes the activations of up to LANES gates from number `at` on, `stride` apart.
    void activate_gates(long expert, long at, const float* sums, float* to, long stride) const {
        const long left = std::min<long>(LANES, call.size - at), outputs = expert * 2 * call.size;
        Floats halves[2];
        for (int i = 0; i < 2; i++) {
            const long output = outputs + i * call.size + at;
            halves[i] = load(sums + i * LANES);
            if (call.gate_up_scales) halves[i] *= load(call.gate_up_scales + output, left);
            if (call.gate_up_bias) halves[i] += load(call.gate_up_bias + output, left);
        }
        float activated[LANES];
        store(activated, gated(halves[0], halves[1], call.activation));
        for (long i = 0; i < left; i++) to[(at + i) * stride] = activated[i];
    }

    void compute_outputs() const {
        const long num_panels = count_panels(call.hidden, false);
        const Tasks tasks(blocks, num_panels);
        for_each(tasks.count(), call.num_threads, [&](long task) {
            tasks.run(blocks, task, [&](const Block& block, long panel, int group) {
                alignas(64) float sums[MOST_SUMS];
                const W* panels = (const W*)call.down + (block.expert * num_panels + panel) * call.size * PANEL;
                multiply_tiles(inner + block.first * call.size, block.tiles, panels, call.size, group, sums);
                for_pairs(block, [&](long tile, int row, int, long first) {
                    write_outputs(block.expert, order[first + row], panel * PANEL, group,
                                  sums + (tile * MOST_ROWS + row * group) * PANEL);
                });
            });
        });
    }

    void write_outputs(long expert, long pair, long first, int group, const float* sums) const {
        const Floats weight = fill(call.weights[first_token * call.top_k + pair]);
        const long end = std::min(first + group * PANEL, call.hidden);
        for (long at = first; at < end; at += LANES, sums += LANES) {
            const long left = std::min<long>(LANES, end - at), output = expert * call.hidden + at;
            Floats value = load(sums);
            if (call.down_scales) value *= load(call.down_scales + output, left);
            if (call.down_bias) value += load(call.down_bias + output, left);
            store(rows + pair * call.hidden + at, value * weight, left);
        }
    }

    void add() const {
        for_each(count, call.num_threads, [&](long token) {
            const float* from = rows + token * call.top_k * call.hidden;
            T* out = (T*)call.out + (first_token + token) * call.hidden;
            for (long at = 0; at < call.hidden; at += LANES) {
                const long left = std::min<long>(LANES, call.hidden - at);
                Floats total = load(from + at, left);
                for (long i = 1; i < call.top_k; i++) total += load(from + i * call.hidden + at, left);
                store(out + at, total, left);
            }
        });
    }

    void compute() {
        sort();
        pack();
        compute_inner();
        compute_outputs();
        add();
    }
};

template <class T, class W> int run_experts(const ExpertsCall& call) {
    const long bytes = sizeof(float) * call.top_k * (call.hidden + call.size);  // of a token
    const long most = std::clamp(MOST_BYTES / std::max(1L, bytes), 1L, std::max<long>(1, call.rows));
    const long num_blocks = (call.rows + most - 1) / most;
    const std::unique_ptr<float, decltype(&std::free)> memory(
        (float*)std::aligned_alloc(64, round_up(most * bytes + 64, 64)), &std::free);
    if (!memory) return 2;
    for (long i = 0, first = 0; i < num_blocks; i++) {
        const long count = call.rows / num_blocks + (i < call.rows % num_blocks);
        float* inner = memory.get() + count * call.top_k * call.hidden;
        Tokens<T, W>{call, first, count, memory.get(), inner, {}, {}}.compute();
        first += count;
    }
    return 0;
}

template <class W> void pack_expert(const PackExpertCall& call) {
    const long inputs = call.in_features, outputs = call.out_features, half = outputs / 2;
    for_each(count_panels(outputs, call.is_gated), call.num_threads, [&](long panel) {
        const W* weight = (const W*)call.weight;
        W* to = (W*)call.panels + panel * inputs * PANEL;
        for (long first = 0; first < inputs; first += 64)  // a part of the panel that stays in the first cache
            for (long i = 0; i < PANEL; i++) {
                const bool is_up = call.is_gated && i >= LANES;
                const long row = call.is_gated ? panel * LANES + i % LANES : panel * PANEL + i;
                const W* from = row < (call.is_gated ? half : outputs) ? weight + (is_up * half + row) * inputs : nullptr;
                for (long step = first; step < std::min(first + 64, inputs); step++)
                    to[step * PANEL + place<W>(i)] = from ? from[step] : W{};
            }
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

// Numbers of a packed weight; 0 if this machine's build does not take its type.
extern "C" long quire_expert_size(long out_features, long in_features, long is_gated, long dtype) {
    const bool is_unknown = with_type(dtype, [](auto*) {});
    return is_unknown ? 0 : count_panels(out_features, is_gated) * PANEL * in_features;
}

// 0; 1 if this machine's build does not take the weight's type.
extern "C" int quire_pack_expert(const PackExpertCall* call) {
    if (call->is_int8) return pack_expert<int8_t>(*call), 0;
    return with_type(call->dtype, [&](auto* type) { pack_expert<std::remove_pointer_t<decltype(type)>>(*call); });
}

// 0; 1 if this machine's build does not take x's type; 2 if there is no memory; 3 if there is no such expert.
extern "C" int quire_experts(const ExpertsCall* call) {
    for (long pair = 0; pair < call->rows * call->top_k; pair++)
        if (call->ids[pair] < 0 || call->ids[pair] >= call->num_experts) return 3;
    int failed = 0;
    const int unknown = with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        failed = call->is_int8 ? run_experts<T, int8_t>(*call) : run_experts<T, T>(*call);
    });
    return unknown ? unknown : failed;
}
