"""Views by schedule, photographs on demand: epochs, resume, the cache's bound, errors, evaluation."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.dataparsers.base_dataparser import DataParser, DataParserConfig, DataparserOutputs
from nerfstudio.data.utils.dataloaders import FixedIndicesEvalDataloader
from PIL import Image
from torch import nn

from splaxel_ns import dataset as dataset_module
from splaxel_ns.datamanager import SplaxelDatamanager, SplaxelDatamanagerConfig
from splaxel_ns.photo_cache import GIB, PhotoCache, available_memory

SIZES = [(48, 36), (36, 48), (40, 30)]


@dataclass
class TinyConfig(DataParserConfig):
    _target: type = field(default_factory=lambda: TinyParser)
    num_train: int = 7
    num_eval: int = 3
    sizes: tuple[tuple[int, int], ...] = tuple(SIZES)


@dataclass
class TinyParser(DataParser):
    """Photographs `<split>/<i>.png`, each of one colour that encodes its index, sizes in turn."""

    config: TinyConfig
    photographs_needed: bool = True

    def _generate_dataparser_outputs(self, split: str = "train", **kwargs) -> DataparserOutputs:
        is_train = split == "train"
        num = self.config.num_train if is_train else self.config.num_eval
        paths = [self.config.data / ("train" if is_train else "test") / f"{i:03d}.png" for i in range(num)]
        if self.photographs_needed and not all(path.exists() for path in paths):
            raise ValueError(f"{num} photographs registered, some are missing under {self.config.data}")
        sizes = torch.tensor([self.config.sizes[i % len(self.config.sizes)] for i in range(max(1, num))])
        poses = torch.eye(4)[None, :3].repeat(max(1, num), 1, 1)
        centre = sizes[:, :1] / 2, sizes[:, 1:] / 2
        cameras = Cameras(poses, 40.0, 40.0, *centre, width=sizes[:, :1], height=sizes[:, 1:])
        return DataparserOutputs(image_filenames=paths, cameras=cameras[:num])


def write_photographs(config: TinyConfig) -> None:
    for split, num in (("train", config.num_train), ("test", config.num_eval)):
        (config.data / split).mkdir(parents=True)
        for i in range(num):
            width, height = config.sizes[i % len(config.sizes)]
            Image.new("RGB", (width, height), (i, 100, split == "test")).save(config.data / split / f"{i:03d}.png")


def make(data: Path, *, write: bool = True, mode: str = "val", parser: dict | None = None, **options):
    config = TinyConfig(data=data, **(parser or {}))
    if write:
        write_photographs(config)
    return SplaxelDatamanagerConfig(dataparser=config, **options).setup(device="cpu", test_mode=mode)


def taken(manager: SplaxelDatamanager, num_steps: int) -> list[int]:
    """Indices of the next steps' views, checked against pixels and camera."""
    indices = []
    for step in range(num_steps):
        batch = manager.next_train_batch(step)
        assert len(batch) == manager.config.batch_size
        for camera, data in batch:
            index = data["image_idx"]
            sizes = manager.dataparser.config.sizes
            width, height = sizes[index % len(sizes)]
            assert camera.shape == (1,) and camera.metadata is not None and camera.metadata["cam_idx"] == index
            assert (int(camera.width), int(camera.height)) == (width, height)
            assert data["image"].shape == (height, width, 3) and data["image"].dtype == torch.uint8
            assert data["image"][3, 3].tolist() == [index, 100, 0]
            indices.append(index)
    return indices


