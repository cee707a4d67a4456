// Products with codes of four bits.

#include "products.h"

namespace quire {
namespace widened {

template void multiply_panels(const Layout<Int4>&, const uint8_t*, int, const float*, const Tiles&, float*);
template void multiply_panels(const Layout<Table4>&, const uint8_t*, int, const float*, const Tiles&, float*);

}  // namespace widened
}  // namespace quire
