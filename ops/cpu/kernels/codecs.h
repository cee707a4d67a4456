// Converts a packed weight to float32 in registers: one codec for each kind of code.
//
// A step is the elements of PANEL outputs at one input: two vectors. A codec loads a unit of UNIT steps at once, and
// converts AT_ONCE of them with each call. `put` writes one code into a unit, or `word` returns an output's word
// (HAS_WORD), so that only the codec knows the places of codes. Integer codes (IS_INTEGER) also become words of several
// steps (words.h), of integers, and the other codes (IS_BFLOAT) words of two steps in bfloat16.
#pragma once

#include "vector.h"
#include "words.h"

#include <array>
#include <cmath>
#include <type_traits>
#include <utility>

namespace quire {
namespace quantized {

constexpr long PANEL = 2 * LANES;  // outputs

// The values by which Python passes codecs.
enum CodecNumber {
    PLAIN_FLOAT32 = 0, PLAIN_BFLOAT16 = 1, PLAIN_FLOAT16 = 2, CODE_INT8 = 3, CODE_E4M3 = 4, CODE_E5M2 = 5,
    CODE_INT4 = 6, CODE_TABLE4 = 7,
};

#if defined(QUIRE_HAS_BFLOATS)
constexpr int BFLOAT_STEPS = 2;  // of a unit of codes that become bfloat16

// Two steps as words; bfloat16 represents their values.
inline BFloats in_pairs(Floats first, Floats second) {
    return (BFloats)(bits_as<Words>(first) >> 16 | (bits_as<Words>(second) & 0xffff0000));
}

// Two steps that a codec widens.
template <int WORD, class C> void in_words(const C& codec, const typename C::Unit& unit, BFloats (&to)[2]) {
    Floats first[1][2], second[1][2];
    codec.template widen<2 * WORD>(unit, first);
    codec.template widen<2 * WORD + 1>(unit, second);
    for (int half = 0; half < 2; half++) to[half] = in_pairs(first[0][half], second[0][half]);
}
#else
constexpr int BFLOAT_STEPS = 1;
#endif

// Numbers that are their own values, with no scales.
template <class T> struct Plain {
    using Code = T;
    using Unit = std::array<Floats, 2>;
    static constexpr int UNIT = 1, AT_ONCE = 1;       // steps
    static constexpr long BYTES = PANEL * sizeof(T);  // of a unit
    static constexpr bool IS_SCALED = false, IS_NIBBLE = false, IS_INTEGER = false, IS_BFLOAT = false;
    explicit Plain(const float*) {}
    void adjust(Floats&, Floats&) const {}
    static Unit load(const uint8_t* from) {
        Unit unit;
        load_pair((const T*)from, unit[0], unit[1]);
        return unit;
    }
    template <int FIRST> void widen(const Unit& unit, Floats (*to)[2]) const { to[0][0] = unit[0], to[0][1] = unit[1]; }
    // `load_pair` takes every second bfloat16.
    static long place(long output) {
        if constexpr (!std::is_same_v<T, BFloat16>) return output;
        return output < LANES ? 2 * output : 2 * (output - LANES) + 1;
    }
    static void put(uint8_t* unit, int, long output, T code) { ((T*)unit)[place(output)] = code; }
    static Code code(const void* row, long input) { return ((const T*)row)[input]; }
    static constexpr long row_bytes(long inputs) { return inputs * sizeof(T); }
    static bool is_finite(T) { return true; }
};

// Codes of one byte.
struct Bytes {
    using Code = uint8_t;
    static constexpr bool IS_SCALED = true, IS_NIBBLE = false;
    static bool adds_offset() { return false; }
    static Code code(const void* row, long input) { return ((const uint8_t*)row)[input]; }
    static constexpr long row_bytes(long inputs) { return inputs; }
    static bool is_finite(Code) { return true; }
};

// 8-bit floats with EXPONENT bits of exponent (arXiv:2209.05433). Codes that are no finite number make
// their group's scale NaN when they are packed.
template <int EXPONENT> struct Float8 : Bytes {
    static constexpr int MANTISSA = 7 - EXPONENT, UNIT = BFLOAT_STEPS, AT_ONCE = 1;
    static constexpr long BYTES = UNIT * PANEL;
    static constexpr bool IS_INTEGER = false, IS_BFLOAT = true;
    using Unit = const uint8_t*;
    static Unit load(Unit from) { return from; }
    static void put(uint8_t* unit, int step, long output, Code code) { unit[step * PANEL + output] = code; }
#if defined(QUIRE_HAS_BFLOATS)
    template <int WORD> void in_words(Unit from, BFloats (&to)[2]) const { quantized::in_words<WORD>(*this, from, to); }
#endif
    explicit Float8(const float*) {}
#if defined(QUIRE_HAS_AVX512) || (defined(__AVX2__) && defined(__F16C__))
    // The bits of a float16 that is 2^(2^(EXPONENT - 1) - 16) of the number; `adjust` makes up for that.
    template <int FIRST> void widen(Unit unit, Floats (*to)[2]) const {
        const Unit from = unit + FIRST * PANEL;
        const int16_t mask = (int16_t)(0x8000 | (0x7f << (10 - MANTISSA)));
#if defined(QUIRE_HAS_AVX512)
        const __m512i words = _mm512_slli_epi16(_mm512_cvtepi8_epi16(read<__m256i>(from)), 10 - MANTISSA);
        const __m512i halves = _mm512_and_si512(words, _mm512_set1_epi16(mask));
        to[0][0] = (Floats)_mm512_cvtph_ps(_mm512_castsi512_si256(halves));
        to[0][1] = (Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
#else
        const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(read<__m128i>(from)), 10 - MANTISSA);
        const __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16(mask));
        to[0][0] = (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
        to[0][1] = (Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#endif
    }
    void adjust(Floats& scale, Floats&) const { scale *= (float)(1 << (16 - (1 << (EXPONENT - 1)))); }
#else
    void adjust(Floats&, Floats&) const {}
    // The bits of a float32 that is 2^(2^(EXPONENT - 1) - 128) of the number.
    static Floats widen(const uint8_t* from) {
        typedef uint8_t Few __attribute__((vector_size(LANES)));
        const Words codes = __builtin_convertvector(read<Few>(from), Words);
        const Words bits = (codes & 0x7f) << (23 - MANTISSA) | (codes & 0x80) << 24;
        return bits_as<Floats>(bits) * std::ldexp(1.0f, 128 - (1 << (EXPONENT - 1)));
    }
    template <int FIRST> void widen(Unit from, Floats (*to)[2]) const {
        to[0][0] = widen(from + FIRST * PANEL), to[0][1] = widen(from + FIRST * PANEL + LANES);
    }
#endif
    static bool is_finite(Code code) { return EXPONENT == 4 ? (code & 0x7f) != 0x7f : (code & 0x7f) < 0x7c; }
};

// Codes of four bits. In memory the lower half of a byte is the earlier input.
struct Halves {
    using Code = uint8_t;
    static constexpr bool IS_SCALED = true, IS_NIBBLE = true;
    static bool adds_offset() { return false; }
    static Code code(const void* row, long input) { return ((const uint8_t*)row)[input / 2] >> (4 * (input % 2)) & 15; }
    static constexpr long row_bytes(long inputs) { return inputs / 2; }
    static bool is_finite(Code) { return true; }
};

// A word for each output: the even steps in its lower half and the odd ones in its upper half.
template <int BITS> struct InWords {
    static constexpr int UNIT = 32 / BITS, AT_ONCE = 1;
    static constexpr long BYTES = PANEL * 4;
    using Unit = std::array<Ints, 2>;
    static Unit load(const uint8_t* from) { return {read<Ints>(from), read<Ints>(from + LANES * 4)}; }
    static constexpr int shift(int step) { return step % 2 * 16 + step / 2 * BITS; }
    // A unit's word of the codes of its steps, which follow one another from the lowest bits up.
    static constexpr uint32_t word(uint32_t codes) {
        uint32_t even = codes & EVEN, odd = codes >> BITS & EVEN;
        for (int bits = BITS; bits < 16; bits *= 2) {
            const uint32_t mask = bits == 8 ? 0xffff : 0x00ff00ff;
            even = (even | even >> bits) & mask, odd = (odd | odd >> bits) & mask;
        }
        return even | odd << 16;
    }

private:
    static constexpr uint32_t EVEN = BITS == 4 ? 0x0f0f0f0f : 0x00ff00ff;
};

template <class C> constexpr bool HAS_WORD = std::is_base_of_v<InWords<4>, C> || std::is_base_of_v<InWords<8>, C>;

// Codes that are integers in two's complement.
template <int BITS> struct Integer : InWords<BITS> {
    static constexpr bool IS_INTEGER = true, IS_BFLOAT = false;
    using typename InWords<BITS>::Unit;
    template <int FIRST> static void widen(const Unit& unit, Floats (*to)[2]) {
        constexpr int ABOVE = 32 - BITS - InWords<BITS>::shift(FIRST);
        for (int half = 0; half < 2; half++)
            to[0][half] = __builtin_convertvector(unit[half] << ABOVE >> (32 - BITS), Floats);
    }
    // Steps 2 * PAIR and the next one.
    template <int PAIR> static void in_words(const Unit& unit, Pairs (&to)[2]) {
        constexpr int ABOVE = 16 - BITS - InWords<BITS>::shift(2 * PAIR);
        for (int half = 0; half < 2; half++) to[half] = (Pairs)unit[half] << ABOVE >> (16 - BITS);
    }
#if defined(QUIRE_HAS_QUADS)
#if defined(QUIRE_HAS_SAFE_QUADS)
    using InBytes = std::conditional_t<BITS == 4, InQuads, InSafeQuads>;
#else
    using InBytes = InQuads;
#endif
    static constexpr int MIDDLE = 1 << (BITS - 1);
#if defined(QUIRE_HAS_SIGNED_QUADS)
    // The codes of the steps of quad QUAD.
    template <int QUAD> static void in_words(const Unit& unit, Quads (&to)[2]) {
        constexpr int ABOVE = 8 - BITS - BITS * QUAD;
        for (int half = 0; half < 2; half++) to[half] = (Quads)unit[half] << ABOVE >> (8 - BITS);
    }
#else
    // Code + MIDDLE of the steps of quad QUAD.
    template <int QUAD> static void in_words(const Unit& unit, Quads (&to)[2]) {
        constexpr int MASK = (1 << BITS) - 1;
#if defined(QUIRE_HAS_AVX512)
        constexpr int AND_THEN_XOR = 0x6a;
        for (int half = 0; half < 2; half++)
            to[half] = (Quads)_mm512_ternarylogic_epi32(
                (__m512i)((Words)unit[half] >> (BITS * QUAD)), _mm512_set1_epi8((char)MASK),
                _mm512_set1_epi8((char)MIDDLE), AND_THEN_XOR);
#else  // first what all quads of the unit need
        constexpr uint32_t BYTES = 0x01010101, MIDDLES = MIDDLE * (uint32_t)(0xffffffff / MASK);
        for (int half = 0; half < 2; half++)
            to[half] = (Quads)(((Words)unit[half] ^ MIDDLES) >> (BITS * QUAD) & BYTES * MASK);
#endif
    }
#endif
    // Which steps a vector's bytes are: those of 16 / UNIT units, quad by quad.
    static constexpr std::array<int8_t, 16> quad_order() {
        constexpr int UNIT = InWords<BITS>::UNIT;
        std::array<int8_t, 16> order{};
        for (int step = 0; step < 16; step++) {
            const int shift = InWords<BITS>::shift(step % UNIT), quad = shift % 8 / BITS;
            order[step / UNIT * UNIT + quad * 4 + shift / 8] = (int8_t)step;
        }
        return order;
    }
#endif
};

struct Int8 : Bytes, Integer<8> {
    explicit Int8(const float*) {}
    void adjust(Floats&, Floats&) const {}
};

// A code is an integer n from -8 to 7, with the value table[0] * n + table[1].
struct Int4 : Halves, Integer<4> {
    explicit Int4(const float* table) : factor(table[0]), middle(table[1]) {}
    void adjust(Floats& scale, Floats& offset) const {
        offset = multiply_add(scale, fill(middle), offset);
        scale *= factor;
    }
    bool adds_offset() const { return middle != 0; }

    float factor, middle;
};

#if defined(__AVX2__) && !defined(QUIRE_HAS_AVX512)
// A number's four bytes are looked up one by one, because a shuffle of bytes takes 16 of them, one of words 8.
struct Table4 : Halves {
    static constexpr bool IS_INTEGER = false, IS_BFLOAT = true;
    static constexpr int UNIT = 4, AT_ONCE = 2;
    static constexpr long BYTES = PANEL * 2;
    using Unit = __m256i;
    static Unit load(const uint8_t* from) { return read<__m256i>(from); }
    explicit Table4(const float* table) {
        for (int i = 0; i < 4; i++) {
            uint8_t part[16];
            for (int code = 0; code < 16; code++) part[code] = (uint8_t)(bits_as<uint32_t>(table[code]) >> (8 * i));
            bytes[i] = _mm256_broadcastsi128_si256(read<__m128i>(part));
        }
    }
    template <int FIRST> void widen(const Unit& unit, Floats (*to)[2]) const {
        const __m256i codes = _mm256_and_si256(FIRST ? _mm256_srli_epi16(unit, 4) : unit, _mm256_set1_epi8(15));
        __m256i part[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) part[i] = _mm256_shuffle_epi8(bytes[i], codes);
        const __m256i low[2] = {_mm256_unpacklo_epi8(part[0], part[1]), _mm256_unpackhi_epi8(part[0], part[1])};
        const __m256i high[2] = {_mm256_unpacklo_epi8(part[2], part[3]), _mm256_unpackhi_epi8(part[2], part[3])};
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            to[i][0] = (Floats)_mm256_unpacklo_epi16(low[i], high[i]);
            to[i][1] = (Floats)_mm256_unpackhi_epi16(low[i], high[i]);
        }
    }
    // The instructions above interleave within each half of a register.
    static void put(uint8_t* unit, int step, long output, Code code) {
        const long lane = output % LANES, at = lane / 4 * 16 + step % 2 * 8 + output / LANES * 4 + lane % 4;
        unit[at] |= code << (step / 2 * 4);
    }
    void adjust(Floats&, Floats&) const {}

    __m256i bytes[4];
};
#else
struct Table4 : Halves, InWords<4> {
    static constexpr bool IS_INTEGER = false, IS_BFLOAT = true;
    explicit Table4(const float* from) {
        std::memcpy(table, from, sizeof(table));
#if defined(QUIRE_HAS_BFLOATS)
        store(bfloats, quire::load(table)), store(bfloats + 16, quire::load(table));
#endif
    }
    template <int FIRST> void widen(const Unit& unit, Floats (*to)[2]) const {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const Words codes = (Words)unit[half] >> shift(FIRST) & 15;
#if defined(QUIRE_HAS_AVX512)
            to[0][half] = (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)quire::load(table));
#else
            for (int i = 0; i < LANES; i++) to[0][half][i] = table[codes[i]];
#endif
        }
    }
    void adjust(Floats&, Floats&) const {}

