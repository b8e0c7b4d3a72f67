"""Which images are held out for evaluation.

Letters: N images. Splits are made over everything a dataset registers, before unusable images are dropped, so that
one missing file does not move all other images between training and evaluation.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from nerfstudio.data.utils.dataparsers_utils import (
    get_train_eval_split_filename,
    get_train_eval_split_fraction,
    get_train_eval_split_interval,
)

EvalMode = Literal["fraction", "filename", "interval", "all"]


def split_images(
    names: Sequence[str],  # [N]
    mode: EvalMode,
    interval: int,
    train_fraction: float,
    eval_images: Sequence[str] = (),
) -> tuple[np.ndarray, np.ndarray]:  # [N] bool, [N] bool
    """Masks of the images to train on and to evaluate on. A single image is always trained on.

    Args:
        names: paths below the image folder, in the dataset's order.
        mode, interval, train_fraction: as in nerfstudio; an interval of 0 holds out nothing.
        eval_images: names to hold out; overrides the mode.

    Raises:
        ValueError: a name in `eval_images` fits no image or several, an option is out of range, or no image is left
            to train on.
    """
    train, held_out = np.ones(len(names), dtype=bool), np.zeros(len(names), dtype=bool)
    if eval_images:
        held_out[[find_name(wanted, names) for wanted in eval_images]] = True
        train = ~held_out
    elif mode == "all":
        held_out[:] = True
    elif len(names) > 1:
        held_out[_eval_rows(names, mode, interval, train_fraction)] = True
        train = ~held_out
    if len(names) and not train.any():
        raise ValueError(f"All {len(names)} images are held out for evaluation; leave some to train on.")
    return train, held_out


def find_name(wanted: str, names: Sequence[str]) -> int:
    """Index of the image of that name: its path in the dataset, or its file name where only one image has it."""
    plain = [name.replace("\\", "/") for name in names]
    key = wanted.replace("\\", "/")
    hits = [i for i, name in enumerate(plain) if name == key]
    hits = hits or [i for i, name in enumerate(plain) if name.endswith(f"/{key}")]
    if len(hits) > 1:
        raise ValueError(f"'{wanted}' in --eval-images fits '{names[hits[0]]}' and '{names[hits[1]]}'. Give its path.")
    if not hits:
        close = difflib.get_close_matches(key, plain, n=3) or plain[:3]
        raise ValueError(f"'{wanted}' in --eval-images is not an image of the dataset. Names look like {close}.")
    return hits[0]


def _eval_rows(names: Sequence[str], mode: EvalMode, interval: int, train_fraction: float) -> np.ndarray:
    if mode == "interval":
        if interval < 0:
            raise ValueError(f"eval_interval is {interval}; it must be 0 (hold out nothing) or more.")
        return get_train_eval_split_interval(list(names), interval)[1] if interval else np.zeros(0, dtype=int)
    if mode == "fraction":
        if not 0.0 < train_fraction <= 1.0:
            raise ValueError(f"train_split_fraction is {train_fraction}; it must be above 0 and at most 1.")
        return get_train_eval_split_fraction(list(names), train_fraction)[1]
    if mode == "filename":
        return get_train_eval_split_filename([Path(name.replace("\\", "/")) for name in names])[1].astype(int)
    raise ValueError(f"eval_mode is '{mode}'; it must be fraction, filename, interval or all.")
