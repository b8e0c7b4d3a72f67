// The instruction set that the ops use: the best of this processor unless one was asked for.
#pragma once

namespace splaxel {

enum class CpuLevel : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

CpuLevel cpu_level();

}  // namespace splaxel
