// Threads of a loop, without torch headers.
#pragma once

#include <omp.h>

#include <cstdint>

namespace splaxel {

// Calls f(chunk) for chunk = 0 .. chunks - 1, each on its own thread if there are that many. f must not throw.
template <class F>
inline void for_chunks(int chunks, F f) {
  if (chunks == 1) {
    f(0);
    return;
  }
#pragma omp parallel num_threads(chunks)
  for (int chunk = omp_get_thread_num(); chunk < chunks; chunk += omp_get_num_threads()) f(chunk);
}

// The part [begin, end) of 0 .. size - 1 that is one of several equal chunks.
struct Chunk {
  int64_t begin, end;
  Chunk(int64_t size, int chunk, int chunks) : begin(size * chunk / chunks), end(size * (chunk + 1) / chunks) {}
};

// Threads worth starting for that many cheap items.
inline int chunks_for(int64_t size, int threads, int64_t least = 4096) {
  const int64_t wanted = size / least + 1;
  return static_cast<int>(wanted < threads ? wanted : threads);
}

}  // namespace splaxel
