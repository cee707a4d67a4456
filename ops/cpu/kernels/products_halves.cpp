// Products with codes of four bits.

#include "products.h"

namespace quire {
namespace quantized {

template void multiply_panels(const Layout<Int4>&, const uint8_t*, int, const float*, const Tiles&, float*);
template void multiply_panels(const Layout<Table4>&, const uint8_t*, int, const float*, const Tiles&, float*);

}  // namespace quantized
}  // namespace quire
