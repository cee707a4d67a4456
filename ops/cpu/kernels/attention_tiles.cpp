// Attention in pairs of bfloat16, with AMX. See attention.h.

#include "attention_items.h"
#include "tiles_amx.h"

#if defined(QUIRE_HAS_AMX)

namespace quire {

template void attend<TiledPair, BFloat16>(const AttentionCall&);

}  // namespace quire
#endif
