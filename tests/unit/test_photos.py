"""Photographs as files: found, whole, and of their cameras' size."""

from __future__ import annotations

import unicodedata
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from splaxel_ns.dataparsers.photos import (
    PhotographReport,
    check_photographs,
    list_photographs,
    match_names,
    reconcile_intrinsics,
)

RNG = np.random.default_rng(0)


def picture(path: Path, size: tuple[int, int] = (40, 30), orientation: int = 0, **options) -> Path:
    """Noise, so that halves of files are cut within the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(RNG.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))
    if orientation:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = orientation
    image.save(path, **options)
    return path


def cut(path: Path, share: float) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def check(paths: list[Path], root: Path) -> PhotographReport:
    return check_photographs(paths, on_problem="skip", root=root)


def test_summary_counts_and_names_what_is_wrong(tmp_path: Path) -> None:
    paths = [picture(tmp_path / f"{k}.jpg") for k in range(8)]
    paths[2].unlink()
    paths[3].write_bytes(b"")
    cut(paths[5], 0.5)
    paths[6].write_text("this is no picture")
    report = check(paths, tmp_path)
    assert report.kept.tolist() == [0, 1, 4, 7]
    assert report.sizes.tolist() == [[40, 30]] * 4
    assert report.names("missing") == ["2.jpg"] and report.names("empty") == ["3.jpg"]
    assert report.names("truncated") == ["5.jpg"] and report.names("unreadable") == ["6.jpg"]
    assert report.summary.startswith("8 registered, 7 found, 4 usable; 1 missing: '2.jpg'")
    with pytest.raises(ValueError, match=r"8 registered, 7 found.*'2\.jpg'.*--on-problem skip"):
        check_photographs(paths, on_problem="stop", root=tmp_path)


def test_all_good_and_first_three_names_of_many(tmp_path: Path) -> None:
    paths = [picture(tmp_path / "a/0.png"), picture(tmp_path / "b/0.png")]
    assert check_photographs(paths, on_problem="stop", root=tmp_path).summary == "2 registered, 2 found."
    missing = [tmp_path / f"a/{k}.png" for k in range(1, 6)]
    assert "5 missing: 'a/1.png', 'a/2.png', 'a/3.png', ..." in check(paths + missing, tmp_path).summary


def test_nothing_left_stops_even_when_skipping(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 missing.*None of them can be used"):
        check([tmp_path / "x.jpg"], tmp_path)


def test_junk_is_ignored(tmp_path: Path) -> None:
    good = picture(tmp_path / "IMG.JPG")
    for junk in ("._IMG.JPG", "Thumbs.db", "__MACOSX/x.jpg", ".DS_Store", "notes.txt"):
        (tmp_path / junk).parent.mkdir(exist_ok=True)
        (tmp_path / junk).write_bytes(b"\0\x05\x16\x07")
    assert list_photographs(tmp_path) == {"IMG.JPG": good}
    assert check([good, tmp_path / "._IMG.JPG"], tmp_path).kept.tolist() == [0]


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.tif", "x.webp", "x.bmp"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_cut_files_are_found_in_every_format(tmp_path: Path, name: str, share: float) -> None:
    whole, damaged = picture(tmp_path / "whole" / name), cut(picture(tmp_path / name), share)
    report = check([whole, damaged], tmp_path)
    assert report.kept.tolist() == [0]
    assert report.problems[0][1] in ("truncated", "unreadable")


def test_data_behind_the_end_is_no_damage(tmp_path: Path) -> None:
    """Telephones append films to JPEGs, copiers pad with zeros."""
    paths = [picture(tmp_path / name) for name in ("a.jpg", "b.jpg", "c.png")]
    for path, tail in zip(paths, (b"\0" * 700, b"\0ftypmp42" * 9, b"tail"), strict=True):
        path.write_bytes(path.read_bytes() + tail)
    assert check(paths, tmp_path).kept.tolist() == [0, 1, 2]


def test_the_end_of_the_thumbnail_is_not_the_end(tmp_path: Path) -> None:
    """A JPEG whose EXIF block holds a whole JPEG, cut within its own picture."""
    small = BytesIO()
    Image.new("RGB", (8, 6)).save(small, "JPEG")
    plain = picture(tmp_path / "x.jpg").read_bytes()
    block = b"Exif\0\0" + small.getvalue()
    whole = plain[:2] + b"\xff\xe1" + (len(block) + 2).to_bytes(2, "big") + block + plain[2:]
    (tmp_path / "x.jpg").write_bytes(whole[: len(whole) - 100])
    (tmp_path / "y.jpg").write_bytes(whole)
    assert check([tmp_path / "x.jpg", tmp_path / "y.jpg"], tmp_path).kept.tolist() == [1]


def test_sizes_are_those_of_stored_pixels(tmp_path: Path) -> None:
    path = picture(tmp_path / "turned.jpg", size=(40, 30), orientation=6)
    report = check([path], tmp_path)
    assert report.sizes.tolist() == [[40, 30]] and report.orientations.tolist() == [6]


def test_many_files_and_folders_in_place_of_files(tmp_path: Path) -> None:
    path = picture(tmp_path / "x.png")
    (tmp_path / "folder.png").mkdir()
    report = check([path] * 600 + [tmp_path / "folder.png", path / "below.png"], tmp_path)
    assert len(report.kept) == 600
    assert [kind for _, kind, _ in report.problems] == ["unreadable", "missing"]


def test_linked_folders_are_followed_and_circles_are_not(tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere/x.png")
    (tmp_path / "images").mkdir()
    (tmp_path / "images/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/circle").symlink_to(tmp_path / "images")
    assert list(list_photographs(tmp_path / "images")) == ["link/x.png"]


def match(names: list[str], files: list[str]) -> list[str]:
    root = Path("/r")
    paths = match_names(names, {file: root / file for file in files}, root)
    return [path.relative_to(root).as_posix() for path in paths]


def test_names_survive_a_move_between_systems() -> None:
    assert match(["a\\IMG 1.JPG", "./b/IMG 1.JPG"], ["b/IMG 1.jpg", "a/img 1.jpg"]) == ["a/img 1.jpg", "b/IMG 1.jpg"]
    decomposed = unicodedata.normalize("NFD", "Süd (4).JPG")
    assert match(["Süd (4).JPG"], [decomposed]) == [decomposed]
    assert match(["a\\0.jpg"], ["a\\0.jpg", "a/0.jpg"]) == ["a\\0.jpg"]
    assert match(["C:\\s\\images\\a\\0.jpg", "C:\\s\\images\\b\\0.jpg"], ["a/0.jpg", "b/0.jpg"]) == [
        "a/0.jpg",
        "b/0.jpg",
    ]
    assert match(["images/0.jpg", "images/1.jpg"], ["0.jpg", "1.jpg"]) == ["0.jpg", "1.jpg"]


def test_names_never_match_by_file_name_alone() -> None:
    """b/0.jpg is missing; the files of the same name elsewhere are other photographs."""
    assert match(["a/0.jpg", "b/0.jpg"], ["a/0.jpg", "0.jpg"]) == ["a/0.jpg", "b/0.jpg"]
    assert match(["a/0.jpg", "b/0.jpg"], ["c/0.jpg"]) == ["a/0.jpg", "b/0.jpg"]


def test_names_that_differ_only_in_case() -> None:
    assert match(["x.JPG", "x.jpg"], ["x.jpg", "x.JPG"]) == ["x.JPG", "x.jpg"]
    with pytest.raises(ValueError, match="may be 'x.JPG' or 'x.jpg'"):
        match(["X.jpg"], ["x.JPG", "x.jpg"])


INTRINSICS = np.array([[200.0, 210.0, 99.5, 70.0]])


@pytest.mark.parametrize("size", [(100, 74), (100, 75), (67, 50), (400, 298), (50, 37)])
def test_resized_photographs_scale_their_intrinsics(size: tuple[int, int]) -> None:
    scaled, note = reconcile_intrinsics(INTRINSICS, np.array([[200, 149]]), np.array([size]), ["x.jpg"])
    ratio = np.array([size[0] / 200, size[1] / 149] * 2)
    np.testing.assert_allclose(scaled[0], INTRINSICS[0] * ratio, rtol=1e-14)
    assert note is not None and "1 of 1 photographs" in note and f"file {size[0]}x{size[1]}" in note


def test_equal_sizes_change_nothing() -> None:
    scaled, note = reconcile_intrinsics(INTRINSICS, np.array([[200, 149]]), np.array([[200, 149]]), ["x.jpg"])
    np.testing.assert_array_equal(scaled, INTRINSICS)
    assert note is None
    assert reconcile_intrinsics(np.zeros((0, 4)), np.zeros((0, 2)), np.zeros((0, 2)), [])[1] is None


@pytest.mark.parametrize(
    ("camera", "file", "orientation", "match"),
    [
        ((200, 149), (200, 100), 1, "'x.jpg' has 200x100 pixels, its camera 200x149.*both sides alike"),
        ((149, 200), (200, 149), 6, "EXIF orientation .here 6.*auto-orient"),
        ((149, 200), (200, 149), 1, "turned after its camera was computed"),
        ((149, 200), (101, 75), 1, "turned after its camera was computed"),
        ((149, 200), (200, 101), 1, "200x101 pixels, its camera 149x200.*both sides alike"),
        ((149, 200), (200, 101), 6, "200x101 pixels, its camera 149x200.*both sides alike"),
        ((0, 149), (200, 149), 1, "camera of 'x.jpg' is 0x149"),
    ],
)
def test_other_proportions_stop(camera, file, orientation, match) -> None:
    with pytest.raises(ValueError, match=match):
        reconcile_intrinsics(
            INTRINSICS, np.array([camera]), np.array([file]), ["x.jpg"], orientations=np.array([orientation])
        )
