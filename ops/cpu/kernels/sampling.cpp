// From logits to tokens: masks, the likeliest token of each row, and draws, in the dtype of the model's logits.
// `quire.ops.backend` defines the operations. One thread computes a row, so a token does not depend on other rows.
//
// Every function returns 0, or 1 if this machine's build has no code for the dtype; nothing is then written.

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace quire {
namespace {

constexpr long CHUNK = 2048;              // tokens: few enough to stay in the L1 cache from one pass to the next
constexpr long WORTH_A_THREAD = 1 << 16;  // logits below which waking other threads costs more than they save
constexpr float LOG2_E = 1.44269504f;

// The vector of logits from `begin` on; those past `end` are -inf.
template <class T> inline Floats logits_at(const T* logits, long begin, long end) {
    if (end - begin >= LANES) return load(logits + begin);
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane < (int)(end - begin) ? load(logits + begin, end - begin) : fill(-INFINITY);
}

// Calls body(x, y) for the logits in [begin, end), two vectors at a time, in the order that is fastest.
template <class T, class Body> inline void for_pairs(const T* logits, long begin, long end, Body body) {
    long i = begin;
    for (; i + 2 * LANES <= end; i += 2 * LANES) {
        Floats x, y;
        load_pair(logits + i, x, y);
        body(x, y);
    }
    for (; i < end; i += LANES) body(logits_at(logits, i, end), fill(-INFINITY));
}

// A row in chunks of CHUNK tokens: each chunk's greatest logit, and its sum of weights for a draw.
struct Chunks {
    std::vector<float> most, sums;  // padded to whole vectors with -inf and 0
    long count = 0;

    void begin(long size) {
        count = (size + CHUNK - 1) / CHUNK;
        most.assign(round_up(count, LANES), -INFINITY), sums.assign(round_up(count, LANES), 0);
    }

    float greatest() const {
        Floats greatest = load(most.data());
        for (size_t i = LANES; i < most.size(); i += LANES) greatest = greater(load(most.data() + i), greatest);
        return largest(greatest);
    }
};

Chunks& chunks_of_thread(long size) {
    thread_local Chunks chunks;
    chunks.begin(size);
    return chunks;
}

template <class T> float greatest(const T* logits, long begin, long end) {
    Floats most = fill(-INFINITY), other = most;  // two independent chains of comparisons
    for_pairs(logits, begin, end, [&](Floats x, Floats y) { most = greater(x, most), other = greater(y, other); });
    return largest(greater(most, other));
}

// e^(x - most). A logit of -inf has the weight 0, because it must never be drawn, even if its whole chunk is -inf. NaN
// stays NaN.
inline Floats weight(Floats x, float most) { return exp2((x - (most == -INFINITY ? 0 : most)) * LOG2_E); }

// Element `position` of SplitMix64's sequence from `start`, as a fraction: see `quire.ops.random`.
inline double uniform(uint64_t start, int64_t position) {
    uint64_t bits = start + ((uint64_t)position + 1) * 0x9e3779b97f4a7c15;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
    return (double)((bits ^ bits >> 31) >> 11) * 0x1p-53;
}

// Sums each chunk's weights relative to its own greatest logit, so that memory is read once; then rescales the sums to
// the row's greatest logit.
template <class T> bool draw(const T* logits, long size, double uniform, int64_t* token_id) {
    Chunks& chunks = chunks_of_thread(size);
    for (long chunk = 0; chunk < chunks.count; chunk++) {
        const long begin = chunk * CHUNK, end = std::min(size, begin + CHUNK);
        const float most = chunks.most[chunk] = greatest(logits, begin, end);
        Floats weights{}, others{};
        for_pairs(logits, begin, end, [&](Floats x, Floats y) { weights += weight(x, most), others += weight(y, most); });
        chunks.sums[chunk] = sum(weights + others);
    }
    *token_id = 0;
    const float most = chunks.greatest();
    for (long i = 0; i < chunks.count; i += LANES)
        store(&chunks.sums[i], load(&chunks.sums[i]) * weight(load(&chunks.most[i]), most));
    double total = 0;
    for (long chunk = 0; chunk < chunks.count; chunk++) total += chunks.sums[chunk];
    if (!(total > 0 && std::isfinite(total) && std::isfinite(most))) return false;

    // Finds where the running sum first exceeds the target: the chunk, then the vector in it, then the token. Rounding
    // may put the target at or past the total; then the last one with a weight is taken.
    const double target = uniform * total;
    double before = 0;
    long chunk = -1;
    for (long i = 0; i < chunks.count; i++) {
        if (!(chunks.sums[i] > 0)) continue;
        if (chunk >= 0) before += chunks.sums[chunk];
        chunk = i;
        if (before + chunks.sums[i] > target) break;
    }
    long first = -1;
    Floats weights{};
    float part = 0;
    for (long i = chunk * CHUNK, end = std::min(size, i + CHUNK); i < end && before + part <= target; i += LANES) {
        const Floats next = weight(logits_at(logits, i, end), most);
        if (!(sum(next) > 0)) continue;
        before += part;
        first = i, weights = next, part = sum(next);
    }
    for (int lane = 0; lane < LANES; lane++) {
        if (!(weights[lane] > 0)) continue;
        *token_id = first + lane;
        before += weights[lane];
        if (before > target) break;
    }
    return true;
}

// Finds the first of the greatest logits. Returns false if a logit is NaN or the greatest is infinite.
template <class T> bool likeliest(const T* logits, long size, int64_t* token_id) {
    Chunks& chunks = chunks_of_thread(size);
    Ints faults{};
    for (long chunk = 0; chunk < chunks.count; chunk++) {
        Floats most = fill(-INFINITY), other = most;
        for_pairs(logits, chunk * CHUNK, std::min(size, (chunk + 1) * CHUNK), [&](Floats x, Floats y) {
            faults |= (x != x) | (y != y);
            most = greater(x, most), other = greater(y, other);
        });
        chunks.most[chunk] = largest(greater(most, other));
    }
    *token_id = 0;
    const float best = chunks.greatest();
    bool usable = std::isfinite(best);
    for (int lane = 0; lane < LANES; lane++) usable = usable && !faults[lane];
    if (!usable) return false;
    const long chunk = std::find(chunks.most.begin(), chunks.most.end(), best) - chunks.most.begin();
    for (long i = chunk * CHUNK;; i += LANES) {
        const Floats x = logits_at(logits, i, size);
        for (int lane = 0; lane < LANES; lane++)
            if (x[lane] == best) return *token_id = i + lane, true;
    }
}

// Sets logits to `never`, the bits of -inf, where the token's bit is not set.
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

// Sets usable[row] = body(logits of the row, row) for all rows. A call is a DrawCall or a LikeliestCall.
template <class Call, class Body> int for_rows(const Call& call, Body body) {
    return with_type(call.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_each(call.num_rows, call.num_rows * call.size > WORTH_A_THREAD ? call.num_threads : 1, [&](long row) {
            call.usable[row] = body((const T*)call.logits + row * call.stride, row);
        });
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

// logits, starts, positions → token_ids and usable.
extern "C" int quire_draw(const DrawCall* call) {
    return for_rows(*call, [&](auto* logits, long row) {
        return draw(logits, call->size, uniform(call->starts[row], call->positions[row]), call->token_ids + row);
    });
}

// logits → token_ids and usable.
extern "C" int quire_likeliest(const LikeliestCall* call) {
    return for_rows(*call,
                    [&](auto* logits, long row) { return likeliest(logits, call->size, call->token_ids + row); });
}

// Sets logits of `rows` to -inf where the token's bit is not set in the row of bitmask. Returns 1, and writes nothing,
// if a row is out of range.
extern "C" int quire_apply_bitmask(const ApplyBitmaskCall* call) {
    const long count = call->count, size = call->size;
    for (long i = 0; i < count; i++)
        if (call->rows[i] < 0 || call->rows[i] >= call->num_rows) return 1;
    auto run = [&](auto never) {
        using Bits = decltype(never);
        for_each(count, count * size > WORTH_A_THREAD ? call->num_threads : 1, [&](long i) {
            mask((Bits*)call->logits + call->rows[i] * call->stride, call->bitmask + i * ((size + 31) / 32), size, never);
        });
    };
    switch (call->dtype) {
        case FLOAT32: return run(uint32_t{0xff800000}), 0;
        case BFLOAT16: return run(uint16_t{0xff80}), 0;
        case FLOAT16: return run(uint16_t{0xfc00}), 0;
        default: return 1;
    }
}
