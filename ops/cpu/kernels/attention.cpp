// Causal attention over pages, in place: nothing is gathered. See `quire.ops.Backend.attention` for the meaning.
//
// The work is cut into items: (request, KV head, up to MAX_ROWS / G consecutive queries), where G query heads share a KV
// head. A query of one head is a "row". One thread takes an item and walks over its keys in tiles of KEYS, with
// the softmax kept up to date along the way (arXiv:2112.05682, 2205.14135). For each tile keys and values are packed once
// for all rows of the item:
//
//     keys   [units of head_dim][KEYS]          transposed, so that a vector holds one dimension of many keys
//     values [units of KEYS][head_dim]
//
// and then scores = queries * keys and out += weights * values are the same small matrix product. A unit is what one
// multiply-add instruction consumes per lane: a float, or a pair of bfloat16 where the machine multiplies those (they are
// summed in float32). A decode step has G rows for each packed tile; it waits for memory, so the packing costs no time.
//
// Tiles begin at multiples of KEYS and a row's arithmetic does not see its neighbours: a query's result depends neither
// on the batch nor on how a prompt was cut.

#include "vector.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

namespace quire {
namespace {

constexpr int KEYS = 64;      // keys of a tile; with head_dim 128 in bfloat16 its keys and values stay in a 48 KiB L1
constexpr int MAX_ROWS = 64;  // rows that share a packed tile
constexpr int BLOCK = 4;      // rows whose sums are in registers at once
constexpr int COLUMNS = LANES == 16 ? 4 : 2;  // vectors of them: BLOCK * COLUMNS accumulators

}  // namespace

// Mirrored in `quire.ops.cpu.native`. Strides count elements; the last dimension of every tensor is dense.
struct AttentionCall {
    const void* q;  // [num_tokens, num_kv_heads * group, head_dim]
    void* out;      // like q, dense
    const void* keys;  // [num_kv_heads, num_blocks, block_size, head_dim]
    const void* values;
    const int64_t* query_lens;    // [num_rows]
    const int64_t* seq_lens;      // [num_rows]
    const int32_t* block_tables;  // [num_rows, table_stride]
    int64_t q_token_stride, q_head_stride;
    int64_t kv_head_stride;
    int64_t num_requests, table_stride, block_size;
    int64_t num_kv_heads, group, head_dim;
    int64_t window;  // 0: none
    int64_t q_dtype, kv_dtype, num_threads;
    double scale;
};

namespace {

struct Pair { uint32_t bits; };  // bfloat16 of an even index in the lower half, of the next in the upper

inline Floats add_product(Floats total, float a, const float* b) { return total + a * load(b); }

#if defined(__AVX512BF16__)
inline Floats add_product(Floats total, Pair a, const Pair* b) {
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(a.bits), (__m512bh)read<__m512i>(b));
}
#endif

// c[row][column] = keep[row] * c[row][column] + sum over t of a[row][t] * b[t][column], for ROWS rows and N vectors of
// columns; without `keep` whatever c held is forgotten.
template <int ROWS, int N, class Unit>
inline void multiply_block(
    const Unit* a, long a_stride, const Unit* b, long b_stride, long steps, float* c, long c_stride, const float* keep) {
    Floats total[ROWS][N];
    for (int row = 0; row < ROWS; row++)
        for (int n = 0; n < N; n++)
            total[row][n] = keep ? keep[row] * load(c + row * c_stride + n * LANES) : Floats{};
    for (long t = 0; t < steps; t++)
        for (int row = 0; row < ROWS; row++)
            for (int n = 0; n < N; n++)
                total[row][n] = add_product(total[row][n], a[row * a_stride + t], b + t * b_stride + n * LANES);
    for (int row = 0; row < ROWS; row++)
        for (int n = 0; n < N; n++) store(c + row * c_stride + n * LANES, total[row][n]);
}

template <int ROWS, class Unit>
void multiply_rows(const Unit* a, long a_stride, const Unit* b, long b_stride, long steps, float* c, long c_stride,
                   long width, const float* keep) {
    long column = 0;
    for (; column + COLUMNS * LANES <= width; column += COLUMNS * LANES)
        multiply_block<ROWS, COLUMNS>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, keep);
    for (; column < width; column += LANES)
        multiply_block<ROWS, 1>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, keep);
}

