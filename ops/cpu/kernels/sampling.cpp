// From logits to tokens: masks, then the likeliest of each row, or a draw, on the logits as the model wrote them. See
// `quire.ops.Backend` for their meaning. A row belongs to one thread, so its token does not depend on its neighbours.
//
// Every function returns 0, or 1 if this machine's build has no code for the dtype: nothing is written then.

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace quire {
namespace {

constexpr long CHUNK = 512;               // tokens of a chunk: a draw looks for its chunk, then for its token
constexpr long WORTH_A_THREAD = 1 << 16;  // logits below which calling other threads costs more than they save

inline Ints lanes() {
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane;
}

// Up to LANES logits; those past `count` are -inf.
template <class T> inline Floats logits_at(const T* from, long count) {
    if (count >= LANES) return load(from);
    return lanes() < (int)count ? load(from, count) : fill(-INFINITY);
}

template <class T> float greatest(const T* logits, long size) {
    Floats most[4] = {fill(-INFINITY), fill(-INFINITY), fill(-INFINITY), fill(-INFINITY)};  // four do not wait in turn
    for (long i = 0; i < size; i += 4 * LANES)
        for (int n = 0; n < 4; n++) {
            if (i + n * LANES >= size) break;
            Floats x = logits_at(logits + i + n * LANES, size - i - n * LANES);
            most[n] = x > most[n] ? x : most[n];
        }
    return std::max(std::max(largest(most[0]), largest(most[1])), std::max(largest(most[2]), largest(most[3])));
}

// e^(x - most), exactly 0 where that is no normal number: -inf must never be drawn. NaN is kept.
inline Floats weight(Floats x, float most) {
    Floats below = x - most;
    return below < -87.0f ? Floats{} : exp(below);
}

template <class T> bool draw(const T* logits, long size, double uniform, double* sums, int64_t* token_id) {
    const float most = greatest(logits, size);
    const long num_chunks = (size + CHUNK - 1) / CHUNK;
    double total = 0;
    for (long chunk = 0; chunk < num_chunks; chunk++) {
        const long end = std::min(size, (chunk + 1) * CHUNK);
        Floats part{};
        for (long i = chunk * CHUNK; i < end; i += LANES) part += weight(logits_at(logits + i, size - i), most);
        total += sums[chunk] = sum(part);
    }
    *token_id = 0;
    if (!(total > 0 && std::isfinite(total))) return false;

    // Where the running sum first exceeds the target; rounding may put the target at or past the end, so the last
    // place with weight stands by.
    const double target = uniform * total;
    double before = 0;
    long chunk = -1;
    for (long i = 0, n = num_chunks; i < n; i++) {
        if (!(sums[i] > 0)) continue;
        if (chunk >= 0) before += sums[chunk];
        chunk = i;
        if (before + sums[i] > target) break;
    }
    const long end = std::min(size, (chunk + 1) * CHUNK);
    for (long i = chunk * CHUNK; i < end; i += LANES) {
        Floats weights = weight(logits_at(logits + i, size - i), most);
        for (int lane = 0; lane < LANES; lane++) {
            if (!(weights[lane] > 0)) continue;
            *token_id = i + lane;
            before += weights[lane];
            if (before > target) return true;
        }
    }
    return true;
}

// The first of the greatest logits; false if any is NaN or the greatest infinite.
template <class T> bool likeliest(const T* logits, long size, int64_t* token_id) {
    Floats most = fill(-INFINITY);
    Ints place = lanes(), here = place, faults{};
    for (long i = 0; i < size; i += LANES, here += LANES) {
        Floats x = logits_at(logits + i, size - i);
        faults |= x != x;
        place = x > most ? here : place;
        most = x > most ? x : most;
    }
    const float best = largest(most);
    bool usable = std::isfinite(best);
    long first = size;
    for (int lane = 0; lane < LANES; lane++) {
        usable = usable && !faults[lane];
        if (most[lane] == best && place[lane] < first) first = place[lane];
    }
    *token_id = usable ? first : 0;
    return usable;
}

// -inf, by its bits, where the token's bit is not set.
template <class Bits> void mask(Bits* logits, const uint32_t* words, long size, Bits never) {
    for (long word = 0; word * 32 < size; word++, logits += 32) {
        const uint32_t allowed = words[word];
        if (allowed == UINT32_MAX) continue;
        const long count = std::min(32L, size - word * 32);
        if (count == 32)
            for (int i = 0; i < 32; i++) logits[i] = allowed >> i & 1 ? logits[i] : never;
        else
            for (int i = 0; i < count; i++) logits[i] = allowed >> i & 1 ? logits[i] : never;
    }
}

// body(logits of the row, row) → whether they were usable.
template <class Body>
int for_rows(const void* logits, long num_rows, long size, long stride, bool* usable, long dtype, long num_threads,
             Body body) {
    auto run = [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_each(num_rows, num_rows * size > WORTH_A_THREAD ? num_threads : 1,
                 [&](long row) { usable[row] = body((const T*)logits + row * stride, row); });
    };
    switch (dtype) {
        case FLOAT32: return run(static_cast<float*>(nullptr)), 0;
        case BFLOAT16: return run(static_cast<BFloat16*>(nullptr)), 0;
#if defined(QUIRE_HAS_FLOAT16)
        case FLOAT16: return run(static_cast<Half*>(nullptr)), 0;
#endif
        default: return 1;
    }
}

}  // namespace
}  // namespace quire

using namespace quire;

// logits [num_rows, size], rows `stride` apart; uniforms [num_rows] → token_ids and usable [num_rows].
extern "C" int quire_draw(
    const void* logits, const double* uniforms, int64_t* token_ids, bool* usable, long num_rows, long size, long stride,
    long dtype, long num_threads) {
    return for_rows(logits, num_rows, size, stride, usable, dtype, num_threads, [&](auto* from, long row) {
        thread_local std::vector<double> sums;
        sums.resize((size + CHUNK - 1) / CHUNK);
        return draw(from, size, uniforms[row], sums.data(), token_ids + row);
    });
}

extern "C" int quire_likeliest(
    const void* logits, int64_t* token_ids, bool* usable, long num_rows, long size, long stride, long dtype,
    long num_threads) {
    return for_rows(logits, num_rows, size, stride, usable, dtype, num_threads,
                    [&](auto* from, long row) { return likeliest(from, size, token_ids + row); });
}

// Of logits [num_rows, size], rows `stride` apart, those at rows [count]: -inf where the bit of the token is not set in
// their row of bitmask [count, size / 32, rounded up], dense. 1 if there is no such row; nothing is written then.
extern "C" int quire_apply_bitmask(
    void* logits, const int64_t* rows, const uint32_t* bitmask, long count, long num_rows, long size, long stride,
    long dtype, long num_threads) {
    for (long i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= num_rows) return 1;
    auto run = [&](auto never) {
        using Bits = decltype(never);
        for_each(count, count * size > WORTH_A_THREAD ? num_threads : 1, [&](long i) {
            mask((Bits*)logits + rows[i] * stride, bitmask + i * ((size + 31) / 32), size, never);
        });
    };
    switch (dtype) {
        case FLOAT32: return run(uint32_t{0xff800000}), 0;
        case BFLOAT16: return run(uint16_t{0xff80}), 0;
        case FLOAT16: return run(uint16_t{0xfc00}), 0;
        default: return 1;
    }
}
