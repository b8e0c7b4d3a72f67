"""What a GPU makes of the kernels: their tests on the device, their times beside gsplat's, training, and peak memory.

Needs torch with CUDA and nvcc. Where nerfstudio or gsplat are missing, `python -m splaxel_ns.bench.gpu --json out.json`
does the same and names what it left out. Without a GPU it says so and writes a result with nothing in it.

Scenes are splats in the image plane, as projection leaves them: major radii of 6 to 10 pixels (3 sigma), minor axes
0.25 to 1 of that, opacity logits N(-1, 1.5). Shapes: N Gaussians, P partitions, H x W pixels.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splaxel_ns import cuda
from splaxel_ns.bench.results import ResultFile
from splaxel_ns.cuda import _backend
from splaxel_ns.partition import PartitionTree

TILE = 16  # pixels
PARTITIONS = (1, 4, 8)
SCENE = Path(__file__).resolve().parents[2] / "tests/data/matrixcity_caliterra/small_city/aerial"
TARGETS = {"forward": 1.0, "backward": 1.3, "composition": 0.1}
"""At P = 1, gsplat's time over ours at least; composition of 8 partial images over one render at most."""


@dataclass(frozen=True)
class Splats:
    """Projected Gaussians of one view, on one device, and where they are in the world."""

    means2d: Tensor  # [N, 2], pixels
    depths: Tensor  # [N]
    conics: Tensor  # [N, 3]
    opacities: Tensor  # [N]
    colors: Tensor  # [N, 3]
    extents: Tensor  # [N, 2], pixels
    means: Tensor  # [N, 3], world units; the camera is the origin
    K: Tensor  # [3, 3], pixels
    width: int
    height: int

    def leaves(self) -> list[Tensor]:
        """Fresh copies of what has gradients: means2d, depths, conics, opacities, colors."""
        tensors = (self.means2d, self.depths, self.conics, self.opacities, self.colors)
        return [tensor.clone().requires_grad_() for tensor in tensors]


@dataclass(frozen=True)
class Parts:
    """Splats in P partitions."""

    tree: PartitionTree
    on_device: Any  # the tree's tensors, where the splats are
    owner: Tensor  # [N] int32
    spans: Tensor  # [P, H, 2] int32
    order: list[int]


@dataclass(frozen=True)
class _Tree:
    axis: Tensor
    threshold: Tensor
    children: Tensor
    lo: Tensor
    hi: Tensor


def make_splats(num: int, width: int, height: int, device: torch.device, seed: int = 0) -> Splats:
    """Random splats, evenly spread over the image."""
    rng = torch.Generator(device).manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=rng, device=device)

    means2d = uniform(0.0, 1.0, num, 2) * torch.tensor([width, height], device=device)
    depths = uniform(2.0, 10.0, num)
    angle, major = uniform(0.0, 3.14159, num), uniform(2.0, 10.0 / 3, num)
    minor = (major * uniform(0.25, 1.0, num)).clamp_min(0.55)
    cos, sin = angle.cos(), angle.sin()
    xx, yy = (cos * major) ** 2 + (sin * minor) ** 2, (sin * major) ** 2 + (cos * minor) ** 2
    xy = cos * sin * (major**2 - minor**2)
    opacities = (torch.randn(num, generator=rng, device=device) * 1.5 - 1.0).sigmoid()
    reach = (2 * (255 * opacities).log()).clamp_min(0.0).sqrt() * 1.00001
    K = torch.tensor([[width, 0.0, width / 2], [0.0, width, height / 2], [0.0, 0.0, 1.0]], device=device)
    slopes = (means2d - K[:2, 2]) / width
    return Splats(
        means2d, depths, torch.stack([yy, -xy, xx], dim=1) / (xx * yy - xy**2)[:, None], opacities,
        uniform(0.0, 1.0, num, 3), torch.stack([xx.sqrt(), yy.sqrt()], dim=1) * reach[:, None],
        torch.cat([slopes, torch.ones_like(slopes[:, :1])], dim=1) * depths[:, None], K, width, height,
    )  # fmt: skip


