// Products with low-rank weights that are added to a linear layer's outputs, with weights of its own for each token.
//
// All arithmetic is in float32, and a result is rounded once. A token's result has the same bits in any batch.
// Returns 0, or 1 if this machine's build has no code for the dtype; nothing is then written.

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace quire {
namespace {

constexpr long WORTH_A_THREAD = 1 << 14;  // products below which waking other threads costs more than they save

// x · y, both of `size` elements.
template <class T> float product(const T* x, const T* y, long size) {
    Floats total{};
    long i = 0;
    for (; i + LANES <= size; i += LANES) total = multiply_add(load(x + i), load(y + i), total);
    float result = sum(total);
    if (i == size) return result;
    const Floats rest = load(x + i, size - i) * load(y + i, size - i);
    for (long lane = 0; lane < size - i; lane++) result += rest[lane];
    return result;
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" int quire_add_low_rank(const AddLowRankCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long rank = call->rank, num_parts = call->num_parts, size = call->in_features, outs = call->out_features;
        const long products = call->num_tokens * rank * (num_parts * size + outs);
        for_each(call->num_tokens, products > WORTH_A_THREAD ? call->num_threads : 1, [&](long token) {
            const long adapter = call->rows[token];
            if (adapter < 0) return;
            const T* x = (const T*)call->x + token * call->x_stride;
            const T* a = (const T*)call->a + adapter * num_parts * rank * size;
            const T* b = (const T*)call->b + adapter * outs * rank;
            T* out = (T*)call->out + token * call->out_stride;
            std::vector<float> inner(rank);
            long at = 0;
            for (long part = 0; part < num_parts; part++, a += rank * size) {
                for (long i = 0; i < rank; i++) inner[i] = product(x, a + i * size, size);
                for (; at < call->ends[part]; at += LANES) {
                    const long count = std::min<long>(LANES, call->ends[part] - at);
                    Floats total = load(out + at, count);
                    for (long i = 0; i < rank; i++)
                        total = multiply_add(fill(inner[i]), load(b + i * outs + at, count), total);
                    store(out + at, total, count);
                }
                at = call->ends[part];
            }
        });
    });
}
