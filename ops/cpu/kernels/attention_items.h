// Attention of one item on one thread, and of a call's items on all threads. See attention.h.
#pragma once

#include "attention.h"
#include "kernels.h"
#include "pages.h"
#include "softmax.h"
#include "threads.h"
#include "tiles.h"
#include "tiles_codes.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

namespace quire {
namespace {  // each including source has separate types, and GCC inlines more of local code

constexpr double WORTH_THREADS = 1e5;  // queries * keys * heads * dimensions below which one thread works alone

template <class Unit> constexpr bool HAS_FIXED = std::is_same_v<Unit, CodePair>;  // queries and weights are int16
template <class Unit> constexpr bool TAKES_ALL = ELEMENTS<Unit> == 1 || HAS_FIXED<Unit>;  // types of queries

// Packs a query, multiplied by `lift`.
template <class Query> void pack_query(const Query* q, long head_dim, float lift, float* packed) {
    for (long d = 0; d < head_dim; d += LANES) store(packed + d, load(q + d, head_dim - d) * lift);
}

void pack_query(const BFloat16* q, long head_dim, float lift, Pair* packed) {
    BFloat16* to = reinterpret_cast<BFloat16*>(packed);
    if (lift == 1) return void(std::memcpy(to, q, head_dim * sizeof(BFloat16)));
    for (long d = 0; d < head_dim; d += LANES) store(to + d, load(q + d, head_dim - d) * lift, head_dim - d);
}

// Packs a query as one of `count` columns.
void pack_query_column(const BFloat16* q, long head_dim, Pair* packed, long count) {
    for (long d = 0; d < head_dim; d += 2, packed += count) *packed = read<Pair>(q + d);
}

struct Seen { long begin, end; };  // keys

// One thread's memory for an item, laid out once for the largest item of a call.
template <class Unit> struct Workspace {
    long query_stride, out_stride;
    std::unique_ptr<char, decltype(&std::free)> memory{nullptr, &std::free};
    Seen* seen;                               // [rows of one head]
    Unit *queries, *keys, *values, *weights;  // [rows][query_stride], packed, packed, [rows][KEYS in units]
    float *scores, *steps;                    // [rows][KEYS], [rows]: of queries, if they are int16
    typename KeepOf<Unit>::type* keep;        // [rows]: factor for the sums so far
    float *out, *most;                        // of this split: [rows][out_stride], [rows]: greatest score so far
    Floats* total;                            // [rows]: sums of weights, by lane
    float *split, *sums;                      // [sums_size], [rows][sums_size]: of the splits before
    typename RegistersOf<Unit>::type registers;

    Workspace(long rows, long head_dim) {
        query_stride = round_up(head_dim, 4 * LANES) / ELEMENTS<Unit>;
        out_stride = round_up(head_dim, 4 * LANES);
        lay_out(rows, head_dim);
        memory.reset(static_cast<char*>(std::aligned_alloc(64, size)));
        lay_out(rows, head_dim);
    }

private:
    long size = 0;

    void lay_out(long rows, long head_dim) {
        size = 0;
        take(seen, rows);
        take(queries, rows * query_stride);
        take(keys, query_stride * KEYS);
        take(values, out_stride * KEYS);
        take(weights, rows * KEYS);
        take(scores, rows * KEYS);
        take(steps, HAS_FIXED<Unit> ? rows : 0);
        take(keep, rows);
        take(out, rows * out_stride);
        take(most, rows);
        take(total, rows);
        take(split, sums_size(head_dim));
        take(sums, rows * sums_size(head_dim));
    }

    template <class T> void take(T*& part, long count) {
        part = reinterpret_cast<T*>(memory.get() + size);
        size += round_up(count * sizeof(T), 64);
    }
};

// The scales of a tile's rows, if they have any: keys are scaled as scores, values as weights.
template <class Cache> struct Scales {
    float of_keys[KEYS], of_values[KEYS];

    explicit Scales(const Operands<Cache>& tile) {
        if constexpr (IS_CODED<Cache>)
            for (long i = 0; i < KEYS; i++) {
                of_keys[i] = scale_of(tile.keys[i], tile.head_dim);
                of_values[i] = scale_of(tile.values[i], tile.head_dim);
            }
    }

    static void multiply_by(const float* scales, float* numbers, long width, float factor) {
        for (long i = 0; i < width; i += LANES) store(numbers + i, load(numbers + i) * load(scales + i) * factor);
    }
};

// One item on one thread.
template <class Unit, class Cache> struct Attention {
    const AttentionCall& call;
    const Item& item;
    Shared* shared;  // null: the item has all splits
    Workspace<Unit>& work;
    Ahead<Cache>& ahead;
    const long head_dim = call.head_dim, group = call.group;
    const long rows = item.num_queries * group;  // of one head
    const long all_rows = item.num_heads * rows;
    const Walk walk{call, item};

    void run() {
        for (long row = 0; row < rows; row++) {
            const long position = position_of(row);
            work.seen[row] = {first_seen(call, position, item.prefix), end_seen(call, position, item.prefix)};
        }
        with_query_type([&](auto* type) { take_queries(type); });
        const long first = walk.begin / SPLIT, last = (walk.end - 1) / SPLIT;
        for (long split = first; split <= last; split++) {
            add_split(std::max(walk.begin, split * SPLIT), std::min(walk.end, (split + 1) * SPLIT));
            if (shared) end_split(shared->sums_of(split), true);
            else if (first < last) end_split(work.sums, split == first);
        }
        if (!shared) return finish(first < last ? work.sums : nullptr);
        if (shared->items_left.fetch_sub(1) > 1) return;
        float* sums = shared->sums.get();
        const long size = sums_size(head_dim);
        for (long split = 1; split < shared->num_splits; split++)
            for (long i = 0; i < shared->split_size; i += size)
                merge(sums + i, sums + split * shared->split_size + i, head_dim);
        finish(sums);
    }

    Operands<Cache> operands(const Tile& tile, long head) const {
        const long kv_head = item.first_head + head;
        return {keys(tile, kv_head), values(tile, kv_head), tile.count, head_dim, &ahead};
    }

    Rows<Cache> keys(const Tile& tile, long kv_head) const {
        return {static_cast<const Cache*>(call.kv_cache) + kv_head * call.block_size * call.row_size, tile.offsets,
                tile.are_neighbours};
    }

    Rows<Cache> values(const Tile& tile, long kv_head) const { return keys(tile, call.num_kv_heads + kv_head); }

    // Calls body with a null pointer of the type of queries and outputs.
    template <class Body> void with_query_type(Body body) const {
        if constexpr (TAKES_ALL<Unit>) with_type(call.q_dtype, body);
        else body(static_cast<BFloat16*>(nullptr));
    }

    template <class Query> void take_queries(const Query*) {
        for (long head = 0; head < item.num_heads; head++) {
            const Query* q = static_cast<const Query*>(call.q) +
                             (item.first_token + item.first_query) * call.q_token_stride +
                             (item.first_head + head) * group * call.q_head_stride;
            Unit* to = work.queries + head * rows * work.query_stride;
            for (long row = 0; row < rows; row++) {
                const Query* from = q + row / group * call.q_token_stride + row % group * call.q_head_stride;
                if constexpr (QUERIES_IN_COLUMNS<Unit>)
                    if (item.in_place) {
                        pack_query_column(from, head_dim, to + row, rows);
                        continue;
                    }
                if constexpr (HAS_FIXED<Unit>)
                    work.steps[head * rows + row] =
                        fix_query<Cache>(from, head_dim, item.in_place, to + row * work.query_stride);
                else pack_query(from, head_dim, LIFT<Cache>, to + row * work.query_stride);
            }
        }
    }

    void add_split(long begin, long end) {
        std::fill_n(work.most, all_rows, -INFINITY);
        std::fill_n(work.total, all_rows, Floats{});
        std::fill_n(work.out, all_rows * work.out_stride, 0.0f);
        for (long start = begin; start < end; start += KEYS) {
            const Tile tile = walk.tile(start);
            if (item.in_place) add_in_place(tile);
            else
                for (long head = 0; head < item.num_heads; head++) add_packed(head, start, operands(tile, head));
        }
    }

    void end_split(float* sums, bool is_first) {
        const long size = sums_size(head_dim);
        for (long row = 0; row < all_rows; row++, sums += size) {
            float* split = is_first ? sums : work.split;
            split[0] = work.most[row], split[1] = sum(work.total[row]);
            std::memcpy(split + LANES, work.out + row * work.out_stride, (size - LANES) * sizeof(float));
            if (!is_first) merge(sums, split, head_dim);
        }
    }

    // Adds one tile for one head.
    __attribute__((noinline)) void add_packed(long head, long start, const Operands<Cache>& tile) {
        pack_keys(tile, work.keys);
        pack_values(tile, work.values, work.out_stride);
        const Scales<Cache> scales(tile);
        for (long row = 0; row < rows; row += ROWS_AT_ONCE<Unit>) {
            const long num = std::min<long>(ROWS_AT_ONCE<Unit>, rows - row), index = head * rows + row;
            // Keys after those that the rows see are skipped, and so are tiles of which they see nothing.
            const long count = std::min(tile.count, work.seen[row + num - 1].end - start);
            if (count <= 0 || work.seen[row].begin >= start + count) continue;
            multiply(work.registers, num, work.queries + index * work.query_stride, work.query_stride, work.keys, KEYS,
                     (head_dim + ELEMENTS<Unit> - 1) / ELEMENTS<Unit>, work.scores, KEYS, round_up(count, LANES),
                     nullptr);
            weigh(head, row, num, start, count, scales, index, 0);
            multiply(work.registers, num, work.weights, KEYS / ELEMENTS<Unit>, work.values, work.out_stride,
                     (count + ELEMENTS<Unit> - 1) / ELEMENTS<Unit>, work.out + index * work.out_stride,
                     work.out_stride, round_up(head_dim, LANES), work.keep);
        }
    }

    // Adds one tile for all heads, in memory order; codes head by head.
    __attribute__((noinline)) void add_in_place(const Tile& tile) {
        with_rows<ROWS_IN_PLACE<Unit>>(rows, [&](auto constant) {
            constexpr int ROWS = constant();
            constexpr long stride = KEYS / ELEMENTS<Unit>;
            const long together = IS_CODED<Cache> ? 1 : item.num_heads;
            for (long first = 0; first < item.num_heads; first += together) {
                const long last = first + together;
                for (long head = first; head < last; head++)
                    multiply_keys<ROWS>(work.registers, work.queries + head * ROWS * work.query_stride,
                                        work.query_stride, operands(tile, head), work.scores + head * ROWS * KEYS,
                                        work.keys);
                for (long head = first; head < last; head++)
                    weigh(head, 0, ROWS, tile.start, tile.count, Scales<Cache>(operands(tile, head)), head * ROWS,
                          head * ROWS);
                for (long head = first; head < last; head++)
                    multiply_values<ROWS>(work.registers, work.weights + head * ROWS * stride, stride,
                                          operands(tile, head), work.out + head * ROWS * work.out_stride,
                                          work.out_stride, work.keep + head * ROWS, work.values);
            }
        });
    }

    // Turns the scores of `num` rows of the item's `head`, from `row` on, in a tile of `count` keys into weights, and sets the
    // rows' `keep`. `index` is the first row's index among all rows, `place` its index among the rows in `work.scores`.
    void weigh(long head, long row, long num, long start, long count, const Scales<Cache>& scales, long index,
               long place) {
        for (; num > BLOCK; num -= BLOCK, row += BLOCK, index += BLOCK, place += BLOCK)
            weigh(head, row, BLOCK, start, count, scales, index, place);
        const long width = round_up(count, KEYS_AT_ONCE<Unit>);
        const bool is_bent = call.softcap || call.slopes || call.distance_bias || call.scale <= 0;
        float* all_scores = work.scores + place * KEYS;
        Unit* packed = work.weights + place * KEYS / ELEMENTS<Unit>;
        auto* weights = [&] {
            if constexpr (IS_CODED<Cache>) return all_scores;  // in their place, until they are scaled
            else return packed;
        }();
        const float scale = is_bent ? (float)M_LOG2E : (float)(call.scale * M_LOG2E);
        Softening<std::remove_pointer_t<decltype(weights)>> softening{
            num, all_scores, scale, work.most + index, work.total + index, weights};
        for (long i = 0; i < num; i++) {
            softening.begin[i] = std::max(0L, work.seen[row + i].begin - start);
            softening.end[i] = std::min(count, work.seen[row + i].end - start);
            float* scores = all_scores + i * KEYS;
            if constexpr (IS_CODED<Cache>)
                scales.multiply_by(scales.of_keys, scores, width, HAS_FIXED<Unit> ? work.steps[index + i] : UNLIFT<Cache>);
            if (is_bent)
                bend(scores, width, (float)call.scale, (float)call.softcap,
                     call.slopes ? call.slopes[query_head(head, row + i)] : 0, start - position_of(row + i));
            if (call.distance_bias)
                bias_by_distance(scores, width, call.distance_bias + query_head(head, row + i) * (2 * call.reach + 1),
                                 call.reach, start - position_of(row + i));
        }
        softening.run(width);
        for (long i = 0; i < num; i++) {
            float* scores = all_scores + i * KEYS;
            Unit* to = packed + i * KEYS / ELEMENTS<Unit>;
            if constexpr (HAS_FIXED<Unit>) {
                work.keep[place + i] = {softening.keep[i], fix_weights(scores, scales.of_values, width, to)};
            } else {
                work.keep[place + i] = softening.keep[i];
                if constexpr (IS_CODED<Cache>) {
                    scales.multiply_by(scales.of_values, scores, width, LIFT<Cache>);
                    for (long n = 0; n < width / LANES; n++) store_weights(to, n, load(scores + n * LANES));
                }
            }
        }
    }

    // The position of a row's query.
    long position_of(long row) const { return walk.first_position + row / group; }

    // The query head of a row of the item's `head`.
    long query_head(long head, long row) const { return (item.first_head + head) * group + row % group; }

    // Writes the outputs from `sums`, or from the only split if `sums` is null.
    void finish(const float* sums) {
        with_query_type([&](auto* type) { finish(sums, type); });
    }

    template <class Query> void finish(const float* sums, Query*) {
        for (long head = 0; head < item.num_heads; head++) {
            const long first = ((item.first_token + item.first_query) * call.num_kv_heads + item.first_head + head) * group;
            for (long row = 0; row < rows; row++) {
                const long place = first + row / group * call.num_kv_heads * group + row % group;
                Query* to = static_cast<Query*>(call.out) + place * head_dim;
                const long index = head * rows + row;
                const float* mine = sums + index * sums_size(head_dim);
                const float* from = sums ? mine + LANES : work.out + index * work.out_stride;
                if constexpr (IN_TURNS<Unit, Cache> > 0)
                    if (item.in_place) {
                        for (long d = 0; d < head_dim; d++)
                            work.split[d] = from[place_of_value<Unit, Cache>(d)];
                        from = work.split;
                    }
                float share = 1 / (sums ? mine[1] : sum(work.total[index]));
                if (call.lse)
                    call.lse[place] = (float)M_LN2 * ((sums ? mine[0] : work.most[index]) - std::log2(share));
                if (call.sinks) share = with_sink(share, sums ? mine[0] : work.most[index],
                                                  call.sinks[query_head(head, row)]);
                share *= UNLIFT<Cache>;
                for (long d = 0; d < head_dim; d += LANES) store(to + d, load(from + d) * share, head_dim - d);
            }
        }
    }
};

}  // namespace

template <class Unit, class Cache> void attend(const AttentionCall& call) {
    const std::vector<Item> items = items_of(call, ROWS_IN_PLACE<Unit>);
    const long count = (long)items.size();
    double pairs = 0;
    for (const Item& item : items) pairs += (double)item.num_queries * item.num_heads * item.end_key;
    const bool is_small = pairs * call.head_dim < WORTH_THREADS;
    // A thread takes its next item early, so that the item can be prefetched. The last items are taken late, each by
    // the first thread that is done.
    const long contested = count - 2 * call.num_threads;
    long rows = 0;
    for (const Item& item : items) rows = std::max(rows, item.num_heads * item.num_queries * call.group);
    std::vector<Shared> shared = shared_of(call, items);
    std::atomic<long> taken{0};
    in_team(is_small || count <= 1 ? 1 : call.num_threads, [&] {
        long index = taken.fetch_add(1);
        if (index >= count) return;
        Workspace<Unit> work(rows, call.head_dim);
        Ahead<Cache> ahead(call);
        while (index < count) {
            const bool early = index < contested;
            const long next = early ? taken.fetch_add(1) : count;
            ahead.follow(items[index], next < count ? &items[next] : nullptr);
            const Item& item = items[index];
            Attention<Unit, Cache>{
                call, item, item.shared < 0 ? nullptr : &shared[item.shared], work, ahead}.run();
            index = early ? next : taken.fetch_add(1);
        }
    });
}

}  // namespace quire