def cut(splats: Splats, num_partitions: int) -> Parts:
    """Partitions, and for each the rectangle that its splats reach as its region."""
    sample = splats.means[:: max(1, len(splats.means) // 200_000)].cpu()
    tree = PartitionTree.build(sample, num_partitions)
    device = splats.means.device
    there = _Tree(*(t.to(device) for t in (tree.axis, tree.threshold, tree.children, tree.lo, tree.hi)))
    owner = torch.zeros(len(splats.means), dtype=torch.int32, device=device)
    for leaf in range(num_partitions):
        inside = ((splats.means >= there.lo[leaf]) & (splats.means < there.hi[leaf])).all(dim=1)
        owner[inside] = leaf
    spans = torch.zeros(num_partitions, splats.height, 2, dtype=torch.int32)
    for leaf in range(num_partitions):
        own = owner == leaf
        low = (splats.means2d - splats.extents)[own].amin(dim=0).floor().clamp_min(0).tolist()
        high = (splats.means2d + splats.extents)[own].amax(dim=0).ceil().tolist()
        top, bottom = int(low[1]), min(int(high[1]), splats.height)
        spans[leaf, top:bottom] = torch.tensor([int(low[0]), min(int(high[0]), splats.width)], dtype=torch.int32)
    return Parts(tree, there, owner, spans.to(device), tree.order(torch.zeros(3)))


def draw(splats: Splats, leaves: list[Tensor], parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """The partial images of all partitions, exactly."""
    view = torch.eye(4, device=splats.K.device)
    means2d, depths, conics, opacities, colors = leaves
    *images, _ = cuda.rasterize_partials(
        means2d, depths, conics, opacities, colors, splats.extents, parts.owner, splats.means, view, splats.K,
        parts.on_device, parts.order, parts.spans, splats.width, boundary="exact",
    )  # fmt: skip
    return images[0], images[1], images[2]


def milliseconds(call: Callable[[], Any], seconds: float, device: torch.device, most: int = 200) -> float:
    """Median time of a call on the device, over repetitions within the time given, after two to warm up."""
    for _ in range(2):
        call()
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (len(times) < most and time.perf_counter() < end):
        if device.type == "cuda":
            begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(begin.elapsed_time(stop))
        else:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def kernel_milliseconds(call: Callable[[], Any], names: Sequence[str], repetitions: int = 5) -> dict[str, float]:
    """Mean device time per call of the kernels whose names contain each of `names`."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(repetitions):
            call()
        torch.cuda.synchronize()
    total = dict.fromkeys(names, 0.0)
    for event in record.key_averages():
        for name in names:
            if name in event.key:
                total[name] += 1e-3 * event.device_time_total / repetitions
    return total


def backward_call(images: Sequence[Tensor], leaves: list[Tensor]) -> Callable[[], Any]:
    """The backward pass of images, again and again, from gradients of ones."""
    weights = [torch.ones_like(image) for image in images]
    return lambda: torch.autograd.grad(list(images), leaves, weights, retain_graph=True, allow_unused=True)


def measure_ours(splats: Splats, parts: Parts, seconds: float) -> dict[str, float]:
    """Times of one number of partitions, in milliseconds: all of the forward pass, its backward pass, composition."""
    device = splats.means2d.device
    leaves = splats.leaves()
    images = draw(splats, leaves, parts)
    result = {
        "forward_ms": milliseconds(lambda: draw(splats, leaves, parts), seconds, device),
        "backward_ms": milliseconds(backward_call(images, leaves), seconds, device),
    }
    partials = tuple(image.detach().requires_grad_() for image in images)
    background = torch.zeros(3, device=device)
    composed = cuda.composite(partials[0], partials[1], partials[2], background)
    call = backward_call(composed, list(partials))
    result["composite_ms"] = milliseconds(
        lambda: cuda.composite(partials[0], partials[1], partials[2], background), seconds, device
    )
    result["composite_backward_ms"] = milliseconds(call, seconds, device)
    if device.type == "cuda":
        names = ("draw_kernel", "renders_kernel", "count_kernel", "list_kernel", "RadixSort")
        found = kernel_milliseconds(lambda: draw(splats, leaves, parts), names)
        result |= {f"kernel_{name}_ms": value for name, value in found.items()}
    return {name: round(value, 4) for name, value in result.items()}


def measure_gsplat(splats: Splats, seconds: float) -> dict[str, float]:
    """gsplat's tile intersection and rasteriser on the same splats, colours and depth as 4 channels."""
    from gsplat.cuda._wrapper import isect_offset_encode, isect_tiles, rasterize_to_pixels

    device = splats.means2d.device
    tiles = (-(-splats.width // TILE), -(-splats.height // TILE))
    radii = torch.where(splats.extents[:, 0] > 0, splats.extents.amax(dim=1).ceil(), 0.0).int()
    leaves = splats.leaves()
    means2d, depths, conics, opacities, colors = (leaf[None] for leaf in leaves)

    def bins() -> tuple[Tensor, Tensor]:
        _, keys, ids = isect_tiles(means2d.detach(), radii[None], depths.detach(), TILE, *tiles)
        return isect_offset_encode(keys, 1, *tiles), ids

    offsets, ids = bins()

    def rasterize() -> tuple[Tensor, Tensor]:
        channels = torch.cat([colors, depths[..., None]], dim=-1)
        return rasterize_to_pixels(
            means2d, conics, channels, opacities, splats.width, splats.height, TILE, offsets, ids
        )

    return {
        "binning_ms": round(milliseconds(bins, seconds, device), 4),
        "forward_ms": round(milliseconds(rasterize, seconds, device), 4),
        "backward_ms": round(milliseconds(backward_call(rasterize(), leaves), seconds, device), 4),
        "pairs": len(ids),
    }


def run_tests(root: Path) -> dict[str, Any]:
    """The kernels' tests, on the device."""
    folder = root / "tests" / "kernels_cuda"
    if not folder.is_dir() or importlib.util.find_spec("pytest") is None:
        return {"left_out": "there are no tests beside the package, or no pytest"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    environment = {**os.environ, "SPLAXEL_GPU_TESTS": "device"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    lines = done.stdout.strip().splitlines()
    return {"passed": done.returncode == 0, "summary": lines[-1] if lines else "", "output": done.stdout[-4000:]}


@dataclass
class Gpu:
    """Time the CUDA kernels beside gsplat's and run their tests on the device, if there is one."""

    json: Path
    """Result file."""
    sizes: tuple[int, ...] = (1_000_000, 5_000_000, 20_000_000)
    """Numbers of Gaussians."""
    width: int = 1920
    """Of the image, pixels."""
    height: int = 1080
    """Of the image, pixels."""
    seconds: float = 2.0
    """Time for each measurement; at least three repetitions."""
    tests: bool = True
    """Also run the kernels' tests on the device."""
    scene: Path | None = None
    """What splaxel and splatfacto train (MatrixCity layout); None: the committed aerial scene."""
    steps: int = 1000
    """Of training."""
    minutes: float = 8.0
    """Training is left out, or ended, when all of it has taken that long."""
    left_out: list[str] = field(default_factory=list, init=False)

    def main(self) -> None:
        file = ResultFile(self.json)
        if not torch.cuda.is_available():
            print("no CUDA device")
            file.write({"device": None, "rows": []})
            return
        device = torch.device("cuda")
        result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        start = time.perf_counter()
        _backend.load(device)
        result["load_seconds"] = round(time.perf_counter() - start, 1)
        if self.tests:
            result["tests"] = run_tests(Path(__file__).resolve().parents[2])
            print(f"kernel tests on the device: {result['tests'].get('summary', result['tests'])}")
        gsplat = importlib.util.find_spec("gsplat") is not None
        if not gsplat:
            self.left_out.append("gsplat's rasteriser: gsplat is not installed")
        result |= {"left_out": self.left_out, "times": "milliseconds, medians", "rows": []}
        for num in self.sizes:
            result["rows"].append(self.measure(num, device, gsplat))
            print(result["rows"][-1])
            file.write(result)
        result["training"] = self.train(start + 60.0 * self.minutes)
        print(result["training"])
        file.write(result)

    def train(self, deadline: float) -> dict[str, Any]:
        """Iterations per second and peak memory of both methods, as far as there is time (of `perf_counter`)."""
        scene = SCENE if self.scene is None else self.scene
        missing = [name for name in ("nerfstudio", "gsplat") if importlib.util.find_spec(name) is None]
        if missing or not scene.is_dir():
            reason = f"{' and '.join(missing)} missing" if missing else f"there is no {scene}"
            self.left_out.append(f"iterations per second of splaxel and splatfacto: {reason}")
            return {}
        from splaxel_ns.bench.gpu_training import METHODS, measure_apart

        torch.cuda.empty_cache()  # the others need memory too
        rows: dict[str, Any] = {}
        for left, method in zip(range(len(METHODS), 0, -1), METHODS, strict=True):
            rows[method] = measure_apart(method, scene, self.steps, (deadline - time.perf_counter()) / left)
        speeds = [rows[method].get("iterations_per_second") for method in METHODS]
        if all(speeds):
            rows["splaxel_over_splatfacto"] = round(speeds[0] / speeds[1], 3)
        return rows

    def measure(self, num: int, device: torch.device, gsplat: bool) -> dict[str, Any]:
        """All times of one size."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        splats = make_splats(num, self.width, self.height, device)
        row: dict[str, Any] = {"gaussians": num, "image": [self.width, self.height], "partitions": {}}
        for count in PARTITIONS:
            row["partitions"][count] = measure_ours(splats, cut(splats, count), self.seconds)
        if device.type == "cuda":
            row["peak_memory_gb"] = round(1e-9 * torch.cuda.max_memory_allocated(), 2)
        one, eight = row["partitions"][1], row["partitions"][8]
        row["composition_of_8_over_a_render"] = round(eight["composite_ms"] / one["forward_ms"], 3)
        if gsplat:
            row["gsplat"] = measure_gsplat(splats, self.seconds)
            drawn = one.get("kernel_draw_kernel_ms") or one["forward_ms"]
            row["forward_ratio"] = round(row["gsplat"]["forward_ms"] / drawn, 3)
            row["backward_ratio"] = round(row["gsplat"]["backward_ms"] / one["backward_ms"], 3)
        return row


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(prog="python -m splaxel_ns.bench.gpu", description=Gpu.__doc__)
    parser.add_argument("--json", type=Path, required=True, help="result file")
    try:
        Gpu(parser.parse_args().json).main()
    except (OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"splaxel-bench: {error}") from error
