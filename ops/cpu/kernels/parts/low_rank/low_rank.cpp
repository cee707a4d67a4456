// Products with low-rank weights that are added to a linear layer's outputs, with weights of its own for each token.
//
// Tokens with the same adapter are computed in blocks, so that a weight is loaded once for several. Sums are float32, and
// a result is rounded once; with AVX512-BF16, bfloat16 is multiplied in pairs, for which the products with `a` are rounded
// as well. Each product of a token has its own sum, in the same order in every block, so a token's result has the same
// bits in any batch. Returns 0, or 1 if this machine's build has no code for the dtype; nothing is then written.
//
// The outputs may be gates and ups, whose activation is then written instead, for tokens without adapters as well.
//
// Weights come from memory once a step. So what is read next is prefetched, and a call reads in the order of memory.

#include "elements.h"
#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <sched.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace quire {
namespace {

#if defined(QUIRE_HAS_AVX512_BF16)
constexpr int MOST_TOKENS = 6;  // of a block: with its rows, as many sums as there are registers for
#else
constexpr int MOST_TOKENS = 4;
#endif
constexpr int ROWS = LANES == 16 ? 4 : 2;
constexpr long WORTH_A_THREAD = 1 << 15;  // products below which waking other threads costs more than they save
constexpr long COLUMNS = 256;             // outputs of one piece of work
constexpr long BLOCKS_A_THREAD = 4;       // from which on threads take whole blocks
constexpr long LINE = 64;                 // bytes of a cache line
constexpr int LOOKS = 64;                 // at other threads' progress, before this one offers its core

// Weights that are read next, for prefetches: some rows of eight cache lines, `stride` bytes apart.
struct Ahead {
    const char* from;
    long stride;

    // The same rows side by side.
    static Ahead of(const void* from) { return {(const char*)from, 8 * LINE}; }

    __attribute__((always_inline)) void fetch(long row, long line) const {
        __builtin_prefetch(from + row * stride + line * LINE);
    }
};

// ------------------------------------------------------------------------------------------------------- in float32

// What a block's products with `a` are kept as, for those with `b`: [rows][MOST_TOKENS].
template <class T> struct InnerOf { using Type = float; };

// The products of TOKENS tokens with NUM_ROWS rows of `a`, each of `size` elements.
template <int TOKENS, int NUM_ROWS, class T>
void products(const T* const* x, const T* a, long size, float* inner, const Ahead&) {
    Floats sums[TOKENS][NUM_ROWS] = {};
    for (long i = 0; i < size; i += LANES) {
        Floats values[TOKENS];
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) values[t] = load(x[t] + i, size - i);
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; r++) {
            const Floats row = load(a + r * size + i, size - i);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++) sums[t][r] = multiply_add(values[t], row, sums[t][r]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; r++) inner[r * MOST_TOKENS + t] = sum(sums[t][r]);
}

// Adds the products of TOKENS tokens' `inner` [rank] with `b` [rank, row of `stride`] to outputs `from` to `end`, and
// writes the sums to `to`.
template <int TOKENS, class T>
void add_outputs(const float* inner, const T* b, long rank, long stride, const T* const* out, long from, long end,
                 const float* factors, const float* shifts, T* const* to, const Ahead&) {
    for (long at = from; at < end; at += LANES) {
        const long count = std::min<long>(LANES, end - at);
        Floats totals[TOKENS];
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) totals[t] = load(out[t] + at, count);
        for (long i = 0; i < rank; i++) {
            const Floats row = load(b + i * stride + at, count);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++) totals[t] = multiply_add(fill(inner[i * MOST_TOKENS + t]), row, totals[t]);
        }
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            if (factors != nullptr) totals[t] = multiply_add(totals[t], load(factors + at, count), load(shifts + at, count));
            store(to[t] + at - from, totals[t], count);
        }
    }
}

// ------------------------------------------------------------------------------------------ with pairs of bfloat16

#if defined(QUIRE_HAS_AVX512_BF16)
// Of two neighbouring rows, the numbers of each token are a pair: [rows / 2][MOST_TOKENS][2].
template <> struct InnerOf<BFloat16> { using Type = BFloat16; };

