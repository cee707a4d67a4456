// Products with codes of eight bits.

#include "products.h"

namespace quire {
namespace quantized {

template void multiply_panels(const Layout<Int8>&, const uint8_t*, int, const float*, const Tiles&, float*);
template void multiply_panels(const Layout<Float8<4>>&, const uint8_t*, int, const float*, const Tiles&, float*);
template void multiply_panels(const Layout<Float8<5>>&, const uint8_t*, int, const float*, const Tiles&, float*);

}  // namespace quantized
}  // namespace quire