@pytest.mark.parametrize("batch_size", [1, 2, 3, 9])
def test_every_view_once_per_epoch_in_exact_batches(tmp_path: Path, batch_size: int) -> None:
    manager = make(tmp_path, batch_size=batch_size)
    assert manager.new_epoch_next(0) and manager.views_done == 0
    indices = taken(manager, 7 * 3)
    epochs = [indices[start : start + 7] for start in range(0, len(indices), 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert manager.views_done == 21 * batch_size


def test_participants_drop_and_repeat_nothing(tmp_path: Path) -> None:
    manager = make(tmp_path, batch_size=2)
    with pytest.raises(ValueError, match="3 sets of participants"):
        manager.set_participants([{0}] * 3)
    manager.set_participants([{i % 3} if i else set() for i in range(7)])
    indices = taken(manager, 14)
    assert all(sorted(indices[start : start + 7]) == list(range(7)) for start in range(0, 28, 7))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_resume_continues_exactly(tmp_path: Path, batch_size: int) -> None:
    manager = make(tmp_path / "data", batch_size=batch_size)
    taken(manager, 4)
    manager.next_eval_image(0)
    path = tmp_path / "state.pt"
    torch.save(manager.state_dict(), path)
    expected = taken(manager, 12)
    expected_eval = [manager.next_eval_image(0)[1]["image_idx"] for _ in range(7)]

    resumed = make(tmp_path / "data", write=False, batch_size=batch_size)
    resumed.load_state_dict(torch.load(path, weights_only=True))
    assert taken(resumed, 12) == expected
    assert [resumed.next_eval_image(0)[1]["image_idx"] for _ in range(7)] == expected_eval
    assert resumed.epoch == manager.epoch and resumed.views_done == manager.views_done


def test_one_view_at_a_time_keeps_the_order(tmp_path: Path) -> None:
    batches, singles = make(tmp_path, batch_size=3), make(tmp_path, write=False, batch_size=3)
    expected = taken(batches, 5)
    found = [singles.next_train(step)[1]["image_idx"] for step in range(4)]
    state = singles.state_dict()
    singles = make(tmp_path, write=False, batch_size=3)
    singles.load_state_dict(state)
    found += [singles.next_train(step)[1]["image_idx"] for step in range(2)]
    assert found + taken(singles, 3) == expected


def test_other_views_than_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    manager = make(tmp_path / "a")
    taken(manager, 3)
    other = make(tmp_path / "b", parser={"num_train": 9})
    other.load_state_dict(manager.state_dict())
    assert "not those of the checkpoint" in " ".join(capsys.readouterr().out.split())
    assert sorted(taken(other, 9)) == list(range(9))


def test_weights_of_a_pipeline_do_not_hold_the_schedule(tmp_path: Path) -> None:
    pipeline = nn.Module()
    pipeline.datamanager = make(tmp_path)
    assert len(pipeline.state_dict()) == 0


def test_photographs_that_fit_are_decoded_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    manager = make(tmp_path, cache_gib=0.1)
    cache = manager.train_dataset.cache
    assert "each is decoded once" in " ".join(capsys.readouterr().out.split())
    assert manager.get_train_rays_per_batch() == round((48 * 36 * 5 + 40 * 30 * 2) / 7)
    assert cache.num_decoded == 0
    for index in range(7):
        assert manager.train_dataset[index]["image"].shape[2] == 3  # the viewer's thumbnails
    for _ in range(3):
        taken(manager, 7)
        list(manager.fixed_indices_eval_dataloader)
    assert cache.num_decoded == 7 + 3 and len(cache) == 10


def test_memory_stays_bounded(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    size, num, limit = (160, 120), 40, 1 << 20
    manager = make(tmp_path, parser={"num_train": num, "sizes": (size,)}, cache_gib=limit / GIB, max_thread_workers=2)
    cache = manager.train_dataset.cache
    assert "stay in memory" in " ".join(capsys.readouterr().out.split())
    taken(manager, num)
    kept, decoded = len(cache), cache.num_decoded
    assert 9 <= kept < num * size[0] * size[1] * 3 / limit * num and decoded >= num
    for _ in range(2):
        assert sorted(taken(manager, num)) == list(range(num))
    list(manager.fixed_indices_eval_dataloader)
    assert cache.peak_bytes <= limit
    assert len(cache) == kept and cache.num_decoded <= decoded + 2 * (num - kept) + 3 + manager.num_ahead


def test_one_photograph_beyond_the_limit_still_trains(tmp_path: Path) -> None:
    manager = make(tmp_path, cache_gib=100 / GIB)
    assert sorted(taken(manager, 7)) == list(range(7)) and len(manager.train_dataset.cache) == 0


def test_slow_loading_does_not_reorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = taken(make(tmp_path, batch_size=2), 14)
    read = dataset_module.read_photograph
    rng = np.random.default_rng(0)

    def slow(path: Path) -> np.ndarray:
        time.sleep(float(rng.uniform(0, 0.02)))
        return read(path)

    monkeypatch.setattr(dataset_module, "read_photograph", slow)
    manager = make(tmp_path, write=False, batch_size=2, max_thread_workers=4, cache_gib=20000 / GIB)
    assert taken(manager, 14) == expected


def test_decoding_runs_ahead_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    read = dataset_module.read_photograph

    def noted(path: Path) -> np.ndarray:
        threads.add(threading.current_thread())
        return read(path)

    monkeypatch.setattr(dataset_module, "read_photograph", noted)
    manager = make(tmp_path, cache_gib=0.1)
    manager.next_train_batch(0)
    deadline = time.monotonic() + 20
    while manager.train_dataset.cache.num_decoded < 7 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert manager.train_dataset.cache.num_decoded == 7
    assert threading.main_thread() not in threads


def test_a_damaged_photograph_is_named_where_it_is_used(tmp_path: Path) -> None:
    manager = make(tmp_path)
    whole = (tmp_path / "train" / "004.png").read_bytes()
    (tmp_path / "train" / "004.png").write_bytes(whole[: len(whole) // 2])
    good, bad = [], 0
    for _ in range(7):
        try:
            good += taken(manager, 1)
        except ValueError as error:
            assert "train/004.png" in str(error) and "cannot be read" in str(error)
            bad += 1
    assert bad >= 1 and 4 not in good
    # The view is still to come: a run that is continued with the whole photograph misses none.
    (tmp_path / "train" / "004.png").write_bytes(whole)
    good += taken(manager, bad)
    assert sorted(good) == list(range(7))


def test_evaluation_is_lazy_and_seeded(tmp_path: Path) -> None:
    manager = make(tmp_path, cache_gib=0.1)
    views = manager.fixed_indices_eval_dataloader
    assert len(views) == 3 and manager.train_dataset.cache.num_decoded == 0
    for index, (camera, data) in enumerate(views):
        assert data["image"][0, 0].tolist() == [index, 100, 1]
        assert (int(camera.width), int(camera.height)) == SIZES[index]
    assert views[-1][1]["image_idx"] == 2
    drawn = [manager.next_eval(0)[1]["image_idx"] for _ in range(6)]
    assert sorted(drawn[:3]) == sorted(drawn[3:]) == [0, 1, 2]
    again = make(tmp_path, write=False)
    assert [again.next_eval_image(0)[1]["image_idx"] for _ in range(6)] == drawn


def test_empty_evaluation_split(tmp_path: Path) -> None:
    manager = make(tmp_path, parser={"num_eval": 0})
    assert len(manager.fixed_indices_eval_dataloader) == 0 and list(manager.fixed_indices_eval_dataloader) == []
    assert not manager.eval_dataset
    with pytest.raises(ValueError, match="val split is empty"):
        manager.next_eval_image(0)
    assert sorted(taken(manager, 7)) == list(range(7))


def test_empty_training_split(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no view"):
        make(tmp_path, parser={"num_train": 0})


def test_inference_opens_no_photograph(tmp_path: Path) -> None:
    manager = make(tmp_path, write=False, mode="inference")
    assert manager.dataparser.photographs_needed is False and len(manager.train_dataset) == 7
    assert manager.train_dataset[1]["image"].shape == (48, 36, 3)
    assert manager.train_dataset.cache.num_decoded == 0


def test_viewing_without_photographs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    manager = make(tmp_path, write=False, mode="test")
    assert "Going on without photographs" in " ".join(capsys.readouterr().out.split())
    assert manager.train_dataset[0]["image"].shape == (36, 48, 3)
    with pytest.raises(ValueError, match=r"test/000\.png.*no such photograph"):
        list(manager.fixed_indices_eval_dataloader)
    with pytest.raises(ValueError, match="some are missing"):
        make(tmp_path, write=False, mode="val")


def test_render_of_a_split_uses_the_dataset(tmp_path: Path) -> None:
    """What `ns-render dataset` does with the datamanager."""
    manager = make(tmp_path, mode="test")
    loader = FixedIndicesEvalDataloader(input_dataset=manager.eval_dataset, device=manager.device, num_workers=4)
    images = [batch["image"] for _, batch in loader]
    assert [image.shape[:2] for image in images] == [(h, w) for w, h in SIZES]
    assert len(manager.eval_dataset._dataparser_outputs.image_filenames) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_cameras_sampling_strategy": "fps"}, "train-cameras-sampling-strategy fps"),
        ({"cache_images": "gpu"}, "cache-images gpu"),
        ({"cache_images_type": "float32"}, "cache-images-type float32"),
        ({"masks_on_gpu": True}, "masks-on-gpu"),
        ({"eval_num_images_to_sample_from": 3}, "eval-num-images-to-sample-from 3"),
        ({"batch_size": 0}, "batch-size"),
        ({"cache_gib": 0.0}, "cache-gib"),
        ({"camera_res_scale_factor": 0.0}, "camera-res-scale-factor"),
    ],
)
def test_unsupported_options_are_refused(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, write=False, **options)


def test_cache_decodes_once_for_many_threads() -> None:
    cache = PhotoCache(limit=1 << 20, threads=2)

    def decode() -> dict[str, torch.Tensor]:
        time.sleep(0.05)
        return {"image": torch.zeros(4, 4, 3, dtype=torch.uint8)}

    cache.announce([("a", 48, decode)])
    threads = [threading.Thread(target=cache.get, args=("a", decode)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.num_decoded == 1 and cache.num_bytes == 48
    cache.close()


def test_cache_gives_up_what_is_not_wanted_any_more() -> None:
    cache = PhotoCache(limit=100, threads=1)
    release = threading.Event()

    def decode() -> dict[str, torch.Tensor]:
        release.wait(20)
        return {"image": torch.zeros(50, dtype=torch.uint8)}

    cache.announce([("a", 50, decode), ("b", 50, decode), ("c", 50, decode)])  # c is beyond the limit
    cache.announce([("d", 50, decode)])  # a is being decoded, b is given up
    release.set()
    assert cache.get("d", decode)["image"].shape == (50,)
    cache.announce([])
    assert cache.num_decoded == 2 and len(cache) <= 2 and cache.peak_bytes <= 100
    cache.close()


def test_threads_end_with_the_interpreter() -> None:
    code = (
        "import time, torch\n"
        "from splaxel_ns.photo_cache import PhotoCache\n"
        "def decode():\n    time.sleep(0.1)\n    return {'image': torch.zeros(3)}\n"
        "cache = PhotoCache(1 << 20, threads=2)\n"
        "cache.announce([(i, 12, decode) for i in range(8)])\n"
        "cache.get(0, decode)\n"
        "print('done')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout.strip() == "done", result.stderr


def test_available_memory() -> None:
    assert 1 << 20 < available_memory() < 1 << 50


CAPTURE = Path(__file__).parents[1] / "data" / "matrixcity_caliterra"


def test_real_capture() -> None:
    """The committed aerial scene through its own dataparser: every photograph once, of its camera's size."""
    config = SplaxelDatamanagerConfig(data=CAPTURE / "small_city" / "aerial", batch_size=4)
    manager = config.setup(device="cpu")
    num = len(manager.train_dataset)
    views = [view for step in range(-(-num // 4)) for view in manager.next_train_batch(step)]
    assert sorted(data["image_idx"] for _, data in views[:num]) == list(range(num))
    for camera, data in views + list(manager.fixed_indices_eval_dataloader):
        assert data["image"].shape == (int(camera.height), int(camera.width), 3)
        assert 20 < data["image"].float().mean() < 200
    assert manager.train_dataset.cache is not None
    assert manager.train_dataset.cache.num_decoded == num + len(manager.eval_dataset)


def test_real_capture_without_photographs(tmp_path: Path) -> None:
    shutil.copytree(CAPTURE, tmp_path / "bare", ignore=shutil.ignore_patterns("*.png", "*.jpg", "*.exr"))
    managers = [
        SplaxelDatamanagerConfig(data=root / "small_city" / "aerial").setup(device="cpu", test_mode="inference")
        for root in (CAPTURE, tmp_path / "bare")
    ]
    with_photographs, bare = (manager.train_dataset for manager in managers)
    assert torch.equal(with_photographs.cameras.camera_to_worlds, bare.cameras.camera_to_worlds)
    assert torch.equal(with_photographs.cameras.fx, bare.cameras.fx) and len(bare) == len(with_photographs)
    assert bare[0]["image"].shape[:2] == (int(bare.cameras.height[0]), int(bare.cameras.width[0]))
