"""Opaque walls behind each other, one per rank, and what ranks that visit them find saturated."""

from __future__ import annotations

import io
from typing import Any

import torch
from test_model import batch, make_cameras, make_model, one_camera, train_view
from torch import Tensor

from splaxel_ns import comm
from splaxel_ns.checkpoint import plain
from splaxel_ns.cuda.saturation import unpack_bits
from splaxel_ns.exchange import RankRegions, covered
from splaxel_ns.model import SplaxelModel
from splaxel_ns.owner_exchange import OwnerRegions, has
from splaxel_ns.rank_saturation import RankSaturationMasks, decided_by
from splaxel_ns.saturation import SaturationMasks, ViewMask

SPACING = 10.0
"""Between two walls: the boxes' cuts fall between them, and the camera looks at them from the front."""
NUM_VIEWS = 3
SMALL, LARGE = 1.6, 8.0
"""Sides of the wall in front: one that hides a part of the others, and one that hides them from all views."""


def walls(num_walls: int, front_side: float = SMALL, num_partitions: int | None = None, **options: Any) -> SplaxelModel:
    """Walls across the z axis in a box each, the last one in front and those behind it stepping aside."""
    grids, sides, colors = [], [], []
    for number in range(num_walls):
        behind = num_walls - 1 - number
        side = front_side if not behind else 4.5 + behind
        steps, z = torch.linspace(-side / 2, side / 2, 14), -SPACING * behind
        grids.append(torch.cartesian_prod(steps + 2.0 * behind, steps, torch.tensor([z, z - 0.05, z - 0.1])))
        sides.append(torch.full((len(grids[-1]),), side / 14))
        colors.append(torch.eye(3)[number % 3].expand(len(grids[-1]), 3))
    points = torch.cat(grids)
    seeds = (points, torch.full((len(points), 3), 128, dtype=torch.uint8))
    if options.get("exchange") != "gaussian":
        options["num_partitions"] = num_partitions or num_walls
    model = make_model(seeds, background_color="black", **options)
    with torch.no_grad():
        model.scales.copy_(torch.log(torch.cat(sides))[:, None].expand(-1, 3))
        model.opacities.fill_(5.0)
        model.features_dc.copy_(torch.cat(colors))
    model.keep_own_share()
    model.train()
    return model


def clear_front(model: SplaxelModel) -> None:
    """The wall in front becomes transparent."""
    with torch.no_grad():
        model.opacities[model.means[:, 2] > -SPACING / 2] = -20.0
    model.changed()


def contents(mask: ViewMask | None) -> Any:
    """What must be the same everywhere."""
    return None if mask is None else (mask.partitions, mask.absent, mask.bits, mask.budgets)


def masks_of(model: SplaxelModel) -> list[Any]:
    views = [model.view_of(one_camera(index)) for index in range(NUM_VIEWS)]
    return [contents(model.saturation.mask_of(index, view, model.tree)) for index, view in enumerate(views)]


def counts_of(masks: SaturationMasks) -> dict[str, Any]:
    return {"version": masks.version, "bytes": masks.num_bytes, "masked": masks.num_masked} | vars(masks.last_epoch)


def epoch(model: SplaxelModel, in_flight: int = 2) -> dict[str, Any]:
    """Visit every view once as the pipeline does, with several under way."""
    model.world.take_counters()
    pictures: list[Any] = []
    started = []
    model.gauss_params.zero_grad()
    seen: dict[str, Any] = {"takes_part": [], "decided": [], "losses": []}

    def land() -> None:
        camera, flight = started.pop(0)
        outputs = model.finish(camera, flight)
        if outputs:
            crop = outputs["crop"]
            pictures.append((vars(crop), outputs["rgb"].detach(), needed_by(model.world.rank, flight.regions)))
            terms = model.get_loss_dict(outputs, batch())
            if terms["main_loss"].requires_grad:
                terms["main_loss"].backward()
            seen["losses"].append(float(terms["main_loss"].detach()))
        else:
            pictures.append(None)
            seen["losses"].append(0.0)
        seen["takes_part"].append(flight.own is not None)
        seen["decided"].append(decided_by(model.world.rank, flight.regions, flight.spans))
        model.after_backward(camera)

    for index in range(NUM_VIEWS):
        camera = one_camera(index)
        started.append((camera, model.begin(camera)))
        if len(started) == in_flight:
            land()
    while started:
        land()
    pixels = model.world.take_counters().bytes_sent.get("pixels", 0)
    return {"pictures": pictures, "bytes": pixels, "gradients": gradients_of(model)} | seen


def needed_by(rank: int, regions: RankRegions) -> Tensor:
    """[H, W] bool."""
    if isinstance(regions, OwnerRegions):
        return has(regions.wanted, rank)
    needed = covered(regions.needs[rank], regions.width)
    return needed if regions.needed is None else needed & unpack_bits(regions.needed[rank], regions.width)


def whole(model: SplaxelModel) -> list[Tensor]:
    """The pictures of evaluation, without masks."""
    model.eval()
    with torch.no_grad():
        pictures = [model.get_outputs(one_camera(index))["rgb"] for index in range(NUM_VIEWS)]
    model.train()
    return pictures


