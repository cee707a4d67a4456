// What a processor's instruction sets do not tell of it.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace quire {

// Whether the first cache waits for so many lines at a time that memory can be prefetched into it as fast as into the
// second: AMD's from family 26 (Zen 5) on does, those of Zen 4 and Zen 3 do not. Others were not measured.
inline bool has_deep_first_cache() {
#if defined(__x86_64__)
    static const bool has = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || !__get_cpuid(1, &a, &b, &c, &d)) return false;
        const unsigned family = (a >> 8 & 15) + (a >> 20 & 255);
        return family >= 26;
    }();
    return has;
#else
    return false;
#endif
}

}  // namespace quire
