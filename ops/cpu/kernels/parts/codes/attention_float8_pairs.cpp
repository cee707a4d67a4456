// Attention over caches of codes with exponents, in pairs of bfloat16, with vectors. See attention.h.

#include "attention_items.h"

#if defined(QUIRE_HAS_AVX512_BF16)

namespace quire {

template void attend<Pair, E4M3>(const AttentionCall&);
template void attend<Pair, E5M2>(const AttentionCall&);

}  // namespace quire
#endif
