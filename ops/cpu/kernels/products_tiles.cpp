// Products of integers of 8 bits by instructions that multiply matrices.

#include "tiled_products.h"

#if defined(QUIRE_HAS_TILED_QUADS)

namespace quire {
namespace quantized {

template void multiply_tiled(const Layout<Int8>&, const uint8_t*, int, const uint8_t*, long, long, float*);
template void multiply_tiled(const Layout<Int4>&, const uint8_t*, int, const uint8_t*, long, long, float*);

}  // namespace quantized
}  // namespace quire
#endif
