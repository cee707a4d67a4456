// Rows of packed weights: what an embedding takes of the weight that it shares with a head.
//
// A row has one element a step in its panel, so the whole panel is dequantized. That is little compared to a layer.

#include "elements.h"
#include "kernels.h"
#include "quantized_panels.h"

#include <algorithm>
#include <vector>

namespace quire {
namespace {

// out = x, rounded; then times `scale`, rounded again.
template <class T> void write_row(const float* x, long size, float scale, T* out) {
    for (long i = 0; i < size; i += LANES) {
        const long left = std::min<long>(LANES, size - i);
        store(out + i, load(x + i, left), left);
        if (scale != 1) store(out + i, load(out + i, left) * scale, left);
    }
}

}  // namespace

namespace quantized {
namespace {

// Number `order[i]` of `to` = number i of an output of a panel; without an order, number i.
template <class C>
void widen_output(const Layout<C>& weight, const uint8_t* panel, long output, const int64_t* order, float* to) {
    const C codec = weight.codec;
    const long half = output / LANES, lane = output % LANES;
    for (long start = 0; start < weight.inputs; start += weight.group, panel += weight.group_bytes()) {
        Floats scale[2], offset[2];
        if constexpr (C::IS_SCALED) weight.load_scales(panel, scale, offset);
        const uint8_t* units = panel + weight.header();
        for (long first = 0; first < weight.group; first += C::UNIT, units += C::BYTES) {
            const typename C::Unit unit = C::load(units);
            const auto widen = [&](auto within) {
                Floats numbers[C::AT_ONCE][2];
                codec.template widen<decltype(within)::value>(unit, numbers);
                for (int part = 0; part < C::AT_ONCE; part++) {
                    const long step = first + within + part;
                    if (step >= weight.group) return;
                    Floats number = numbers[part][half];
                    if constexpr (C::IS_SCALED) number = multiply_add(number, scale[half], offset[half]);
                    to[order ? order[start + step] : start + step] = number[lane];
                }
            };
            for_unit<C>(widen, std::make_integer_sequence<int, C::UNIT / C::AT_ONCE>());
        }
    }
}

}  // namespace
}  // namespace quantized
}  // namespace quire

using namespace quire;

// 0; 1 if this machine's build has no code for a type; 2 if an index is out of range.
extern "C" int quire_take_quantized_rows(const TakeQuantizedRowsCall* call) {
    const WeightForm& form = call->form;
    for (long i = 0; i < call->count; i++)
        if (call->index[i] < 0 || call->index[i] >= form.out_features) return 2;
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        quantized::with_codec(form.codec, [&](auto* codec) {
            using C = std::remove_pointer_t<decltype(codec)>;
            const quantized::CodedWeight<C> weight(form, call->table);
            const long elements = call->count * form.in_features * quantized::PANEL;
            parallel(call->count, elements, call->num_threads, [&](long i) {
                std::vector<float> row(form.in_features);
                const uint8_t* panel = call->panels + call->index[i] / quantized::PANEL * weight.panel_bytes();
                quantized::widen_output(weight.layout, panel, call->index[i] % quantized::PANEL, call->order, row.data());
                write_row(row.data(), form.in_features, (float)call->scale, (T*)call->out + i * form.in_features);
            });
        });
    });
}
