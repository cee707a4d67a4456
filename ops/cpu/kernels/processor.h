// Properties of a processor that its instruction sets do not show.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace quire {

// Whether the first cache waits for so many lines at a time that memory can be prefetched into it as fast as into the
// second: a Zen 5's does (AMD's family 26; later ones are taken to, too), a Zen 4's does not. Others were not measured.
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
