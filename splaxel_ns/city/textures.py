"""Procedural textures: noise that is filtered to the size of a pixel, and filtered edges.

Every function here is evaluated at the points that rays hit, so a texture has no resolution; what is finer than a ray's
footprint is averaged instead of sampled, else distant surfaces would glitter from one view to the next.

Shapes: n points.
"""

from __future__ import annotations

import numpy as np


class Noise:
    """Tileable noise of all scales (amplitude about 1 / frequency), mean 0, deviation 1, with filtered levels."""

    def __init__(self, seed: int, size: int = 1024, exponent: float = 0.85) -> None:
        white = np.fft.rfft2(np.random.default_rng(seed).standard_normal((size, size)))
        frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None])
        frequency[0, 0] = np.inf  # no mean
        image = np.fft.irfft2(white * frequency**-exponent, s=(size, size))
        levels = [(image / image.std()).astype(np.float32)]
        while len(levels[-1]) > 1:
            last = levels[-1]
            levels.append((last[::2, ::2] + last[1::2, ::2] + last[::2, 1::2] + last[1::2, 1::2]) / 4)
        sizes = np.array([len(level) for level in levels])
        self._sizes = sizes.astype(np.int32)
        self._starts = np.concatenate([[0], np.cumsum(sizes**2)[:-1]]).astype(np.int32)
        self._values = np.concatenate([level.ravel() for level in levels])

    def sample(
        self,
        u: np.ndarray,  # [n] metres
        v: np.ndarray,  # [n] metres
        texel: float,  # metres per texel of the finest level
        footprint: np.ndarray,  # [n] metres
    ) -> np.ndarray:  # [n] float32
        """Noise averaged over about the footprint."""
        level = np.log2(np.maximum(footprint / texel, 1.0)).astype(np.int32)
        np.minimum(level, len(self._sizes) - 1, out=level)
        size = self._sizes[level]
        column = (np.floor(u / texel).astype(np.int32) >> level) & (size - 1)
        row = (np.floor(v / texel).astype(np.int32) >> level) & (size - 1)
        return self._values[self._starts[level] + row * size + column]


def band(x: np.ndarray, half: np.ndarray | float, footprint: np.ndarray) -> np.ndarray:  # [n]
    """How much of a pixel lies within `half` of x = 0: the box average of |x| < half, in 0..1."""
    reach = 0.5 * footprint
    return (np.clip(x + reach, -half, half) - np.clip(x - reach, -half, half)) / footprint


def step(x: np.ndarray, footprint: np.ndarray) -> np.ndarray:  # [n]
    """How much of a pixel has x > 0."""
    return np.clip(x / footprint + 0.5, 0.0, 1.0)


def fade(footprint: np.ndarray, feature: float) -> np.ndarray:  # [n]
    """1 where a repeated feature of that size (metres) can be seen, 0 where pixels are larger than it."""
    return np.clip(2.0 - 2.0 * footprint / feature, 0.0, 1.0)


def hashed(*numbers: np.ndarray | int) -> np.ndarray:  # [n] float32 in 0..1
    """A random number for every combination of integers."""
    state = np.uint32(0x9E3779B9)
    for number in numbers:
        state = (state ^ np.asarray(number).astype(np.int64).astype(np.uint32)) * np.uint32(0x85EBCA6B)
        state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        state = state ^ (state >> np.uint32(16))
    return np.asarray(state >> np.uint32(8), np.float32) / np.float32(1 << 24)


def mix(a: np.ndarray, b: np.ndarray, share: np.ndarray) -> np.ndarray:  # [n, 3], [n, 3] or [3], [n] -> [n, 3]
    """`a` where share is 0, `b` where it is 1."""
    return a + (b - a) * share[:, None]
