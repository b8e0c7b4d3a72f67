"""What a training configuration must satisfy before a run starts."""

from __future__ import annotations

from nerfstudio.engine.trainer import TrainerConfig

from splaxel_ns import comm

MAX_PORT = 2**16 - 1


def check_run(config: TrainerConfig, world_size: int) -> None:
    """Refuse what cannot be done.

    Raises:
        ValueError: Naming the option and the remedy.
    """
    if world_size > 1 and comm.launched()[1] > 1:
        raise ValueError(
            f"--machine.num-devices is {world_size} in a process of torchrun: use either, and leave out the other."
        )
    if config.max_num_iterations < 1:
        raise ValueError(f"--max-num-iterations is {config.max_num_iterations}; it must be at least 1.")
    if config.mixed_precision or config.use_grad_scaler:
        raise ValueError("splaxel trains in float32: leave out --mixed-precision and --use-grad-scaler.")
    if any(steps != 1 for steps in config.gradient_accumulation_steps.values()):
        raise ValueError(
            "splaxel accumulates gradients over the views of a step: instead of --gradient-accumulation-steps use "
            "--pipeline.datamanager.batch-size."
        )
    ports = {"port": config.viewer.websocket_port, "port-default": config.viewer.websocket_port_default}
    for name, port in ports.items():
        if port is not None and not 1 <= port <= MAX_PORT:  # the viewer's thread would end, and the run wait for it
            raise ValueError(f"--viewer.websocket-{name} is {port}; it must be from 1 to {MAX_PORT}.")
