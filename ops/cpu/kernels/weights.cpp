// Builds the weight of a form; each codec and kind of x has a type. They are compiled only here.

#include "quantized_panels.h"

#include <type_traits>

namespace quire {
namespace quantized {

int with_weight(const WeightForm& form, const float* table, [[maybe_unused]] long x_bits,
                [[maybe_unused]] long rows, const std::function<void(const Weight&)>& body) {
    return with_codec(form.codec, [&](auto* codec) {
        using C = std::remove_pointer_t<decltype(codec)>;
        if constexpr (C::IS_INTEGER) {
#if defined(QUIRE_HAS_TILED_QUADS)
            if (x_bits <= 8 && TiledWeight<C>::suits(form, rows)) return body(TiledWeight<C>(form, table));
#endif
#if defined(QUIRE_HAS_QUADS)
            if (x_bits <= 8) return body(WordWeight<C, typename C::InBytes>(form, table));
#endif
#if defined(QUIRE_HAS_PAIRS)
            if (x_bits <= 16) return body(WordWeight<C, InPairs>(form, table));
#endif
        }
        if constexpr (C::IS_BFLOAT) {
#if defined(QUIRE_HAS_BFLOATS)
            if (x_bits <= 16) return body(WordWeight<C, InBFloats>(form, table));
#endif
        }
        body(CodedWeight<C>(form, table));
    });
}

}  // namespace quantized
}  // namespace quire
