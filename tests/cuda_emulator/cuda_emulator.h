// Runs CUDA kernels on the CPU: the .cu files compile with g++ against this header instead of nvcc's headers.
//
// The threads of a block are fibers on one thread of the processor, resumed in random order; blocks run one after the
// other, in random order too. So results that depend on an order, and barriers that are missing or that not all threads
// reach, show. Each array of shared memory is an allocation of its own, filled with NaN bits before every block: address
// sanitizer sees overflows, tests see what was never written. What no fiber can show is a read-modify-write that
// should be atomic: nothing interrupts a fiber between two waits. Occupancy, limits of shared memory and the device's
// arithmetic are not emulated either.
//
// Stricter than the hardware: a thread may not end while others of its block still wait at barriers, lanes of a warp must
// meet at the same line with the same mask, and a mask names only lanes that are still running.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#error "The emulator switches stacks with x86-64 instructions."
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using cudaStream_t = void*;

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kStack = 64 << 10, kGuard = 4096;

struct Fiber {
  void* stack_pointer;
  char* stack;
  void* fake_stack;  // the sanitizer's
  bool ended;
};

struct Warp {
  uint32_t arrived, mask, ended;
  int line;
  unsigned generation;
  uint64_t slots[2][kWarp];  // two, so that a lane that hurries on does not overwrite what others still have to read
};

struct Block {
  int num_threads, num_waiting, num_ended, line, sum, result;
  std::vector<int> ready;
  Warp warps[kMaxThreads / kWarp];
  std::vector<std::pair<const void*, void*>> shared;
};

inline Fiber fibers[kMaxThreads];
inline Block block;
inline int current;
inline void* scheduler_pointer;
inline void* scheduler_fake;
inline const void* scheduler_bottom;
inline size_t scheduler_size;
inline std::string error;
inline uint64_t random_state = 88172645463325252ull;
inline void (*kernel)(void*);
inline void* kernel_arguments;

inline unsigned random_below(size_t count) {  // xorshift64*
  random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
  return static_cast<unsigned>((random_state * 2685821657736338717ull >> 32) % count);
}

// Saves the registers that a call preserves on this stack, and goes on where the other stack left off.
__attribute__((naked, noinline)) inline void switch_stack(void**, void*) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
}

inline void leave_for([[maybe_unused]] void** fake, [[maybe_unused]] const void* bottom, [[maybe_unused]] size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake, bottom, size);
#endif
}

inline void arrived_from(
    [[maybe_unused]] void* fake, [[maybe_unused]] const void** bottom, [[maybe_unused]] size_t* size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, bottom, size);
#endif
}

// Back to the scheduler; returns once something makes this thread ready again and the scheduler picks it.
inline void wait() {
  Fiber& fiber = fibers[current];
  leave_for(&fiber.fake_stack, scheduler_bottom, scheduler_size);
  switch_stack(&fiber.stack_pointer, scheduler_pointer);
  arrived_from(fiber.fake_stack, &scheduler_bottom, &scheduler_size);
}

[[noreturn]] inline void fail(const std::string& what) {
  if (error.empty())
    error = what + " (block " + std::to_string(blockIdx.x) + "," + std::to_string(blockIdx.y) + "," +
            std::to_string(blockIdx.z) + ", thread " + std::to_string(current) + ")";
  for (;;) wait();
}

inline void end_of_thread() {
  Warp& warp = block.warps[current / kWarp];
  const uint32_t lane = 1u << current % kWarp;
  if (warp.arrived & warp.mask && warp.mask & lane)
    fail("a lane ended while others of its warp wait for it in line " + std::to_string(warp.line));
  if (block.num_waiting > 0)
    fail("a thread ended while others of its block wait at the barrier of line " + std::to_string(block.line));
  warp.ended |= lane;
  ++block.num_ended;
  fibers[current].ended = true;
}

[[noreturn]] inline void fiber_main() {
  arrived_from(nullptr, &scheduler_bottom, &scheduler_size);
  kernel(kernel_arguments);
  end_of_thread();
  for (;;) wait();
}

inline void prepare(int thread) {
  Fiber& fiber = fibers[thread];
  if (fiber.stack == nullptr) {
    void* memory =
        mmap(nullptr, kStack + kGuard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) throw std::bad_alloc();
    fiber.stack = static_cast<char*>(memory) + kGuard;
  }
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber.stack, kStack);  // an abandoned fiber leaves its frames' red zones behind
#endif
  fiber.ended = false;
  fiber.fake_stack = nullptr;
  void** top = reinterpret_cast<void**>(fiber.stack + kStack - 64);  // a multiple of 16, as the ABI wants before a call
  top[0] = reinterpret_cast<void*>(&fiber_main);
  top[1] = nullptr;
  for (int i = 1; i <= 6; ++i) top[-i] = nullptr;
  fiber.stack_pointer = top - 6;
}

