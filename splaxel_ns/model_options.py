"""The options of the model, as `ns-train splaxel --help` shows them under --pipeline.model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nerfstudio.models.splatfacto import SplatfactoModelConfig

from splaxel_ns.types import Boundary, Exchange


@dataclass
class SplaxelModelOptions(SplatfactoModelConfig):
    """splatfacto's options, whose intervals and schedules count images here (steps times batch size), and ours."""

    num_partitions: int | None = None
    """exchange of pixels: convex boxes that space is cut into, 1 to 16. None: one per rank. A checkpoint brings its
    own."""
    boundary: Boundary = "filter"
    """exchange of pixels: Gaussians that straddle two boxes: filter (the paper; drop them on rays where both boxes are
    rendered), exact (as one model on one device) or none (ablation)."""
    exchange: Exchange = "selective"
    """What several ranks swap for a view: selective (the paper; the pixels that each needs), owner (as selective, but
    where many ranks share pixels one of them composes a block of them and sends gradients back), dense (all pixels of
    all) or gaussian (the baseline that moves Gaussians instead: projected ones go to image strips)."""
    half_pixels: bool = False
    """exchange of pixels: those of training views travel as float16; gradients stay float32."""
    active_pixels: bool = False
    """exchange of pixels: of those of training views, empty ones are one bit each. Same picture, fewer bytes."""
    placement: Literal["random", "kdtree"] = "random"
    """exchange gaussian: which rank holds which Gaussian, at random or by boxes."""
    migrate_every: int = 100
    """Several ranks: Gaussians that have left their rank's boxes move to the rank they are in every so many images."""
    balance_every: int = 2000
    """Several ranks: every so many images space is cut anew if one rank has too many Gaussians."""
    max_imbalance: float = 0.2
    """Several ranks: how many more than the mean one may have, as a share of it (paper, section 8.1)."""
    imbalance: float = 0.0
    """Several ranks: start with boxes of which the last holds that much more than its share, to see them balanced."""
    in_flight: int = 2
    """Several ranks: views that are drawn before the first of them must be composed; while the pixels of one travel,
    the next is drawn."""
    near_plane: float | None = None
    """Gaussians nearer to the camera are not drawn, in the scene's unit. None: one hundredth of the depth at which the
    training cameras see the nearest seed points; kept in the checkpoint."""
    max_gaussians: int = 0
    """Growth stops at this many Gaussians, those with the largest gradients first. 0: no limit."""
    strategy: Literal["default", "mcmc"] = "default"
    """How Gaussians are grown: default (clone, split and prune by gradients) or mcmc (sampling by opacity, up to
    max_gs_num; its paper also sets stop_split_at to 25000)."""
    max_gs_num: int = 1_000_000
    """mcmc: growth stops at this many Gaussians."""
    noise_lr: float = 5e5
    """mcmc: the noise on the means, in parts of their learning rate."""
    mcmc_min_opacity: float = 0.005
    """mcmc: Gaussians at or below this opacity are moved to where opaque ones are (cull_alpha_thresh in splatfacto)."""
    mcmc_opacity_reg: float = 0.01
    """mcmc: weight of the mean opacity in the loss."""
    mcmc_scale_reg: float = 0.01
    """mcmc: weight of the mean scale in the loss."""
    saturation: bool = True
    """Leave out of a training view what lies behind partitions that are opaque there (paper, section 4.3), from the
    epoch after it was found. With one partition, or a camera optimiser, there is nothing to leave out. Several ranks:
    what lies behind ranks that are opaque there, and with exchange selective or owner."""
    saturation_threshold: float = 1e-4
    """saturation: what so little light reaches is saturated."""
    saturation_every: int = 0
    """saturation: also take over what was found every so many images. 0: only at the start of an epoch."""
    saturation_gib: float = 1.0
    """saturation: memory for what is left out. Views beyond it are drawn in full."""
    transmittance_stop: float = 1e-4
    """A pixel is finished once so little light from behind would reach it. 0: never."""
    seed: int = 42
    """Seed of the random backgrounds (a function of seed, step and view), of splitting, and of what mcmc draws."""
