"""Photographs as files: which of the registered ones are there, whole, and of the size their cameras claim.

Headers and last bytes are read, pixels are not: thousands of photographs take seconds. Nothing here knows a
dataset layout; the dataparsers call `list_photographs`, `check_photographs` and `reconcile_intrinsics`.

Orientation tags (EXIF 0x0112) are ignored throughout: sizes are those of the stored pixels. COLMAP and the
renderers that write datasets look at stored pixels too, so a turned photograph would no longer fit its camera.
A loader must therefore not turn photographs either (PIL's `Image.open` does not, OpenCV's `imread` does unless
told IMREAD_IGNORE_ORIENTATION). Where sizes show that the cameras belong to turned photographs, we stop.

Letters: N photographs or cameras, M photographs kept.
"""

from __future__ import annotations

import os
import struct
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError
from rich.progress import Progress

PHOTOGRAPH_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
_JUNK_NAMES = frozenset({"thumbs.db", "desktop.ini", ".ds_store"})
_JUNK_FOLDERS = frozenset({"__macosx", "@eadir", ".trash", ".thumbnails"})
_PROGRESS_FROM = 500  # files; fewer are done before a bar could be read
_EXIF_ORIENTATION = 0x0112
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"

Problem = Literal["missing", "empty", "truncated", "unreadable"]


@dataclass(frozen=True)
class PhotographReport:
    """What `check_photographs` found. Names are paths below the image root, as shown to the user."""

    kept: np.ndarray  # [M] int64, indices into the paths that were checked, ascending
    sizes: np.ndarray  # [M, 2] int64, (width, height) of the stored pixels
    orientations: np.ndarray  # [M] int64, EXIF orientation 1..8; 1 where there is none
    problems: tuple[tuple[str, Problem, str], ...]  # (name, kind, reason) of every file that cannot be used
    summary: str
    """One sentence: n registered, n found, and the first names of what is wrong."""

    def names(self, kind: Problem) -> list[str]:
        """Names with that problem, in the order of the paths."""
        return [name for name, found, _ in self.problems if found == kind]


@dataclass(frozen=True)
class _Probe:
    """One file: its size and orientation, or what is wrong with it."""

    size: tuple[int, int] = (0, 0)
    orientation: int = 1
    problem: Problem | None = None
    reason: str = ""


def is_junk(path: Path) -> bool:
    """Whether an operating system left the file beside photographs (`._x.JPG`, Thumbs.db, __MACOSX/...)."""
    name = path.name.lower()
    return name.startswith("._") or name in _JUNK_NAMES or any(part.lower() in _JUNK_FOLDERS for part in path.parts)


def list_photographs(root: Path) -> dict[str, Path]:
    """All photographs below `root`: {path below root with forward slashes: path}, sorted, without junk.

    Symbolic links to folders are followed; a link that leads back into its own parents is not.
    """
    found: dict[str, Path] = {}
    seen = {os.path.realpath(root)}
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = {name: os.path.realpath(os.path.join(folder, name)) for name in subfolders}
        subfolders[:] = [name for name in subfolders if real[name] not in seen and name.lower() not in _JUNK_FOLDERS]
        seen.update(real[name] for name in subfolders)
        for name in files:
            path = Path(folder, name)
            below = path.relative_to(root)
            if path.suffix.lower() in PHOTOGRAPH_SUFFIXES and not is_junk(below):
                found[below.as_posix()] = path
    return dict(sorted(found.items()))