// `width` is a multiple of LANES; `rows` at most BLOCK.
template <class Unit>
void multiply(long rows, const Unit* a, long a_stride, const Unit* b, long b_stride, long steps, float* c, long c_stride,
              long width, const float* keep) {
    switch (rows) {
        case 1: return multiply_rows<1>(a, a_stride, b, b_stride, steps, c, c_stride, width, keep);
        case 2: return multiply_rows<2>(a, a_stride, b, b_stride, steps, c, c_stride, width, keep);
        case 3: return multiply_rows<3>(a, a_stride, b, b_stride, steps, c, c_stride, width, keep);
        default: return multiply_rows<4>(a, a_stride, b, b_stride, steps, c, c_stride, width, keep);
    }
}

// The elements of a and b in turn: their lower halves, or their upper.
template <bool UPPER> inline Words interleave(Words a, Words b) {
    constexpr int S = UPPER ? LANES / 2 : 0, L = LANES;
#if defined(__clang__)
#define QUIRE_SHUFFLE(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define QUIRE_SHUFFLE(...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    return QUIRE_SHUFFLE(S, S + L, S + 1, S + L + 1, S + 2, S + L + 2, S + 3, S + L + 3, S + 4, S + L + 4, S + 5,
                         S + L + 5, S + 6, S + L + 6, S + 7, S + L + 7);
#elif defined(__AVX__)
    return QUIRE_SHUFFLE(S, S + L, S + 1, S + L + 1, S + 2, S + L + 2, S + 3, S + L + 3);
#else
    return QUIRE_SHUFFLE(S, S + L, S + 1, S + L + 1);
#endif
#undef QUIRE_SHUFFLE
}

// Transposes LANES x LANES words: each round moves one bit of the row index to the column index.
inline void transpose(Words (&rows)[LANES]) {
    for (int size = 1; size < LANES; size *= 2) {
        Words mixed[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = interleave<false>(rows[i], rows[i + LANES / 2]);
            mixed[2 * i + 1] = interleave<true>(rows[i], rows[i + LANES / 2]);
        }
        for (int i = 0; i < LANES; i++) rows[i] = mixed[i];
    }
}

// LANES units of a key from its element `first` on; zero past `head_dim`.
template <class Cache> inline Words units(const float*, const Cache* key, long first, long head_dim) {
    return bits_as<Words>(load(key + first, head_dim - first));
}

inline Words units(const Pair*, const BFloat16* key, long first, long head_dim) {
    if (head_dim - first >= 2 * LANES) return read<Words>(key + first);
    BFloat16 padded[2 * LANES] = {};
    std::memcpy(padded, key + first, (head_dim - first) * sizeof(BFloat16));
    return read<Words>(padded);
}

template <class Unit> constexpr int ELEMENTS = 1;  // of a unit
template <> constexpr int ELEMENTS<Pair> = 2;

// Where a tile's keys and values are. Past `count` the last one is repeated.
template <class Cache> struct Tile {
    long count;
    const Cache *keys[KEYS], *values[KEYS];
};

// The packing of a tile asks for the memory of the next one. Pages lie anywhere, so the processor cannot foresee it, and
// a thread that waits for each page reads at a third of the memory's speed.
inline void fetch(const void* soon) { __builtin_prefetch(soon); }

// Keys → packed [units of head_dim][KEYS]. Columns past the tile's count are filled too; their scores are unused.
template <class Unit, class Cache>
void pack_keys(const Tile<Cache>& tile, const Tile<Cache>& next, long head_dim, Unit* packed) {
    for (long column = 0; column < tile.count; column += LANES)
        for (long first = 0; first < head_dim; first += LANES * ELEMENTS<Unit>) {
            Words block[LANES];
            for (int i = 0; i < LANES; i++) {
                block[i] = units(packed, tile.keys[column + i], first, head_dim);
                fetch(next.keys[column + i] + first);
            }
            transpose(block);
            Unit* to = packed + first / ELEMENTS<Unit> * KEYS + column;
            for (int i = 0; i < LANES; i++) std::memcpy(to + i * KEYS, &block[i], sizeof(block[i]));
        }
}

// Values → packed [units of the tile's count][stride].
template <class Cache>
void pack_values(const Tile<Cache>& tile, const Tile<Cache>& next, long head_dim, float* packed, long stride) {
    for (long i = 0; i < tile.count; i++)
        for (long d = 0; d < head_dim; d += LANES) {
            fetch(next.values[i] + d);
            store(packed + i * stride + d, load(tile.values[i] + d, head_dim - d));
        }
}

