// Cuts a call of attention into items, and walks over and prefetches the pages of an item. See attention.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "amx.h"
#include "kernels.h"
#include "processor.h"
#include "rows.h"
#include "vector.h"

namespace quire {

constexpr int KEYS = 64;         // keys of a tile; with head_dim 128 in bfloat16 a tile fits a 48 KiB L1 cache
constexpr int SPLIT = 2048;      // keys after which a softmax starts again; the splits are merged at the end
constexpr int BLOCK = 4;         // rows whose sums are in registers at once
constexpr int SPAN = 2 * LANES;  // elements of a value that are loaded at a time
constexpr int PARTS = 8;         // the least items for each thread, so that all threads finish together

// Up to MAX_ROWS rows share a packed tile: rows of one head, or of several heads. Fewer rows make more items, so pieces
// have as few as MIN_ROWS if there would not be enough items for the threads. Where arithmetic is faster, packing pays
// only for more rows.
constexpr int MAX_ROWS = 256;
#if defined(QUIRE_HAS_AMX)
constexpr int MIN_ROWS = MAX_ROWS;
#else
constexpr int MIN_ROWS = 64;
#endif

// The tokens of a request from `begin` up to `end` see each other.
struct Prefix {
    long begin, end;

    bool has(long position) const { return begin <= position && position < end; }
};

// Queries [first_query, first_query + num_queries) of a request, against keys [first_key, end_key) of some KV heads.
struct Item {
    long request, first_token, first_query, num_queries, first_head, num_heads, first_key, end_key;
    Prefix prefix;
    long shared;  // the same number for the items that divide the keys of the same queries among them; or -1
    long cost;
    bool in_place;  // whether keys and values are read in place (few rows), not packed head by head
};

// The first key that a query at `position` sees. It never falls from one query to the next.
inline long first_seen(const AttentionCall& call, long position, const Prefix& prefix) {
    const long by_window = call.window ? position + 1 - call.window : 0;
    const long back = call.chunks == PREVIOUS ? call.chunk : 0;
    const long by_chunk = call.chunk && call.chunks != EARLIER ? position - position % call.chunk - back : 0;
    const long first = std::max({0L, by_window, by_chunk});
    if (!prefix.has(position)) return first;
    return std::min(first, call.span_window ? std::max<long>(prefix.begin, position + 1 - call.span_window) : prefix.begin);
}

// The key after the last that a query at `position` sees; 0 if it sees none. It never falls from one query to the next.
inline long end_seen(const AttentionCall& call, long position, const Prefix& prefix) {
    if (call.chunks == OWN) {
        if (!prefix.has(position)) return position + 1;
        return call.span_window ? std::min<long>(prefix.end, position + call.span_window) : prefix.end;
    }
    return std::max(0L, position - position % call.chunk - (call.chunks == EARLIER ? call.chunk : 0));
}

// Whether an item's heads are read in turns, so that memory is read in its order. Otherwise a head's values follow its
// keys: the scales of coded values are needed before the values are.
template <class Cache> bool is_across(const Item& item) { return item.in_place && !IS_CODED<Cache>; }

// How many queries a piece has at most.
inline long queries_of_piece(const AttentionCall& call) {
    for (long rows = MAX_ROWS;; rows /= 2) {
        const long queries = std::max<long>(1, rows / call.group);
        long count = 0;
        for (long request = 0; request < call.num_requests; request++)
            count += (call.query_lens[request] + queries - 1) / queries * call.num_kv_heads;
        if (count >= PARTS * call.num_threads || rows <= MIN_ROWS) return queries;
    }
}

// Pieces: some queries of each request, against all keys of one head. Adds the cost of all pieces and heads to `total`.
inline std::vector<Item> pieces_of(const AttentionCall& call, long few, long& total) {
    std::vector<Item> pieces;
    pieces.reserve(call.num_requests);
    const long queries = queries_of_piece(call);
    long first_token = 0;
    for (long request = 0; request < call.num_requests; request++) {
        const long count = call.query_lens[request], computed = call.seq_lens[request] - count;
        const int64_t* span = call.prefix_spans ? call.prefix_spans + 2 * request : nullptr;
        const Prefix prefix = span ? Prefix{span[0], span[1]} : Prefix{0, 0};
        for (long first = 0; first < count; first += queries) {
            const long num = std::min(queries, count - first);
            const long end = end_seen(call, computed + first + num - 1, prefix);
            const long first_key = first_seen(call, computed + first, prefix);
            const long cost = (num + 8) * std::max(1L, end);  // reading the keys costs as much as 8 queries
            const bool in_place = num * call.group <= few && call.head_dim % SPAN == 0;
            pieces.push_back({request, first_token, first, num, 0, 0, first_key, end, prefix, -1, cost, in_place});
            total += cost * call.num_kv_heads;
        }
        first_token += count;
    }
    return pieces;
}

// Cuts a piece by keys into items with all heads, so that its pages are read from end to end. Returns false, and makes
// no items, if they would be too few.
inline bool cut_across(const AttentionCall& call, const Item& piece, long wanted, long shared,
                       std::vector<Item>& items) {
    const long first = piece.first_key / SPLIT, splits = (piece.end_key - 1) / SPLIT + 1 - first;
    const long parts = std::min(wanted, splits), rows = piece.num_queries * call.group;
    const bool is_worth_it = parts > 1 && parts >= std::min(wanted, 2 * call.num_threads);
    if (!is_worth_it || !piece.in_place || rows * call.num_kv_heads > MAX_ROWS) return false;
    for (long part = 0; part < parts; part++) {
        Item item = piece;
        item.num_heads = call.num_kv_heads, item.shared = shared;
        item.first_key = std::max(piece.first_key, (first + part * splits / parts) * SPLIT);
        item.end_key = std::min(piece.end_key, (first + (part + 1) * splits / parts) * SPLIT);
        item.cost = piece.cost * call.num_kv_heads * (item.end_key - item.first_key) / piece.end_key;
        items.push_back(item);
    }
    return true;
}

// The items of a call. An item with up to `few` rows of a head reads keys and values in place.
inline std::vector<Item> items_of(const AttentionCall& call, long few) {
    long total = 0, num_shared = 0;
    std::vector<Item> pieces = pieces_of(call, few, total), items;
    items.reserve(pieces.size());
    for (Item& item : pieces) {
        const long wanted = item.cost * call.num_kv_heads * PARTS * call.num_threads / total;
        if (cut_across(call, item, wanted, num_shared, items)) {
            num_shared++;
            continue;
        }
        // A lone request needs no more items than threads: items with fewer heads read shorter runs of memory.
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
    // The costliest items come first, so that threads finish together.
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    return items;
}

// The places of keys [start, start + count) of one request, as offsets from page 0 of the same head; the last offset is
// repeated past `count`. `are_neighbours` says of each LANES keys whether they are one contiguous piece.
struct Tile {
    long start, count, offsets[KEYS];
    bool are_neighbours[KEYS / LANES];
};

// `rows` neighbouring keys of one request on one page; the first is at `offset`.
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
        first_key = item.first_key;
        begin = first_key / KEYS * KEYS;
        end = item.end_key;
    }

