// Causal attention in the latent space, where all heads share one key a token. `quire.ops.latent` defines it.
//
// A query of one head is a "row". The work is cut into items: up to ROWS rows of a request, query by query, against all
// or some keys. One thread takes an item and walks over its keys in tiles of KEYS. Each tile is widened to float32 once
// for all rows, and laid out twice: as values, [KEYS][rank + rotary_dim], and transposed, as keys, in panels. Then scores =
// queries * keys and out += weights * values are the same small matrix product (tiles.h), with an online softmax
// between them (softmax.h).
//
// As in attention.h, tiles begin at multiples of KEYS, softmaxes start again at multiples of SPLIT, and each row is
// computed on its own. So a row's result depends neither on the batch nor on how the work is cut.

#include "kernels.h"
#include "softmax.h"
#include "threads.h"
#include "tiles.h"
#include "vector.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

namespace quire {
namespace {

constexpr long ROWS = 32;         // most rows of an item: with a tile of 576 numbers a key they fit into 512 KiB
constexpr int TOGETHER = 6;       // rows whose sums are in registers at once, in two vectors each
constexpr long PANEL = COLUMNS * LANES;  // keys whose numbers lie together, so that they stay in the L1 cache
constexpr long FEWEST_ROWS = 8;   // for fewer, laying out a tile takes as long as the products
constexpr double SMALL_CALL = 1e5;  // rows * keys * numbers a key below which one thread works alone

// Rows [first_row, first_row + num_rows) of a request, counted over its queries and heads, against the keys of splits
// [first_split, end_split). `sums` are those of all splits of the item's rows, if several items divide them.
struct Piece {
    long request, first_token, first_row, num_rows, first_split, end_split;
    float* sums;
    double cost;
};

// The rows of a piece that is cut by keys, whose splits are merged at the end.
struct Cut { Piece piece; long num_splits; };

struct Shape {
    const LatentAttentionCall& call;
    const long rank = call.rank, size = call.rank + call.rotary_dim;
    const long stride = round_up(size, COLUMNS * LANES), out_stride = round_up(rank, COLUMNS * LANES);

    long query_len(long request) const { return call.query_lens ? call.query_lens[request] : 1; }
    long sums_of_row() const { return sums_size(rank); }

    // The position of a row's query.
    long position(const Piece& piece, long row) const {
        const long computed = call.seq_lens[piece.request] - query_len(piece.request);
        return computed + (piece.first_row + row) / call.heads;
    }
};

// One thread's memory for an item.
struct Workspace {
    std::unique_ptr<float, decltype(&std::free)> memory{nullptr, &std::free};
    float *queries, *values, *keys, *scores, *weights, *out, *keep, *most, *split, *sums;
    Floats total[ROWS];

