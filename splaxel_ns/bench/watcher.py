"""A client of the viewer without a browser, which would need the ranks' cores."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any

import msgspec
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect


class Client:
    """A client of viser: it looks at the scene, moves now and then, and counts the pictures.

    Args:
        port: Of the viewer on this machine.
        move_every: Seconds between two moves; 0: none.
    """

    def __init__(self, port: int, move_every: float) -> None:
        self.pictures = 0
        self._move_every = move_every
        self._socket = connect(f"ws://127.0.0.1:{port}", max_size=None, compression=None)
        self._left = threading.Event()
        self._threads = [threading.Thread(target=self._look), threading.Thread(target=self._move)]

    def __enter__(self) -> Client:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._socket.close()
        for thread in self._threads:
            thread.join()

    def _look(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            for message in self._socket:
                # One message holds several of viser's; those of the background carry the picture.
                self.pictures += message.count(b"BackgroundImageMessage")  # type: ignore[arg-type]

    def _move(self) -> None:
        number = 0
        with contextlib.suppress(ConnectionClosed):
            while not self._left.is_set():
                self._socket.send(msgspec.msgpack.encode(_camera(0.2 * number)))
                number += 1
                self._left.wait(self._move_every or None)


def _camera(angle: float) -> dict[str, Any]:
    """viser's message about a camera that looks down on the scene's middle, turned about the vertical axis."""
    half = 0.5 * angle
    # Looking down is half a turn about x, before the turn about z: quaternions w, x, y, z.
    return {
        "type": "ViewerCameraMessage",
        "wxyz": [0.0, math.cos(half), math.sin(half), 0.0],
        "position": [0.0, 0.0, 15.0],
        "fov": 0.9,
        "aspect": 1.5,
        "look_at": [0.0, 0.0, 0.0],
        "up_direction": [-math.sin(angle), math.cos(angle), 0.0],
    }