    // The first of the tile's keys that may be read: a page before the window may belong to another request by now.
    long first_of(long start) const { return std::max(start, first_key); }

    long end_of(long start) const { return std::min(start + KEYS, end); }

    Run run(long position, long until) const {
        const uint32_t size = call->block_size, page = (uint32_t)position / size, offset = (uint32_t)position % size;
        return {table[page] * call->page_stride + offset * call->row_size,
                std::min<long>(size - offset, until - position)};
    }

    Tile tile(long start) const {
        const long until = end_of(start);
        Tile found{start, until - start, {}, {}};
        long position = first_of(start), i = 0;
        const long before = position - start;  // masked keys, which get the offset of the first key that may be read
        Run next = run(position, until);
        for (; i < before; i++) found.offsets[i] = next.offset;
        while (true) {
            for (long k = 0; k < next.rows; k++) found.offsets[i + k] = next.offset + k * call->row_size;
            i += next.rows;
            position += next.rows;
            if (position == until) break;
            next = run(position, until);
        }
        for (const long last = found.offsets[i - 1]; i < KEYS; i++) found.offsets[i] = last;
        for (long first = 0; first < KEYS; first += LANES) {
            bool are = true;
            for (long k = first + 1; k < first + LANES; k++)
                are &= found.offsets[k] - found.offsets[k - 1] == call->row_size;
            found.are_neighbours[first / LANES] = are;
        }
        return found;
    }
};

