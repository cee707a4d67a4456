// Attention of each token to selected rows, of one or several caches: all heads share a row as their key and their
// value. `quire.ops.latent` defines it.
//
// The work is cut into items: up to ROWS heads of a token. One thread takes an item and walks over all of its rows in
// tiles of KEYS (latent_rows.h), with an online softmax (softmax.h). So a token's result depends neither on the batch nor
// on how the work is cut.

#include "kernels.h"
#include "latent_rows.h"
#include "softmax.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <type_traits>
#include <vector>

namespace quire {
namespace {

constexpr long ROWS = 32;           // most heads of an item: with a tile of 512 elements a key they fit into 512 KiB
constexpr double SMALL_CALL = 1e5;  // heads * rows * elements a row below which one thread works alone

// One thread's memory.
struct Workspace {
    LatentRows rows;
    std::vector<const char*> keys;  // of the item's token
    std::vector<float> sums;

    explicit Workspace(const AttendRowsCall& call) : rows(ROWS, call.size, call.size), sums(sums_size(call.size)) {}
};

template <class Query> struct Attention {
    const AttendRowsCall& call;
    const RowReader& reader;
    Workspace& work;

    // Heads [first, first + num) of a token.
    void run(long token, long first, long num) {
        const Query* q = (const Query*)call.q + token * call.q_token_stride + first * call.q_head_stride;
        for (long row = 0; row < num; row++) work.rows.take_query(row, q + row * call.q_head_stride, call.size);
        find_keys(token);
        work.rows.start(num);
        const long end = (long)work.keys.size();
        for (long key = 0; key < end; key += KEYS) add_tile(key, std::min<long>(KEYS, end - key), num);
        Query* out = (Query*)call.out + (token * call.heads + first) * call.size;
        for (long row = 0; row < num; row++, out += call.size) finish(row, call.sinks[first + row], out);
    }

private:
    void find_keys(long token) {
        work.keys.clear();
        for (long i = 0; i < call.num_parts; i++) {
            const SeenRows& part = call.parts[i];
            const int32_t* slots = part.slots + token * part.most;
            for (long n = 0; n < part.counts[token]; n++)
                work.keys.push_back(
                    reader.at(part.cache, slots[n], part.block_size, part.page_stride, part.row_stride));
        }
    }

    void add_tile(long start, long count, long num) {
        for (long i = 0; i < count; i++) work.rows.take_key(i, reader, work.keys[start + i], call.size);
        work.rows.transpose_keys(count);
        work.rows.score(0, num, count);
        work.rows.soften(0, num, count, (float)(call.scale * M_LOG2E), [=](long) { return count; });
        work.rows.add_values(0, num, count);
    }

    void finish(long row, float sink, Query* out) {
        float* sums = work.sums.data();
        work.rows.write_sums(row, sums);
        const float share = with_sink(1 / sums[1], sums[0], sink);
        for (long d = 0; d < call.size; d += LANES) store(out + d, load(sums + LANES + d) * share, call.size - d);
    }
};

template <class Query> void run(const AttendRowsCall& call, const RowReader& reader) {
    double cost = 0;
    for (long token = 0; token < call.num_tokens; token++)
        for (long i = 0; i < call.num_parts; i++)
            cost += (double)call.parts[i].counts[token] * call.heads * call.size;
    const long num_threads = cost < SMALL_CALL ? 1 : call.num_threads;
    constexpr long PARTS_OF_THREAD = 4;
    long rows = ROWS;
    while (num_threads > 1 && rows > LatentRows::FEWEST &&
           call.num_tokens * ((call.heads + rows - 1) / rows) < PARTS_OF_THREAD * num_threads)
        rows /= 2;
    const long pieces = (call.heads + rows - 1) / rows, count = call.num_tokens * pieces;
    std::atomic<long> taken{0};
    in_team(count > 1 ? num_threads : 1, [&] {
        long index = taken.fetch_add(1);
        if (index >= count) return;
        Workspace work(call);
        for (; index < count; index = taken.fetch_add(1)) {
            const long first = index % pieces * rows;
            Attention<Query>{call, reader, work}.run(index / pieces, first, std::min(rows, call.heads - first));
        }
    });
}

}  // namespace
}  // namespace quire

// Returns 0, or 1 if this machine's build has no code for the dtypes; `out` is then unchanged.
extern "C" int quire_attend_rows(const quire::AttendRowsCall* call) {
    using namespace quire;
    RowReader reader;
    return find_reader(call->cache_dtype, reader) || with_type(call->dtype, [&](auto* query) {
        run<std::remove_pointer_t<decltype(query)>>(*call, reader);
    });
}
