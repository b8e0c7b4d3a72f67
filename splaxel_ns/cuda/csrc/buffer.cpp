#include "buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace splaxel {
namespace {

constexpr size_t kHeader = 64;              // before each block: its size
constexpr size_t kHugePage = size_t{2} << 20;

struct Pool {
  std::mutex mutex;
  std::vector<char*> free;  // by size
};

Pool& pool() {
  static Pool* kept = new Pool;  // never destroyed: tensors may outlive static destructors
  return *kept;
}

size_t& size_of(char* start) { return *reinterpret_cast<size_t*>(start); }

}  // namespace

void* take_block(size_t bytes) {
  const size_t wanted = bytes + kHeader;
  {
    Pool& p = pool();
    const std::lock_guard<std::mutex> lock(p.mutex);
    const auto fit = std::find_if(p.free.begin(), p.free.end(), [&](char* start) { return size_of(start) >= wanted; });
    // A block many times too large would be missing where it is needed.
    if (fit != p.free.end() && size_of(*fit) <= 4 * wanted + kHugePage) {
      char* start = *fit;
      p.free.erase(fit);
      return start + kHeader;
    }
  }
  // Some room to grow: the next view has a few more pairs.
  const bool large = wanted >= kHugePage;
  const size_t unit = large ? kHugePage : size_t{4096};
  const size_t size = (wanted + (large ? wanted / 4 : 0) + unit - 1) / unit * unit;
  char* start = static_cast<char*>(std::aligned_alloc(unit, size));
  if (start == nullptr) throw std::bad_alloc();
  if (large) madvise(start, size, MADV_HUGEPAGE);  // random access over small pages is bound by address translation
  size_of(start) = size;
  return start + kHeader;
}

void give_block(void* block) {
  char* start = static_cast<char*>(block) - kHeader;
  Pool& p = pool();
  char* surplus = nullptr;
  {
    const std::lock_guard<std::mutex> lock(p.mutex);
    const auto at = std::lower_bound(
        p.free.begin(), p.free.end(), start, [](char* a, char* b) { return size_of(a) < size_of(b); });
    p.free.insert(at, start);
    if (p.free.size() > kKeptBlocks) {
      surplus = p.free.front();  // the smallest is the cheapest to make again
      p.free.erase(p.free.begin());
    }
  }
  std::free(surplus);
}

}  // namespace splaxel
