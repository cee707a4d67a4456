// Products of integers: codes with x of 16 bits.

#include "word_products.h"

#if defined(QUIRE_HAS_PAIRS)

namespace quire {
namespace quantized {

template void multiply_words(InPairs, const Layout<Int8>&, const uint8_t*, int, const uint8_t*, const Tiles&, float*);
template void multiply_words(InPairs, const Layout<Int4>&, const uint8_t*, int, const uint8_t*, const Tiles&, float*);

}  // namespace quantized
}  // namespace quire
#endif
