// The products of AVX-VNNI by those of AVX2, for processors without AVX-VNNI: `-include` it before the kernels.
#pragma once

#include <immintrin.h>

// What the kernels ask the compiler.
#define __AVXVNNI__ 1

namespace emulated {

// Adds to each sum the products of two neighbours of 16 bits. Sums of 32 bits wrap.
inline __m256i dpwssd(__m256i sum, __m256i x, __m256i y) { return _mm256_add_epi32(sum, _mm256_madd_epi16(x, y)); }

// Adds to each sum the products of four neighbours: bytes without signs by bytes with signs.
inline __m256i dpbusd(__m256i sum, __m256i x, __m256i y) {
    const __m256i low = _mm256_set1_epi16(0xff), even = _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8);
    const __m256i odd_products = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
    return _mm256_add_epi32(dpwssd(sum, _mm256_and_si256(x, low), even), odd_products);
}

}  // namespace emulated

#define _mm256_dpwssd_avx_epi32 emulated::dpwssd
#define _mm256_dpbusd_avx_epi32 emulated::dpbusd
