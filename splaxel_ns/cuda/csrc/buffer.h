// Work memory that outlives the call: fresh pages cost more than the loops that fill them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace splaxel {

// Blocks are 64-byte aligned and uninitialised. Those given back are kept for the next calls, at most kKeptBlocks of
// them, so the pool holds about what the largest call needed. Thread-safe.
constexpr int kKeptBlocks = 64;
void* take_block(size_t bytes);  // throws std::bad_alloc
void give_block(void* block);

struct GiveBlock {
  void operator()(void* block) const { give_block(block); }
};

template <class T>
using Block = std::unique_ptr<T[], GiveBlock>;

template <class T>
Block<T> uninitialised(int64_t count) {
  return Block<T>(static_cast<T*>(take_block(sizeof(T) * static_cast<size_t>(count))));
}

}  // namespace splaxel