    float table[16];
#if defined(QUIRE_HAS_BFLOATS)
    // A look-up takes five bits of an index. The highest is another code's, so the table is stored twice.
    template <int WORD> void in_words(const Unit& unit, BFloats (&to)[2]) const {
        const __m512i numbers = read<__m512i>(bfloats);
        for (int half = 0; half < 2; half++)
            to[half] = (BFloats)_mm512_permutexvar_epi16((__m512i)((Words)unit[half] >> shift(2 * WORD)), numbers);
    }
    BFloat16 bfloats[32];
#endif
};
#endif

// Calls body with each of 0, AT_ONCE, .. below UNIT as an integral_constant.
template <class C, class Body, int... I>
inline __attribute__((always_inline)) void for_unit(Body body, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I * C::AT_ONCE>()), ...);
}

// Calls body with a null pointer of the codec's type, and returns 0. Returns 1, without a call, if this machine's build
// has no such codec.
template <class Body> inline int with_codec(long number, Body body) {
    switch (number) {
        case PLAIN_FLOAT32: return body((Plain<float>*)nullptr), 0;
        case PLAIN_BFLOAT16: return body((Plain<BFloat16>*)nullptr), 0;
#if defined(QUIRE_HAS_FLOAT16)
        case PLAIN_FLOAT16: return body((Plain<Half>*)nullptr), 0;
#endif
        case CODE_INT8: return body((Int8*)nullptr), 0;
        case CODE_E4M3: return body((Float8<4>*)nullptr), 0;
        case CODE_E5M2: return body((Float8<5>*)nullptr), 0;
        case CODE_INT4: return body((Int4*)nullptr), 0;
        case CODE_TABLE4: return body((Table4*)nullptr), 0;
        default: return 1;
    }
}

}  // namespace quantized
}  // namespace quire
