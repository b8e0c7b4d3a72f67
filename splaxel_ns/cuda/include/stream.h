// Pixels of partial images as flat streams: those of a region, row after row, without indices (both sides know the
// region). A pixel is C = 4 or 5 numbers: red, green, blue, transmittance and, with 5, depth. See cuda/streams.py.
#pragma once

#include "common.h"

namespace splaxel {

struct PartialPixel {
  float r, g, b, transmittance, depth;
};

// What a partial image is where nothing was drawn.
SPLAXEL_INLINE PartialPixel empty_pixel() { return {0.0f, 0.0f, 0.0f, 1.0f, 0.0f}; }

// Whether somebody must send the pixel: where the transmittance is 1 nothing was blended.
SPLAXEL_INLINE bool is_active(float transmittance) { return transmittance != 1.0f; }

// Where a region's pixels are in a stream.
struct StreamRegion {
  const int32_t* spans;       // [H, 2]
  const int64_t* row_starts;  // [H] pixels
  // -1 outside the region.
  SPLAXEL_INLINE int64_t index(int x, int y) const {
    const int begin = spans[2 * y], end = spans[2 * y + 1];
    return x >= begin && x < end ? row_starts[y] + (x - begin) : -1;
  }
};

// Larger numbers would become infinite in float16, and infinity times nothing not a number.
SPLAXEL_INLINE float within_half(float value) {
  constexpr float kLargest = 65504.0f;
  return value > kLargest ? kLargest : (value < -kLargest ? -kLargest : value);
}

// How a number of a stream is read and written; also defined where the device's 16-bit type is known.
template <class Value>
struct StreamValue;

template <>
struct StreamValue<float> {
  SPLAXEL_INLINE static float load(float value) { return value; }
  SPLAXEL_INLINE static float store(float value) { return value; }
};

template <class Value>
SPLAXEL_INLINE PartialPixel read_pixel(const Value* stream, int channels, int64_t index) {
  using As = StreamValue<Value>;
  const Value* at = stream + channels * index;
  return {As::load(at[0]), As::load(at[1]), As::load(at[2]), As::load(at[3]), channels > 4 ? As::load(at[4]) : 0.0f};
}

template <class Value>
SPLAXEL_INLINE void write_pixel(const PartialPixel& pixel, Value* stream, int channels, int64_t index) {
  using As = StreamValue<Value>;
  Value* at = stream + channels * index;
  at[0] = As::store(pixel.r);
  at[1] = As::store(pixel.g);
  at[2] = As::store(pixel.b);
  at[3] = As::store(pixel.transmittance);
  if (channels > 4) at[4] = As::store(pixel.depth);
}

}  // namespace splaxel
