// The operations that choose the tokens of sparse attention. `quire.ops.latent` defines them.
//
// Every function returns 0, or 1 if this machine's build has no code for the dtype; nothing is then written.
//
// The keys that a token scores are cut into blocks, which threads take one by one, tile by tile (latent_rows.h). A score
// depends neither on the batch nor on how the work is cut.

#include "elements.h"
#include "kernels.h"
#include "latent_rows.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>
#include <vector>

namespace quire {
namespace {

constexpr long BLOCK = 256;                // keys that a thread scores at a time
constexpr long MOST_SCORES = 4l << 20;     // that exist at once, if one token has no more
constexpr double WORTH_THREADS = 1e5;      // multiplications below which one thread works alone

struct Token { long index, request, num_seen; };

// Keys [first, first + BLOCK) of a token, whose scores begin at `scores`.
struct Piece { const Token* token; long first; float* scores; };

long slot(const SelectTokensCall& call, long request, long position) {
    const int32_t* table = call.block_tables + request * call.table_stride;
    return table[position / call.entry_size] * call.entry_size + position % call.entry_size;
}

template <class Query> void score(const SelectTokensCall& call, const RowReader& reader, const Piece& piece) {
    const Token& token = *piece.token;
    const long heads = call.heads;
    LatentRows rows(heads, call.size, 0);
    for (long head = 0; head < heads; head++)
        rows.take_query(head, (const Query*)call.q + token.index * call.q_token_stride + head * call.q_head_stride,
                        call.size);
    std::vector<float> weights(heads);
    widen((const Query*)call.weights + token.index * call.weights_stride, heads, weights.data());
    const long end = std::min(piece.first + BLOCK, token.num_seen);
    for (long first = piece.first; first < end; first += KEYS) {
        const long count = std::min<long>(KEYS, end - first);
        for (long i = 0; i < count; i++) {
            const long place = slot(call, token.request, first + i);
            rows.take_key(i, reader, reader.at(call.cache, place, call.block_size, call.page_stride, call.row_stride),
                          call.size);
        }
        rows.transpose_keys(count);
        rows.score(0, heads, count);
        for (long n = 0; n < count; n += LANES) {
            Floats total{};
            for (long head = 0; head < heads; head++) {
                const Floats scaled = load(rows.scores_of(head) + n) * (float)call.scale;
                total = multiply_add(scaled > 0 ? scaled : Floats{}, fill(weights[head]), total);
            }
            store(piece.scores + first + n, total == total ? total : fill(-INFINITY), count - n);
        }
    }
}

struct Selector {
    const SelectTokensCall& call;
    const RowReader& reader;
    void (*score)(const SelectTokensCall&, const RowReader&, const Piece&);  // for the queries' type

    // Writes a token's slots, or positions; `scores` are read only if it sees more tokens than are chosen.
    void choose(const Token& token, const float* scores) const {
        const long count = std::min(token.num_seen, call.top_k);
        std::vector<int32_t> order(token.num_seen);
        std::iota(order.begin(), order.end(), 0);
        if (token.num_seen > count) {
            std::nth_element(order.begin(), order.begin() + count, order.end(), [&](int32_t a, int32_t b) {
                return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
            });
            std::sort(order.begin(), order.begin() + count);
        }
        int32_t* out = call.out + token.index * call.top_k;
        const auto place = [&](long position) {
            return (int32_t)(call.gives_positions ? position : slot(call, token.request, position));
        };
        for (long i = 0; i < count; i++) out[i] = place(order[i]);
        std::fill(out + count, out + call.top_k, place(0));
        call.counts[token.index] = count;
    }

    void run() const {
        std::vector<Token> tokens;
        for (long request = 0; request < call.num_requests; request++)
            for (long i = call.query_lens ? call.query_lens[request] : 1; i > 0; i--)
                tokens.push_back({(long)tokens.size(), request, call.seq_lens[request] - i + 1});
        std::vector<float> scores;
        for (size_t begin = 0; begin < tokens.size();) {  // as many tokens as have MOST_SCORES
            std::vector<long> starts;
            long num_scores = 0;
            size_t end = begin;
            for (; end < tokens.size() && (end == begin || num_scores + scored(tokens[end]) <= MOST_SCORES); end++) {
                starts.push_back(num_scores);
                num_scores += scored(tokens[end]);
            }
            if ((long)scores.size() < num_scores) scores.resize(num_scores);
            std::vector<Piece> pieces;
            for (size_t t = begin; t < end; t++)
                for (long first = 0; first < scored(tokens[t]); first += BLOCK)
                    pieces.push_back({&tokens[t], first, scores.data() + starts[t - begin]});
            const long threads = (double)num_scores * call.heads * call.size < WORTH_THREADS ? 1 : call.num_threads;
            for_each((long)pieces.size(), threads, [&](long i) { score(call, reader, pieces[i]); });
            for_each((long)(end - begin), threads, [&](long i) {
                choose(tokens[begin + i], scores.data() + starts[i]);
            });
            begin = end;
        }
    }

private:
    // How many keys of a token are scored.
    long scored(const Token& token) const { return token.num_seen > call.top_k ? token.num_seen : 0; }
};

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" int quire_store_rows(const StoreRowsCall* call) {
    int failed = 0;
    const int unknown = with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        failed = with_cache_type(call->cache_dtype, [&](auto* cache_type) {
            using Cache = std::remove_pointer_t<decltype(cache_type)>;
            parallel(call->num_tokens, call->num_tokens * call->size, call->num_threads, [&](long token) {
                const long slot = call->slots[token], block_size = call->block_size;
                Cache* to = (Cache*)call->cache + slot / block_size * call->page_stride +
                            slot % block_size * call->row_stride;
                store_row((const T*)call->x + token * call->x_stride, to, call->size, (float)call->largest);
            });
        });
    });
    return unknown | failed;
}

extern "C" int quire_select_tokens(const SelectTokensCall* call) {
    RowReader reader;
    return find_reader(call->cache_dtype, reader) || with_type(call->dtype, [&](auto* query) {
        Selector{*call, reader, score<std::remove_pointer_t<decltype(query)>>}.run();
    });
}
