"""What belongs to single Gaussians in a run's state, told from all the rest: it goes where they go.

Tables are named by the place they have in the state: parameters as in the checkpoint's entry `pipeline`,
`optimizers.GROUP.ENTRY`, `strategy.NAME`.

Shapes: N Gaussians of this rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from splaxel_ns.comm import World
from splaxel_ns.shard_files import described, dtype_of

GAUSSIANS = "_model.gauss_params."
"""How the names of the Gaussians' parameters begin in a checkpoint's entry `pipeline`."""
MOMENT = "optimizers."
STATISTIC = "strategy."


def split_rows(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take what belongs to single Gaussians out of a run's state.

    Args:
        state: As of `resume.run_state`; not changed.

    Returns:
        The rest, and the tables [N, ...] by name: parameters, moments, statistics.
    """
    pipeline = {name: value for name, value in state["pipeline"].items() if not name.startswith(GAUSSIANS)}
    tables = {name: value for name, value in state["pipeline"].items() if name.startswith(GAUSSIANS)}
    num = len(tables[f"{GAUSSIANS}means"])
    optimizers = dict(state["optimizers"])
    for name, parameter in list(tables.items()):
        group = name.removeprefix(GAUSSIANS)
        if group not in optimizers:
            continue
        kept: dict[str, Any] = {}
        for entry, value in optimizers[group]["state"].get(0, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                tables[f"{MOMENT}{group}.{entry}"] = value
            else:
                kept[entry] = value
        optimizers[group] = optimizers[group] | {"state": {0: kept} if kept else {}}
    model = dict(state["model"])
    statistics = dict(model.get("strategy", {}))
    for name, value in list(statistics.items()):
        if isinstance(value, Tensor) and value.dim() and len(value) == num:
            tables[f"{STATISTIC}{name}"] = statistics.pop(name)
    rest = {**state, "pipeline": pipeline, "optimizers": optimizers, "model": model | {"strategy": statistics}}
    return rest, {name: tables[name].detach() for name in sorted(tables)}


def join_rows(rest: Mapping[str, Any], tables: Mapping[str, Tensor]) -> dict[str, Any]:
    """A run's state with these Gaussians: the reverse of `split_rows`, for other rows too.

    Raises:
        ValueError: A table belongs to nothing in the state.
    """
    state = {**rest, "pipeline": dict(rest["pipeline"]), "optimizers": dict(rest["optimizers"])}
    state["model"] = rest["model"] | {"strategy": dict(rest["model"].get("strategy", {}))}
    for name, value in tables.items():
        group, _, entry = name.removeprefix(MOMENT).rpartition(".")
        if name.startswith(GAUSSIANS):
            state["pipeline"][name] = value
        elif name.startswith(STATISTIC):
            state["model"]["strategy"][name.removeprefix(STATISTIC)] = value
        elif name.startswith(MOMENT) and group in state["optimizers"]:
            optimizer = state["optimizers"][group]
            kept = optimizer["state"].get(0, {}) | {entry: value}
            state["optimizers"][group] = optimizer | {"state": {0: kept}}
        else:
            raise ValueError(f"The checkpoint's table {name!r} belongs to nothing in it: it is damaged")
    return state


def agree_on_tables(
    world: World, rest: dict[str, Any], tables: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor], list[int]]:
    """Give every rank the same tables, zeros where a rank that saw nothing yet has none; every rank calls this at once.

    Args:
        world: The ranks.
        rest: As of `split_rows`.
        tables: As of `split_rows`.

    Returns:
        The rest, with Adam's count of steps of the job, the highest; the tables; the rows of each rank.

    Raises:
        LostRank: A peer is gone.
    """
    num = len(tables[f"{GAUSSIANS}means"])
    own = {
        "num": num,
        "tables": {name: described(value) for name, value in tables.items()},
        "steps": {
            name: float(optimizer["state"][0]["step"])
            for name, optimizer in rest["optimizers"].items()
            if f"{GAUSSIANS}{name}" in tables and "step" in optimizer["state"].get(0, {})
        },
    }
    said = [json.loads(text) for text in _texts(world, json.dumps(own))]
    agreed: dict[str, dict[str, Any]] = {}
    steps: dict[str, float] = {}
    for one in said:
        for name, table in one["tables"].items():
            assert agreed.setdefault(name, table) == table, f"Ranks hold {name} of different kinds"
        for name, step in one["steps"].items():
            steps[name] = max(step, steps.get(name, 0.0))
    optimizers = dict(rest["optimizers"])
    for name, step in steps.items():
        kept = optimizers[name]["state"].get(0, {}) | {"step": torch.tensor(step)}
        optimizers[name] = optimizers[name] | {"state": {0: kept}}
    agreed = {name: agreed[name] for name in sorted(agreed)}
    full = {
        name: tables[name] if name in tables else torch.zeros(num, *table["row"], dtype=dtype_of(table))
        for name, table in agreed.items()
    }
    statistics = {
        name: value for name, value in rest["model"]["strategy"].items() if f"{STATISTIC}{name}" not in agreed
    }
    rest = rest | {"optimizers": optimizers, "model": rest["model"] | {"strategy": statistics}}
    return rest, full, [one["num"] for one in said]


def _texts(world: World, text: str) -> list[str]:
    """Everybody's string."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return [bytes(part.tolist()).decode() for part in world.gather_uneven(own, "agreement")]
