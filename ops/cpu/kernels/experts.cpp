// Mixture of experts: a gated or plain layer and the layer after it, for each token those of its experts. Gates and
// ups of different codecs are two products, the gates' sums waiting for the ups.
//
// The pairs of a token and one of its experts are sorted by expert. An expert's pairs become the rows of two products
// with its panels (quantized_panels.h), so that only panels of experts with rows are read, each once if its rows are few.
// Sums and activations are float32; the second layer packs its input from them.
//
// The outputs of a token's experts are stored separately and added in the token's own order. So a token's result depends
// neither on the other tokens nor on the number of threads. A pair with an expert of another rank (-1) is skipped.

#include "quantized_panels.h"
#include "threads.h"

#include <cstdlib>
#include <memory>
#include <vector>

namespace quire {
namespace quantized {
namespace {

constexpr long MOST_BYTES = 48L << 20;  // of working memory; the allocator keeps so much (memory.py)

// Neighbouring pairs of one expert, [first, first + tiles.rows) in the sorted order.
struct Block {
    long expert, first;
    Tiles tiles;
};

// The tasks of one product: the panels of each block, in groups.
class Tasks {
public:
    Tasks(const std::vector<Block>& blocks, const Weight& weight, long num_threads)
        : num_panels(weight.num_panels()), row_bytes(weight.row_bytes()), num_threads(num_threads) {
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
    Groups groups(const Block& block) const { return {num_panels, block.tiles, row_bytes, num_threads}; }

    const long num_panels, row_bytes, num_threads;
    std::vector<long> ends;
};

// One of the two layers of all experts.
struct Layer {
    const Weight& weight;
    const uint8_t* panels;

    // The sums of `count` panels of an expert from number `panel` on: [count][rows][PANEL].
    void multiply(const Block& block, long panel, int count, const uint8_t* x, float* sums) const {
        const uint8_t* own = panels + (block.expert * weight.num_panels() + panel) * weight.panel_bytes();
        weight.multiply(own, count, x + block.first * weight.row_bytes(), block.tiles, sums);
    }
};

// Adds b (a x) to `out`: `a` has `rank` rows of each part, `most` apart, and a part's outputs follow those before it.
template <class X, class T>
void add_low_rank(const X* x, const T* a, const T* b, long parts, long rank, long most, long inputs, long outputs,
                  float* out) {
    const long part_size = outputs / parts;
    for (long part = 0; part < parts; part++, out += part_size)
        for (long r = 0; r < rank; r++) {
            const T *row = a + (part * most + r) * inputs, *column = b + r * outputs + part * part_size;
            Floats products = {};
            for (long i = 0; i < inputs; i += LANES)
                products = multiply_add(load(x + i, inputs - i), load(row + i, inputs - i), products);
            const Floats factor = fill(sum(products));
            for (long i = 0; i < part_size; i += LANES) {
                const long left = std::min<long>(LANES, part_size - i);
                store(out + i, multiply_add(factor, load(column + i, left), load(out + i, left)), left);
            }
        }
}

// Some of a call's tokens, from first_token on.
struct Tokens {
    const ExpertsCall& call;
    const Layer gate_up;
    const Layer* up;  // of gates and ups that are packed apart; else null
    const Layer down;
    long first_token, count;
    uint8_t* rows;   // of the pairs, tile by tile: x, and then what `down` reads, as their weights take them
    float* inner;    // [pairs][size]: the gated activations of the pairs
    float* outputs;  // [pairs][hidden], in the pairs' order
    std::vector<int32_t> order;  // pairs by expert
    std::vector<Block> blocks;
    std::vector<float> added;  // what adapters add to a layer: [pairs][its outputs]; empty: nothing