void pack_values(const Tile<BFloat16>& tile, const Tile<BFloat16>& next, long head_dim, Pair* packed, long stride) {
    for (long i = 0; i < tile.count; i += 2)
        for (long d = 0; d < head_dim; d += LANES) {
            fetch(next.values[i + d / LANES % 2] + d);  // two steps of d are one cache line
            Words even = bits_as<Words>(load(tile.values[i] + d, head_dim - d));
            Words odd = i + 1 < tile.count ? bits_as<Words>(load(tile.values[i + 1] + d, head_dim - d)) : Words{};
            Words pairs = even >> 16 | odd;  // a bfloat16 as a float32 has its bits in the upper half
            std::memcpy(packed + i / 2 * stride + d, &pairs, sizeof(pairs));
        }
}

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
        out_stride = round_up(head_dim, LANES);
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

// Scores of one row and tile → weights e^(score - most). Keys outside [begin, end) get the weight 0. Returns the factor
// for what was summed up under the greatest score before.
template <class Unit>
float soften(const float* scores, long width, long begin, long end, float scale, float& most, Floats& total,
             Unit* weights) {
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const Floats hidden = fill(-INFINITY);
    Floats x[KEYS / LANES], highest = hidden;
    for (long n = 0; n < width / LANES; n++) {
        Ints key = lane + (int)(n * LANES);
        Ints seen = (key >= (int)begin) & (key < (int)end);
        x[n] = seen ? load(scores + n * LANES) * scale : hidden;
        highest = x[n] > highest ? x[n] : highest;
    }
    float before = most;
    most = std::max(before, largest(highest));
    float keep = before == -INFINITY ? 0 : std::exp(before - most);
    total *= keep;
    for (long n = 0; n < width / LANES; n++) {
        Ints key = lane + (int)(n * LANES);
        Ints seen = (key >= (int)begin) & (key < (int)end);
        Floats weight = seen ? exp(x[n] - most) : Floats{};
        total += weight;
        store_weights(weights + n * LANES / ELEMENTS<Unit>, weight);
    }
    return keep;
}

struct Item { long request, first_token, first_query, num_queries, cost; };

// One item's keys, tile by tile.
template <class Cache> struct Walk {
    const AttentionCall& call;
    const int32_t* table;
    const Cache *keys, *values;
    long first_position, first_key, begin, end;  // begin: of the first tile; end: past the last key

    Walk(const AttentionCall& call, const Item& item, long kv_head)
        : call(call),
          table(call.block_tables + item.request * call.table_stride),
          keys(static_cast<const Cache*>(call.keys) + kv_head * call.kv_head_stride),
          values(static_cast<const Cache*>(call.values) + kv_head * call.kv_head_stride) {
        first_position = call.seq_lens[item.request] - call.query_lens[item.request] + item.first_query;
        first_key = call.window ? std::max(0L, first_position + 1 - call.window) : 0;
        begin = first_key / KEYS * KEYS;
        end = first_position + item.num_queries;
    }

    Tile<Cache> tile(long start) const {
        Tile<Cache> found;
        found.count = std::min<long>(KEYS, end - start);
        // A page before the window may have been given away: the first key that is seen stands for those on it.
        long position = std::max(start, first_key);
        long page = position / call.block_size, offset = position % call.block_size;
        for (long i = 0; i < KEYS; i++) {
            const long element = (table[page] * call.block_size + offset) * call.head_dim;
            found.keys[i] = keys + element;
            found.values[i] = values + element;
            if (start + i < position || position + 1 == end) continue;
            position++;
            if (++offset == call.block_size) page++, offset = 0;
        }
        return found;
    }
};