def match_names(names: Sequence[str], listing: Mapping[str, Path], root: Path) -> list[Path]:
    """Find the files that a dataset's names mean, by whole paths below `root`, never by base names alone.

    Forgiven are what moving a dataset between systems changes: backslashes, upper and lower case, composed or
    decomposed accents, and leading folders that all names share (`C:\\survey\\images\\...`).

    Args:
        names: [N] as the dataset stores them.
        listing: what is there (`list_photographs(root)`).
        root: the folder of the photographs.

    Returns:
        [N] paths. Where nothing fits, the path at which the file is missing.

    Raises:
        ValueError: two files differ only in what is forgiven, and neither is meant exactly.
    """
    by_key: dict[str, list[str]] = {}
    for name in listing:
        by_key.setdefault(_name_key(name), []).append(name)
    plain = [name.replace("\\", "/").removeprefix("./") for name in names]
    shared = os.path.commonprefix([name.split("/")[:-1] for name in plain])
    drop = 0
    while drop < len(shared) and not any(_name_key(name.split("/", drop)[-1]) in by_key for name in plain):
        drop += 1
    paths = []
    for name, raw in zip(plain, names, strict=True):
        below = name.split("/", drop)[-1]
        exact = raw if raw in listing else below
        hits = by_key.get(_name_key(below), [])
        if exact in listing:
            paths.append(listing[exact])
        elif len(hits) > 1:
            raise ValueError(f"'{raw}' may be '{hits[0]}' or '{hits[1]}' in {root}. Remove or rename one of them.")
        else:
            paths.append(listing[hits[0]] if hits else root / name)
    return paths


def check_photographs(
    paths: Sequence[Path], *, on_problem: Literal["stop", "skip"], root: Path, what: str = "Photographs"
) -> PhotographReport:
    """Look at every registered photograph once, before anything is trained.

    Args:
        paths: [N] files the dataset names. Junk files among them are left out without a word.
        on_problem: "stop" raises when a file is missing, empty, cut off or unreadable; "skip" leaves it out.
        root: the folder that names in messages are relative to.
        what: what the files are, for messages.

    Raises:
        ValueError: a photograph cannot be used and `on_problem` is "stop", or none is left. Says how many were
            registered and found, and names the first ones.
    """
    candidates = [i for i, path in enumerate(paths) if not is_junk(Path(_below(path, root)))]
    probes = _probe_all([paths[i] for i in candidates])
    names = [_below(paths[i], root) for i in candidates]
    good = [k for k, probe in enumerate(probes) if probe.problem is None]
    problems: tuple[tuple[str, Problem, str], ...] = tuple(
        (name, probe.problem, probe.reason)
        for name, probe in zip(names, probes, strict=True)
        if probe.problem is not None
    )
    summary = _summary(len(candidates), len(good), problems)
    if problems and (on_problem == "stop" or not good):
        remedy = (
            "Put the named files in place, or leave them out with --on-problem skip."
            if good
            else "None of them can be used: is this the folder the dataset was made from?"
        )
        raise ValueError(f"{what} in {root}: {summary} {remedy}")
    return PhotographReport(
        kept=np.array([candidates[k] for k in good], dtype=np.int64),
        sizes=np.array([probes[k].size for k in good], dtype=np.int64).reshape(-1, 2),
        orientations=np.array([probes[k].orientation for k in good], dtype=np.int64),
        problems=problems,
        summary=summary,
    )


