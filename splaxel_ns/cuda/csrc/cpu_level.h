// The instruction set that the ops use: the best of this processor unless one was asked for.
#pragma once

#include <string>

namespace splaxel {

enum class CpuLevel : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// The level in use. The first call reads the environment variable SPLAXEL_CPU.
CpuLevel cpu_level();

// Chooses "best", "portable", "avx2" or "avx512"; returns the name of the level now in use. Throws
// std::invalid_argument if there is no such level or the processor lacks it.
std::string set_cpu_level(const std::string& name);

}  // namespace splaxel
