// Causal attention in the latent space, where all heads share one key a token. `quire.ops.latent` defines it.
//
// A query of one head is a "row". The work is cut into items: up to ROWS rows of a request, query by query, against all
// or some keys. One thread takes an item and walks over its keys in tiles of KEYS (latent_rows.h), with an online softmax
// (softmax.h).
//
// As in attention.h, tiles begin at multiples of KEYS, softmaxes start again at multiples of SPLIT, and each row is
// computed on its own. So a row's result depends neither on the batch nor on how the work is cut.

#include "kernels.h"
#include "latent_rows.h"
#include "softmax.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

namespace quire {
namespace {

constexpr long ROWS = 32;           // most rows of an item: with a tile of 576 elements a key they fit into 512 KiB
constexpr double SMALL_CALL = 1e5;  // rows * keys * elements a key below which one thread works alone

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
    LatentRows rows;
    std::vector<float> split, sums;

    explicit Workspace(const Shape& shape)
        : rows(ROWS, shape.size, shape.rank), split(shape.sums_of_row()), sums(ROWS * shape.sums_of_row()) {}
};

template <class Query> struct Item {
    const Shape& shape;
    const LatentAttentionCall& call;
    const RowReader& reader;
    const Piece& piece;
    Workspace& work;
    const long latent_bytes = reader.bytes(shape.rank);

    void run() {
        take_queries();
        const long end = shape.position(piece, piece.num_rows - 1) + 1;  // keys that the last row sees
        const long size = shape.sums_of_row();
        for (long split = piece.first_split; split < piece.end_split; split++) {
            work.rows.start(piece.num_rows);
            for (long key = split * SPLIT; key < std::min(end, (split + 1) * SPLIT); key += KEYS)
                add_tile(key, std::min<long>(KEYS, end - key));
            for (long row = 0; row < piece.num_rows; row++) {
                float* mine = piece.sums ? piece.sums + (split * piece.num_rows + row) * size : &work.sums[row * size];
                const bool is_first = piece.sums || split == piece.first_split;
                work.rows.write_sums(row, is_first ? mine : work.split.data());
                if (!is_first) merge(mine, work.split.data(), shape.rank);
            }
        }
        if (!piece.sums) finish(work.sums.data());
    }

    // Writes the outputs from the sums of all rows.
    void finish(const float* sums) {
        const long rank = shape.rank, size = shape.sums_of_row();
        const long place = piece.first_token * call.heads + piece.first_row;
        Query* out = (Query*)call.out + place * rank;
        for (long row = 0; row < piece.num_rows; row++, sums += size, out += rank) {
            const float share = 1 / sums[1];
            if (call.lse) call.lse[place + row] = (float)M_LN2 * (sums[0] - std::log2(share));
            for (long d = 0; d < rank; d += LANES) store(out + d, load(sums + LANES + d) * share, rank - d);
        }
    }

private:
    void take_queries() {
        for (long row = 0; row < piece.num_rows; row++) {
            const long token = piece.first_token + (piece.first_row + row) / call.heads;
            const long head = (piece.first_row + row) % call.heads;
            work.rows.take_query(row, (const Query*)call.q + token * call.q_token_stride + head * call.q_head_stride,
                                 shape.rank);
            work.rows.take_query(
                row, (const Query*)call.q_rotated + token * call.rotated_token_stride + head * call.rotated_head_stride,
                call.rotary_dim, shape.rank);
        }
    }

    void add_tile(long start, long count) {
        const int32_t* table = call.block_tables + piece.request * call.table_stride;
        for (long i = 0; i < count; i++) {
            const long position = start + i;
            const long slot = table[position / call.entry_size] * call.entry_size + position % call.entry_size;
            const char* row = reader.at(call.cache, slot, call.block_size, call.page_stride, call.row_stride);
            work.rows.take_key(i, reader, row, shape.rank);
            work.rows.take_key(i, reader, row + latent_bytes, call.rotary_dim, shape.rank);
        }
        work.rows.transpose_keys(count);
        long first = 0;  // of the rows that see any of the tile
        while (shape.position(piece, first) < start) first++;
        work.rows.score(first, piece.num_rows - first, count);
        work.rows.soften(first, piece.num_rows, count, (float)(call.scale * M_LOG2E), [&](long row) {
            return std::min(count, shape.position(piece, row) + 1 - start);
        });
        work.rows.add_values(first, piece.num_rows - first, count);
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
        while (rows > LatentRows::FEWEST && rows * (double)end / parts > fair) rows /= 2;
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

template <class Query> void run(const LatentAttentionCall& call, const RowReader& reader) {
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
            Item<Query>{shape, call, reader, pieces.items[index], work}.run();
    });
    if (pieces.cuts.empty()) return;
    Workspace work(shape);
    for (const Cut& cut : pieces.cuts) {
        const long size = cut.piece.num_rows * shape.sums_of_row();
        for (long split = 1; split < cut.num_splits; split++)
            for (long i = 0; i < size; i += shape.sums_of_row())
                merge(cut.piece.sums + i, cut.piece.sums + split * size + i, shape.rank);
        Item<Query>{shape, call, reader, cut.piece, work}.finish(cut.piece.sums);
    }
}

}  // namespace
}  // namespace quire

// Returns 0, or 1 if this machine's build has no code for the dtypes; `out` is then unchanged.
extern "C" int quire_latent_attention(const quire::LatentAttentionCall* call) {
    using namespace quire;
    RowReader reader;
    return find_reader(call->cache_dtype, reader) || with_type(call->dtype, [&](auto* query) {
        run<std::remove_pointer_t<decltype(query)>>(*call, reader);
    });
}