// Queries of one request against one KV head; `after` is what this thread does next.
template <class Unit, class Query, class Cache>
void attend(const AttentionCall& call, const Item& item, long kv_head, const Walk<Cache>& after,
            Workspace<Unit>& work) {
    const long head_dim = call.head_dim, group = call.group, rows = item.num_queries * group;
    const Walk<Cache> walk(call, item, kv_head);
    const long first_position = walk.first_position;
    const Query* q = static_cast<const Query*>(call.q) + (item.first_token + item.first_query) * call.q_token_stride +
                     kv_head * group * call.q_head_stride;

    for (long row = 0; row < rows; row++) {
        const Query* from = q + row / group * call.q_token_stride + row % group * call.q_head_stride;
        pack_query(from, head_dim, work.queries + row * work.query_stride);
        work.most[row] = -INFINITY;
        work.total[row] = Floats{};
    }
    std::fill_n(work.out, rows * work.out_stride, 0.0f);

    Tile<Cache> tile = walk.tile(walk.begin);
    for (long start = walk.begin; start < walk.end; start += KEYS) {
        const Tile<Cache> next = start + KEYS < walk.end ? walk.tile(start + KEYS) : after.tile(after.begin);
        const long count = tile.count, width = round_up(count, LANES);
        pack_keys(tile, next, head_dim, work.keys);
        pack_values(tile, next, head_dim, work.values, work.out_stride);
        for (long i = round_up(count, LANES); i < next.count; i++)  // what a tile shorter than the next left out
            for (long d = 0; d < head_dim; d += 64 / (long)sizeof(Cache)) {
                fetch(next.keys[i] + d);
                fetch(next.values[i] + d);
            }
        tile = next;

        for (long row = 0; row < rows; row += BLOCK) {
            const long num = std::min<long>(BLOCK, rows - row);
            const long last_position = first_position + (row + num - 1) / group;
            if (last_position < start) continue;  // all of the tile lies in its future
            if (call.window && first_position + row / group + 1 - call.window >= start + count) continue;  // or past
            multiply<Unit>(num, work.queries + row * work.query_stride, work.query_stride, work.keys, KEYS,
                           (head_dim + ELEMENTS<Unit> - 1) / ELEMENTS<Unit>, work.scores, KEYS, width, nullptr);
            float keep[BLOCK];
            for (long i = 0; i < num; i++) {
                const long position = first_position + (row + i) / group;
                const long from = call.window ? std::max(0L, position + 1 - call.window - start) : 0;
                const long to = std::min(count, position + 1 - start);
                keep[i] = soften(work.scores + i * KEYS, width, from, to, (float)call.scale, work.most[row + i],
                                 work.total[row + i], work.weights + i * KEYS / ELEMENTS<Unit>);
            }
            multiply<Unit>(num, work.weights, KEYS / ELEMENTS<Unit>, work.values, work.out_stride,
                           (count + ELEMENTS<Unit> - 1) / ELEMENTS<Unit>, work.out + row * work.out_stride,
                           work.out_stride, work.out_stride, keep);
        }
    }
    Query* out = static_cast<Query*>(call.out) +
                 ((item.first_token + item.first_query) * call.num_kv_heads + kv_head) * group * head_dim;
    for (long row = 0; row < rows; row++) {
        Query* to = out + (row / group * call.num_kv_heads * group + row % group) * head_dim;
        const float share = 1 / sum(work.total[row]);
        for (long d = 0; d < head_dim; d += LANES)
            store(to + d, load(work.out + row * work.out_stride + d) * share, head_dim - d);
    }
}

std::vector<Item> items_of(const AttentionCall& call) {
    std::vector<Item> items;
    const long queries = std::max<long>(1, MAX_ROWS / call.group);
    long first_token = 0;
    for (long request = 0; request < call.num_requests; request++) {
        const long count = call.query_lens[request], computed = call.seq_lens[request] - count;
        for (long first = 0; first < count; first += queries) {
            const long num = std::min(queries, count - first);
            items.push_back({request, first_token, first, num, num * (computed + first + num)});
        }
        first_token += count;
    }
    // The costliest first, so that threads finish together.
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    return items;
}

template <class Unit, class Query, class Cache> void run(const AttentionCall& call) {
    const std::vector<Item> items = items_of(call);
    const long count = (long)items.size() * call.num_kv_heads;
    // A thread takes a few neighbours at once, so that it knows what it does next.
    const long run_length = std::clamp<long>(count / (16 * call.num_threads), 1, 8);
    const long rows = std::max<long>(items.empty() ? 0 : MAX_ROWS, call.group);
#pragma omp parallel num_threads((int)call.num_threads) if (call.num_threads > 1 && count > 1)
    {
        Workspace<Unit> work(rows, call.head_dim);
#pragma omp for schedule(dynamic, run_length)
        for (long i = 0; i < count; i++) {
            const long after = std::min(i + 1, count - 1);
            attend<Unit, Query, Cache>(call, items[i / call.num_kv_heads], i % call.num_kv_heads,
                                       {call, items[after / call.num_kv_heads], after % call.num_kv_heads}, work);
        }
    }
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
