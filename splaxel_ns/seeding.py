"""Where training starts: the first Gaussians and the near plane, from the seed points and the cameras.

Shapes: N points, C cameras.
"""

from __future__ import annotations

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.utils.rich_utils import CONSOLE
from scipy.spatial import KDTree
from torch import Tensor

NEAR_FRACTION = 0.01
"""The near plane in parts of the depth at which a typical camera sees its nearest seed points."""
NEAR_PERCENTILE = 0.05
NEAR_WITHOUT_SCENE = 0.01
"""Near plane in world units where no camera sees a seed point: splatfacto's."""
MAX_CAMERAS = 64
MAX_POINTS = 20_000


def seed_gaussians(seed_points: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor | None]:
    """The finite seed points as the first means.

    Args:
        seed_points: Points [N, 3] in world units and colours [N, 3] in 0..255 (or [0, 3]), or None.

    Returns:
        means [N, 3] float32 and colours [N, 3] float32 in 0..1, or None where there are none.

    Raises:
        ValueError: Points and colours differ in number.
    """
    if seed_points is None or len(seed_points[0]) == 0:
        return torch.zeros(0, 3), None
    points, colors = seed_points[0].detach().float().cpu(), seed_points[1].detach().float().cpu() / 255.0
    if len(colors) not in (0, len(points)):
        raise ValueError(f"The point cloud has {len(points)} points but {len(colors)} colours")
    finite = torch.isfinite(points).all(dim=-1)
    if not bool(finite.all()):
        CONSOLE.print(f"[yellow]{int((~finite).sum())} seed points with non-finite coordinates are left out")
    return points[finite].contiguous(), colors[finite].contiguous() if len(colors) else None


def random_gaussians(low: Tensor, high: Tensor, num_random: int) -> tuple[Tensor, None]:
    """Means drawn from a box, without colours, and a sentence that says so.

    Args:
        low: Corner of the box, world units.  # [3]
        high: Opposite corner.  # [3]
        num_random: How many.
    """
    box = " to ".join(str([round(v, 3) for v in corner.tolist()]) for corner in (low, high))
    CONSOLE.print(
        f"Training starts from {num_random} random points in the box {box}. A point cloud gives a better "
        "picture sooner.",
        style="yellow",
        markup=False,  # the box is in brackets
    )
    return low + torch.rand(num_random, 3) * (high - low), None


def camera_box(cameras: Cameras | None, random_scale: float) -> tuple[Tensor, Tensor]:
    """Bounds of the camera centres, grown by half the longest side: those of a flight lie in a plane above it all."""
    if cameras is None or len(cameras) == 0:
        centers = torch.zeros(1, 3)
    else:
        centers = cameras.camera_to_worlds[..., :3, 3].reshape(-1, 3).float().cpu()
    low, high = centers.amin(dim=0), centers.amax(dim=0)
    longest = float((high - low).max())
    margin = 0.5 * (longest if longest > 0 else random_scale)
    return low - margin, high + margin


def initial_log_scales(means: Tensor) -> Tensor:
    """Logarithms of isotropic scales: each point's mean distance to its three nearest neighbours, always finite.

    Args:
        means: World units.  # [N, 3]

    Returns:
        [N, 3]. Coinciding points get a millionth of the cloud's extent, a single point a hundredth of a unit.
    """
    num_points = len(means)
    if num_points == 0:
        return torch.zeros(0, 3)
    if num_points == 1:
        return torch.full((1, 3), 0.01).log()
    neighbours = min(3, num_points - 1)
    distances, _ = KDTree(means.double().numpy()).query(means.double().numpy(), k=neighbours + 1, workers=-1)
    extent = float((means.amax(dim=0) - means.amin(dim=0)).max())
    floor = 1e-6 * extent if extent > 0 else 0.01
    mean_distance = torch.from_numpy(distances[:, 1:]).float().mean(dim=-1, keepdim=True).clamp_min(floor)  # [N, 1]
    return mean_distance.log().repeat(1, 3)


def automatic_near_plane(means: Tensor, cameras: Cameras | None) -> float:
    """A near plane relative to the scene, so that its unit (metres, hectometres) does not matter.

    One hundredth of the depth at which the median training camera sees the nearest 5 % of its seed points.

    Args:
        means: Seed points in world units.  # [N, 3]
        cameras: Training cameras (OpenGL axes), or None.

    Returns:
        World units.
    """
    if cameras is None or len(cameras) == 0 or len(means) == 0:
        return NEAR_WITHOUT_SCENE
    points = means[:: max(1, len(means) // MAX_POINTS)].double()
    nearest = []
    for index in range(0, len(cameras), max(1, len(cameras) // MAX_CAMERAS)):
        camera = cameras[index : index + 1]
        pose = camera.camera_to_worlds[0].double().cpu()  # [3, 4], OpenGL: the camera looks along -z
        local = (points - pose[:, 3]) @ pose[:, :3]
        depth = -local[:, 2]
        u = float(camera.fx) * local[:, 0] / depth + float(camera.cx)
        v = -float(camera.fy) * local[:, 1] / depth + float(camera.cy)
        seen = (depth > 0) & (u >= 0) & (v >= 0) & (u <= float(camera.width)) & (v <= float(camera.height))
        if bool(seen.any()):
            nearest.append(depth[seen].quantile(NEAR_PERCENTILE))
    return NEAR_FRACTION * float(torch.stack(nearest).median()) if nearest else NEAR_WITHOUT_SCENE
