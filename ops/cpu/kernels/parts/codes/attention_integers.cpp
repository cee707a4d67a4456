// Attention over caches of integer codes, in pairs of int16. See attention.h.

#include "attention_items.h"

namespace quire {

template void attend<CodePair, Int8Code>(const AttentionCall&);
template void attend<CodePair, TwoInt4Codes>(const AttentionCall&);

}  // namespace quire
