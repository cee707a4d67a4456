// Attention over unquantized caches, in float32. See attention.h.

#include "attention_items.h"

namespace quire {

template void attend<float, float>(const AttentionCall&);
template void attend<float, BFloat16>(const AttentionCall&);
#if defined(QUIRE_HAS_FLOAT16)
template void attend<float, Half>(const AttentionCall&);
#endif

}  // namespace quire