    void sort() {
        const long pairs = count * call.top_k;
        const int64_t* ids = call.ids + first_token * call.top_k;
        long passes = std::min(gate_up.weight.passes_of_tile(), down.weight.passes_of_tile());
        if (up) passes = std::min(passes, up->weight.passes_of_tile());
        std::vector<long> starts(call.num_experts + 1);
        for (long pair = 0; pair < pairs; pair++)
            if (ids[pair] >= 0) starts[ids[pair] + 1]++;
        for (long expert = 0; expert < call.num_experts; expert++) {
            starts[expert + 1] += starts[expert];
            for (long first = starts[expert], end = starts[expert + 1]; first < end;) {
                const long rows = std::min(end - first, MOST_BLOCK);
                blocks.push_back({expert, first, Tiles(rows, passes)});
                first += rows;
            }
        }
        order.resize(starts[call.num_experts]);
        for (long pair = 0; pair < pairs; pair++)
            if (ids[pair] >= 0) order[starts[ids[pair]]++] = (int32_t)pair;
    }

    // Packs the rows of a layer; from(place in `order`) is the address of a pair's elements of `dtype`.
    template <class From> void pack(const Weight& weight, const int64_t* inputs, long dtype, From from) const {
        const long bytes = weight.row_bytes(), size = weight.form.in_features;
        for_each((long)blocks.size(), call.num_threads, [&](long i) {
            const int64_t* own_inputs = inputs ? inputs + blocks[i].expert * size : nullptr;
            const Tiles& tiles = blocks[i].tiles;
            for (long tile = 0; tile < tiles.count; tile++) {
                const long first = blocks[i].first + tiles.start(tile);
                const void* own[MOST_ROWS];
                for (int row = 0; row < tiles.size(tile); row++) own[row] = from(first + row);
                weight.pack_tile(own, dtype, own_inputs, tiles.size(tile), rows + first * bytes);
            }
        });
    }

    // Calls body(expert, place in `order`, first output, sums of PANEL outputs) for all outputs of a layer.
    template <class Body> void compute_sums(const Layer& layer, Body body) const {
        const Tasks tasks(blocks, layer.weight, call.num_threads);
        for_each(tasks.count(), call.num_threads, [&](long task) {
            tasks.run(blocks, task, [&](const Block& block, long panel, int group) {
                alignas(64) float sums[MOST_SUMS];
                layer.multiply(block, panel, group, rows, sums);
                for (long row = 0; row < block.tiles.rows; row++)
                    for (int i = 0; i < group; i++)
                        body(block.expert, block.first + row, panel + i, sums + (i * block.tiles.rows + row) * PANEL);
            });
        });
    }

    void compute_inner() const {
        const bool is_gated = call.gate_up_form.is_gated;
        compute_sums(gate_up, [&](long expert, long place, long panel, const float* sums) {
            if (is_gated) return activate_gates(expert, panel * LANES, sums, sums + LANES, place);
            for (long half = 0; half < PANEL; half += LANES) {
                const long at = panel * PANEL + half, left = std::min<long>(LANES, call.size - at);
                if (left <= 0) return;
                if (up) store(inner + place * call.size + at, load(sums + half), left);
                else activate_ups(expert, at, sums + half, place);
            }
        });
    }

    // Computes the ups, and multiplies them by their activated gates.
    void compute_ups() const {
        compute_sums(*up, [&](long expert, long place, long panel, const float* sums) {
            for (long half = 0; half < PANEL; half += LANES) {
                const long at = panel * PANEL + half, left = std::min<long>(LANES, call.size - at);
                if (left <= 0) return;
                alignas(64) float gates[LANES];
                store(gates, load(inner + place * call.size + at, left));
                activate_gates(expert, at, gates, sums + half, place);
            }
        });
    }

    // What multiplies the sums of a pair's first layer.
    float input_weight(long place) const { return call.weighs_inputs ? weight_of(order[place]) : 1; }

    float weight_of(long pair) const { return call.weights[first_token * call.top_k + pair]; }

    long num_parts() const { return call.gate_up_form.is_gated || up ? 2 : 1; }

