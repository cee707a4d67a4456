// The processor's tile registers, where it has them: eight of 16 rows of 64 bytes.
#pragma once

#include "vector.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(QUIRE_HAS_AVX512_BF16) && defined(__linux__)
#define QUIRE_HAS_AMX 1

#include <cstdint>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace quire {

// Linux gives a process these registers only if it asks for them, and its later threads with it.
inline bool may_use_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl
    static const bool is_allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return is_allowed;
}

struct TileShape {
    long rows = 16, bytes = 64;
};

// One thread's registers. They are given back at the end: a thread that has them takes longer to switch to.
class TileRegisters {
public:
    TileRegisters() = default;
    TileRegisters(const TileRegisters&) = delete;

    ~TileRegisters() {
        if (shapes) _tile_release();
    }

    // `number`, not 0, stands for these shapes: nothing is done if they are those of the last call.
    template <class Shape> void shape(long number, Shape shape_of) {
        if (number == shapes) return;
        shapes = number;
        alignas(64) struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int tile = 0; tile < 8; tile++) {
            const TileShape shape = shape_of(tile);
            config.bytes[tile] = (uint16_t)shape.bytes, config.rows[tile] = (uint8_t)shape.rows;
        }
        _tile_loadconfig(&config);
    }

private:
    long shapes = 0;
};

}  // namespace quire
#endif