// Prefetches an item's pages. The hardware prefetcher cannot predict the next page, and a thread that waits for each
// page reads at a third of the memory's bandwidth. So each thread prefetches the cache lines that it will read some bytes
// later, across heads and tiles: into the first cache, or where that waits for few lines at a time, further ahead into
// the second.
template <class Cache> class Ahead {
public:
    static constexpr long FAR_BYTES = 32768, NEAR_BYTES = IS_CODED<Cache> ? 24576 : 8192;

    explicit Ahead(const AttentionCall& call)
        : call(call), part_size(call.num_kv_heads * call.block_size * call.row_size) {}

    // `item` is read next, and then `then`, if it is not null.
    void follow(const Item& item, const Item* then) {
        after = then;
        if (current == &item) return;  // already in it
        enter(item);
        due = 0;
        advance(is_near ? NEAR_BYTES : FAR_BYTES);
    }

    // To be called when the next `bytes` are read. Inlined, because GCC drops calls of a function that only prefetches.
    __attribute__((always_inline)) void advance(long bytes) {
        long left = due + bytes;
        const char* next = line;
        while (left > 0) {
            if (next >= end) {
                const long unread = next_run();
                if (unread < 0) {
                    line = next, due = 0;
                    return;
                }
                left -= unread;
                next = line;
                continue;
            }
            const long lines = (std::min<long>(left, end - next) + 63) / 64;
            left -= 64 * lines;
            if (is_near)
#pragma GCC unroll 4
                for (long i = 0; i < lines; i++) __builtin_prefetch(next + 64 * i, 0, 3);
            else
#pragma GCC unroll 4
                for (long i = 0; i < lines; i++) __builtin_prefetch(next + 64 * i, 0, 2);
            next += 64 * lines;
        }
        line = next;
        due = left;
    }

private:
    // Finds the next run of memory. Returns the bytes before it that count as read but are outside the window, or -1 if
    // the next item is not known.
    __attribute__((noinline)) long next_run() {
        long unread = 0;
        if (position == until) {
            if (!next_part()) return -1;
            until = walk.end_of(start);
            position = walk.first_of(start);
            unread = (position - start) * call.row_size * (long)sizeof(Cache);
            page = first_page, row = first_row;
        }
        const long rows = std::min(call.block_size - row, until - position);
        line = reinterpret_cast<const char*>(static_cast<const Cache*>(call.kv_cache) +
                                             walk.table[page] * call.page_stride + part * part_size +
                                             (head * call.block_size + row) * call.row_size);
        end = line + rows * call.row_size * sizeof(Cache);
        position += rows, row += rows;
        if (row == call.block_size) page++, row = 0;
        return unread;
    }

    // Goes to the next part in the order of reading. Packed: keys, values; then the next head, tile, item. In place:
    // the next head, then the tile's values, then the next tile, item. Returns false, and changes nothing, if the next
    // item is not known.
    bool next_part() {
        if (part < 0) {
            part = 0;
        } else if (!is_across<Cache>(*current) && part < 1) {
            part = 1;
        } else if (head + 1 < current->first_head + current->num_heads) {
            head++;
            if (!is_across<Cache>(*current)) part = 0;
        } else if (is_across<Cache>(*current) && part < 1) {
            part = 1, head = current->first_head;
        } else if (start + KEYS < walk.end) {
            start += KEYS;
            first_page = page, first_row = row;
            head = current->first_head, part = 0;
        } else if (after) {
            enter(*after);
            after = nullptr, part = 0;
        } else {
            return false;
        }
        return true;
    }

    void enter(const Item& item) {
        current = &item;
        walk = Walk(call, item);
        start = walk.begin;
        first_page = walk.first_of(start) / call.block_size;
        first_row = walk.first_of(start) % call.block_size;
        head = item.first_head, part = -1;
        position = until = 0;
        line = end = nullptr;
    }

    const AttentionCall& call;
    const long part_size;
    const bool is_near = has_deep_first_cache();  // lines are prefetched into the first cache
    const Item *current = nullptr, *after = nullptr;
    Walk walk{};
    long start, part, head;           // the tile's first key; 0: keys, 1: values
    long first_page, first_row;       // the tile's first page and row
    long position, until, page, row;  // the tile's rows in [position, until) have not been prefetched
    const char *line = nullptr, *end = nullptr;
    long due = 0;  // bytes to prefetch; negative after whole cache lines exceeded what was due
};

}  // namespace quire
