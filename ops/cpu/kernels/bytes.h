// Sixteen elements as int8 in one register, for the words of word_rows.h.
#pragma once

#include "amx.h"
#include "vector.h"

// Where there are products of four neighbours of 8 bits. ARM's take two signed factors.
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define QUIRE_HAS_SIGNED_QUADS 1
#endif
#if defined(QUIRE_HAS_AVX512_VNNI) || (defined(__AVX2__) && !defined(QUIRE_HAS_AVX512)) || defined(QUIRE_HAS_SIGNED_QUADS)
#define QUIRE_HAS_QUADS 1
#endif
// The same for matrices.
#if defined(QUIRE_HAS_SIGNED_QUADS) && defined(__ARM_FEATURE_MATMUL_INT8)
#define QUIRE_HAS_ARM_MATRICES 1
#endif
#if defined(QUIRE_HAS_AMX_INT8) || defined(QUIRE_HAS_ARM_MATRICES)
#define QUIRE_HAS_TILED_QUADS 1
#endif

#if defined(QUIRE_HAS_QUADS)

namespace quire {
namespace quantized {

#if defined(QUIRE_HAS_SIGNED_QUADS)
using Bytes16 = int8x16_t;

// 16 elements times `inverse` as integers, the first `count` of them from `from`.
template <class T> Bytes16 in_bytes(const T* from, long count, float inverse) {
    int16x4_t shorts[4];
    for (int part = 0; part < 4; part++, from += LANES, count -= LANES) {
        const Floats scaled = count > 0 ? load(from, count) * inverse : Floats{};
        shorts[part] = vqmovn_s32(vcvtnq_s32_f32((float32x4_t)scaled));
    }
    return vcombine_s8(vqmovn_s16(vcombine_s16(shorts[0], shorts[1])), vqmovn_s16(vcombine_s16(shorts[2], shorts[3])));
}

// Bytes order[0], order[1], .. of x.
inline Bytes16 shuffled(Bytes16 x, const int8_t* order) { return vqtbl1q_s8(x, vld1q_u8((const uint8_t*)order)); }
#else
using Bytes16 = __m128i;

// 16 elements times `inverse` as integers, the first `count` of them from `from`.
template <class T> Bytes16 in_bytes(const T* from, long count, float inverse) {
#if defined(QUIRE_HAS_AVX512)
    const Floats scaled = count > 0 ? load(from, count) * inverse : Floats{};
    return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)scaled));
#else
    __m128i shorts[2];
    for (int half = 0; half < 2; half++, from += LANES, count -= LANES) {
        const Floats scaled = count > 0 ? load(from, count) * inverse : Floats{};
        const __m256i rounded = _mm256_cvtps_epi32((__m256)scaled);
        shorts[half] = _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    }
    return _mm_packs_epi16(shorts[0], shorts[1]);
#endif
}

// Bytes order[0], order[1], .. of x.
inline Bytes16 shuffled(Bytes16 x, const int8_t* order) { return _mm_shuffle_epi8(x, read<__m128i>(order)); }
#endif

}  // namespace quantized
}  // namespace quire
#endif
