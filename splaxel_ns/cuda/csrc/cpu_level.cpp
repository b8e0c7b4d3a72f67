#include "cpu_level.h"

#include <atomic>
#include <cstdlib>
#include <string>

#include "op.h"

namespace splaxel {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512"};

CpuLevel best_level() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2"))
    return CpuLevel::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return CpuLevel::kAvx2;
  return CpuLevel::kPortable;
}

CpuLevel parse_level(const std::string& name) {
  const CpuLevel best = best_level();
  if (name == "best") return best;
  for (int level = 0; level < 3; ++level) {
    if (name != kNames[level]) continue;
    TORCH_CHECK_VALUE(
        level <= static_cast<int>(best), "This processor has no ", name, "; its best level is ",
        kNames[static_cast<int>(best)], ".");
    return static_cast<CpuLevel>(level);
  }
  TORCH_CHECK_VALUE(false, "The level of instructions '", name, "' is not one of best, portable, avx2, avx512.");
}

// Unset until the first use: SPLAXEL_CPU is read then.
std::atomic<int> chosen{-1};

std::string set_cpu_level(const std::string& name) {
  chosen = static_cast<int>(parse_level(name));
  return kNames[chosen];
}

}  // namespace

CpuLevel cpu_level() {
  if (chosen < 0) {
    const char* wanted = std::getenv("SPLAXEL_CPU");
    chosen = static_cast<int>(parse_level(wanted != nullptr && *wanted != '\0' ? wanted : "best"));
  }
  return static_cast<CpuLevel>(chosen.load());
}

}  // namespace splaxel

TORCH_LIBRARY_IMPL(splaxel, CatchAll, m) { m.impl("set_cpu_level", &splaxel::set_cpu_level); }