    // Computes what adapters add to a layer of `outputs`; from(place) is the address of a pair's inputs.
    template <class T, class From> void multiply_adapters(const void* a, const void* b, long parts, long inputs,
                                                          long outputs, From from) {
        added.assign(count * call.top_k * outputs, 0);
        for_each((long)blocks.size(), call.num_threads, [&](long i) {
            const Block& block = blocks[i];
            for (long place = block.first; place < block.first + block.tiles.rows; place++) {
                const long adapter = call.adapters[first_token + order[place] / call.top_k];
                if (adapter < 0) continue;
                const long own = adapter * call.num_experts + block.expert;
                add_low_rank(from(place), (const T*)a + own * parts * call.rank * inputs,
                             (const T*)b + own * call.rank * outputs, parts, call.ranks[own], call.rank, inputs, outputs,
                             added.data() + place * outputs);
            }
        });
    }

    // What adapters add to outputs of a pair from number `at` on, of `outputs`.
    Floats from_adapter(long place, long outputs, long at, long left) const {
        return added.empty() ? Floats{} : load(added.data() + place * outputs + at, left);
    }

    // Writes the activations of up to LANES outputs without gates from number `at` on.
    void activate_ups(long expert, long at, const float* sums, long place) const {
        const long left = std::min<long>(LANES, call.size - at), output = expert * call.size + at;
        Floats ups = (load(sums) + from_adapter(place, call.size, at, left)) * input_weight(place);
        if (call.gate_up_bias) ups += load(call.gate_up_bias + output, left);
        store(inner + place * call.size + at, activate(ups, call.activation), left);
    }

    // The same for gates and their ups.
    void activate_gates(long expert, long at, const float* gates, const float* ups, long place) const {
        const long left = std::min<long>(LANES, call.size - at), outputs = expert * 2 * call.size;
        const float weight = input_weight(place);
        Floats halves[2] = {load(gates), load(ups)};
        for (int i = 0; i < 2; i++)
            halves[i] = (halves[i] + from_adapter(place, 2 * call.size, i * call.size + at, left)) * weight;
        if (call.gate_up_bias)
            for (int i = 0; i < 2; i++) halves[i] += load(call.gate_up_bias + outputs + i * call.size + at, left);
        store(inner + place * call.size + at, gated(halves[0], halves[1], call.activation), left);
    }

    void compute_outputs() const {
        compute_sums(down, [&](long expert, long place, long panel, const float* sums) {
            write_outputs(expert, place, panel * PANEL, sums);
        });
    }

    void write_outputs(long expert, long place, long first, const float* sums) const {
        const long pair = order[place];
        const Floats weight = fill(call.weighs_inputs ? 1 : weight_of(pair));
        const long end = std::min(first + PANEL, call.hidden);
        for (long at = first; at < end; at += LANES, sums += LANES) {
            const long left = std::min<long>(LANES, end - at), output = expert * call.hidden + at;
            Floats value = load(sums) + from_adapter(place, call.hidden, at, left);
            if (call.down_bias) value += load(call.down_bias + output, left);
            store(outputs + pair * call.hidden + at, value * weight, left);
        }
    }

    template <class T> void add() const {
        for_each(count, call.num_threads, [&](long token) {
            const int64_t* ids = call.ids + (first_token + token) * call.top_k;
            const float* from = outputs + token * call.top_k * call.hidden;
            T* out = (T*)call.out + (first_token + token) * call.hidden;
            long first = 0;
            while (first < call.top_k && ids[first] < 0) first++;
            for (long at = 0; at < call.hidden; at += LANES) {
                const long left = std::min<long>(LANES, call.hidden - at);
                Floats total = first < call.top_k ? load(from + first * call.hidden + at, left) : fill(0);
                for (long i = first + 1; i < call.top_k; i++)
                    if (ids[i] >= 0) total += load(from + i * call.hidden + at, left);
                store(out + at, total, left);
            }
        });
    }

