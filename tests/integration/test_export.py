"""`splaxel-export`: the PLY is the model, seen from the input frame. Every check draws it anew from the file."""

from __future__ import annotations

import copy
import errno
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from colmap_writer import Model, survey, write_binary
from conftest import SCENE, Trained
from plyfile import PlyData
from scipy.spatial.transform import Rotation
from torch import Tensor

import splaxel_ns
from splaxel_ns import export
from splaxel_ns.cameras import view_of
from splaxel_ns.config import splaxel
from splaxel_ns.dataparsers.colmap import SplaxelColmapDataParserConfig

NAMES = [f"{k:04}.jpg" for k in range(6)]
LENS = ("PINHOLE", 120, 90, (110.0, 112.0, 61.5, 44.0))


def colmap_pipeline(data: Path, model: Model, **parser: Any) -> Any:
    """A model over a COLMAP survey, without photographs: random shapes and view-dependent colours in 4 partitions."""
    write_binary(data / "sparse" / "0", model)
    config: Any = copy.deepcopy(splaxel.config).pipeline
    config.datamanager.dataparser = SplaxelColmapDataParserConfig(data=data, eval_interval=3, **parser)
    config.model.num_partitions = 4
    pipeline = config.setup(device="cpu", test_mode="inference")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, spread in (("quats", 1.0), ("features_dc", 1.0), ("features_rest", 0.2), ("opacities", 2.0)):
            value = pipeline.model.gauss_params[name]
            value.copy_(spread * torch.randn(value.shape, generator=generator))
        scales = pipeline.model.gauss_params["scales"]
        scales.copy_(-2.5 + 0.7 * torch.randn(scales.shape, generator=generator))
    return pipeline.eval()


def draw(path: Path, world_to_cam: np.ndarray, lens: Tensor, size: tuple[int, int], near: float) -> Tensor:
    """The picture of a PLY in input coordinates, as another program would draw it: [H, W, 3]."""
    ply = PlyData.read(path)
    offset = np.array([float(v) for v in ply.comments[0].split()[1:]])
    vertices = ply["vertex"]

    def columns(*names: str) -> Tensor:
        return torch.from_numpy(np.stack([np.asarray(vertices[name]) for name in names], axis=-1))

    num_rest = sum(p.name.startswith("f_rest_") for p in vertices.properties) // 3
    rest = columns(*(f"f_rest_{i}" for i in range(3 * num_rest))).reshape(-1, 3, num_rest).transpose(1, 2)
    moved = world_to_cam.copy()
    moved[:3, 3] += world_to_cam[:3, :3] @ offset
    rgb, *_ = splaxel_ns.rasterize(
        columns("x", "y", "z"),
        columns(*(f"rot_{i}" for i in range(4))),
        columns(*(f"scale_{i}" for i in range(3))).exp(),
        torch.sigmoid(columns("opacity")[:, 0]),
        torch.cat([columns(*(f"f_dc_{i}" for i in range(3)))[:, None], rest], dim=1),
        torch.from_numpy(moved).float(),
        lens,
        *size,
        torch.tensor([0.1490, 0.1647, 0.2157]),
        near_plane=near,
    )
    return rgb.clamp(0.0, 1.0)


def psnr(a: Tensor, b: Tensor) -> float:
    return float(-10 * torch.log10(((a - b).double() ** 2).mean()))