def reconcile_intrinsics(
    intrinsics: np.ndarray,  # [N, 4] float64: fx, fy, cx, cy in pixels, pixel centres at +0.5
    camera_sizes: np.ndarray,  # [N, 2] (width, height) the intrinsics were made for
    file_sizes: np.ndarray,  # [N, 2] (width, height) of the files
    names: Sequence[str],  # [N] for messages
    orientations: np.ndarray | None = None,  # [N] EXIF orientations, for messages
) -> tuple[np.ndarray, str | None]:
    """Fit intrinsics to photographs that were resized after the cameras were computed.

    Both axes must have been scaled alike, up to the one pixel that rounding an odd size can cost on either axis.
    The size of a photograph is then the size of its file.

    Returns:
        The intrinsics for the files, [N, 4] float64, and a sentence for the log (None when all sizes agree).

    Raises:
        ValueError: a photograph has other proportions than its camera (cropped, turned, or of another camera).
    """
    file_sizes = np.asarray(file_sizes, dtype=np.float64).reshape(-1, 2)
    camera_sizes = np.asarray(camera_sizes, dtype=np.float64).reshape(-1, 2)
    if (camera_sizes <= 0).any():
        first = int(np.flatnonzero((camera_sizes <= 0).any(axis=1))[0])
        raise ValueError(
            f"The camera of '{names[first]}' is {_size(camera_sizes[first])} pixels large. Correct width and "
            f"height in the dataset's camera file; the photograph has {_size(file_sizes[first])}."
        )
    low = ((file_sizes - 1.0) / camera_sizes).max(axis=1)  # the scales that round to both sides: low < s < high
    high = ((file_sizes + 1.0) / camera_sizes).min(axis=1)
    wrong = np.flatnonzero(low >= high)
    if len(wrong):
        first = int(wrong[0])
        orientation = 1 if orientations is None else int(orientations[first])
        raise ValueError(_mismatch(names[first], len(wrong), file_sizes[first], camera_sizes[first], orientation))
    ratio = file_sizes / camera_sizes  # [N, 2]
    scaled = np.asarray(intrinsics, dtype=np.float64) * np.concatenate([ratio, ratio], axis=1)
    changed = (file_sizes != camera_sizes).any(axis=1)
    if not changed.any():
        return scaled, None
    first = int(np.flatnonzero(changed)[0])
    return scaled, (
        f"{int(changed.sum())} of {len(changed)} photographs are not of the size their cameras were computed for "
        f"(first '{names[first]}': file {_size(file_sizes[first])}, camera {_size(camera_sizes[first])}); "
        f"intrinsics were scaled by {ratio[changed].min():.4g} to {ratio[changed].max():.4g}."
    )


def _name_key(name: str) -> str:
    return unicodedata.normalize("NFC", name.replace("\\", "/")).casefold()


def _size(size: np.ndarray) -> str:
    return f"{int(size[0])}x{int(size[1])}"


def _mismatch(name: str, count: int, file: np.ndarray, camera: np.ndarray, orientation: int) -> str:
    """The message for a photograph whose proportions are not its camera's."""
    head = f"'{name}' has {_size(file)} pixels, its camera {_size(camera)}: not the same proportions"
    head += f" (nor have {count - 1} others). " if count > 1 else ". "
    sideways = (file[0] - file[1]) * (camera[0] - camera[1]) < 0
    # The swapped sides must fit the camera's up to rounding: else it is another photograph.
    turned = sideways and ((file[::-1] - 1.0) / camera).max() < ((file[::-1] + 1.0) / camera).min()
    if turned and orientation >= 5:
        return head + (
            f"The cameras were computed for photographs turned by their EXIF orientation (here {orientation}), which "
            "is not applied here. Write it into the pixels first, for example with `exiftran -ai` or "
            "`mogrify -auto-orient`."
        )
    if turned:
        return head + "The photograph was turned after its camera was computed. Turn it back."
    return head + "Use the photographs the cameras were computed for, or resize them with both sides alike."


def _below(path: Path, root: Path) -> str:
    try:
        return path.relative_to(root).as_posix()
    except ValueError:
        return path.as_posix()


def _summary(registered: int, usable: int, problems: Sequence[tuple[str, Problem, str]]) -> str:
    """One sentence; per kind of problem its count, first names, and for odd files the reason."""
    found = registered - sum(kind == "missing" for _, kind, _ in problems)
    parts = [f"{registered} registered, {found} found" + (f", {usable} usable" if usable < found else "")]
    kinds: tuple[Problem, ...] = ("missing", "empty", "truncated", "unreadable")
    for kind in kinds:
        hits = [(name, reason) for name, found_kind, reason in problems if found_kind == kind]
        if hits:
            shown = ", ".join(f"'{name}'" + (f" ({reason})" if reason else "") for name, reason in hits[:3])
            parts.append(f"{len(hits)} {kind}: {shown}" + (", ..." if len(hits) > 3 else ""))
    return "; ".join(parts) + "."


