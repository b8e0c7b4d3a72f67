"""The viewer in a real browser: the model's picture, our panel, and training while somebody watches."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import CHROMIUM, Browser, labelled, wait_for
from conftest import SCENE, Trained
from nerfstudio.configs.base_config import ViewerConfig
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.utils import profiler
from nerfstudio.utils.eval_utils import eval_setup
from nerfstudio.viewer.utils import parse_object
from nerfstudio.viewer.viewer import Viewer
from nerfstudio.viewer.viewer_elements import ViewerControl, ViewerElement
from PIL import Image
from test_export import copy_without_photographs

from splaxel_ns.config import splaxel
from splaxel_ns.viewer_panel import WHOLE_IMAGE, partition_colors, visible_boxes

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
PATIENCE = 60.0  # seconds; nothing here takes more than a few on an idle machine


@pytest.fixture(scope="module")
def pipeline(trained: Trained) -> Any:
    return eval_setup(trained.config, test_mode="test")[1]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"), "about:blank", size=(900, 700))
    yield opened
    opened.close()


@pytest.fixture
def viewer(pipeline: Any, tmp_path: Path) -> Iterator[Viewer]:
    opened = open_viewer(pipeline, tmp_path)
    yield opened
    opened.viser_server.stop()


def open_viewer(pipeline: Any, folder: Path) -> Viewer:
    """The viewer as `ns-viewer` opens it."""
    config = ViewerConfig(websocket_host="127.0.0.1", websocket_port_default=7600, max_num_display_images=4)
    lock: Any = threading.Lock()
    opened = Viewer(config, folder / "viewer.log", SCENE, pipeline, train_lock=lock)
    opened.init_scene(pipeline.datamanager.train_dataset, "completed")
    opened.update_scene(step=0)
    return opened


def address(viewer: Viewer) -> str:
    return f"http://127.0.0.1:{viewer.viser_server.get_port()}"


def look(browser: Browser) -> np.ndarray:
    """What the browser shows of the scene, without control panel and axes: [H, W, 3] in 0..255."""
    pixels = np.asarray(Image.open(io.BytesIO(browser.screenshot())).convert("RGB"), dtype=np.int64)
    return pixels[60:480, :560]


def shows(pixels: np.ndarray, color: tuple[int, int, int]) -> bool:
    """Whether some pixels have about this colour's hue, strongly."""
    a, b = np.array(color) - np.mean(color), pixels - pixels.mean(axis=-1, keepdims=True)
    length = np.linalg.norm(b, axis=-1)
    return int(((b @ a > 0.97 * length * np.linalg.norm(a)) & (length > 40)).sum()) > 20


@needs_browser
def test_picture_boxes_and_partial_image(viewer: Viewer, pipeline: Any, browser: Browser) -> None:
    model = pipeline.model
    browser.open(address(viewer))
    client = wait_for(lambda: [*viewer.viser_server.get_clients().values()], PATIENCE, "client")[0]
    wait_for(lambda: "Show boxes" in browser.text(), PATIENCE, "panel")
    center = visible_boxes(model).mean(axis=(0, 1))
    with client.atomic():
        client.camera.position = 10 * (center + np.array([0.6, -2.0, 2.0]))
        client.camera.look_at = 10 * center
    viewer.set_camera_visibility(False)
    wait_for(lambda: look(browser).std(axis=(0, 1)).min() > 5, PATIENCE, "rendered picture")
    wait_for(lambda: not shows(look(browser), partition_colors(4)[0]), PATIENCE, "picture without boxes")

    browser.click_on(labelled("Show boxes"))
    wait_for(lambda: all(shows(look(browser), c) for c in partition_colors(4)), PATIENCE, "boxes in four colours")
    browser.click_on(labelled("Show boxes"))
    wait_for(lambda: not any(shows(look(browser), c) for c in partition_colors(4)), PATIENCE, "end of the boxes")

    def choose(name: str) -> None:
        browser.click_on(labelled("Partial image"))
        browser.click_on(f"[...document.querySelectorAll('[role=option]')].find(e => e.textContent.trim() == '{name}')")

    black = int((look(browser).max(axis=-1) < 12).sum())
    choose("partition 2")
    wait_for(lambda: model.shown_partition == 2, PATIENCE, "choice")
    wait_for(lambda: (look(browser).max(axis=-1) < 12).sum() > black + 50_000, PATIENCE, "partial image over black")
    choose(WHOLE_IMAGE)
    wait_for(lambda: (look(browser).max(axis=-1) < 12).sum() < black + 1000, PATIENCE, "whole image")
    assert model.shown_partition is None


def test_the_panel_is_found_and_is_no_part_of_the_state(pipeline: Any) -> None:
    elements = parse_object(pipeline, ViewerElement, "Custom Elements")
    assert {path.rsplit("/", 1)[1] for path, _ in elements} == {"boxes", "overlay", "partial_image"}
    assert len(parse_object(pipeline, ViewerControl, "Custom Elements")) == 1
    assert not [name for name in pipeline.state_dict() if not name.startswith("_model.")]
    assert len([*pipeline.parameters()]) == len([*pipeline.model.parameters()])


