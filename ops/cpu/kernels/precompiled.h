// What most sources include. The builder has the compiler parse it once for all of them (`quire.ops.cpu.builder`), since
// the vendor's intrinsics alone take it longer than most sources. Each source still includes what it uses.
#pragma once

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>
