// Chooses the units of a call of attention over a cache of plain numbers. See attention.h.

#include "attention.h"

#include <type_traits>

// Returns 0, or 1 if this machine's build has no code for the dtypes; `out` is then unchanged.
extern "C" int quire_attention(const quire::AttentionCall* call) {
    using namespace quire;
#if defined(QUIRE_HAS_AMX)
    if (call->q_dtype == BFLOAT16 && call->kv_dtype == BFLOAT16 && call->head_dim % 32 == 0 && may_use_tiles())
        return attend<TiledPair, BFloat16>(*call), 0;
#endif
#if defined(QUIRE_HAS_AVX512_BF16)
    if (call->q_dtype == BFLOAT16 && call->kv_dtype == BFLOAT16 && call->head_dim % 2 == 0)
        return attend<Pair, BFloat16>(*call), 0;
#endif
    if (with_type(call->q_dtype, [](auto*) {})) return 1;
    return with_type(call->kv_dtype,
                     [&](auto* type) { attend<float, std::remove_pointer_t<decltype(type)>>(*call); });
}
