// Products with unquantized weights.

#include "products.h"

namespace quire {
namespace quantized {

template void multiply_panels(const Layout<Plain<float>>&, const uint8_t*, int, const float*, const Tiles&, float*);
template void multiply_panels(const Layout<Plain<BFloat16>>&, const uint8_t*, int, const float*, const Tiles&, float*);
#if defined(QUIRE_HAS_FLOAT16)
template void multiply_panels(const Layout<Plain<Half>>&, const uint8_t*, int, const float*, const Tiles&, float*);
#endif

}  // namespace quantized
}  // namespace quire