def story(num_partitions: int, front_side: float, exchange: str = "selective") -> list[dict[str, Any]]:
    """Three epochs, then the front wall becomes clear, and three more; of this rank, or of one process alone."""
    num_walls = comm.world().size if comm.world().size > 1 else num_partitions
    model = walls(num_walls, front_side, num_partitions, exchange=exchange)
    chapters = []
    for number in range(6):
        if number == 3:
            clear_front(model)
        model.take_saturation_snapshot(new_epoch=True)
        chapter = {"masks": masks_of(model), "participants": model.participants_for(make_cameras(NUM_VIEWS))}
        chapter |= {"whole": whole(model)} | (epoch(model) if model.is_shared else epoch_alone(model))
        chapters.append(chapter | {"counts": counts_of(model.saturation), "metrics": model.saturation.metrics()})
    return chapters


def epoch_alone(model: SplaxelModel) -> dict[str, Any]:
    model.gauss_params.zero_grad()
    losses = [float(train_view(model, batch(), one_camera(index))["main_loss"].detach()) for index in range(NUM_VIEWS)]
    return {"losses": losses, "gradients": gradients_of(model), "owner": model.tree.locate(model.means.detach())}


def gradients_of(model: SplaxelModel) -> dict[str, Tensor]:
    params = model.gauss_params.items()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in params}


def masked_model(**options: Any) -> SplaxelModel:
    """Every view has a mask in force and another visit behind it."""
    model = walls(comm.world().size, **options)
    for _ in range(2):
        epoch(model)
        model.take_saturation_snapshot(new_epoch=True)
    epoch(model)
    return model


def drops() -> dict[str, Any]:
    """Views masked before and after what must drop them."""
    counts: dict[str, Any] = {}
    model = masked_model(reset_alpha_every=1, refine_every=5, warmup_length=1000)
    counts["masked"] = model.saturation.num_masked
    optimizers = {name: torch.optim.Adam([value]) for name, value in model.gauss_params.items()}
    for step in range(6):
        model.refine(step, optimizers)
    counts["reset"] = model.saturation.num_masked
    model.take_saturation_snapshot(new_epoch=True)  # nothing waited either
    counts["after the reset"] = model.saturation.num_masked

    model = masked_model(num_downscales=1, resolution_schedule=100)
    model.step = 100
    epoch(model)
    counts["resolution"] = model.saturation.num_masked
    model.take_saturation_snapshot(new_epoch=True)
    counts["new resolution"] = model.saturation.num_masked

    model = masked_model()
    tree = type(model.tree).from_state_dict(model.tree.state_dict())
    model._set_tree(tree)
    model.changed()
    epoch(model)
    counts["boxes"] = model.saturation.num_masked
    return counts


def bounded(limit_in_views: float) -> dict[str, Any]:
    """Masks under a bound that not all views fit in."""
    model = masked_model()
    one = model.saturation.num_bytes / NUM_VIEWS
    limit = int(limit_in_views * one)
    model.saturation = RankSaturationMasks(model.saturation.eps, limit, model.world)
    largest = 0
    for _ in range(3):
        epoch(model)
        model.take_saturation_snapshot(new_epoch=True)
        largest = max(largest, model.saturation.num_bytes)
    return {"masked": model.saturation.num_masked, "largest": largest, "limit": limit, "masks": masks_of(model)}


def saved_and_continued() -> dict[str, Any]:
    """The masks of a run, and of one that goes on from its state after an epoch and a half."""
    model, other = masked_model(), walls(comm.world().size)
    model.finish(one_camera(1), model.begin(one_camera(1)))
    state = plain(model.saturation.state_dict())
    found = {"ranks": state["ranks"], "in force": masks_of(model), "state": state}
    if model.world.rank:  # one file serves all ranks
        state = None
    holder = io.BytesIO()
    torch.save(state, holder)
    data = torch.frombuffer(bytearray(holder.getvalue()), dtype=torch.uint8)
    parts = model.world.gather_uneven(data, "test")
    state = torch.load(io.BytesIO(parts[0].numpy().tobytes()), weights_only=True)
    other.saturation.load_state_dict(state)
    found["loaded"] = masks_of(other)
    clear_front(model)
    clear_front(other)
    for one in (model, other):
        one.finish(one_camera(2), one.begin(one_camera(2)))
        one.take_saturation_snapshot(new_epoch=True)
    found["then"] = masks_of(model), counts_of(model.saturation)
    found["then loaded"] = masks_of(other), counts_of(other.saturation)
    return found


def foreign(state: Any) -> int:
    """Views masked by the state of other ranks."""
    model = walls(comm.world().size)
    model.saturation.load_state_dict(state)
    epoch(model)
    model.take_saturation_snapshot(new_epoch=True)
    return model.saturation.num_masked


def come_apart(how: str) -> str:
    """What a snapshot says when one rank's masks differ in a budget, or when it has visited another view."""
    model = masked_model()
    if model.world.rank == 1 and how == "budget":
        model.saturation._masks[0].budgets[0][5] ^= 1
    if model.world.rank == 1 and how == "visit":
        model.saturation._forget_waiting(2)
    try:
        model.take_saturation_snapshot(new_epoch=True)
    except comm.Disagreement as error:
        return str(error)
    return "nothing noticed"


def not_used(options: dict[str, Any]) -> tuple[bool, int]:
    model = walls(comm.world().size, **options)
    for _ in range(2):
        model.take_saturation_snapshot(new_epoch=True)
        epoch(model)
    return model.prunes, model.saturation.version