constexpr long PAIRS = 32;  // elements of a vector

// All elements of a vector, or the first of them.
struct All {
    __m512i load(const BFloat16* from) const { return _mm512_loadu_si512(from); }
    void store(BFloat16* to, __m512i values) const { _mm512_storeu_si512(to, values); }
};
struct First {
    __mmask32 mask;
    explicit First(long count) : mask((1u << count) - 1) {}
    __m512i load(const BFloat16* from) const { return _mm512_maskz_loadu_epi16(mask, from); }
    void store(BFloat16* to, __m512i values) const { _mm512_mask_storeu_epi16(to, mask, values); }
};

// Calls body(i, elements) for each vector of elements `from` to `end`, of which the last may have fewer.
template <class Body> __attribute__((always_inline)) inline void for_pairs(long from, long end, Body body) {
    long i = from;
    for (; i + PAIRS <= end; i += PAIRS) body(i, All());
    if (i < end) body(i, First(end - i));
}

// The sums of a, of b, of c and of d, in the first four lanes. Each is made in the same way.
inline __m512 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512d ab = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));  // of each 128 bits: a, b, a, b
    const __m512d cd = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    __m512 all = (__m512)_mm512_unpacklo_pd(ab, cd) + (__m512)_mm512_unpackhi_pd(ab, cd);
    all += _mm512_shuffle_f32x4(all, all, 0x4e);
    return all + _mm512_shuffle_f32x4(all, all, 0xb1);
}

// As above, rounded to bfloat16; with zeros up to four rows.
template <int TOKENS, int NUM_ROWS>
void products(const BFloat16* const* x, const BFloat16* a, long size, BFloat16* inner, const Ahead& ahead) {
    __m512 sums[TOKENS][ROWS];
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sums[t][r] = _mm512_setzero_ps();
    for_pairs(0, size, [&](long i, auto some) __attribute__((always_inline)) {
        __m512bh rows[NUM_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < NUM_ROWS; r++) rows[r] = (__m512bh)some.load(a + r * size + i);
#pragma GCC unroll 8
        for (int line = 0; line < 4; line++) ahead.fetch(i / PAIRS / 2, i / PAIRS % 2 * 4 + line);
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            const __m512bh values = (__m512bh)some.load(x[t] + i);
#pragma GCC unroll 8
            for (int r = 0; r < NUM_ROWS; r++) sums[t][r] = _mm512_dpbf16_ps(sums[t][r], rows[r], values);
        }
    });
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) {
        const __m512 all = sums_of(sums[t][0], sums[t][1], sums[t][2], sums[t][3]);
        const uint64_t both = _mm_cvtsi128_si64(_mm256_castsi256_si128((__m256i)_mm512_cvtneps_pbh(all)));
        const uint32_t first = (uint32_t)both, second = (uint32_t)(both >> 32);
        std::memcpy(inner + 2 * t, &first, sizeof(first));
        std::memcpy(inner + 2 * (MOST_TOKENS + t), &second, sizeof(second));
    }
}

// The numbers at `from` in the order of the outputs below: 0 to 3 of each 8, then 4 to 7.
inline void load_halves(const float* from, long count, __m512& low, __m512& high) {
    const __m512 first = (__m512)load(from, std::min<long>(count, LANES));
    const __m512 second = count > LANES ? (__m512)load(from + LANES, count - LANES) : _mm512_setzero_ps();
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    low = _mm512_permutex2var_ps(first, places, second);
    high = _mm512_permutex2var_ps(first, _mm512_add_epi32(places, _mm512_set1_epi32(4)), second);
}

