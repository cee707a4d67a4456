// Gates around recurrent layers and around attention. `quire.ops.recurrent` defines the operations. All arithmetic is in
// float32. Every function returns 0, or 1 if this machine's build has no code for the dtype; nothing is then written.

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <cmath>
#include <type_traits>

namespace quire {
namespace {

constexpr long WORTH_A_THREAD = 1 << 14;  // elements below which waking other threads costs more than they save

// x times the factor that a gate's number z becomes; see MultiplyGateCall.
Floats gated(long activation, Floats x, Floats z) {
    switch (activation) {
        case 0: return x * silu(z);
        case 1: return times_sigmoid(x, z);
        case 3: return x * softplus(z);
        default: return x * z;
    }
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" int quire_gated_rms_norm(const GatedRmsNormCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long groups = call->groups, size = call->size, count = call->num_tokens * groups;
        for_each(count, count * size > WORTH_A_THREAD ? call->num_threads : 1, [&](long i) {
            const long token = i / groups, group = i % groups;
            const T* x = (const T*)call->x + token * call->x_stride + group * size;
            const T* gate = (const T*)call->gate + token * call->gate_stride + group * size;
            const T* weight = (const T*)call->weight + group * call->weight_stride;
            T* out = (T*)call->out + i * size;
            const auto input = [&](long at) {
                const Floats value = load(x + at, size - at);
                return call->is_gate_first ? gated(call->activation, value, load(gate + at, size - at)) : value;
            };
            Floats squares{};
            for (long at = 0; at < size; at += LANES) squares += input(at) * input(at);
            const float inverse = 1 / std::sqrt(sum(squares) / size + (float)call->eps);
            for (long at = 0; at < size; at += LANES) {
                const Floats scaled = input(at) * inverse * load(weight + at, size - at);
                const Floats result =
                    call->is_gate_first ? scaled : gated(call->activation, scaled, load(gate + at, size - at));
                store(out + at, result, size - at);
            }
        });
    });
}

extern "C" int quire_multiply_gate(const MultiplyGateCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long size = call->size, share = size / call->num_gates;
        for_each(call->num_tokens, call->num_tokens * size > WORTH_A_THREAD ? call->num_threads : 1, [&](long token) {
            const T *x = (const T*)call->x + token * call->x_stride;
            const T *gate = (const T*)call->gate + token * call->gate_stride;
            T* out = (T*)call->out + token * size;
            if (share == 1) {
                for (long i = 0; i < size; i += LANES) {
                    const Floats z = load(gate + i, size - i);
                    store(out + i, gated(call->activation, load(x + i, size - i), z), size - i);
                }
                return;
            }
            for (long g = 0; g < call->num_gates; g++, x += share, out += share) {
                const Floats factor = gated(call->activation, fill(1), fill(load(gate + g, 1)[0]));
                for (long i = 0; i < share; i += LANES) store(out + i, load(x + i, share - i) * factor, share - i);
            }
        });
    });
}
