// The operations around the attention of multi-head latent attention. `quire.ops.latent` defines them.
//
// Every function returns 0, or 1 if this machine's build has no code for the dtype; nothing is then written.

#include "elements.h"
#include "kernels.h"
#include "rows.h"
#include "threads.h"
#include "tiles.h"
#include "vector.h"

#include <algorithm>
#include <type_traits>

namespace quire {
namespace {

constexpr long TOKENS = 30;  // tokens of one head that a thread takes at a time
constexpr int TOGETHER = 6;  // tokens whose sums are in registers at once: a weight is converted once for all of them
constexpr long MOST_INPUTS = 1024;
constexpr double WORTH_THREADS = 1e5;  // multiplications below which one thread works alone

// out[row] = x[row] * weight for ROWS rows and N vectors of outputs.
template <int ROWS, int N, class T>
inline void multiply_head(const float* x, const T* weight, long inputs, long outputs, T* out, long out_stride) {
    Floats total[ROWS][N] = {};
    for (long t = 0; t < inputs; t++)
        for (int n = 0; n < N; n++) {
            const Floats column = load(weight + t * outputs + n * LANES);
            for (int row = 0; row < ROWS; row++) total[row][n] = multiply_add(fill(x[row * MOST_INPUTS + t]), column, total[row][n]);
        }
    for (int row = 0; row < ROWS; row++)
        for (int n = 0; n < N; n++) store(out + row * out_stride + n * LANES, total[row][n]);
}

// The outputs past the last whole vector.
template <class T>
void multiply_rest(const float* x, const T* weight, long inputs, long outputs, long rest, T* out) {
    Floats total{};
    for (long t = 0; t < inputs; t++) total = multiply_add(fill(x[t]), load(weight + t * outputs, rest), total);
    store(out, total, rest);
}

// `rows` tokens of one head.
template <class T>
void multiply_rows(const float* x, long rows, const T* weight, long inputs, long outputs, T* out, long out_stride) {
    for (long row = 0; row < rows; row += TOGETHER) {
        const float* from = x + row * MOST_INPUTS;
        T* to = out + row * out_stride;
        with_rows<TOGETHER>(std::min<long>(TOGETHER, rows - row), [&](auto constant) {
            constexpr int ROWS = constant(), N = ROWS > 2 ? 2 : 8 / ROWS;
            long o = 0;
            for (; o + N * LANES <= outputs; o += N * LANES)
                multiply_head<ROWS, N>(from, weight + o, inputs, outputs, to + o, out_stride);
            for (; o + LANES <= outputs; o += LANES)
                multiply_head<ROWS, 1>(from, weight + o, inputs, outputs, to + o, out_stride);
            for (int i = 0; o < outputs && i < ROWS; i++)
                multiply_rest(from + i * MOST_INPUTS, weight + o, inputs, outputs, outputs - o, to + i * out_stride + o);
        });
    }
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" int quire_head_linear(const HeadLinearCall* call) {
    const long inputs = call->in_features, outputs = call->out_features, heads = call->heads;
    if (inputs > MOST_INPUTS) return 1;
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long pieces = (call->num_tokens + TOKENS - 1) / TOKENS;
        const bool is_small = (double)call->num_tokens * heads * inputs * outputs < WORTH_THREADS;
        for_each(heads * pieces, is_small ? 1 : call->num_threads, [&](long index) {
            const long head = index / pieces, token = index % pieces * TOKENS;
            const long rows = std::min(TOKENS, call->num_tokens - token);
            const T* x = (const T*)call->x + token * call->token_stride + head * call->head_stride;
            alignas(64) float wide[TOKENS * MOST_INPUTS];
            for (long row = 0; row < rows; row++)
                for (long i = 0; i < inputs; i += LANES)
                    store(wide + row * MOST_INPUTS + i, load(x + row * call->token_stride + i, inputs - i), inputs - i);
            multiply_rows(wide, rows, (const T*)call->weight + head * inputs * outputs, inputs, outputs,
                          (T*)call->out + (token * heads + head) * outputs, heads * outputs);
        });
    });
}

extern "C" int quire_rotate_and_store_latent(const RotateAndStoreLatentCall* call) {
    constexpr long MOST = 1024;
    const long rank = call->rank, size = call->rotary_dim, turned = call->turned_dim, heads = call->heads;
    const bool is_float = call->weight_dtype == FLOAT32;
    if (rank > MOST || size > MOST || (!is_float && call->weight_dtype != call->dtype)) return 1;
    int failed = 0;
    int unknown = with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        failed = with_cache_type(call->cache_dtype, [&](auto* cache_type) {
            using Cache = std::remove_pointer_t<decltype(cache_type)>;
            const float eps = (float)call->eps, largest = (float)call->largest;
            const long elements = call->num_tokens * (rank + (heads + 1) * size);
            parallel(call->num_tokens, elements, call->num_threads, [&](long token) {
                const T *c = (const T*)call->cos + token * turned, *s = (const T*)call->sin + token * turned;
                T normal[MOST], pairs[MOST], key[MOST];
                const auto turn = [&](const T* x, T* out) {
                    rotate(call->is_interleaved ? halves(x, pairs, size, size) : x, c, s, out, size, turned);
                };
                const T* latent = (const T*)call->latent + token * call->latent_stride;
                const long slot = call->slots[token], block_size = call->block_size;
                Cache* to = (Cache*)call->cache + slot / block_size * call->page_stride +
                            slot % block_size * call->row_stride;
                normalize(latent, call->weight, is_float, 0, normal, rank, eps);
                store_row(normal, to, rank, largest);
                turn(latent + rank, key);
                store_row(key, to + row_size<Cache>(rank), size, largest);
                const T* q = (const T*)call->q + token * call->q_token_stride;
                T* out = (T*)call->out + token * heads * size;
                for (long head = 0; head < heads; head++) turn(q + head * call->q_head_stride, out + head * size);
            });
        });
    });
    return unknown | failed;
}
