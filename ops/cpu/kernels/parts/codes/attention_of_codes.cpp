// Chooses the units of a call of attention over a cache of codes. See attention.h.

#include "attention.h"

#include <type_traits>

// Like quire_attention.
extern "C" int quire_attention_of_codes(const quire::AttentionCall* call) {
    using namespace quire;
#if defined(QUIRE_HAS_AVX512_BF16)
    if (call->q_dtype == BFLOAT16 && call->kv_dtype == E4M3_CODES && call->head_dim % 2 == 0)
        return attend<Pair, E4M3>(*call), 0;
    if (call->q_dtype == BFLOAT16 && call->kv_dtype == E5M2_CODES && call->head_dim % 2 == 0)
        return attend<Pair, E5M2>(*call), 0;
#endif
    if (with_type(call->q_dtype, [](auto*) {})) return 1;
    return with_codes(call->kv_dtype, [&](auto* type) {
        using Cache = std::remove_pointer_t<decltype(type)>;
        attend<std::conditional_t<IS_WHOLE<Cache>, CodePair, float>, Cache>(*call);
    });
}
