"""A long run on two ranks that is killed again and again, against one that is left alone."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nerfstudio.utils.rich_utils import CONSOLE

from splaxel_ns.bench.results import ResultFile

PATIENCE_S = 60.0
"""A job that has lost a rank must have ended by then (design 9)."""
WARM_UP = 200
"""Steps after a start whose memory is not compared."""


@dataclass
class Soak:
    """Train twice on several ranks: undisturbed, and with ranks killed at random and resumed; compare."""

    data: Path
    """The scene (MatrixCity layout)."""
    json: Path
    """Result file."""
    steps: int = 5000
    """Training steps."""
    ranks: int = 2
    """Processes."""
    kills: int = 10
    """How often a random rank is killed (kill -9)."""
    save_every: int = 200
    """Steps between checkpoints."""
    max_gaussians: int = 40_000
    """Growth ends there."""
    seed: int = 0
    """Of the moments and ranks that are killed."""

    def main(self) -> None:
        result_file = ResultFile(self.json)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            calm = self._run(folder, "calm", [])
            generator = random.Random(self.seed)
            # Not in the first steps: there is nothing to resume before the first checkpoint, which is no fault.
            moments = sorted(generator.randrange(self.save_every, self.steps - 10) for _ in range(self.kills))
            killed = self._run(folder, "killed", [(step, generator.randrange(self.ranks)) for step in moments])
        result = {
            "steps": self.steps,
            "ranks": self.ranks,
            "undisturbed": calm,
            "killed": killed,
            "psnr_difference": killed["psnr"] - calm["psnr"],
        }
        result_file.write(result)
        CONSOLE.print(
            f"{len(moments)} kills: PSNR {killed['psnr']:.3f} dB, undisturbed {calm['psnr']:.3f} dB; "
            f"longest end after a kill {max(killed['seconds_to_end'], default=0.0):.1f} s; "
            f"{killed['rebalanced']} repartitions; memory in the last fifth, since the last start, "
            f"{killed['memory_growth']:+.1%}"
        )
        self._require(result)

    def _require(self, result: dict[str, Any]) -> None:
        wrong = []
        for name in ("undisturbed", "killed"):
            run = result[name]
            if not run["count_conserved"]:
                wrong.append(f"{name}: Gaussians were lost or doubled")
            if not run["finite"]:
                wrong.append(f"{name}: a loss was not finite")
            if run["memory_growth"] > 0.05:
                wrong.append(f"{name}: memory grew by {run['memory_growth']:.1%} after growth had stopped")
            if run["rebalanced"] < 2:
                wrong.append(f"{name}: space was cut anew {run['rebalanced']} times only")
        if max(result["killed"]["seconds_to_end"], default=0.0) > PATIENCE_S:
            wrong.append("a job outlived its killed rank")
        if abs(result["psnr_difference"]) > 0.1:
            wrong.append(f"PSNR differs by {result['psnr_difference']:+.3f} dB")
        if wrong:
            raise SystemExit("The soak failed: " + "; ".join(wrong) + ".")

    def _run(self, folder: Path, name: str, kills: list[tuple[int, int]]) -> dict[str, Any]:
        """One run to its end, killed at the given steps."""
        stats = folder / f"{name}.jsonl"
        seconds_to_end, texts = [], []
        for number, (step, rank) in enumerate([*kills, (self.steps, -1)]):
            path = folder / f"{name}.{number}.log"
            with open(path, "w", encoding="utf-8") as log:
                job = self._start(folder, name, stats, log)
                seconds = self._watch(job, stats, step, rank)
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
            if rank >= 0:
                seconds_to_end.append(seconds)
                CONSOLE.print(f"{name}: rank {rank} killed about step {step}; the job ended after {seconds:.1f} s")
            elif job.returncode != 0:
                raise SystemExit(f"The {name} run failed:\n{texts[-1][-3000:]}")
        whole = "".join(texts)
        return self._examine(stats) | {
            "psnr": self._evaluate(folder, name),
            "seconds_to_end": seconds_to_end,
            "rebalanced": whole.count("new boxes"),
            "named": sum("lost rank" in text or "exitcode  : -9" in text for text in texts[:-1]),
        }

    def _start(self, folder: Path, name: str, stats: Path, log: IO[str]) -> subprocess.Popen[bytes]:
        scale = self.steps * self.ranks  # images
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)),
            *(str(Path(sys.executable).with_name("ns-train")), "splaxel", "--data", str(self.data)),
            *("--output-dir", str(folder), "--experiment-name", "soak", "--timestamp", name, "--resume", "auto"),
            *("--vis", "tensorboard", "--max-num-iterations", str(self.steps)),
            *("--steps-per-save", str(self.save_every), "--steps-per-eval-all-images", "0"),
            *("--steps-per-eval-image", "0", "--pipeline.stats-file", str(stats)),
            *("--pipeline.datamanager.batch-size", str(self.ranks)),
            *("--pipeline.model.max-gaussians", str(self.max_gaussians)),
            *("--pipeline.model.stop-split-at", str(scale // 2)),
            *("--pipeline.model.imbalance", "0.5", "--pipeline.model.max-imbalance", "0.02"),
            *("--pipeline.model.balance-every", str(max(scale // 20, 1))),
            *("--optimizers.means.scheduler.max-steps", str(scale)),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)

    def _watch(self, job: subprocess.Popen[bytes], stats: Path, step: int, rank: int) -> float:
        """Wait for the end, killing a rank once the step is reached; how long the job lived on after that."""
        killed_at = None
        while job.poll() is None:
            time.sleep(0.1)
            if rank >= 0 and killed_at is None and last_step(stats) >= step:
                victim = process_of(job.pid, rank)
                if victim is not None:
                    os.kill(victim, signal.SIGKILL)
                    killed_at = time.monotonic()
            if killed_at is not None and time.monotonic() - killed_at > 2 * PATIENCE_S:
                os.killpg(job.pid, signal.SIGKILL)
        return 0.0 if killed_at is None else time.monotonic() - killed_at

    def _examine(self, stats: Path) -> dict[str, Any]:
        """What the statistics of a run say; steps that were done twice count as they were done last."""
        lines = [json.loads(line) for line in stats.read_text().splitlines() if line.endswith("}")]
        by_step: dict[int, dict[int, dict[str, float]]] = {}
        for line in lines:
            by_step.setdefault(line["step"], {})[line["rank"]] = line
        totals = [sum(rank["gaussians"] for rank in by_step[step].values()) for step in sorted(by_step)]
        last = sorted(by_step)[-len(by_step) // 5 :]  # growth has stopped long before
        main = [line["step"] for line in lines if line["rank"] == 0]
        # Processes that have just started still fill their caches.
        begun = next((main[k] for k in range(len(main) - 1, 0, -1) if main[k] <= main[k - 1]), 0) + WARM_UP
        memory = [sum(rank["memory"] for rank in by_step[step].values()) for step in last if step >= begun]
        tenth = max(len(memory) // 10, 1)
        return {
            "steps_done": len(by_step),
            "gaussians": totals[-1],
            "count_conserved": len(set(totals[-len(last) :])) == 1
            and all(len(r) == self.ranks for r in by_step.values()),
            "finite": all(math.isfinite(value) for line in lines for value in line.values()),
            "memory": memory[-1] if memory else None,
            "memory_steps": len(memory),
            "memory_growth": sum(memory[-tenth:]) / max(sum(memory[:tenth]), 1) - 1.0 if memory else 0.0,
        }

    def _evaluate(self, folder: Path, name: str) -> float:
        output = folder / f"{name}.eval.json"
        config = folder / "soak" / "splaxel" / name / "config.yml"
        command = [str(Path(sys.executable).with_name("ns-eval")), "--load-config", str(config)]
        subprocess.run([*command, "--output-path", str(output)], check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(output.read_text())["results"]["psnr"])


def last_step(stats: Path) -> int:
    """The step of the last whole line of a statistics file, -1 before there is one."""
    if not stats.exists():
        return -1
    with open(stats, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        lines = [line for line in file.read().split(b"\n") if line.startswith(b"{") and line.endswith(b"}")]
    return int(json.loads(lines[-1])["step"]) if lines else -1


def process_of(launcher: int, rank: int) -> int | None:
    """The process that torchrun started for a rank, None if there is none (any more)."""
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        for child in children:
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
    except OSError:
        return None
    return None