// Two rows of `b` are multiplied at once: their elements are interleaved to pairs, and so are the numbers of `inner`. Of
// each 8 outputs, the first four are in one vector and the last four in another.
template <int TOKENS>
void add_outputs(const BFloat16* inner, const BFloat16* b, long rank, long stride, const BFloat16* const* out, long from,
                 long end, const float* factors, const float* shifts, BFloat16* const* to, const Ahead& ahead) {
    const __m512i nothing = _mm512_setzero_si512(), together = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for_pairs(from, end, [&](long at, auto some) __attribute__((always_inline)) {
        __m512 low[TOKENS], high[TOKENS];
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            const __m512i before = some.load(out[t] + at);
            __builtin_prefetch(out[t] + at + 8 * PAIRS, 1);
            low[t] = (__m512)_mm512_unpacklo_epi16(nothing, before);
            high[t] = (__m512)_mm512_unpackhi_epi16(nothing, before);
        }
        for (long i = 0; i < rank; i += 2) {
            const BFloat16* row = b + i * stride + at;
            const __m512i even = some.load(row), odd = i + 1 < rank ? some.load(row + stride) : nothing;
#pragma GCC unroll 8
            for (int r = 0; r < 2; r++) ahead.fetch(i + r, (at - from) / PAIRS);
            const __m512bh first = (__m512bh)_mm512_unpacklo_epi16(even, odd);
            const __m512bh second = (__m512bh)_mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; t++) {
                const __m512bh pair = (__m512bh)_mm512_set1_epi32(read<int>(inner + i * MOST_TOKENS + 2 * t));
                low[t] = _mm512_dpbf16_ps(low[t], first, pair);
                high[t] = _mm512_dpbf16_ps(high[t], second, pair);
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            if (factors != nullptr) {
                __m512 low_factors, high_factors, low_shifts, high_shifts;
                load_halves(factors + at, end - at, low_factors, high_factors);
                load_halves(shifts + at, end - at, low_shifts, high_shifts);
                low[t] = _mm512_fmadd_ps(low[t], low_factors, low_shifts);
                high[t] = _mm512_fmadd_ps(high[t], high_factors, high_shifts);
            }
            const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(high[t], low[t]);
            some.store(to[t] + at - from, _mm512_permutexvar_epi64(together, halves));
        }
    });
}
#endif

// ---------------------------------------------------------------------------------------------------- both of these

// Products as above, with `num_rows` rows. Meanwhile the rows after them are prefetched, or at last what is `ahead`.
template <int TOKENS, class T, class Inner>
void all_products(const T* const* x, const T* a, long num_rows, long size, Inner* inner, const Ahead& ahead) {
    for (long left = num_rows; left > 0; left -= ROWS, a += ROWS * size, inner += ROWS * MOST_TOKENS) {
        const Ahead next = left > ROWS ? Ahead::of(a + ROWS * size) : ahead;
        switch (left) {
            case 1: products<TOKENS, 1>(x, a, size, inner, next); break;
            case 2: products<TOKENS, 2>(x, a, size, inner, next); break;
            case 3: products<TOKENS, ROWS < 3 ? ROWS : 3>(x, a, size, inner, next); break;
            default: products<TOKENS, ROWS>(x, a, size, inner, next);
        }
    }
}

struct Block {
    long adapter;  // -1: none
    int count;
    long tokens[MOST_TOKENS];
};

// The tokens, or those with adapters alone, divided into blocks of the same adapter, in order.
std::vector<Block> blocks_of(const int64_t* rows, long num_tokens, bool takes_all) {
    std::vector<long> order;
    for (long token = 0; token < num_tokens; token++)
        if (takes_all || rows[token] >= 0) order.push_back(token);
    std::stable_sort(order.begin(), order.end(), [&](long x, long y) { return rows[x] < rows[y]; });
    std::vector<Block> blocks;
    for (long token : order) {
        if (blocks.empty() || blocks.back().adapter != rows[token] || blocks.back().count == MOST_TOKENS)
            blocks.push_back({rows[token], 0, {}});
        Block& block = blocks.back();
        block.tokens[block.count++] = token;
    }
    return blocks;
}

template <int COUNT = 1, class Body> void with_count(int count, Body body) {
    if constexpr (COUNT < MOST_TOKENS)
        if (count > COUNT) return with_count<COUNT + 1>(count, body);
    body(std::integral_constant<int, COUNT>{});
}

// Calls first(i) for each i below `num_firsts`, and, when all these are done, second(i) for each below `num_seconds`.
template <class First, class Second>
void for_each_in_turn(long num_firsts, long num_seconds, long num_threads, First first, Second second) {
    Shares firsts(num_firsts, num_threads), seconds(num_seconds, num_threads);
    std::atomic<long> num_done{0};
    auto counted = [&](long i) { first(i), num_done.fetch_add(1); };
    in_team(num_threads, [&] {
        firsts.take(counted);
        for (int looks = 0; num_done.load() < num_firsts;)  // other threads are at the last of them
            if (++looks % LOOKS == 0) sched_yield();
        seconds.take(second);
    });
}