inline void resume(int thread) {
  current = thread;
  threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y)};
  Fiber& fiber = fibers[thread];
  leave_for(&scheduler_fake, fiber.stack, kStack);
  switch_stack(&scheduler_pointer, fiber.stack_pointer);
  arrived_from(scheduler_fake, nullptr, nullptr);
}

inline void run_block() {
  block.num_threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  block.num_waiting = block.num_ended = 0;
  for (Warp& warp : block.warps) warp = {};
  block.ready.resize(static_cast<size_t>(block.num_threads));
  std::iota(block.ready.begin(), block.ready.end(), 0);
  for (int thread = 0; thread < block.num_threads; ++thread) prepare(thread);
  while (!block.ready.empty() && error.empty()) {
    std::swap(block.ready[random_below(block.ready.size())], block.ready.back());
    const int thread = block.ready.back();
    block.ready.pop_back();
    resume(thread);
  }
  for (const auto& array : block.shared) std::free(array.second);
  block.shared.clear();
  if (error.empty() && block.num_ended < block.num_threads)
    error = block.num_waiting > 0
                ? "not all threads reach the barrier of line " + std::to_string(block.line)
                : "lanes of a warp wait for others that never come";
}

template <class Call>
void launch(dim3 grid, dim3 threads, Call call) {
  if (threads.x * threads.y * threads.z > kMaxThreads || threads.x * threads.y * threads.z % kWarp != 0)
    throw std::runtime_error("emulator: a block has a multiple of 32 threads, at most 1024");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535)
    throw std::runtime_error("emulator: a grid has 1 to 65535 blocks along y and z, and at least one along x");
  gridDim = grid, blockDim = threads;
  kernel = [](void* arguments) { (*static_cast<Call*>(arguments))(); };
  kernel_arguments = &call;
  std::vector<unsigned> order(static_cast<size_t>(grid.x) * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0u);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
  for (const unsigned at : order) {
    blockIdx = {at % grid.x, at / grid.x % grid.y, at / (grid.x * grid.y)};
    run_block();
    if (!error.empty()) throw std::runtime_error("emulator: " + std::exchange(error, std::string()));
  }
}

template <class T>
T* shared_memory(const void* key, size_t count) {
  for (const auto& array : block.shared)
    if (array.first == key) return static_cast<T*>(array.second);
  void* memory = std::malloc(count * sizeof(T));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0xff, count * sizeof(T));
  block.shared.emplace_back(key, memory);
  return static_cast<T*>(memory);
}

// Waits for all threads of the block; returns the sum of their values.
inline int barrier(int value, int line) {
  if (block.num_waiting == 0) block.line = line, block.sum = 0;
  if (block.line != line)
    fail("threads of a block wait at the barriers of lines " + std::to_string(block.line) + " and " +
         std::to_string(line));
  if (block.num_ended > 0) fail("a thread ended before the barrier of line " + std::to_string(line));
  block.sum += value;
  if (++block.num_waiting < block.num_threads) {
    wait();
    return block.result;
  }
  block.num_waiting = 0;
  block.result = block.sum;
  for (int thread = 0; thread < block.num_threads; ++thread)
    if (thread != current) block.ready.push_back(thread);
  return block.result;
}

// Waits for the lanes of the mask; returns what each of them brought.
inline const uint64_t* meet(uint32_t mask, uint64_t value, int line) {
  Warp& warp = block.warps[current / kWarp];
  const uint32_t lane = 1u << current % kWarp;
  const auto wrong = [line](const char* what) { fail(what + (" in line " + std::to_string(line))); };
  if (!(mask & lane)) wrong("a lane calls a warp operation whose mask does not name it");
  if (mask & warp.ended) wrong("a mask names lanes that have ended");
  if (warp.arrived != 0 && (warp.mask != mask || warp.line != line))
    wrong(("lanes of a warp meet in line " + std::to_string(warp.line) + " and").c_str());
  warp.mask = mask, warp.line = line;
  uint64_t* slots = warp.slots[warp.generation & 1];
  slots[current % kWarp] = value;
  warp.arrived |= lane;
  if (warp.arrived != mask) {
    wait();
    return slots;
  }
  warp.arrived = 0;
  ++warp.generation;
  const int first = current / kWarp * kWarp;
  for (int i = 0; i < kWarp; ++i)
    if (mask >> i & 1 && first + i != current) block.ready.push_back(first + i);
  return slots;
}