    explicit Workspace(const Shape& shape) {
        const long sums_row = shape.sums_of_row();
        const long sizes[] = {ROWS * shape.stride, KEYS * shape.stride, shape.stride * KEYS, ROWS * KEYS, ROWS * KEYS,
                              ROWS * shape.out_stride, ROWS, ROWS, sums_row, ROWS * sums_row};
        float** const parts[] = {&queries, &values, &keys, &scores, &weights, &out, &keep, &most, &split, &sums};
        long count = 0;
        for (long size : sizes) count += round_up(size, 16);
        memory.reset(static_cast<float*>(std::aligned_alloc(64, count * sizeof(float))));
        float* next = memory.get();
        for (int i = 0; i < 10; next += round_up(sizes[i], 16), i++) *parts[i] = next;
    }
};

template <class Query, class Cache> struct Item {
    const Shape& shape;
    const LatentAttentionCall& call;
    const Piece& piece;
    Workspace& work;
    const long seq_len = call.seq_lens[piece.request];

    void run() {
        take_queries();
        const long end = shape.position(piece, piece.num_rows - 1) + 1;  // keys that the last row sees
        const long size = shape.sums_of_row();
        for (long split = piece.first_split; split < piece.end_split; split++) {
            start_split();
            for (long key = split * SPLIT; key < std::min(end, (split + 1) * SPLIT); key += KEYS)
                add_tile(key, std::min<long>(KEYS, end - key));
            for (long row = 0; row < piece.num_rows; row++) {
                float* mine = piece.sums ? piece.sums + (split * piece.num_rows + row) * size : work.sums + row * size;
                const bool is_first = piece.sums || split == piece.first_split;
                write_sums(row, is_first ? mine : work.split);
                if (!is_first) merge(mine, work.split, shape.rank);
            }
        }
        if (!piece.sums) finish(work.sums);
    }

    // Writes the outputs from the sums of all rows.
    void finish(const float* sums) {
        const long rank = shape.rank, size = shape.sums_of_row();
        Query* out = (Query*)call.out + (piece.first_token * call.heads + piece.first_row) * rank;
        for (long row = 0; row < piece.num_rows; row++, sums += size, out += rank) {
            const float share = 1 / sums[1];
            for (long d = 0; d < rank; d += LANES) store(out + d, load(sums + LANES + d) * share, rank - d);
        }
    }

private:
    void take_queries() {
        for (long row = 0; row < piece.num_rows; row++) {
            const long token = piece.first_token + (piece.first_row + row) / call.heads;
            const long head = (piece.first_row + row) % call.heads;
            float* to = work.queries + row * shape.stride;
            widen((const Query*)call.q + token * call.q_token_stride + head * call.q_head_stride, shape.rank, to);
            widen((const Query*)call.q_rotated + token * call.rotated_token_stride + head * call.rotated_head_stride,
                  call.rotary_dim, to + shape.rank);
        }
    }

    template <class T> static void widen(const T* from, long count, float* to) {
        for (long i = 0; i < count; i += LANES) store(to + i, load(from + i, count - i), count - i);
    }

    void start_split() {
        std::fill_n(work.most, piece.num_rows, -INFINITY);
        std::fill_n(work.total, piece.num_rows, Floats{});
        std::fill_n(work.out, piece.num_rows * shape.out_stride, 0.0f);
    }

    void write_sums(long row, float* to) {
        to[0] = work.most[row], to[1] = sum(work.total[row]);
        std::memcpy(to + LANES, work.out + row * shape.out_stride,
                    (shape.sums_of_row() - LANES) * sizeof(float));
    }

    // Widens the keys [start, start + count) as rows of values, and transposes them.
    void take_tile(long start, long count) {
        const int32_t* table = call.block_tables + piece.request * call.table_stride;
        for (long i = 0; i < count; i++) {
            const long position = start + i;
            const long slot = table[position / call.entry_size] * call.entry_size + position % call.entry_size;
            const Cache* row = (const Cache*)call.cache + slot / call.block_size * call.page_stride +
                               slot % call.block_size * call.row_stride;
            widen(row, shape.size, work.values + i * shape.stride);
        }
        for (long column = 0; column < count; column += LANES)
            for (long d = 0; d < shape.size; d += LANES) {
                float* panel = work.keys + column / PANEL * PANEL * shape.stride + column % PANEL;
                Words block[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    block[i] = read<Words>(work.values + (column + i) * shape.stride + d);
                transpose(block);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) 
                    std::memcpy(panel + (d + i) * PANEL, &block[i], sizeof(Words));
            }
    }

    void add_tile(long start, long count) {
        take_tile(start, count);
        long first = 0;  // of the rows that see any of the tile
        while (shape.position(piece, first) < start) first++;
        const long width = round_up(count, LANES), rows = piece.num_rows - first;
        multiply_all(rows, work.queries + first * shape.stride, shape.stride, work.keys, PANEL, shape.stride,
                     shape.size, work.scores + first * KEYS, KEYS, width, nullptr);
        const float scale = (float)(call.scale * M_LOG2E);
        for (long row = first; row < piece.num_rows; row++) {
            const long to = std::min(count, shape.position(piece, row) + 1 - start);
            const float* scores = work.scores + row * KEYS;
            float* weights = work.weights + row * KEYS;
            work.keep[row] = to == KEYS
                                 ? soften<true>(scores, KEYS, 0, KEYS, scale, work.most[row], work.total[row], weights)
                                 : soften<false>(scores, width, 0, to, scale, work.most[row], work.total[row], weights);
        }
        multiply_all(rows, work.weights + first * KEYS, KEYS, work.values, shape.stride, 1, count,
                     work.out + first * shape.out_stride, shape.out_stride, shape.out_stride, work.keep + first);
    }

    // `multiply` for any number of rows, one panel after another. A column of `b` is `column_stride` after the one before,
    // between panels.
    static void multiply_all(long rows, const float* a, long a_stride, const float* b, long b_stride, long column_stride,
                             long steps, float* c, long c_stride, long width, const float* keep) {
        for (long column = 0; column < width; column += PANEL)
            for (long row = 0; row < rows; row += TOGETHER)
                with_rows<TOGETHER>(std::min<long>(TOGETHER, rows - row), [&](auto constant) {
                    multiply_rows<constant()>(a + row * a_stride, a_stride, b + column * column_stride, b_stride, steps,
                                              c + row * c_stride + column, c_stride, std::min(PANEL, width - column),
                                              keep ? keep + row : nullptr);
                });
    }
};

// The pieces of a call, the costliest first, and the rows whose keys several of them divide.
struct Pieces {
    std::vector<Piece> items;
    std::vector<Cut> cuts;
    std::vector<std::unique_ptr<float[]>> sums;
    double cost = 0;

