// Products of bfloat16: codes with x in bfloat16.

#include "word_products.h"

#if defined(QUIRE_HAS_BFLOATS)

namespace quire {
namespace quantized {

template void multiply_words(InBFloats, const Layout<Float8<4>>&, const uint8_t*, int, const uint8_t*, const Tiles&, float*);
template void multiply_words(InBFloats, const Layout<Float8<5>>&, const uint8_t*, int, const uint8_t*, const Tiles&, float*);
template void multiply_words(InBFloats, const Layout<Table4>&, const uint8_t*, int, const uint8_t*, const Tiles&, float*);

}  // namespace quantized
}  // namespace quire
#endif
