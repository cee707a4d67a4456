// Causal attention over pages, in place: nothing is gathered. See `quire.ops.Backend.attention` for the meaning.
//
// The work is cut into items: (request, up to MAX_ROWS / G consecutive queries, a few KV heads), where G query heads
// share a KV head. A query of one head is a "row". One thread takes an item and walks over its keys in tiles of KEYS,
// in each over the heads, with the softmax kept up to date along the way (arXiv:2112.05682, 2205.14135). So a decode
// step reads whole pages. For each tile and head the keys and values are packed once for all rows of the item:
//
//     keys   [units of head_dim][KEYS]          transposed, so that a vector holds one dimension of many keys
//     values [units of KEYS][head_dim]
//
// and then scores = queries * keys and out += weights * values are the same small matrix product; up to BLOCK rows take
// them from where they lie, in the same order. A unit is what one multiply-add instruction consumes per lane: a float,
// or a pair of bfloat16 where the machine multiplies those (summed in float32).
//
// Tiles begin at multiples of KEYS and a row's arithmetic does not see its neighbours: a query's result depends neither
// on the batch nor on how a prompt was cut.

#include "kernels.h"
#include "pages.h"
#include "threads.h"
#include "tiles.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

namespace quire {
namespace {

constexpr double WORTH_THREADS = 1e5;  // pairs of query and key times heads and dimensions that one thread does alone

template <class Query> void pack_query(const Query* q, long head_dim, float* packed) {
    for (long d = 0; d < head_dim; d += LANES) store(packed + d, load(q + d, head_dim - d));
}

void pack_query(const BFloat16* q, long head_dim, Pair* packed) { std::memcpy(packed, q, head_dim * sizeof(BFloat16)); }

inline void store_weights(float* to, Floats x) { store(to, x); }
inline void store_weights(Pair* to, Floats x) { store(reinterpret_cast<BFloat16*>(to), x); }

// One thread's memory for an item, laid out once for the largest that a call can need.
template <class Unit> struct Workspace {
    long query_stride, out_stride;
    std::unique_ptr<void, decltype(&std::free)> memory{nullptr, &std::free};
    Unit *queries, *keys, *values, *weights;  // [rows][query_stride], packed, packed, [BLOCK][KEYS in units]
    float *scores, *out, *most;               // [BLOCK][KEYS], [rows][out_stride], [rows]: greatest score so far
    Floats* total;                            // [rows]: sums of weights, by lane

    Workspace(long rows, long head_dim) {
        query_stride = round_up(head_dim, 2 * LANES) / ELEMENTS<Unit>;
        out_stride = round_up(head_dim, COLUMNS * LANES);
        const long sizes[] = {rows * query_stride, query_stride * KEYS, out_stride * KEYS, BLOCK * KEYS,
                              BLOCK * KEYS, rows * out_stride, rows, rows * LANES};
        long count = 0;
        for (long size : sizes) count += round_up(size, 16);
        memory.reset(std::aligned_alloc(64, count * 4));
        char* next = static_cast<char*>(memory.get());
        auto take = [&, index = 0]() mutable {
            char* taken = next;
            next += round_up(sizes[index++], 16) * 4;
            return taken;
        };
        queries = reinterpret_cast<Unit*>(take());
        keys = reinterpret_cast<Unit*>(take());
        values = reinterpret_cast<Unit*>(take());
        weights = reinterpret_cast<Unit*>(take());
        scores = reinterpret_cast<float*>(take());
        out = reinterpret_cast<float*>(take());
        most = reinterpret_cast<float*>(take());
        total = reinterpret_cast<Floats*>(take());
    }
};

// Scores of one row and tile → weights 2^(score * scale - most); `scale` has the factor log2(e) in it. Keys outside
// [begin, end) get the weight 0. Returns the factor for what was summed up under the greatest score before.
template <bool ALL, class Unit>
inline float soften(const float* scores, long width, long begin, long end, float scale, float& most, Floats& total,
                    Unit* weights) {
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const Floats hidden = fill(-INFINITY);
    Floats x[KEYS / LANES], highest = hidden;
    for (long n = 0; n < width / LANES; n++) {
        x[n] = load(scores + n * LANES) * scale;
        if constexpr (!ALL) {
            const Ints key = lane + (int)(n * LANES);
            x[n] = (key >= (int)begin) & (key < (int)end) ? x[n] : hidden;
        }
        highest = x[n] > highest ? x[n] : highest;
    }
    const float before = most, now = std::max(before, largest(highest));
    const float keep = before == -INFINITY ? 0 : exp2(fill(before - now))[0];
    Floats added{};
    for (long n = 0; n < width / LANES; n++) {
        Floats weight = exp2(x[n] - now);
        if constexpr (!ALL) {
            const Ints key = lane + (int)(n * LANES);
            weight = (key >= (int)begin) & (key < (int)end) ? weight : Floats{};
        }
        added += weight;
        store_weights(weights + n * LANES / ELEMENTS<Unit>, weight);
    }
    most = now;
    total = total * keep + added;
    return keep;
}

// One item on one thread.
template <class Unit, class Query, class Cache> struct Attention {
    const AttentionCall& call;
    const Item& item;
    Workspace<Unit>& work;
    Ahead<Cache>& ahead;
    const long head_dim = call.head_dim, group = call.group;
    const long rows = item.num_queries * group;  // of one head
    const Walk walk{call, item};

    void run() {
        begin();
        for (long start = walk.begin; start < walk.end; start += KEYS) {
            const Tile tile = walk.tile(start);
            for (long head = 0; head < item.num_heads; head++) {
                const long kv_head = item.first_head + head;
                add(head, start, {keys(tile, kv_head), values(tile, kv_head), tile.count, head_dim, &ahead});
            }
        }
        finish();
    }

    Rows<Cache> keys(const Tile& tile, long kv_head) const {
        return {static_cast<const Cache*>(call.kv_cache) + kv_head * call.block_size * head_dim, tile.offsets};
    }

    Rows<Cache> values(const Tile& tile, long kv_head) const { return keys(tile, call.num_kv_heads + kv_head); }

    void begin() {
        for (long head = 0; head < item.num_heads; head++) {
            const Query* q = static_cast<const Query*>(call.q) +
                             (item.first_token + item.first_query) * call.q_token_stride +
                             (item.first_head + head) * group * call.q_head_stride;
            for (long row = 0; row < rows; row++)
                pack_query(q + row / group * call.q_token_stride + row % group * call.q_head_stride, head_dim,
                           work.queries + (head * rows + row) * work.query_stride);
        }
        const long all = item.num_heads * rows;
        std::fill_n(work.most, all, -INFINITY);
        std::fill_n(work.total, all, Floats{});
        std::fill_n(work.out, all * work.out_stride, 0.0f);
    }

    // One tile, for one head.
    void add(long head, long start, const Operands<Cache>& tile) {
        const bool pack = rows > BLOCK || head_dim % SPAN;
        if (pack) {
            pack_keys(tile, work.keys);
            pack_values(tile, work.values, work.out_stride);
        }
        for (long row = 0; row < rows; row += BLOCK) {
            const long num = std::min<long>(BLOCK, rows - row), index = head * rows + row;
            const long first_position = walk.first_position + row / group;
            const long last_position = walk.first_position + (row + num - 1) / group;
            if (last_position < start) continue;  // all of the tile lies in its future
            if (call.window && first_position + 1 - call.window >= start + tile.count) continue;  // or past
            float keep[BLOCK];
            weigh(row, num, index, start, tile, pack, keep);
            float* out = work.out + index * work.out_stride;
            constexpr long stride = KEYS / ELEMENTS<Unit>;
            if (pack)
                multiply<Unit>(num, work.weights, stride, work.values, work.out_stride,
                               (tile.count + ELEMENTS<Unit> - 1) / ELEMENTS<Unit>, out, work.out_stride,
                               round_up(head_dim, LANES), keep);
            else
                with_rows(num, [&](auto constant) {
                    multiply_values<constant()>(work.weights, stride, tile, out, work.out_stride, keep);
                });
        }
    }

    // work.weights of `num` rows from `row` on, in the tile at `start`.
    void weigh(long row, long num, long index, long start, const Operands<Cache>& tile, bool packed, float* keep) {
        const long count = tile.count, width = round_up(count, LANES);
        const Unit* queries = work.queries + index * work.query_stride;
        if (packed)
            multiply<Unit>(num, queries, work.query_stride, work.keys, KEYS,
                           (head_dim + ELEMENTS<Unit> - 1) / ELEMENTS<Unit>, work.scores, KEYS, width, nullptr);
        else
            with_rows(num, [&](auto constant) {
                multiply_keys<constant()>(queries, work.query_stride, tile, work.scores);
            });
        const float scale = (float)(call.scale * M_LOG2E);
        for (long i = 0; i < num; i++) {
            const long position = walk.first_position + (row + i) / group;
            const long from = call.window ? std::max(0L, position + 1 - call.window - start) : 0;
            const long to = std::min(count, position + 1 - start);
            const float* scores = work.scores + i * KEYS;
            Unit* weights = work.weights + i * KEYS / ELEMENTS<Unit>;
            float& most = work.most[index + i];
            Floats& total = work.total[index + i];
            keep[i] = from == 0 && to == KEYS ? soften<true>(scores, KEYS, 0, KEYS, scale, most, total, weights)
                                              : soften<false>(scores, width, from, to, scale, most, total, weights);
        }
    }

    void finish() {
        for (long head = 0; head < item.num_heads; head++) {
            Query* out = static_cast<Query*>(call.out) +
                         ((item.first_token + item.first_query) * call.num_kv_heads + item.first_head + head) * group *
                             head_dim;
            for (long row = 0; row < rows; row++) {
                Query* to = out + (row / group * call.num_kv_heads * group + row % group) * head_dim;
                const float* from = work.out + (head * rows + row) * work.out_stride;
                const float share = 1 / sum(work.total[head * rows + row]);
                for (long d = 0; d < head_dim; d += LANES) store(to + d, load(from + d) * share, head_dim - d);
            }
        }
    }
};

template <class Unit, class Query, class Cache> void run(const AttentionCall& call) {
    const std::vector<Item> items = items_of(call);
    const long count = (long)items.size();
    double pairs = 0;
    for (const Item& item : items) pairs += (double)item.num_queries * item.num_heads * call.seq_lens[item.request];
    const bool is_small = pairs * call.head_dim < WORTH_THREADS;
    // A thread says early what it takes next, so that this can be fetched; the last items go to whoever is done first.
    const long contested = count - 2 * call.num_threads;
    const long rows = std::max<long>(items.empty() ? 0 : MAX_ROWS, call.group);
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
            Attention<Unit, Query, Cache>{call, items[index], work, ahead}.run();
            index = early ? next : taken.fetch_add(1);
        }
    });
}

template <class Query> bool run_for(const AttentionCall& call) {
    switch (call.kv_dtype) {
        case FLOAT32: return run<float, Query, float>(call), true;
        case BFLOAT16: return run<float, Query, BFloat16>(call), true;
#if defined(QUIRE_HAS_FLOAT16)
        case FLOAT16: return run<float, Query, Half>(call), true;
#endif
        default: return false;
    }
}

}  // namespace
}  // namespace quire

// Returns 0, or 1 if this machine's build has no code for the dtypes: `out` is untouched then.
extern "C" int quire_attention(const quire::AttentionCall* call) {
    using namespace quire;
#if defined(__AVX512BF16__)
    if (call->q_dtype == BFLOAT16 && call->kv_dtype == BFLOAT16 && call->head_dim % 2 == 0)
        return run<Pair, BFloat16, BFloat16>(*call), 0;
#endif
    switch (call->q_dtype) {
        case FLOAT32: return !run_for<float>(*call);
        case BFLOAT16: return !run_for<BFloat16>(*call);
#if defined(QUIRE_HAS_FLOAT16)
        case FLOAT16: return !run_for<Half>(*call);
#endif
        default: return 1;
    }
}