// A call's work, in pieces: rows of the products of `x` with `a`, which are a block's `inner`, and columns of the
// products of that with `b`.
template <class T> class Task {
public:
    explicit Task(const AddLowRankCall& call)
        : call(call), blocks(blocks_of(call.rows, call.num_tokens, call.gated)), stride(round_up(call.rank, ROWS)),
          num_chunks(((call.gated ? call.out_features / 2 : call.out_features) + COLUMNS - 1) / COLUMNS) {}

    void run() const {
        const long num_parts = call.num_parts, num_blocks = blocks.size(), inner_size = num_parts * MOST_TOKENS * stride;
        long work = call.gated ? call.num_tokens * call.out_features : 0;
        for (const Block& block : blocks)
            work += block.count * rank_of(block) * (num_parts * call.in_features + call.out_features);
        const long num_threads = work > WORTH_A_THREAD ? call.num_threads : 1;
        if (num_threads == 1 || num_blocks >= BLOCKS_A_THREAD * num_threads)
            return for_each(num_blocks, num_threads, [&](long number) {
                thread_local std::vector<Inner> inner;
                if ((long)inner.size() < inner_size) inner.resize(inner_size);
                const Block &block = blocks[number], &next = blocks[std::min(number + 1, num_blocks - 1)];
                for (long part = 0; part < num_parts; part++)
                    multiply(block, part, 0, stride, inner.data(),
                             part + 1 < num_parts ? Ahead::of(a_of(block, part + 1, 0)) : outputs_ahead(block, 0));
                for (long chunk = 0; chunk < num_chunks; chunk++)
                    add(block, chunk, inner.data(),
                        chunk + 1 < num_chunks ? outputs_ahead(block, chunk + 1) : Ahead::of(a_of(next, 0, 0)));
            });
        divide(num_threads);
    }

private:
    using Inner = typename InnerOf<T>::Type;

    // Divides the blocks, so that one token alone keeps all threads busy.
    void divide(long num_threads) const {
        const long num_parts = call.num_parts, inner_size = num_parts * MOST_TOKENS * stride, num_blocks = blocks.size();
        const long num_pieces = stride / ROWS, num_firsts = num_blocks * num_parts * num_pieces;
        const long num_seconds = num_blocks * num_chunks;
        std::vector<Inner> inner(num_blocks * inner_size);
        const auto first_ahead = [&](long i) {
            return Ahead::of(a_of(blocks[i / (num_parts * num_pieces)], i / num_pieces % num_parts, i % num_pieces * ROWS));
        };
        const auto second_ahead = [&](long i) { return outputs_ahead(blocks[i / num_chunks], i % num_chunks); };
        for_each_in_turn(
            num_firsts, num_seconds, num_threads,
            [&](long i) {
                const long number = i / (num_parts * num_pieces), first = i % num_pieces * ROWS;
                const long share = ((i + 1) * num_threads + num_firsts - 1) / num_firsts;  // the next piece may begin it
                const bool is_last = num_firsts * share / num_threads == i + 1;
                multiply(blocks[number], i / num_pieces % num_parts, first, first + ROWS, &inner[number * inner_size],
                         is_last ? second_ahead(num_seconds * (share - 1) / num_threads) : first_ahead(i + 1));
            },
            [&](long i) {
                add(blocks[i / num_chunks], i % num_chunks, &inner[i / num_chunks * inner_size],
                    second_ahead(std::min(i + 1, num_seconds - 1)));
            });
    }

    long rank_of(const Block& block) const {
        if (block.adapter < 0) return 0;
        return call.ranks == nullptr ? call.rank : call.ranks[block.adapter];
    }

    const T* a_of(const Block& block, long part, long row) const {
        const long adapter = std::max(block.adapter, 0L);
        return (const T*)call.a + ((adapter * call.num_parts + part) * call.rank + row) * call.in_features;
    }

    const T* b_of(const Block& block) const {
        return (const T*)call.b + std::max(block.adapter, 0L) * call.rank * call.out_features;
    }

    Ahead outputs_ahead(const Block& block, long chunk) const {
        return {(const char*)(b_of(block) + chunk * COLUMNS), call.out_features * (long)sizeof(T)};
    }

    // Computes rows `first` to `end` of a part of a block's `inner` [part][stride][MOST_TOKENS].
    void multiply(const Block& block, long part, long first, long end, Inner* inner, const Ahead& ahead) const {
        const long rank = rank_of(block);
        end = std::min(end, rank);
        if (first >= end) return;
        const T* x[MOST_TOKENS];
        for (int t = 0; t < block.count; t++) x[t] = (const T*)call.x + block.tokens[t] * call.x_stride;
        Inner* to = inner + (part * stride + first) * MOST_TOKENS;
        const T* a = a_of(block, part, first);
        with_count(block.count, [&](auto count) {
            all_products<count.value>(x, a, end - first, call.in_features, to, ahead);
        });
    }

    // Adds the products of a block's `inner` to the outputs of a chunk.
    void add(const Block& block, long chunk, const Inner* inner, const Ahead& ahead) const {
        if (call.gated) return activate(block, chunk, inner, ahead);
        const long begin = chunk * COLUMNS, stop = std::min<long>(call.out_features, begin + COLUMNS);
        for (long part = 0, from = 0; part < call.num_parts; from = call.ends[part++]) {
            const long first = std::max(from, begin), end = std::min<long>(call.ends[part], stop);
            if (first >= end) continue;
            T* to[MOST_TOKENS];
            for (int t = 0; t < block.count; t++) to[t] = out_of(block, t) + first;
            add_some(block, part, first, end, inner, to, ahead);
        }
    }

    // The same for a chunk of gates and its ups, of which the activation is written.
    void activate(const Block& block, long chunk, const Inner* inner, const Ahead& ahead) const {
        const long size = call.out_features / 2, begin = chunk * COLUMNS, count = std::min(COLUMNS, size - begin);
        T sums[2][MOST_TOKENS][COLUMNS];
        Ahead own = ahead;
        for (long part = 0; part < 2; part++) {
            T* to[MOST_TOKENS];
            for (int t = 0; t < block.count; t++) to[t] = sums[part][t];
            add_some(block, part, part * size + begin, part * size + begin + count, inner, to, own);
            own.from += size * (long)sizeof(T);
        }
        for (int t = 0; t < block.count; t++) {
            const T *gates = sums[0][t], *ups = sums[1][t];
            T* to = (T*)call.gated + block.tokens[t] * size + begin;
            for_vectors(count, [&](long i, auto some) __attribute__((always_inline)) {
                store(to + i, gated(load(gates + i, some), load(ups + i, some), call.activation), some);
            });
        }
    }

    T* out_of(const Block& block, int t) const { return (T*)call.out + block.tokens[t] * call.out_stride; }

    // Adds products to outputs `first` to `end`, which belong to one part, and writes the sums to `to`.
    void add_some(const Block& block, long part, long first, long end, const Inner* inner, T* const* to,
                  const Ahead& ahead) const {
        const bool has_factors = call.factors != nullptr && block.adapter >= 0;
        const float* factors = has_factors ? call.factors + block.adapter * call.out_features : nullptr;
        const float* shifts = has_factors ? call.shifts + block.adapter * call.out_features : nullptr;
        const T* out[MOST_TOKENS];
        for (int t = 0; t < block.count; t++) out[t] = out_of(block, t);
        with_count(block.count, [&](auto count) {
            add_outputs<count.value>(inner + part * stride * MOST_TOKENS, b_of(block), rank_of(block), call.out_features,
                                     out, first, end, factors, shifts, to, ahead);
        });
    }

    const AddLowRankCall& call;
    const std::vector<Block> blocks;
    const long stride;  // rows of a part's inner
    const long num_chunks;
};

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" int quire_add_low_rank(const AddLowRankCall* call) {
    return with_type(call->dtype, [&](auto* type) { Task<std::remove_pointer_t<decltype(type)>>(*call).run(); });
}
