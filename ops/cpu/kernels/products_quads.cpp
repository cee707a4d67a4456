// Products of integers: codes with x of 8 bits.

#include "word_products.h"

#if defined(QUIRE_HAS_QUADS)

namespace quire {
namespace widened {

#if defined(QUIRE_HAS_AVX512_VNNI)
template void multiply_words(InQuads, const Layout<Int8>&, const uint8_t*, int, const uint8_t*, const Tiles&, float*);
#endif
template void multiply_words(InQuads, const Layout<Int4>&, const uint8_t*, int, const uint8_t*, const Tiles&, float*);

}  // namespace widened
}  // namespace quire
#endif
