#include "cpu_level.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

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

std::atomic<int> chosen{-1};  // -1 until the first use

}  // namespace

std::string set_cpu_level(const std::string& name) {
  const int best = static_cast<int>(best_level());
  int level = name == "best" ? best : -1;
  for (int i = 0; i < 3; ++i)
    if (name == kNames[i]) level = i;
  if (level < 0)
    throw std::invalid_argument("The level of instructions '" + name + "' is not one of best, portable, avx2, avx512.");
  if (level > best)
    throw std::invalid_argument("This processor has no " + name + "; its best level is " + kNames[best] + ".");
  chosen = level;
  return kNames[level];
}

CpuLevel cpu_level() {
  if (chosen < 0) {
    const char* wanted = std::getenv("SPLAXEL_CPU");
    set_cpu_level(wanted != nullptr && *wanted != '\0' ? wanted : "best");
  }
  return static_cast<CpuLevel>(chosen.load());
}

}  // namespace splaxel
