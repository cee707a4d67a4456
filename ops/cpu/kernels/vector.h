// Vectors of float32 as wide as the machine's registers: load, store, convert, and elementwise functions.
//
// The code uses the compiler's vector extension, so that one source serves AVX-512, AVX2 and NEON. Intrinsics are used
// only if the extension cannot express an instruction that matters. All arithmetic is in float32.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Instruction sets are used in groups, each whole or not at all: some processors with AVX-512 lack its later parts, and
// compiler flags can be combined at will.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define QUIRE_HAS_AVX512 1
#endif
#if defined(QUIRE_HAS_AVX512) && defined(__AVX512VNNI__)
#define QUIRE_HAS_AVX512_VNNI 1
#endif
#if defined(__AVX2__) && !defined(QUIRE_HAS_AVX512) && defined(__AVXVNNI__)
#define QUIRE_HAS_AVX_VNNI 1
#endif
#if defined(QUIRE_HAS_AVX512) && defined(__AVX512BF16__)
#define QUIRE_HAS_AVX512_BF16 1
#endif
#if defined(QUIRE_HAS_AVX512) || (defined(__AVX__) && defined(__F16C__)) || defined(__aarch64__)
#define QUIRE_HAS_FLOAT16 1
#endif

namespace quire {

#if defined(QUIRE_HAS_AVX512)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));

struct BFloat16 { uint16_t bits; };
struct Half { uint16_t bits; };

// The values by which Python passes dtypes.
enum Dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// The values by which Python passes activation functions.
enum Activation { NO_ACTIVATION = -1, SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2, GELU = 3, RELU = 4, RELU2 = 5, QUICK_GELU = 6, CLAMPED_SILU = 7 };

// Calls body with a null pointer of the dtype's type, and returns 0. Returns 1, without a call, if this machine's build
// has no such type.
template <class Body> inline int with_type(long dtype, Body body) {
    switch (dtype) {
        case FLOAT32: return body(static_cast<float*>(nullptr)), 0;
        case BFLOAT16: return body(static_cast<BFloat16*>(nullptr)), 0;
#if defined(QUIRE_HAS_FLOAT16)
        case FLOAT16: return body(static_cast<Half*>(nullptr)), 0;
#endif
        default: return 1;
    }
}

inline long round_up(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }

template <class To, class From> inline To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

template <class T> inline T read(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline Floats fill(float value) { return value - Floats{}; }

inline Floats load(const float* from) { return read<Floats>(from); }

inline Floats load(const BFloat16* from) {
#if defined(QUIRE_HAS_AVX512)  // one instruction, which GCC 12 does not find for the conversion below
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(read<__m256i>(from)), 16);
#elif defined(__AVX2__)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(read<__m128i>(from)), 16);
#else
    return bits_as<Floats>(__builtin_convertvector(read<Shorts>(from), Words) << 16);
#endif
}

// Loads 2 * LANES elements as two vectors, in the order that is fastest.
template <class T> inline void load_pair(const T* from, Floats& x, Floats& y) { x = load(from), y = load(from + LANES); }

inline void load_pair(const BFloat16* from, Floats& x, Floats& y) {
    const Words both = read<Words>(from);
    x = bits_as<Floats>(both << 16), y = bits_as<Floats>(both & 0xffff0000);
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }

inline void store(BFloat16* to, Floats x) {
#if defined(QUIRE_HAS_AVX512_BF16)
    __m256bh half = _mm512_cvtneps_pbh((__m512)x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    bfloat16x4_t half = vcvt_bf16_f32((float32x4_t)x);
#else
    Words bits = bits_as<Words>(x);
    Words even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    Words rounded = x == x ? even : (bits >> 16) | 0x40;      // NaN stays NaN
    Shorts half = __builtin_convertvector(rounded, Shorts);
#endif
    std::memcpy(to, &half, sizeof(half));
}

template <class T> inline void store_pair(T* to, Floats x, Floats y) { store(to, x), store(to + LANES, y); }

#if defined(QUIRE_HAS_AVX512_BF16)
inline void store_pair(BFloat16* to, Floats x, Floats y) {  // in one store
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
    std::memcpy(to, &both, sizeof(both));
}
#endif

#if defined(QUIRE_HAS_FLOAT16)
inline Floats load(const Half* from) {
#if defined(QUIRE_HAS_AVX512)
    return (Floats)_mm512_cvtph_ps(read<__m256i>(from));
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16(read<float16x4_t>(from));
#else
    return (Floats)_mm256_cvtph_ps(read<__m128i>(from));
#endif
}

inline void store(Half* to, Floats x) {
#if defined(QUIRE_HAS_AVX512)
    auto half = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    auto half = vcvt_f16_f32((float32x4_t)x);
#else
    auto half = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#endif
    std::memcpy(to, &half, sizeof(half));
}
#endif

#if defined(__AVX2__) && !defined(QUIRE_HAS_AVX512)
inline __m256i lanes_below(long count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// Loads the first `count` elements; the other lanes are zero.
template <class T> inline Floats load(const T* from, long count) {
    if (count >= LANES) return load(from);
#if defined(QUIRE_HAS_AVX512)
    const __mmask16 lanes = (__mmask16)((1 << count) - 1);
    if constexpr (sizeof(T) == sizeof(float)) return (Floats)_mm512_maskz_loadu_ps(lanes, from);
    else {
        const __m256i half = _mm256_maskz_loadu_epi16(lanes, from);
        return load(reinterpret_cast<const T*>(&half));
    }
#else
#if defined(__AVX2__)
    if constexpr (sizeof(T) == sizeof(float)) return (Floats)_mm256_maskload_ps((const float*)from, lanes_below(count));
#endif
    T padded[LANES] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
#endif
}

template <class T> inline void store(T* to, Floats x, long count) {
    if (count >= LANES) return store(to, x);
#if defined(QUIRE_HAS_AVX512)
    if constexpr (sizeof(T) == sizeof(float)) return _mm512_mask_storeu_ps(to, (__mmask16)((1 << count) - 1), (__m512)x);
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == sizeof(float)) return _mm256_maskstore_ps((float*)to, lanes_below(count), (__m256)x);
#endif
    T padded[LANES];
    store(padded, x);
    std::memcpy(to, padded, count * sizeof(T));
}

inline void store(int32_t* to, Ints x, long count) { store((float*)to, bits_as<Floats>(x), count); }

// Rounds x to type T, as a store and a load would.
template <class T> inline Floats rounded(Floats x) {
    T memory[LANES];
    store(memory, x);
    return load(memory);
}

// x * y + z with one rounding, if the machine has such an instruction. The compiler fuses what is written with operators
// in some loops and not in others, so that sums would depend on how many rows are computed together.
inline Floats multiply_add(Floats x, Floats y, Floats z) {
#if defined(QUIRE_HAS_AVX512)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__AVX__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
    return x * y + z;
#endif
}

inline float sum(Floats x) {
#if defined(QUIRE_HAS_AVX512)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}

inline int32_t sum(Ints x) {
#if defined(QUIRE_HAS_AVX512)
    return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(__AVX2__)
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}

// The greater of each lane; y if either is NaN.
inline Floats greater(Floats x, Floats y) {
#if defined(QUIRE_HAS_AVX512)
    return (Floats)_mm512_max_ps((__m512)x, (__m512)y);
#else
    return x > y ? x : y;
#endif
}

inline float largest(Floats x) {
#if defined(QUIRE_HAS_AVX512)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// The greatest number of a, of b, of c and of d, in the first four lanes.
inline Floats largest(Floats a, Floats b, Floats c, Floats d) {
#if defined(QUIRE_HAS_AVX512)
    const auto of_two = [](Floats x, Floats y) {  // of each 128 bits: x, y, x, y
        const __m512 upper = _mm512_unpackhi_ps((__m512)x, (__m512)y);
        return greater((Floats)_mm512_unpacklo_ps((__m512)x, (__m512)y), (Floats)upper);
    };
    const __m512d ab = (__m512d)of_two(a, b), cd = (__m512d)of_two(c, d);
    __m512 all = (__m512)greater((Floats)_mm512_unpacklo_pd(ab, cd), (Floats)_mm512_unpackhi_pd(ab, cd));
    all = _mm512_max_ps(all, _mm512_shuffle_f32x4(all, all, 0x4e));
    return (Floats)_mm512_max_ps(all, _mm512_shuffle_f32x4(all, all, 0xb1));
#elif defined(__AVX2__)
    const auto of_two = [](Floats x, Floats y) {
        const __m256 upper = _mm256_unpackhi_ps((__m256)x, (__m256)y);
        return greater((Floats)_mm256_unpacklo_ps((__m256)x, (__m256)y), (Floats)upper);
    };
    const __m256d ab = (__m256d)of_two(a, b), cd = (__m256d)of_two(c, d);
    const __m256 all = (__m256)greater((Floats)_mm256_unpacklo_pd(ab, cd), (Floats)_mm256_unpackhi_pd(ab, cd));
    return greater((Floats)all, (Floats)_mm256_permute2f128_ps(all, all, 1));
#else
    Floats all{};
    all[0] = largest(a), all[1] = largest(b), all[2] = largest(c), all[3] = largest(d);
    return all;
#endif
}

// 2^x within 2 ulp for x up to 127. A subnormal result is 0 or near 0; 2^-inf is 0; NaN stays NaN.
inline Floats exp2(Floats x) {
#if defined(QUIRE_HAS_AVX512)
    constexpr int FLOOR = 0x09;  // r = x - floor(x); scalef multiplies by 2^floor(x)
    const Floats r = (Floats)_mm512_reduce_ps((__m512)x, FLOOR);
    Floats p = fill(1.86712982e-3f);
    p = p * r + 9.01703071e-3f;
    p = p * r + 5.57999127e-2f;
    p = p * r + 2.40164444e-1f;
    p = p * r + 6.93151295e-1f;
    p = p * r + 1.0f;
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    const Floats low = fill(-126.0f), magic = fill(12582912.0f);  // 1.5 * 2^23: rounds to integers
    const Floats clamped = x < low ? low : x, shifted = clamped + magic;
    Floats r = clamped - (shifted - magic);
    Floats p = fill(1.535336188e-4f);
    p = p * r + 1.339887440e-3f;
    p = p * r + 9.618437358e-3f;
    p = p * r + 5.550332472e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472029e-1f;
    p = p * r + 1.0f;
    Ints exponent = (bits_as<Ints>(shifted) - bits_as<Ints>(magic) + 127) << 23;
    return x < low ? Floats{} : p * bits_as<Floats>(exponent);
#endif
}

// x / (1 + e^-z). For z below -86 the result is x * 2^-125, because 2^125 is still a normal number.
inline Floats times_sigmoid(Floats x, Floats z) {
    const Floats high = fill(125.0f);
    Floats exponent = z * -1.44269504f;
    exponent = exponent > high ? high : exponent;
    const Floats share = exp2(exponent) + 1;
#if defined(QUIRE_HAS_AVX512)  // a division takes longer than all of the above
    const Floats inverse = (Floats)_mm512_rcp14_ps((__m512)share);
    return x * (inverse * (2 - share * inverse));
#else
    return x / share;
#endif
}

// tanh(x): a series near 0, where the difference of two exponentials would lose digits.
inline Floats tanh(Floats x) {
    const Floats square = x * x, magnitude = x < 0 ? -x : x;
    Floats series = fill(-8.863236e-3f);
    series = series * square + 2.186949e-2f;
    series = series * square + -5.396825e-2f;
    series = series * square + 1.333333e-1f;
    series = series * square + -3.333333e-1f;
    const Floats falling = exp2(magnitude * -2.88539008f);  // e^(-2|x|)
    const Floats far = (1 - falling) / (1 + falling);
    return magnitude < 0.25f ? x + x * square * series : (x < 0 ? -far : far);
}

inline Floats silu(Floats x) { return times_sigmoid(x, x); }

// x / 2 * (1 + tanh(z / 2)) with z = sqrt(8 / pi) * (x + 0.044715 * x^3).
inline Floats gelu_tanh(Floats x) { return times_sigmoid(x, x * (x * x * 0.0713548163f + 1.59576912f)); }

// x / 2 * (1 + erf(x / sqrt(2))), with erf within 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline Floats gelu(Floats x) {
    const Floats z = (x < 0 ? -x : x) * 0.707106781f, t = 1 / (1 + z * 0.3275911f);
    Floats p = fill(1.061405429f);
    p = p * t + -1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t + -0.284496736f;
    p = p * t + 0.254829592f;
    const Floats tail = p * t * exp2(z * z * -1.44269504f) * 0.5f;  // of the normal distribution beyond |x|
    return x * (x < 0 ? tail : 1 - tail);
}

inline Floats relu(Floats x) { return x < 0 ? Floats{} : x; }

inline Floats activate(Floats x, long activation) {
    switch (activation) {
        case GELU_TANH: return gelu_tanh(x);
        case GELU: return gelu(x);
        case RELU: return relu(x);
        case RELU2: return relu(x) * relu(x);
        case QUICK_GELU: return times_sigmoid(x, x * 1.702f);
        default: return silu(x);
    }
}

// The lesser of each lane; y if either is NaN.
inline Floats lesser(Floats x, Floats y) { return x < y ? x : y; }

// g * sigmoid(1.702 * g) * (u + 1) with g at most 7 and u within [-7, 7]. A NaN stays NaN.
inline Floats clamped_swiglu(Floats gate, Floats up) {
    const Floats limit = fill(7.0f), g = lesser(limit, gate);
    return times_sigmoid(g, g * 1.702f) * (greater(-limit, lesser(limit, up)) + 1);
}

// silu(g) * u with g at most 10 and u within [-10, 10]. A NaN stays NaN.
inline Floats clamped_silu(Floats gate, Floats up) {
    const Floats limit = fill(10.0f);
    return silu(lesser(limit, gate)) * greater(-limit, lesser(limit, up));
}

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// log(1 + e^x): with y = e^-|x|, the greater of x and 0 plus log(1 + y) = 2 * atanh(y / (2 + y)), a series.
inline Floats softplus(Floats x) {
    const Floats y = exp2((x < 0 ? x : -x) * 1.44269504f), z = y / (y + 2), square = z * z;
    Floats series{};
    for (int term = 7; term >= 0; term--) series = series * square + 1.0f / (2 * term + 1);
    return (x < 0 ? Floats{} : x) + 2 * z * series;
}

// The output of a gated layer for gates and their ups.
inline Floats gated(Floats gate, Floats up, long activation) {
    switch (activation) {
        case CLAMPED_SWIGLU: return clamped_swiglu(gate, up);
        case CLAMPED_SILU: return clamped_silu(gate, up);
        default: return activate(gate, activation) * up;
    }
}

}  // namespace quire