def _probe_all(paths: Sequence[Path]) -> list[_Probe]:
    """Probe files side by side: on network drives the time goes into waiting, not computing."""
    show = len(paths) >= _PROGRESS_FROM
    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor(max_workers=8) as pool,
        Progress(transient=True, disable=not show) as progress,
    ):
        # Aerial cameras exceed the size from which Pillow suspects an attack; only headers are read here.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        task = progress.add_task("Looking at photographs", total=len(paths))
        probes = []
        for probe in pool.map(_probe, paths):
            probes.append(probe)
            progress.advance(task)
    return probes


def _probe(path: Path) -> _Probe:
    """Read one header and check that the file does not end early."""
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            if length == 0:
                return _Probe(problem="empty")
            with Image.open(file) as image:
                size = image.size
                kind = image.format
                orientation = int(image.getexif().get(_EXIF_ORIENTATION, 1) or 1)
                strips = _last_strip_end(image) if kind == "TIFF" else 0
            with open(path, "rb") as again:  # Pillow closes the file it was given
                complete = _is_complete(again, length, kind, strips)
    except (FileNotFoundError, NotADirectoryError):
        return _Probe(problem="missing")
    except IsADirectoryError:
        return _Probe(problem="unreadable", reason="a folder")
    except UnidentifiedImageError:
        return _Probe(problem="unreadable", reason="no image format we know")
    except (OSError, SyntaxError, ValueError, TypeError, Image.DecompressionBombError, struct.error) as error:
        # The Pillow readers raise any of these on damaged headers.
        return _Probe(problem="unreadable", reason=str(error) or type(error).__name__)
    if not complete:
        return _Probe(problem="truncated", reason=f"{kind} without its end")
    return _Probe(size=size, orientation=orientation if 1 <= orientation <= 8 else 1)


def _is_complete(file: BinaryIO, length: int, kind: str | None, strips: int) -> bool:
    """Whether the end of the image data is in the file; data after the end is allowed."""
    if kind in ("JPEG", "MPO"):
        file.seek(max(0, length - 2))
        return file.read(2) == b"\xff\xd9" or _jpeg_has_end(file)
    if kind == "PNG":
        file.seek(max(0, length - len(_PNG_END)))
        return file.read(len(_PNG_END)) == _PNG_END or _png_has_end(file, length)
    if kind == "TIFF":
        return strips <= length
    if kind == "WEBP":  # RIFF container: bytes 4..8 count what follows them
        file.seek(4)
        return struct.unpack("<I", file.read(4))[0] + 8 <= length
    if kind == "BMP":
        file.seek(2)
        return struct.unpack("<I", file.read(4))[0] <= length
    return True


def _jpeg_has_end(file: BinaryIO) -> bool:
    """Look for the end marker behind the first scan: telephones append films, copiers append zeros.

    The search starts at the scan because the thumbnail inside the EXIF block has an end marker of its own.
    """
    file.seek(0)
    data = file.read()
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        if marker == 0xDA:
            return data.find(b"\xff\xd9", at) >= 0
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False


def _png_has_end(file: BinaryIO, length: int) -> bool:
    """Walk the chunks (length, name, data, checksum) to IEND."""
    at = 8
    while at + 12 <= length:
        file.seek(at)
        size, name = struct.unpack(">I4s", file.read(8))
        if name == b"IEND":
            return True
        at += 12 + size
    return False


def _last_strip_end(image: Image.Image) -> int:
    """Byte behind the last strip or tile of a TIFF, 0 if its directory does not say."""
    tags = getattr(image, "tag_v2", {})
    ends = [0]
    for offsets, counts in ((273, 279), (324, 325)):  # strips, tiles
        if offsets in tags and counts in tags:
            ends += [int(start) + int(count) for start, count in zip(tags[offsets], tags[counts], strict=False)]
    return max(ends)
