// Puts a weight into the panels of quantized_panels.h.
#pragma once

#include "threads.h"
#include "quantized_panels.h"

#include <limits>

namespace quire {
namespace quantized {

// Packs all of a call.
template <class C> class Packing {
public:
    explicit Packing(const PackQuantizedCall& call)
        : call(call), weight(call.form, NO_TABLE), layout(weight.layout), panel_bytes(weight.panel_bytes()) {}

    void pack_all() const {
        for_each(weight.num_panels(), call.num_threads, [&](long panel) {
            std::memset(call.panels + panel * panel_bytes, 0, panel_bytes);
            for (long i = 0; i < PANEL; i++) pack_output(panel, i);
        });
    }

private:
    // The weight's row of an output of a panel; -1 if the panel is larger than the rest of the weight.
    long row_of(long panel, long output) const {
        const long out_features = call.form.out_features;
        if (!call.form.is_gated) return panel * PANEL + output < out_features ? panel * PANEL + output : -1;
        const long half = out_features / 2, row = panel * LANES + output % LANES;
        return row < half ? row + output / LANES * half : -1;
    }

    void pack_output(long panel, long output) const {
        const long row = row_of(panel, output), num_groups = call.form.in_features / layout.group;
        if (row < 0) return;
        const uint8_t* codes = (const uint8_t*)call.codes + row * C::row_bytes(call.form.in_features);
        for (long group = 0; group < num_groups; group++) {
            uint8_t* to = call.panels + panel * panel_bytes + group * layout.group_bytes();
            const bool is_finite = pack_group(codes, group * layout.group, output, to + layout.header());
            if constexpr (C::IS_SCALED) {
                put_scale(to, output, call.scales, row * num_groups + group, is_finite);
                if (layout.has_offsets)
                    put_scale(to + layout.scale_bytes(), output, call.offsets, row * num_groups + group, true);
            }
        }
    }

    // Writes the codes of an output from input `first` on into a group's units. Returns true if all are finite.
    bool pack_group(const uint8_t* codes, long first, long output, uint8_t* units) const {
        bool is_finite = true;
        if constexpr (HAS_WORD<C>) {
            for (long i = 0; i < layout.group; i += C::UNIT, units += C::BYTES) {
                const uint32_t word = C::word(codes_of(codes, first + i, std::min<long>(C::UNIT, layout.group - i)));
                std::memcpy(units + output * 4, &word, 4);
            }
        } else {
            for (long i = 0; i < layout.group; i++) {
                auto code = C::code(codes, first + i);
                is_finite = is_finite && C::is_finite(code);
                if constexpr (C::IS_NIBBLE) code ^= call.flip;
                C::put(units + i / C::UNIT * C::BYTES, (int)(i % C::UNIT), output, code);
            }
        }
        return is_finite;
    }

    // `count` codes, no more than a unit's, from the lowest bits up.
    uint32_t codes_of(const uint8_t* codes, long first, long count) const {
        constexpr int BITS = 32 / C::UNIT;
        const uint32_t flips = C::IS_NIBBLE ? (uint32_t)call.flip * 0x11111111u : 0;
        uint32_t found = 0;
        if (count == C::UNIT && first * BITS % 8 == 0) {
            std::memcpy(&found, codes + first * BITS / 8, 4);
            return found ^ flips;
        }
        for (long i = 0; i < count; i++) found |= (uint32_t)C::code(codes, first + i) << (BITS * i);
        return found ^ (flips & (uint32_t)((uint64_t(1) << (BITS * count)) - 1));
    }

    void put_scale(uint8_t* to, long output, const void* from, long at, bool is_finite) const {
        if (layout.dtype == FLOAT32)
            ((float*)to)[output] = is_finite ? ((const float*)from)[at] : std::numeric_limits<float>::quiet_NaN();
        else  // bfloat16 and float16: these bits are NaN in both
            ((uint16_t*)to)[output] = is_finite ? ((const uint16_t*)from)[at] : 0x7fff;
    }

    static constexpr float NO_TABLE[16] = {};  // codes stay what they are

    const PackQuantizedCall& call;
    const CodedWeight<C> weight;
    const Layout<C>& layout;
    const long panel_bytes;
};

}  // namespace quantized
}  // namespace quire
