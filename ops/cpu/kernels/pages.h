// Which parts of the cache a call of attention reads, and in what order. See attention.cpp for the whole.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace quire {

constexpr int KEYS = 64;      // keys of a tile; with head_dim 128 in bfloat16 its keys and values stay in a 48 KiB L1
constexpr int MAX_ROWS = 64;  // rows that share a packed tile; of one head, or of several with fewer rows each
constexpr int PARTS = 8;      // items that each thread should get at least, so that all finish together

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

// Queries [first_query, first_query + num_queries) of a request, against some KV heads.
struct Item { long request, first_token, first_query, num_queries, first_head, num_heads, cost; };

inline std::vector<Item> items_of(const AttentionCall& call) {
    std::vector<Item> pieces;
    pieces.reserve(call.num_requests);
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
    items.reserve(pieces.size());
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

// Where the keys [start, start + count) of one request are: offsets from those of the same head on page 0. Past `count`
// the last one is repeated.
struct Tile { long start, count, offsets[KEYS]; };

// Keys of one request that are neighbours on a page: `rows` of them, the first at the offset.
struct Run { long offset, rows; };

// One item's keys, tile by tile.
struct Walk {
    const AttentionCall* call;
    const int32_t* table;
    long first_position, first_key, begin, end;  // begin: of the first tile; end: past the last key

    Walk() = default;

    Walk(const AttentionCall& call, const Item& item)
        : call(&call), table(call.block_tables + item.request * call.table_stride) {
        first_position = call.seq_lens[item.request] - call.query_lens[item.request] + item.first_query;
        first_key = call.window ? std::max(0L, first_position + 1 - call.window) : 0;
        begin = first_key / KEYS * KEYS;
        end = first_position + item.num_queries;
    }

    // The first of the tile's keys that can be read: a page before the window may have been given away.
    long first_of(long start) const { return std::max(start, first_key); }

    long end_of(long start) const { return std::min(start + KEYS, end); }

    Run run(long position, long until) const {
        const uint32_t size = call->block_size, page = (uint32_t)position / size, offset = (uint32_t)position % size;
        return {(table[page] * 2 * call->num_kv_heads * size + offset) * call->head_dim,
                std::min<long>(size - offset, until - position)};
    }

    Tile tile(long start) const {
        const long until = end_of(start);
        Tile found{start, until - start, {}};
        long position = first_of(start), i = 0;
        const long before = position - start;  // the first key that is seen stands for those
        Run next = run(position, until);
        for (; i < before; i++) found.offsets[i] = next.offset;
        while (true) {
            for (long k = 0; k < next.rows; k++) found.offsets[i + k] = next.offset + k * call->head_dim;
            i += next.rows;
            position += next.rows;
            if (position == until) break;
            next = run(position, until);
        }
        for (const long last = found.offsets[i - 1]; i < KEYS; i++) found.offsets[i] = last;
        return found;
    }
};

// Pages lie anywhere, so the processor cannot foresee what is read next, and a thread that waits for each page reads at
// a third of the memory's speed. So it asks for what it will read BYTES later, line by line, whatever the sizes of heads
// and tiles. Nearer, that would come too late; farther, it would have left the first cache again.
template <class Cache> class Ahead {
public:
    static constexpr long BYTES = 6144;

    explicit Ahead(const AttentionCall& call)
        : call(call), part_size(call.num_kv_heads * call.block_size * call.head_dim) {}

    // `item` is read next, and `then`, if that is known, after it.
    void follow(const Item& item, const Item* then) {
        after = then;
        if (current == &item) return;  // already in it
        enter(item);
        due = 0;
        advance(BYTES);
    }

    // The next `bytes` are read now. Inlined: GCC drops calls of a function that only prefetches.
    __attribute__((always_inline)) void advance(long bytes) {
        long left = due + bytes;
        const char* next = line;
        for (; left > 0; left -= 64, next += 64) {
            if (next >= end) {
                const long unread = next_run();
                if (unread < 0) break;
                left -= unread;
                next = line;
            }
            __builtin_prefetch(next);
        }
        line = next;
        due = left;
    }

private:
    // Bytes before it that are counted as read but lie before the window; -1 where it is not known what is next.
    __attribute__((noinline)) long next_run() {
        long unread = 0;
        if (position == until) {
            if (!next_part()) return -1;
            unread = (position - start) * call.head_dim * (long)sizeof(Cache);
        }
        const long rows = std::min(call.block_size - row, until - position);
        line = reinterpret_cast<const char*>(static_cast<const Cache*>(call.kv_cache) +
                                             (2 * walk.table[page] + part) * part_size +
                                             (head * call.block_size + row) * call.head_dim);
        end = line + rows * call.head_dim * sizeof(Cache);
        position += rows, page++, row = 0;
        return unread;
    }

    // Keys, then values; then the next head, tile, item. False, and nothing changed, where the next item is not known.
    bool next_part() {
        if (part < 1) {
            part++;
        } else if (head + 1 < current->first_head + current->num_heads) {
            head++, part = 0;
        } else if (start + KEYS < walk.end) {
            start_at(start + KEYS);
            head = current->first_head, part = 0;
        } else if (after) {
            enter(*after);
            after = nullptr, part = 0;
        } else {
            return false;
        }
        position = walk.first_of(start), until = walk.end_of(start);
        page = first_page, row = first_row;
        return true;
    }

    void enter(const Item& item) {
        current = &item;
        walk = Walk(call, item);
        start_at(walk.begin);
        head = item.first_head, part = -1;
        position = until = 0;
        line = end = nullptr;
    }

    void start_at(long tile) {
        start = tile;
        first_page = walk.first_of(start) / call.block_size, first_row = walk.first_of(start) % call.block_size;
    }

    const AttentionCall& call;
    const long part_size;
    const Item *current = nullptr, *after = nullptr;
    Walk walk{};
    long head, part, start;           // part 0: keys, 1: values
    long first_page, first_row;       // where the tile begins
    long position, until, page, row;  // of the tile's rows, those from `position` on have not been asked for
    const char *line = nullptr, *end = nullptr;
    long due = 0;  // bytes
};

}  // namespace quire