@pytest.mark.parametrize(
    ("offset", "options"),
    [
        ((0.0, 0.0, 0.0), {"orientation_method": "up"}),
        ((0.0, 0.0, 0.0), {"orientation_method": "pca", "scale_factor": 3.0}),
        ((587_660.0, 3_338_101.0, 61.0), {"orientation_method": "up"}),
    ],
    ids=["up", "pca", "UTM"],
)
def test_the_ply_is_the_model_in_the_input_frame(
    offset: tuple[float, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    points = np.random.default_rng(2).uniform([-1, -1, 0], [4, 2, 1], (400, 3))
    survey_model = survey(NAMES, offset, cameras={1: LENS}, points=points)
    pipeline = colmap_pipeline(tmp_path, survey_model, **options)
    model, data = pipeline.model, pipeline.datamanager
    frame = export.frame_of(data.train_dataparser_outputs)
    shift = export.choose_offset(model, frame)
    assert (np.abs(shift).max() > 3e6) == (offset[1] > 0)
    path = tmp_path / "splat.ply"
    export.write_ply(path, model, frame, shift)
    assert len(PlyData.read(path)["vertex"]) == model.num_points == 400
    for index, filename in enumerate(data.train_dataset.image_filenames):
        pose = survey_model.poses[NAMES.index(Path(filename).name)]
        world_to_cam = np.eye(4)
        world_to_cam[:3, :3] = Rotation.from_quat(np.roll(pose.quat, -1)).as_matrix()
        world_to_cam[:3, 3] = pose.translation
        camera = data.train_dataset.cameras[index : index + 1]
        with torch.no_grad(), model.as_one_partition():
            expected = model.get_outputs_for_camera(camera)["rgb"]
        assert expected.std() > 0.05, "the view shows nothing"
        lens = view_of(camera).K
        assert lens.flatten()[[0, 4, 2, 5]].tolist() == pytest.approx(LENS[3])
        picture = draw(path, world_to_cam, lens, (120, 90), float(model.near_plane) / frame.scale)
        assert psnr(picture, expected) > 50, filename


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The command on the trained scene, in this process; folder and what it printed."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["splaxel-export", *arguments(trained, folder)])
        with export.CONSOLE.capture() as capture:
            export.entrypoint()
    return folder, " ".join(capture.get().split())


def arguments(trained: Trained, folder: Path) -> list[str]:
    return ["--load-config", str(trained.config), "--output-dir", str(folder), "--check-views", "2"]


def test_the_command_writes_every_gaussian_and_says_what_it_means(exported: tuple[Path, str]) -> None:
    folder, said = exported
    assert sorted(path.name for path in folder.iterdir()) == ["splat.json", "splat.ply"]
    summary = json.loads((folder / "splat.json").read_text())
    assert len(PlyData.read(folder / "splat.ply")["vertex"]) == summary["gaussians"] > 10_000
    assert summary["offset"] == [0.0, 0.0, 0.0] and summary["partitions"] == 4
    assert summary["psnr_boxes_against_merged"] > 20
    assert len(summary["psnr_photographs_boxes_merged"]) == 2
    assert "Against held-out photographs" in said and "programs that read the PLY know no boxes" in said


def test_large_models_are_written_in_small_pieces(
    exported: tuple[Path, str], trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any size of the pieces gives the same file."""
    from nerfstudio.utils.eval_utils import eval_setup

    _, pipeline, _, _ = eval_setup(trained.config, test_mode="inference")
    frame = export.frame_of(pipeline.datamanager.train_dataparser_outputs)
    monkeypatch.setattr(export, "CHUNK", 1000)
    largest = max(len(chunk) for chunk in export.rows(pipeline.model, frame, np.zeros(3)))  # type: ignore[arg-type]
    assert largest == 1000
    export.write_ply(tmp_path / "splat.ply", pipeline.model, frame, np.zeros(3))  # type: ignore[arg-type]
    assert (tmp_path / "splat.ply").read_bytes() == (exported[0] / "splat.ply").read_bytes()


def test_a_full_disk_or_a_file_in_the_way_is_one_error_and_no_half_file(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("not a folder")
    monkeypatch.setattr(sys, "argv", ["splaxel-export", *arguments(trained, tmp_path / "taken")])
    with pytest.raises(SystemExit, match="splaxel-export: cannot write .*taken.*--output-dir"):
        export.entrypoint()

    def full(*_: Any) -> Any:
        yield np.zeros((1, 62), np.float32)
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "out"
    out.mkdir()
    (out / "splat.ply").write_text("an earlier export")
    monkeypatch.setattr(export, "rows", full)
    monkeypatch.setattr(sys, "argv", ["splaxel-export", *arguments(trained, out)])
    with pytest.raises(SystemExit, match="cannot write .*splat.ply: No space left on device"):
        export.entrypoint()
    assert [path.name for path in out.iterdir()] == ["splat.ply"]
    assert (out / "splat.ply").read_text() == "an earlier export"


def test_no_photograph_is_needed(trained: Trained, tmp_path: Path) -> None:
    """Poses alone do: the scene is copied without its pictures."""
    import yaml

    data = copy_without_photographs(tmp_path / "data")
    config = yaml.load(trained.config.read_text(), Loader=yaml.Loader)
    checkpoints = config.get_checkpoint_dir()
    config.output_dir = tmp_path / "runs"
    config.data = config.pipeline.datamanager.data = data
    config.get_base_dir().mkdir(parents=True)
    (config.get_base_dir() / "config.yml").write_text(yaml.dump(config))
    config.get_checkpoint_dir().symlink_to(checkpoints)
    command = export.Export(config.get_base_dir() / "config.yml", tmp_path / "out", check_views=1)
    command.main()
    summary = json.loads((tmp_path / "out" / "splat.json").read_text())
    assert summary["gaussians"] > 10_000 and summary["psnr_photographs_boxes_merged"] is None


def copy_without_photographs(target: Path) -> Path:
    """The committed scene's poses and points; returns the folder to be given as --data."""
    root = SCENE.parents[1]
    for path in root.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".ply"):
            copied = target / path.relative_to(root)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(path.read_bytes())
    return target / SCENE.relative_to(root)
