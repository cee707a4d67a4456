// Attention over caches of codes with exponents, in float32. See attention.h.

#include "attention_items.h"

namespace quire {

template void attend<float, E4M3>(const AttentionCall&);
template void attend<float, E5M2>(const AttentionCall&);

}  // namespace quire