    void compute() {
        sort();
        const long row_size = call.x_stride * (call.dtype == FLOAT32 ? 4 : 2);
        const auto inputs = [&](long place) {
            return (const uint8_t*)call.x + (first_token + order[place] / call.top_k) * row_size;
        };
        if (call.adapters)
            with_type(call.dtype, [&](auto* type) {
                using T = std::remove_pointer_t<decltype(type)>;
                multiply_adapters<T>(call.gate_up_a, call.gate_up_b, num_parts(), call.hidden, num_parts() * call.size,
                                     [&](long place) { return (const T*)inputs(place); });
            });
        pack(gate_up.weight, call.gate_up_order, call.dtype, inputs);
        compute_inner();
        if (up) {
            pack(up->weight, call.up_order, call.dtype, inputs);
            compute_ups();
        }
        const auto activated = [&](long place) { return inner + place * call.size; };
        if (call.adapters)
            with_type(call.dtype, [&](auto* type) {
                multiply_adapters<std::remove_pointer_t<decltype(type)>>(call.down_a, call.down_b, 1, call.size,
                                                                         call.hidden, activated);
            });
        pack(down.weight, call.down_order, FLOAT32, activated);
        compute_outputs();
        with_type(call.dtype, [&](auto* type) { add<std::remove_pointer_t<decltype(type)>>(); });
    }
};

int run_experts(const ExpertsCall& call, const Layer& gate_up, const Layer* up, const Layer& down) {
    const long widest = std::max(gate_up.weight.row_bytes(), down.weight.row_bytes());
    const long row_bytes = round_up(std::max(widest, up ? up->weight.row_bytes() : 0), 4);
    const long added = call.adapters ? std::max(call.hidden, 2 * call.size) : 0;
    const long bytes = call.top_k * (row_bytes + (long)sizeof(float) * (call.hidden + call.size + added));  // of a token
    const long most = std::clamp(MOST_BYTES / std::max(1L, bytes), 1L, std::max<long>(1, call.rows));
    const long num_blocks = (call.rows + most - 1) / most;
    const std::unique_ptr<uint8_t, decltype(&std::free)> memory(
        (uint8_t*)std::aligned_alloc(64, round_up(most * bytes + 64, 64)), &std::free);
    if (!memory) return 2;
    for (long i = 0, first = 0; i < num_blocks; i++) {
        const long count = call.rows / num_blocks + (i < call.rows % num_blocks), pairs = count * call.top_k;
        float* inner = (float*)(memory.get() + pairs * row_bytes);
        float* outputs = inner + pairs * call.size;
        Tokens{call, gate_up, up, down, first, count, memory.get(), inner, outputs, {}, {}, {}}.compute();
        first += count;
    }
    return 0;
}

}  // namespace
}  // namespace quantized
}  // namespace quire

using namespace quire;
using namespace quire::quantized;

// 0; 1 if this machine's build does not take x's type; 2 if there is no memory; 3 if there is no such expert.
extern "C" int quire_experts(const ExpertsCall* call) {
    for (long pair = 0; pair < call->rows * call->top_k; pair++)
        if (call->ids[pair] < -1 || call->ids[pair] >= call->num_experts) return 3;
    if (with_type(call->dtype, [](auto*) {})) return 1;
    int failed = 0, unknown = 0;
    const long rows = call->rows * call->top_k / std::max<int64_t>(1, call->num_experts);  // of an expert, on average
    const auto with_layer = [&](const WeightForm& form, const float* table, long x_bits, const uint8_t* panels,
                                auto body) {
        unknown |= with_weight(form, table, x_bits, rows, [&](const Weight& weight) { body(Layer{weight, panels}); });
    };
    const auto run = [&](const Layer& gate_up, const Layer* up) {
        with_layer(call->down_form, call->down_table, call->down_x_bits, call->down,
                   [&](const Layer& down) { failed = run_experts(*call, gate_up, up, down); });
    };
    with_layer(call->gate_up_form, call->gate_up_table, call->gate_up_x_bits, call->gate_up, [&](const Layer& gate_up) {
        if (!call->up) return run(gate_up, nullptr);
        with_layer(call->up_form, call->up_table, call->up_x_bits, call->up,
                   [&](const Layer& up) { run(gate_up, &up); });
    });
    return unknown ? unknown : failed;
}
