// The choice of experts: a product in float32, scores, and the best of them.
//
// A token's logits are summed in the same order for any number of tokens.

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

namespace quire {
namespace {

constexpr long TOKENS = 4;    // that share a pass over the weights
constexpr long EXPERTS = 32;  // of a task

// The values by which Python passes scores; 0 is softmax.
enum Score { SIGMOID = 1, SPARSE_MIXER = 2, SQRT_SOFTPLUS = 3 };

template <class T> struct Route {
    const RouteCall& call;
    std::vector<float> logits;  // [rows][num_experts]

    // The logits of up to TOKENS tokens, for experts [begin, end). The last token pads missing ones:
    // the compiler may sum another number of tokens in other ways.
    void multiply(long token, long begin, long end) {
        const long count = std::min(TOKENS, call.rows - token);
        const T* x[TOKENS];
        for (long i = 0; i < TOKENS; i++) x[i] = (const T*)call.x + (token + std::min(i, count - 1)) * call.x_stride;
        for (long expert = begin; expert < end; expert++) {
            const float* weight = call.weight + expert * call.hidden;
            Floats even[TOKENS] = {}, odd[TOKENS] = {};
            long at = 0;
            for (; at + 2 * LANES <= call.hidden; at += 2 * LANES)
                for (int i = 0; i < TOKENS; i++) {
                    even[i] += load(x[i] + at) * load(weight + at);
                    odd[i] += load(x[i] + at + LANES) * load(weight + at + LANES);
                }
            for (; at < call.hidden; at += LANES)
                for (int i = 0; i < TOKENS; i++)
                    even[i] += load(x[i] + at, call.hidden - at) * load(weight + at, call.hidden - at);
            for (long i = 0; i < count; i++)
                logits[(token + i) * call.num_experts + expert] =
                    sum(even[i] + odd[i]) + (call.bias ? call.bias[expert] : 0);
        }
    }

    // Overwrites a token's logits with scores.
    void score(float* logits) const {
        const long count = call.num_experts;
        if (call.score == SQRT_SOFTPLUS) {
            for (long i = 0; i < count; i++)
                logits[i] = std::sqrt(std::max(logits[i], 0.0f) + std::log1p(std::exp(-std::abs(logits[i]))));
            return;
        }
        const bool is_sigmoid = call.score == SIGMOID;
        const float most = is_sigmoid ? 0 : *std::max_element(logits, logits + count);
        float total = 0;
        for (long i = 0; i < count; i += LANES) {
            const Floats x = load(logits + i, count - i);
            store(logits + i, is_sigmoid ? times_sigmoid(fill(1), x) : exp2((x - most) * 1.44269504f), count - i);
        }
        if (is_sigmoid) return;
        for (long i = 0; i < count; i++) total += logits[i];
        for (long i = 0; i < count; i++) logits[i] /= total;
    }

    // Sets the choice of experts to -inf whose group is not among the best.
    void leave_groups(float* choice) const {
        const long size = call.num_experts / call.num_groups;
        std::vector<float> groups(call.num_groups), sorted(size);
        for (long group = 0; group < call.num_groups; group++) {
            std::partial_sort_copy(choice + group * size, choice + (group + 1) * size, sorted.begin(),
                                   sorted.begin() + call.group_best, std::greater<float>());
            for (long i = 0; i < call.group_best; i++) groups[group] += sorted[i];
        }
        std::vector<bool> is_in(call.num_groups);
        for (long i = 0; i < call.top_groups; i++) is_in[best(groups.data(), is_in)] = true;
        for (long group = 0; group < call.num_groups; group++)
            if (!is_in[group])
                std::fill_n(choice + group * size, size, -std::numeric_limits<float>::infinity());
    }

    // The first of the greatest values that are not taken.
    static long best(const float* values, const std::vector<bool>& is_taken) {
        long found = -1;
        for (long i = 0; i < (long)is_taken.size(); i++)
            if (!is_taken[i] && (found < 0 || values[i] > values[found])) found = i;
        return found;
    }

    // The share of an expert among those whose logits are near its own, which is the greatest of those not taken.
    float near_share(const float* logits, const std::vector<bool>& is_taken, long chosen) const {
        const float most = logits[chosen];
        float total = 0;
        for (long i = 0; i < call.num_experts; i++) {
            const bool is_far = (most - logits[i]) / std::max(std::abs(logits[i]), most) > (float)call.distance;
            if (!is_taken[i] && !is_far) total += std::exp(logits[i] - most);
        }
        return 1 / total;
    }

    void choose(long token) {
        float* scores = logits.data() + token * call.num_experts;
        if (call.score != SPARSE_MIXER) score(scores);
        std::vector<float> choice(scores, scores + call.num_experts);
        if (call.correction)
            for (long i = 0; i < call.num_experts; i++) choice[i] += call.correction[i];
        if (call.top_groups < call.num_groups) leave_groups(choice.data());
        std::vector<bool> is_taken(call.num_experts);
        int64_t* ids = call.ids + token * call.top_k;
        float *weights = call.weights + token * call.top_k, total = 0;
        for (long i = 0; i < call.top_k; i++) {
            ids[i] = best(choice.data(), is_taken);
            total += weights[i] = call.score == SPARSE_MIXER ? near_share(scores, is_taken, ids[i]) : scores[ids[i]];
            is_taken[ids[i]] = true;
        }
        const float divisor = call.renormalize ? std::max(total, (float)call.floor) : 1;
        for (long i = 0; i < call.top_k; i++)
            weights[i] = weights[i] / divisor * (float)call.scale * (call.shares ? call.shares[ids[i]] : 1);
    }

    void run() {
        logits.resize(call.rows * call.num_experts);
        const long parts = (call.num_experts + EXPERTS - 1) / EXPERTS, tiles = (call.rows + TOKENS - 1) / TOKENS;
        for_each(tiles * parts, call.num_threads, [&](long task) {
            const long begin = task % parts * EXPERTS;
            multiply(task / parts * TOKENS, begin, std::min(begin + EXPERTS, call.num_experts));
        });
        for_each(call.rows, call.num_threads, [&](long token) { choose(token); });
    }
};

}  // namespace
}  // namespace quire

using namespace quire;

// 0; 1 if this machine's build does not take x's type.
extern "C" int quire_route(const RouteCall* call) {
    return with_type(call->dtype, [&](auto* type) { Route<std::remove_pointer_t<decltype(type)>>{*call, {}}.run(); });
}
