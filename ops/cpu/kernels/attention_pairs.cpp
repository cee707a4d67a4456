// Attention in pairs of bfloat16, with vectors. See attention.h.

#include "attention_items.h"

#if defined(QUIRE_HAS_AVX512_BF16)

namespace quire {

template void attend<Pair, BFloat16>(const AttentionCall&);

}  // namespace quire
#endif