template <class T>
uint64_t to_slot(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t slot = 0;
  std::memcpy(&slot, &value, sizeof value);
  return slot;
}

template <class T>
T from_slot(uint64_t slot) {
  T value;
  std::memcpy(&value, &slot, sizeof value);
  return value;
}

inline int lane_id() { return current % kWarp; }

template <class T, class Combine>
T reduce(uint32_t mask, T value, int line, Combine combine) {
  const uint64_t* slots = meet(mask, to_slot(value), line);
  bool first = true;
  T result{};
  for (int i = 0; i < kWarp; ++i)
    if (mask >> i & 1) result = first ? from_slot<T>(slots[i]) : combine(result, from_slot<T>(slots[i])), first = false;
  return result;
}

}  // namespace emulator

#define SPLAXEL_HERE int line = __builtin_LINE()

inline void __syncthreads(SPLAXEL_HERE) { emulator::barrier(0, line); }
inline int __syncthreads_or(int predicate, SPLAXEL_HERE) { return emulator::barrier(predicate != 0, line) != 0; }
inline int __syncthreads_count(int predicate, SPLAXEL_HERE) { return emulator::barrier(predicate != 0, line); }
inline void __syncwarp(uint32_t mask = 0xffffffffu, SPLAXEL_HERE) { emulator::meet(mask, 0, line); }

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int other, SPLAXEL_HERE) {
  const uint64_t* slots = emulator::meet(mask, emulator::to_slot(value), line);
  const int source = emulator::lane_id() ^ other;
  if (!(mask >> source & 1)) emulator::fail("a shuffle reads a lane outside its mask");
  return emulator::from_slot<T>(slots[source]);
}

template <class T>
T __shfl_sync(uint32_t mask, T value, int source, SPLAXEL_HERE) {
  const uint64_t* slots = emulator::meet(mask, emulator::to_slot(value), line);
  if (!(mask >> source % 32 & 1)) emulator::fail("a shuffle reads a lane outside its mask");
  return emulator::from_slot<T>(slots[source % 32]);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate, SPLAXEL_HERE) {
  const uint64_t* slots = emulator::meet(mask, predicate != 0, line);
  uint32_t votes = 0;
  for (int i = 0; i < emulator::kWarp; ++i)
    if (mask >> i & 1) votes |= static_cast<uint32_t>(slots[i]) << i;
  return votes;
}

inline int __any_sync(uint32_t mask, int predicate, SPLAXEL_HERE) { return __ballot_sync(mask, predicate, line) != 0; }
inline int __all_sync(uint32_t mask, int predicate, SPLAXEL_HERE) {
  return __ballot_sync(mask, predicate, line) == mask;
}
inline int __reduce_max_sync(uint32_t mask, int value, SPLAXEL_HERE) {
  return emulator::reduce(mask, value, line, [](int a, int b) { return a > b ? a : b; });
}
inline int __reduce_add_sync(uint32_t mask, int value, SPLAXEL_HERE) {
  return emulator::reduce(mask, value, line, [](int a, int b) { return a + b; });
}
#undef SPLAXEL_HERE

inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __clz(uint32_t bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline int __float_as_int(float value) { return emulator::from_slot<int>(emulator::to_slot(value)); }
inline float __int_as_float(int value) { return emulator::from_slot<float>(emulator::to_slot(value)); }

// Nothing runs between the two halves of these: whether a kernel needs them is for its reader to judge.
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  return before;
}
template <class T>
T atomicMin(T* at, T value) {
  const T before = *at;
  *at = before < value ? before : value;
  return before;
}
template <class T>
T atomicMax(T* at, T value) {
  const T before = *at;
  *at = before > value ? before : value;
  return before;
}

struct __half {
  _Float16 value;
};
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }
inline float __half2float(__half value) { return static_cast<float>(value.value); }

#define SPLAXEL_LAUNCH(kernel, grid, threads, stream, ...) \
  ((void)(stream), ::emulator::launch(grid, threads, [&] { kernel(__VA_ARGS__); }))
#define SPLAXEL_SHARED(type, name, count) \
  static const char name##_key = 0;       \
  type* const name = ::emulator::shared_memory<type>(&name##_key, count)