    explicit Pieces(const Shape& shape) {
        const LatentAttentionCall& call = shape.call;
        for (long request = 0; request < call.num_requests; request++)
            cost += (double)shape.query_len(request) * call.heads * call.seq_lens[request];
        constexpr long PARTS_OF_THREAD = 4;
        const double fair = cost / (PARTS_OF_THREAD * call.num_threads);
        long token = 0;
        for (long request = 0; request < call.num_requests; token += shape.query_len(request++))
            cut_request(shape, request, token, call.num_threads == 1 ? INFINITY : fair);
        std::stable_sort(items.begin(), items.end(), [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
    }

private:
    void cut_request(const Shape& shape, long request, long token, double fair) {
        const LatentAttentionCall& call = shape.call;
        const long all = shape.query_len(request) * call.heads, end = call.seq_lens[request];
        const long splits = (end + SPLIT - 1) / SPLIT;
        long rows = ROWS, parts = 1;
        while (parts * 2 <= splits && rows * (double)end / parts > fair && all <= ROWS) parts *= 2;
        while (rows > FEWEST_ROWS && rows * (double)end / parts > fair) rows /= 2;
        for (long first = 0; first < all; first += rows) {
            Piece piece{request, token, first, std::min(rows, all - first), 0, 0, nullptr, 0};
            const long seen = shape.position(piece, piece.num_rows - 1) + 1;
            add(shape, piece, (seen + SPLIT - 1) / SPLIT, parts);
        }
    }

    void add(const Shape& shape, Piece piece, long splits, long parts) {
        parts = std::min(parts, splits);
        if (parts > 1) {
            sums.emplace_back(new float[splits * piece.num_rows * shape.sums_of_row()]);
            piece.sums = sums.back().get();
            cuts.push_back({piece, splits});
        }
        for (long part = 0; part < parts; part++) {
            piece.first_split = part * splits / parts, piece.end_split = (part + 1) * splits / parts;
            piece.cost = (double)piece.num_rows * (piece.end_split - piece.first_split);
            items.push_back(piece);
        }
    }
};

template <class Query, class Cache> void run(const LatentAttentionCall& call) {
    const Shape shape{call};
    Pieces pieces(shape);
    const long count = (long)pieces.items.size();
    const long num_threads = pieces.cost * shape.size < SMALL_CALL || count <= 1 ? 1 : call.num_threads;
    std::atomic<long> taken{0};
    in_team(num_threads, [&] {
        long index = taken.fetch_add(1);
        if (index >= count) return;
        Workspace work(shape);
        for (; index < count; index = taken.fetch_add(1))
            Item<Query, Cache>{shape, call, pieces.items[index], work}.run();
    });
    if (pieces.cuts.empty()) return;
    Workspace work(shape);
    for (const Cut& cut : pieces.cuts) {
        const long size = cut.piece.num_rows * shape.sums_of_row();
        for (long split = 1; split < cut.num_splits; split++)
            for (long i = 0; i < size; i += shape.sums_of_row())
                merge(cut.piece.sums + i, cut.piece.sums + split * size + i, shape.rank);
        Item<Query, Cache>{shape, call, cut.piece, work}.finish(cut.piece.sums);
    }
}

}  // namespace
}  // namespace quire

// Returns 0, or 1 if this machine's build has no code for the dtypes; `out` is then unchanged.
extern "C" int quire_latent_attention(const quire::LatentAttentionCall* call) {
    using namespace quire;
    int failed = 0;
    const int unknown = with_type(call->dtype, [&](auto* query) {
        using Query = std::remove_pointer_t<decltype(query)>;
        failed = with_type(call->cache_dtype, [&](auto* cache) {
            run<Query, std::remove_pointer_t<decltype(cache)>>(*call);
        });
    });
    return unknown | failed;
}
