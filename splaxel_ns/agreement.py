"""What ranks agree on between two steps, and the viewer's pictures that they then draw together.

The viewer's thread may not talk to other ranks: it leaves a request, which all ranks serve between steps.

Shapes: H x W pixels.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.scene_box import OrientedBox
from torch import Tensor

from splaxel_ns.comm import World

if TYPE_CHECKING:
    from splaxel_ns.model import SplaxelModel

SHARE = 0.016
"""Of the time of all ranks that drawing for the viewer may take while they train. Two ranks on two cores lose more
to encoding and sending than to drawing: a client that always moved took 22 % of the steps with 0.05, 18 % with this."""
SLOWEST_S = 30.0
"""Between two pictures, whatever they cost."""
LONGEST_WAIT_S = 60.0
"""A picture that has not come by then will not: the viewer shows black, and asks again when the camera moves."""


@dataclass(frozen=True)
class Agreed:
    """The same on all ranks."""

    signal: int | None  # the first signal that some rank got
    stop: bool  # the viewer's stop button
    paused: bool
    picture: bool  # the viewer waits for a picture


def agree(world: World, signal: int | None, stop: bool, paused: bool, picture: bool) -> Agreed:
    """Every rank says what it knows; rank 0 speaks for the viewer.

    Raises:
        LostRank: A peer is gone.
    """
    if world.size == 1:
        return Agreed(signal, stop, paused, picture)
    said = world.gather(torch.tensor([signal or 0, int(stop), int(paused), int(picture)]))
    return Agreed(int(said[:, 0].max()) or None, bool(said[0, 1]), bool(said[0, 2]), bool(said[0, 3]))


class LiveView:
    """Requests of the viewer's thread on rank 0, one at a time, and how all ranks answer them."""

    def __init__(self) -> None:
        self._asked = threading.Condition()
        self._request: tuple[Cameras, OrientedBox | None] | None = None
        self._answer: dict[str, Any] | None = None
        self._closed = False
        self._next_s = 0.0

    @property
    def due(self) -> bool:
        """Whether the viewer waits, and the last picture lies so far back that pictures keep to their `SHARE`."""
        return self.pending and time.monotonic() >= self._next_s

    @property
    def pending(self) -> bool:
        """Whether the viewer waits for a picture."""
        return self._request is not None

    def ask(self, camera: Cameras, crop: OrientedBox | None) -> dict[str, Any] | None:
        """Called by the viewer's thread: wait for a picture; None if none will come."""
        with self._asked:
            if self._closed:
                return None
            self._request, self._answer = (camera, crop), None
            self._asked.wait_for(lambda: self._request is None, LONGEST_WAIT_S)
            self._request = None
            return self._answer

    def serve(self, model: SplaxelModel) -> None:
        """Called by all ranks between steps, when `Agreed.picture`: draw what the viewer asked for.

        Raises:
            LostRank: A peer is gone.
        """
        start = time.monotonic()
        request = self._request if model.world.is_main else None
        numbers = torch.zeros(7 + 12 + 15 + 3, dtype=torch.float64)
        if request is not None:
            numbers = _as_numbers(*request, model.background_color)
        camera, crop, background = _from_numbers(model.world.from_main(numbers, "viewer"))
        model.background_color = background
        was_training = model.training
        model.eval()
        try:
            outputs = model.draw_for_viewer(camera, crop)
        finally:
            model.train(was_training)
        end = time.monotonic()
        self._next_s = end + min((end - start) * (1.0 / SHARE - 1.0), SLOWEST_S)
        with self._asked:
            self._answer, self._request = outputs, None
            self._asked.notify_all()

    def close(self) -> None:
        """No more pictures: training has ended."""
        with self._asked:
            self._closed, self._request = True, None
            self._asked.notify_all()


def _as_numbers(camera: Cameras, crop: OrientedBox | None, background: Tensor) -> Tensor:
    lens = [float(value.flatten()[0]) for value in (camera.fx, camera.fy, camera.cx, camera.cy)]
    size = [float(camera.width.flatten()[0]), float(camera.height.flatten()[0])]
    box = torch.zeros(15) if crop is None else torch.cat([crop.R.flatten(), crop.T.flatten(), crop.S.flatten()]).cpu()
    head = torch.tensor([*lens, *size, float(crop is not None)], dtype=torch.float64)
    pose = camera.camera_to_worlds.reshape(-1)[:12].cpu().double()
    return torch.cat([head, pose, box.double(), background.cpu().double()])


def _from_numbers(numbers: Tensor) -> tuple[Cameras, OrientedBox | None, Tensor]:
    fx, fy, cx, cy, width, height, _ = numbers[:7].tolist()
    pose = numbers[7:19].view(1, 3, 4).float()
    camera = Cameras(pose, fx, fy, cx, cy, int(width), int(height), camera_type=CameraType.PERSPECTIVE)
    box = numbers[19:34].float()
    crop = OrientedBox(R=box[:9].view(3, 3), T=box[9:12], S=box[12:15]) if numbers[6] else None
    return camera, crop, numbers[34:37].float()
