// Work memory that outlives the call: fresh pages cost more than the loops that fill them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace splaxel {

// A block of the pool, 64-byte aligned, never less than was asked for. Blocks given back are kept for the next calls, at
// most kKeptBlocks of them: the pool never holds more than the largest call needed. Thread-safe.
constexpr int kKeptBlocks = 16;
void* take_block(size_t bytes);  // throws std::bad_alloc
void give_block(void* block);

template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(static_cast<T*>(take_block(sizeof(T) * static_cast<size_t>(count)))) {}
  ~Buffer() { give_block(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

}  // namespace splaxel
