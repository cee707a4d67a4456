// Products with low-rank weights that are added to a linear layer's outputs, with weights of its own for each token.
//
// Tokens with the same adapter are computed in blocks, so that a weight is loaded once for several. All arithmetic is in
// float32, and a result is rounded once. Each product of a token has its own sum, in the same order in every block, so a
// token's result has the same bits in any batch. Returns 0, or 1 if this machine's build has no code for the dtype;
// nothing is then written.

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace quire {
namespace {

constexpr long WORTH_A_THREAD = 1 << 16;  // products below which waking other threads costs more than they save
constexpr int MOST_TOKENS = 4;            // of a block: with its rows, as many sums as there are registers for
constexpr int ROWS = LANES == 16 ? 4 : 2;
constexpr long COLUMNS = 16 * LANES;  // outputs of one piece of work

struct Block {
    long adapter;
    int count;
    long tokens[MOST_TOKENS];
};

// Tokens with adapters, divided into blocks of the same adapter, in order.
std::vector<Block> blocks_of(const int64_t* rows, long num_tokens) {
    std::vector<long> order;
    for (long token = 0; token < num_tokens; token++)
        if (rows[token] >= 0) order.push_back(token);
    std::stable_sort(order.begin(), order.end(), [&](long x, long y) { return rows[x] < rows[y]; });
    std::vector<Block> blocks;
    for (long token : order) {
        if (blocks.empty() || blocks.back().adapter != rows[token] || blocks.back().count == MOST_TOKENS)
            blocks.push_back({rows[token], 0, {}});
        Block& block = blocks.back();
        block.tokens[block.count++] = token;
    }
    return blocks;
}

// The products of TOKENS tokens with up to ROWS rows of `a`, each of `size` elements: inner[token * stride + row].
template <int TOKENS, int NUM_ROWS, class T>
void products(const T* const* x, const T* a, long size, float* const* inner) {
    Floats sums[TOKENS][NUM_ROWS] = {};
    for (long i = 0; i < size; i += LANES) {
        Floats values[TOKENS];
        for (int t = 0; t < TOKENS; t++) values[t] = load(x[t] + i, size - i);
        for (int r = 0; r < NUM_ROWS; r++) {
            const Floats row = load(a + r * size + i, size - i);
            for (int t = 0; t < TOKENS; t++) sums[t][r] = multiply_add(values[t], row, sums[t][r]);
        }
    }
    for (int t = 0; t < TOKENS; t++)
        for (int r = 0; r < NUM_ROWS; r++) inner[t][r] = sum(sums[t][r]);
}

template <int TOKENS, class T>
void all_products(const T* const* x, const T* a, long num_rows, long size, float* const* inner) {
    float* at[TOKENS];
    std::copy(inner, inner + TOKENS, at);
    long row = 0;
    for (; row + ROWS <= num_rows; row += ROWS) {
        products<TOKENS, ROWS>(x, a + row * size, size, at);
        for (int t = 0; t < TOKENS; t++) at[t] += ROWS;
    }
    for (; row < num_rows; row++) {
        products<TOKENS, 1>(x, a + row * size, size, at);
        for (int t = 0; t < TOKENS; t++) at[t] += 1;
    }
}

// Adds the products of TOKENS tokens' `inner` [rank] with `b` [rank, row of `stride`] to outputs `from` to `end`.
template <int TOKENS, class T>
void add_outputs(const float* const* inner, const T* b, long rank, long stride, T* const* out, long from, long end,
                 const float* factors, const float* shifts) {
    for (long at = from; at < end; at += LANES) {
        const long count = std::min<long>(LANES, end - at);
        Floats totals[TOKENS];
        for (int t = 0; t < TOKENS; t++) totals[t] = load(out[t] + at, count);
        for (long i = 0; i < rank; i++) {
            const Floats row = load(b + i * stride + at, count);
            for (int t = 0; t < TOKENS; t++) totals[t] = multiply_add(fill(inner[t][i]), row, totals[t]);
        }
        for (int t = 0; t < TOKENS; t++) {
            if (factors != nullptr) totals[t] = multiply_add(totals[t], load(factors + at, count), load(shifts + at, count));
            store(out[t] + at, totals[t], count);
        }
    }
}

template <class Body> void with_count(int count, Body body) {
    switch (count) {
        case 1: return body(std::integral_constant<int, 1>{});
        case 2: return body(std::integral_constant<int, 2>{});
        case 3: return body(std::integral_constant<int, 3>{});
        default: return body(std::integral_constant<int, 4>{});
    }
}

template <class T> void add_low_rank(const AddLowRankCall& call) {
    const long most = call.rank, num_parts = call.num_parts, size = call.in_features, outs = call.out_features;
    const std::vector<Block> blocks = blocks_of(call.rows, call.num_tokens);
    const auto rank_of = [&](const Block& block) { return call.ranks == nullptr ? most : call.ranks[block.adapter]; };
    long work = 0;
    for (const Block& block : blocks) work += block.count * rank_of(block) * (num_parts * size + outs);
    const long num_threads = work > WORTH_A_THREAD ? call.num_threads : 1, num_blocks = blocks.size();
    std::vector<float> inner(num_blocks * MOST_TOKENS * num_parts * most);
    const auto inner_of = [&](long block, int t, long part) {
        return inner.data() + ((block * MOST_TOKENS + t) * num_parts + part) * most;
    };
    // A block's rows are divided so that one token alone keeps all threads busy.
    const long pieces = num_blocks < num_threads ? (most + ROWS - 1) / ROWS : 1;
    for_each(num_blocks * num_parts * pieces, num_threads, [&](long index) {
        const long number = index / (num_parts * pieces), part = index / pieces % num_parts, piece = index % pieces;
        const Block& block = blocks[number];
        const long rank = rank_of(block), first = pieces == 1 ? 0 : piece * ROWS;
        const long end = pieces == 1 ? rank : std::min<long>(rank, first + ROWS);
        if (first >= end) return;
        const T* x[MOST_TOKENS];
        float* to[MOST_TOKENS];
        for (int t = 0; t < block.count; t++) {
            x[t] = (const T*)call.x + block.tokens[t] * call.x_stride;
            to[t] = inner_of(number, t, part) + first;
        }
        const T* a = (const T*)call.a + ((block.adapter * num_parts + part) * most + first) * size;
        with_count(block.count, [&](auto count) { all_products<count.value>(x, a, end - first, size, to); });
    });
    const long chunks = (outs + COLUMNS - 1) / COLUMNS;
    for_each(num_blocks * chunks, num_threads, [&](long index) {
        const long number = index / chunks, begin = index % chunks * COLUMNS, stop = std::min(outs, begin + COLUMNS);
        const Block& block = blocks[number];
        const T* b = (const T*)call.b + block.adapter * most * outs;
        const float* factors = call.factors == nullptr ? nullptr : call.factors + block.adapter * outs;
        const float* shifts = call.shifts == nullptr ? nullptr : call.shifts + block.adapter * outs;
        T* out[MOST_TOKENS];
        for (int t = 0; t < block.count; t++) out[t] = (T*)call.out + block.tokens[t] * call.out_stride;
        for (long part = 0, from = 0; part < num_parts; from = call.ends[part++]) {
            const long first = std::max(from, begin), end = std::min<long>(call.ends[part], stop);
            if (first >= end) continue;
            const float* factor[MOST_TOKENS];
            for (int t = 0; t < block.count; t++) factor[t] = inner_of(number, t, part);
            with_count(block.count, [&](auto count) {
                add_outputs<count.value>(factor, b, rank_of(block), outs, out, first, end, factors, shifts);
            });
        }
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" int quire_add_low_rank(const AddLowRankCall* call) {
    return with_type(call->dtype, [&](auto* type) { add_low_rank<std::remove_pointer_t<decltype(type)>>(*call); });
}
