// The tile registers of a processor with AMX: eight tiles of 16 rows of 64 bytes.
#pragma once

#include "vector.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(QUIRE_HAS_AVX512_BF16) && defined(__linux__)
#define QUIRE_HAS_AMX 1
#if defined(__AMX_INT8__) && defined(QUIRE_HAS_AVX512_VNNI)
#define QUIRE_HAS_AMX_INT8 1
#endif

#include <cstdint>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace quire {

// Linux lets a process, and the threads that it starts later, use these registers only if the process asks for them.
inline bool may_use_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl
    static const bool is_allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return is_allowed;
}

struct TileShape {
    long rows = 16, bytes = 64;
};

// One thread's tile registers. They are released at the end, because a context switch takes longer with them.
class TileRegisters {
public:
    TileRegisters() = default;
    TileRegisters(const TileRegisters&) = delete;

    ~TileRegisters() {
        if (shapes) _tile_release();
    }

    // Sets the shapes of all tiles, unless `number` is the number of the last call. `number`, not 0, identifies shapes.
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
