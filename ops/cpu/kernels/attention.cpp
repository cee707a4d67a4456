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
#include "threads.h"
#include "tiles.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

namespace quire {

// Mirrored in `quire.ops.cpu.native`. Strides count elements; the last dimension of every tensor is dense.
struct AttentionCall {
    const void* q;         // [num_tokens, num_kv_heads * group, head_dim]
    void* out;             // like q, dense
    const void* kv_cache;  // [num_blocks, 2, num_kv_heads, block_size, head_dim], dense
    const int64_t* query_lens;    // [num_rows]
    const int64_t* seq_lens;      // [num_rows]
    const int32_t* block_tables;  // [num_rows, table_stride]
    int64_t q_token_stride, q_head_stride;
    int64_t num_requests, table_stride, block_size;
    int64_t num_kv_heads, group, head_dim;
    int64_t window;  // 0: none
    int64_t q_dtype, kv_dtype, num_threads;
    double scale;
};

namespace {

constexpr int MAX_ROWS = 64;  // rows that share a packed tile; of one head, or of several with fewer rows each
constexpr int PARTS = 8;      // items that each thread should get at least, so that all finish together
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

// Queries [first_query, first_query + num_queries) of a request, against some KV heads.
struct Item { long request, first_token, first_query, num_queries, first_head, num_heads, cost; };

// Where the keys [start, start + count) of one request are: offsets from those of the same head on page 0. Past `count`
// the last one is repeated.
struct Tile { long start, count, offsets[KEYS]; };

// One item's keys, tile by tile.
struct Walk {
    const AttentionCall& call;
    const int32_t* table;
    long first_position, first_key, begin, end;  // begin: of the first tile; end: past the last key

    Walk(const AttentionCall& call, const Item& item)
        : call(call), table(call.block_tables + item.request * call.table_stride) {
        first_position = call.seq_lens[item.request] - call.query_lens[item.request] + item.first_query;
        first_key = call.window ? std::max(0L, first_position + 1 - call.window) : 0;
        begin = first_key / KEYS * KEYS;
        end = first_position + item.num_queries;
    }

    Tile tile(long start) const {
        const long page_size = 2 * call.num_kv_heads * call.block_size * call.head_dim;
        Tile found{start, std::min<long>(KEYS, end - start), {}};
        // A page before the window may have been given away: the first key that is seen stands for those on it.
        long position = std::max(start, first_key);
        long page = position / call.block_size, offset = position % call.block_size;
        for (long i = 0; i < KEYS; i++) {
            found.offsets[i] = table[page] * page_size + offset * call.head_dim;
            if (start + i < position || position + 1 == end) continue;
            position++;
            if (++offset == call.block_size) page++, offset = 0;
        }
        return found;
    }
};

// One item on one thread.
template <class Unit, class Query, class Cache> struct Attention {
    const AttentionCall& call;
    const Item& item;
    Workspace<Unit>& work;
    const long head_dim = call.head_dim, group = call.group;
    const long rows = item.num_queries * group;  // of one head
    const Walk walk{call, item};

    // `after` is what this thread does next.
    void run(const Item& after) {
        begin();
        const Walk walk_after(call, after);
        Tile tile = walk.tile(walk.begin);
        while (true) {
            const bool last = tile.start + KEYS >= walk.end;
            const Tile next = last ? walk_after.tile(walk_after.begin) : walk.tile(tile.start + KEYS);
            for (long head = 0; head < item.num_heads; head++) {
                const bool stay = head + 1 < item.num_heads;
                const long next_head = stay ? item.first_head + head + 1 : last ? after.first_head : item.first_head;
                add(head, tile.start, {keys(tile, item.first_head + head), values(tile, item.first_head + head),
                                       keys(stay ? tile : next, next_head), tile.count, head_dim});
            }
            if (last) break;
            tile = next;
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

std::vector<Item> items_of(const AttentionCall& call) {
    std::vector<Item> pieces;
    const long queries = std::max<long>(1, MAX_ROWS / call.group);
    long first_token = 0, total = 0;
    for (long request = 0; request < call.num_requests; request++) {
        const long count = call.query_lens[request], computed = call.seq_lens[request] - count;
        for (long first = 0; first < count; first += queries) {
            const long num = std::min(queries, count - first);
            const long cost = (num + 8) * (computed + first + num);  // of a head; reading it costs like some queries
            pieces.push_back({request, first_token, first, num, 0, 0, cost});
            total += cost * call.num_kv_heads;
        }
        first_token += count;
    }
    std::vector<Item> items;
    for (Item& item : pieces) {
        // A lone request needs no more parts than threads: fewer heads in an item are shorter runs of memory.
        const long fair = std::max(total / (PARTS * call.num_threads * item.cost),
                                   (call.num_kv_heads + call.num_threads - 1) / call.num_threads);
        const long most = std::min(MAX_ROWS / (item.num_queries * call.group), call.num_kv_heads);
        const long heads = std::max(1L, std::min(fair, most));
        for (; item.first_head < call.num_kv_heads; item.first_head += heads) {
            item.num_heads = std::min(heads, call.num_kv_heads - item.first_head);
            items.push_back(item);
            items.back().cost *= item.num_heads;
        }
    }
    // The costliest first, so that threads finish together.
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    return items;
}

template <class Unit, class Query, class Cache> void run(const AttentionCall& call) {
    const std::vector<Item> items = items_of(call);
    const long count = (long)items.size();
    double pairs = 0;
    for (const Item& item : items) pairs += (double)item.num_queries * item.num_heads * call.seq_lens[item.request];
    const bool is_small = pairs * call.head_dim < WORTH_THREADS;
    // A thread takes a few neighbours at once, so that it knows what it does next.
    const long run_length = std::clamp<long>(count / (16 * call.num_threads), 1, 8);
    const long rows = std::max<long>(items.empty() ? 0 : MAX_ROWS, call.group);
    std::atomic<long> taken{0};
    in_team(is_small || count <= 1 ? 1 : call.num_threads, [&] {
        long first = taken.fetch_add(run_length);
        if (first >= count) return;
        Workspace<Unit> work(rows, call.head_dim);
        for (; first < count; first = taken.fetch_add(run_length))
            for (long i = first; i < std::min(first + run_length, count); i++)
                Attention<Unit, Query, Cache>{call, items[i], work}.run(items[std::min(i + 1, count - 1)]);
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