def in_thread(function: Any) -> Any:
    """The result of a call in a thread, as the viewer's threads make it."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_what_the_viewer_chooses_does_not_reach_evaluation(pipeline: Any) -> None:
    model, camera = pipeline.model, pipeline.datamanager.eval_view(0)[0]
    before = model.get_outputs_for_camera(camera)["rgb"]
    try:
        model.set_background(torch.ones(3))
        model.shown_partition = 1
        box = OrientedBox(torch.eye(3), torch.zeros(3), torch.full((3,), 0.1))
        cropped = in_thread(lambda: model.get_outputs_for_camera(camera, box))["rgb"]
        partial = in_thread(lambda: model.get_outputs_for_camera(camera))["rgb"]
        in_thread(lambda: model.get_outputs_for_camera(camera, box))
        with torch.no_grad():
            assert torch.equal(model.get_outputs(camera)["rgb"], before)
        assert torch.equal(model.get_outputs_for_camera(camera)["rgb"], before)
        model.shown_partition = None
        white = in_thread(lambda: model.get_outputs_for_camera(camera))["rgb"]
    finally:
        model.shown_partition = None
    assert not torch.equal(cropped, before) and not torch.equal(partial, before)
    assert (white >= before).all() and not torch.equal(white, before)


def test_a_lens_that_cannot_be_drawn_does_not_end_the_viewer(pipeline: Any, capsys: pytest.CaptureFixture) -> None:
    """The render panel of the viewer offers fisheye and panoramas."""
    camera = copy.deepcopy(pipeline.datamanager.eval_view(0)[0])
    camera.camera_type[:] = 2
    outputs = in_thread(lambda: pipeline.model.get_outputs_for_camera(camera))
    assert outputs["rgb"].shape == (int(camera.height), int(camera.width), 3)
    assert "perspective" in capsys.readouterr().out
    with pytest.raises(ValueError, match="perspective"):
        pipeline.model.get_outputs_for_camera(camera)


def test_the_viewer_needs_no_photographs(trained: Trained, tmp_path: Path) -> None:
    data = copy_without_photographs(tmp_path / "data")

    def elsewhere(config: Any) -> Any:
        config.data = config.pipeline.datamanager.data = data
        return config

    pipeline: Any = eval_setup(trained.config, test_mode="test", update_config_callback=elsewhere)[1]
    viewer = open_viewer(pipeline, tmp_path)
    viewer.viser_server.stop()
    camera = pipeline.datamanager.train_dataset.cameras[0:1]
    assert pipeline.model.get_outputs_for_camera(camera)["rgb"].std() > 0.02


def losses_of(folder: Path, visit: Any = None) -> dict[int, float]:
    """A training run of 10 steps, with the viewer if `visit(trainer)` is to be called before every step."""
    config: Any = copy.deepcopy(splaxel.config)
    config.output_dir, config.experiment_name, config.timestamp = folder, "live", "run"
    config.vis = "tensorboard" if visit is None else "viewer+tensorboard"
    config.viewer.websocket_host, config.viewer.websocket_port_default = "127.0.0.1", 7700
    config.viewer.max_num_display_images = 4
    config.max_num_iterations, config.steps_per_eval_image = 10, 4
    config.pipeline.datamanager.data = SCENE
    config.pipeline.datamanager.camera_res_scale_factor = 0.25
    config.pipeline.datamanager.dataparser.max_seed_points = 3000
    config.pipeline.model.num_partitions = 4
    torch.manual_seed(3)
    config.save_config()
    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    losses: dict[int, float] = {}
    run_step, train_iteration = trainer._run_step, trainer.train_iteration

    def watched(step: int, *rest: Any) -> None:
        if visit is not None:
            visit(trainer)
        run_step(step, *rest)

    def recorded(step: int) -> Any:
        result = train_iteration(step)
        losses[step] = float(result[0])
        return result

    trainer._run_step, trainer.train_iteration = watched, recorded
    trainer.train()
    profiler.PROFILER.clear()
    return losses


@needs_browser
def test_training_goes_the_same_way_while_somebody_watches(browser: Browser, tmp_path: Path) -> None:
    """The viewer's thread draws between the steps, in evaluation mode, at a resolution of its own."""
    drawn: list[int] = []

    def visit(trainer: Any) -> None:
        viewer = trainer.viewer_state
        if not viewer.render_statemachines:
            browser.open(address(viewer))
            wait_for(lambda: viewer.render_statemachines, PATIENCE, "client")
            machine = next(iter(viewer.render_statemachines.values()))
            send = machine._send_output_to_viewer

            def counted(*args: Any, **kwargs: Any) -> None:
                drawn.append(trainer.step)
                send(*args, **kwargs)

            machine._send_output_to_viewer = counted
            trainer.pipeline.model.shown_partition = 2  # as the panel would
        num, client = len(drawn), next(iter(viewer.viser_server.get_clients().values()))
        client.camera.position = client.camera.position + 0.1
        wait_for(lambda: len(drawn) > num, PATIENCE, "picture")

    alone = losses_of(tmp_path / "alone")
    watched = losses_of(tmp_path / "watched", visit)
    assert len(alone) == 10 and watched == alone
    assert len(set(drawn)) >= 9
