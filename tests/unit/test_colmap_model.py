"""COLMAP models: found where they are, read as people write them, refused clearly when damaged."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from colmap_writer import PINHOLE, Model, Pose, survey, write_binary, write_text

from splaxel_ns.dataparsers.colmap_model import find_model, read_cameras, read_images, read_points

NAMES = [f"{k:04}.jpg" for k in range(4)]
ODD_NAMES = ["Schloß plan-0 (402).JPG", "[a] b/c d.jpg", "üñí/京都 #1.png", "back\\slash 1.jpg", "12 34 56.7"]


@pytest.mark.parametrize("write", [write_binary, write_text])
def test_both_formats_give_the_same_model(tmp_path: Path, write) -> None:
    model = survey(NAMES + ODD_NAMES)
    folder = write(tmp_path, model)
    images = read_images(folder)
    assert images.names == model.names
    np.testing.assert_array_equal(images.quats, [pose.quat for pose in model.poses])
    np.testing.assert_array_equal(images.translations, [pose.translation for pose in model.poses])
    assert images.camera_ids.tolist() == [1] * len(model.poses)
    camera = read_cameras(folder)[1]
    assert (camera.model, camera.width, camera.height, camera.params) == PINHOLE
    xyz, rgb = read_points(folder)
    np.testing.assert_array_equal(xyz, model.points)
    assert rgb.dtype == np.uint8 and rgb[:3].tolist() == [[0, 20, 30], [1, 20, 30], [2, 20, 30]]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "  \t"])
@pytest.mark.parametrize("observations", [True, False])
def test_text_as_other_programs_write_it(tmp_path: Path, newline: str, end: str, observations: bool) -> None:
    """Windows line ends, trailing blanks, image lines without a line of observations."""
    model = survey(ODD_NAMES[:4])
    model = replace(model, poses=(replace(model.poses[0], point_ids=()), *model.poses[1:]))
    folder = write_text(tmp_path, model, newline, observations, end)
    assert read_images(folder).names == model.names
    assert len(read_points(folder)[0]) == 20


def test_text_with_mark_comments_and_exponents(tmp_path: Path) -> None:
    write_text(tmp_path, survey(NAMES))
    (tmp_path / "images.txt").write_text(
        "\ufeff# written elsewhere\n\n"
        "7 9.9e-001 1.0e-002 -1.5E-002 0 1e+003 -2.5e+000 .5 1 plan xx (402).jpg\n\n"
        "# in between\n"
        "3 1 0 0 0 0 0 0 1 [b].jpg\n1.5 2.5 -1 3.5 4.5 12\n\n\n",
        encoding="utf-8",
    )
    images = read_images(tmp_path)
    assert images.names == ["[b].jpg", "plan xx (402).jpg"]  # ordered by id
    np.testing.assert_array_equal(images.quats[1], [0.99, 0.01, -0.015, 0])
    np.testing.assert_array_equal(images.translations[1], [1000, -2.5, 0.5])
    (tmp_path / "cameras.txt").write_text("\ufeff1 pinhole 40.0 30 3.5e+001 36 20 15\r\n")
    assert read_cameras(tmp_path)[1].params == (35.0, 36.0, 20.0, 15.0)


@pytest.mark.parametrize("write", [write_binary, write_text])
def test_ids_are_never_indices(tmp_path: Path, write) -> None:
    """Ids up to 2^31 with holes, in no order; observations of points that no longer exist."""
    ids = [2_000_000_000, 5, 1_000_000_000, 17]
    model = survey(NAMES, cameras={4_000_000_000: PINHOLE}, point_ids=[10**18 - k * 10**9 for k in range(20)])
    poses = zip(model.poses, ids, strict=True)
    model = replace(
        model,
        poses=tuple(replace(pose, image_id=i, camera_id=4_000_000_000, point_ids=(10**15, -1, 3)) for pose, i in poses),
    )
    folder = write(tmp_path, model)
    images = read_images(folder)
    assert images.names == [NAMES[1], NAMES[3], NAMES[2], NAMES[0]]
    assert set(images.camera_ids.tolist()) == set(read_cameras(folder)) == {4_000_000_000}
    np.testing.assert_array_equal(read_points(folder)[0], model.points)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("write", [write_binary, write_text])
def test_few_points(tmp_path: Path, write, count: int) -> None:
    xyz, rgb = read_points(write(tmp_path, replace(survey(NAMES), points=np.ones((count, 3)))))
    assert xyz.shape == rgb.shape == (count, 3)


def test_no_points_file(tmp_path: Path) -> None:
    (write_binary(tmp_path, survey(NAMES)) / "points3D.bin").unlink()
    assert read_points(tmp_path)[0].shape == (0, 3)


@pytest.mark.parametrize(
    "place",
    ["sparse/0", "sparse", "colmap/sparse/0", "dense/sparse", "dense/0/sparse", "colmap", ".", "sparse/aligned"],
)
def test_models_are_found(tmp_path: Path, place: str) -> None:
    write_binary(tmp_path / place, survey(NAMES))
    for extra in ("rigs.bin", "frames.bin", "project.ini"):  # COLMAP 3.12 and later writes these beside the model
        (tmp_path / place / extra).write_bytes(b"\1" * 20)
    (tmp_path / "images").mkdir()
    model, note = find_model(tmp_path)
    assert model.resolve() == (tmp_path / place).resolve() and note is None
    assert len(read_images(model).names) == 4


@pytest.mark.parametrize("write", [write_binary, write_text])
def test_the_largest_of_several_models(tmp_path: Path, write) -> None:
    for name, count in (("0", 2), ("1", 4), ("10", 4), ("2", 1)):
        write(tmp_path / "sparse" / name, survey(NAMES[:count]))
    model, note = find_model(tmp_path)
    assert model.name == "1"
    assert note is not None and "sparse/0 2, sparse/1 4, sparse/2 1, sparse/10 4" in note and "--colmap-path" in note


def test_no_model_and_half_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No COLMAP model.*sparse, colmap/sparse.*--colmap-path"):
        find_model(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        find_model(tmp_path / "nowhere")
    write_binary(tmp_path / "sparse/0", survey(NAMES))
    (tmp_path / "sparse/0/images.bin").unlink()
    with pytest.raises(ValueError, match="sparse/0 holds cameras.bin but no complete"):
        find_model(tmp_path)


def read_all(folder: Path) -> None:
    read_cameras(folder)
    read_images(folder)
    read_points(folder)


@pytest.mark.parametrize("stem", ["cameras", "images", "points3D"])
def test_every_cut_of_a_binary_file_is_one_clear_error(tmp_path: Path, stem: str) -> None:
    path = write_binary(tmp_path, replace(survey(NAMES), points=np.ones((5, 3)))) / f"{stem}.bin"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"{stem}.bin is damaged: .*model_converter"):
            read_all(tmp_path)
    path.write_bytes(whole)
    read_all(tmp_path)


@pytest.mark.parametrize("stem", ["cameras", "images", "points3D"])
def test_foreign_bytes_never_raise_anything_else(tmp_path: Path, stem: str) -> None:
    """Counts and lengths from damaged bytes must neither allocate by them nor escape as other errors."""
    path = write_binary(tmp_path, survey(NAMES)) / f"{stem}.bin"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(200):
        data = bytearray(whole)
        at = int(rng.integers(0, max(1, len(data) - 8)))
        data[at : at + 8] = rng.integers(0, 256, 8, dtype=np.uint8).tobytes()
        path.write_bytes(bytes(data))
        try:
            read_all(tmp_path)
        except ValueError as error:
            assert str(path) in str(error)


def test_git_lfs_pointer(tmp_path: Path) -> None:
    write_binary(tmp_path, survey(NAMES))
    (tmp_path / "images.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(ValueError, match="Git LFS pointer.*git lfs pull"):
        read_images(tmp_path)


def test_unknown_camera_model(tmp_path: Path) -> None:
    write_binary(tmp_path, survey(NAMES))
    (tmp_path / "cameras.bin").write_bytes(struct.pack("<QIiQQ", 1, 3, 77, 40, 30))
    with pytest.raises(ValueError, match="camera 3 is of a kind we do not know .number 77.*image_undistorter"):
        read_cameras(tmp_path)


@pytest.mark.parametrize(
    ("stem", "text", "match"),
    [
        ("images", "1 0 0 0 1 0 0 0 1\n", "images.txt, line 1: expected IMAGE_ID"),
        ("images", "# x\n1 0,5 0 0 1 0 0 0 1 a.jpg\n", "images.txt, line 2: expected IMAGE_ID"),
        ("cameras", "1 PINHOLE 40 30 35 36 20\n", "cameras.txt, line 1: expected 4 parameters for a PINHOLE"),
        ("cameras", "1 PINHOLE 40\n", "cameras.txt, line 1: expected CAMERA_ID"),
        ("points3D", "1 0 0 0 9 9\n", "points3D.txt, line 1: expected POINT3D_ID"),
        ("points3D", "1 0 zero 0 9 9 9 0\n", "points3D.txt holds a point whose position"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, stem: str, text: str, match: str) -> None:
    (write_text(tmp_path, survey(NAMES)) / f"{stem}.txt").write_text(text)
    with pytest.raises(ValueError, match=match):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ("1 1 0 0 0 0 0 0 1 Süd.jpg\n\n".encode("cp1252"), "line 1: the name .* is not UTF-8"),
        ("1 1 0 0 0 0 0 0 1 a.jpg\n\n".encode("utf-16"), "is UTF-16"),
    ],
)
def test_other_encodings_are_named(tmp_path: Path, data: bytes, match: str) -> None:
    (write_text(tmp_path, survey(NAMES)) / "images.txt").write_bytes(data)
    with pytest.raises(ValueError, match=match):
        read_images(tmp_path)


def test_binary_wins_where_both_formats_are(tmp_path: Path) -> None:
    """As in COLMAP, which writes binary; text beside it is an export that may be old."""
    write_text(tmp_path, survey(["old.jpg"]))
    write_binary(tmp_path, survey(["new.jpg"]))
    assert read_images(tmp_path).names == ["new.jpg"]


def test_a_model_without_images(tmp_path: Path) -> None:
    for write in (write_binary, write_text):
        images = read_images(write(tmp_path / write.__name__, Model(())))
        assert images.names == [] and images.quats.shape == (0, 4) and images.translations.shape == (0, 3)


def test_equal_ids_keep_the_order_of_the_file(tmp_path: Path) -> None:
    poses = tuple(Pose(1, (1.0, 0, 0, 0), (0.0, 0, 0), name) for name in ("b.jpg", "a.jpg"))
    assert read_images(write_binary(tmp_path, Model(poses))).names == ["b.jpg", "a.jpg"]
