"""How often the viewer of several ranks gets a picture."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras

from splaxel_ns import agreement
from splaxel_ns.agreement import SHARE, SLOWEST_S, LiveView
from splaxel_ns.comm import World


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Model:
    """Takes its time to draw."""

    training = True
    background_color = torch.zeros(3)
    world = World()

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def eval(self) -> None: ...

    def train(self, _: bool) -> None: ...

    def draw_for_viewer(self, *_: Any) -> dict[str, Any]:
        self.clock.now += self.seconds
        return {"rgb": torch.zeros(2, 2, 3)}


@pytest.mark.parametrize(("seconds", "pause"), [(0.1, 0.1 * (1 / SHARE - 1)), (20.0, SLOWEST_S)])
def test_pictures_keep_to_their_share(monkeypatch: pytest.MonkeyPatch, seconds: float, pause: float) -> None:
    clock = Clock()
    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=clock.monotonic))
    view, model = LiveView(), Model(clock, seconds)
    camera = Cameras(torch.eye(4)[None, :3], 5.0, 5.0, 4.0, 3.0, 8, 6)
    answers: list[Any] = []
    for _ in range(3):
        asking = threading.Thread(target=lambda: answers.append(view.ask(camera, None)))
        asking.start()
        while not view.pending:
            pass
        if answers:
            assert not view.due
            clock.now += pause - 0.01
            assert view.pending and not view.due
            clock.now += 0.02
        assert view.due
        view.serve(model)  # type: ignore[arg-type]
        asking.join()
        assert not view.due and not view.pending
    assert len(answers) == 3 and all("rgb" in answer for answer in answers)
