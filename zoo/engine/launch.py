"""What the launcher asked for, and what came of it."""

from __future__ import annotations

import ctypes
import os
import shlex
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator


LAUNCHERS = {
    "accelerate", "accelerate-launch", "accelerate.commands.launch",
    "torchrun", "torch.distributed.run", "torch.distributed.launch",
}  # fmt: skip


def launcher_arguments() -> tuple[list[str], dict[str, str]]:
    """The command line and environment of the `accelerate launch` or `torchrun` that started us.

    Both empty where there is none, or where the system does not show them.
    """
    import psutil

    try:
        for parent in psutil.Process().parents()[:3]:
            command = parent.cmdline()
            if LAUNCHERS & {os.path.basename(word) for word in command[:4]}:
                return command, parent.environ()
            if os.path.basename(command[0] if command else "").startswith("python"):
                break  # another program started us, such as an ablation: its launcher is not ours
    except psutil.Error:
        pass
    return [], {}


def _flag(command: list[str], name: str) -> str | None:
    """The value of `--name V` or `--name=V`, hyphens or underscores, or None."""
    for i, word in enumerate(command):
        head, equals, value = word.partition("=")
        if head.startswith("--") and head[2:].replace("-", "_") == name:
            return value if equals else (command[i + 1] if i + 1 < len(command) else None)
    return None


def follow_launcher(command: list[str]) -> None:
    """On Linux: SIGTERM for this process when its launcher dies, instead of training on unseen."""
    import signal

    if command and sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def check_processes(accelerator: Accelerator, command: list[str]) -> str | None:
    """A warning where several processes were asked for and this is the only one.

    Raises:
        RuntimeError: several processes run and do not know of each other.
    """
    if accelerator.num_processes > 1:
        return None
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise RuntimeError(
            f"{world} processes were started, but each trains alone (WORLD_SIZE={world}, "
            f"Accelerate sees 1 on {accelerator.device}). On CPUs set ACCELERATE_USE_CPU=true."
        )
    wanted = _flag(command, "num_processes") or _config_processes(command)
    if wanted and wanted.isdigit() and int(wanted) > 1:
        return (
            f"{wanted} processes were asked for and 1 was started: `accelerate launch` starts one "
            "without several GPUs. For several CPU processes: ACCELERATE_USE_CPU=true torchrun "
            f"--nproc_per_node {wanted} {sys.argv[0]} ..."
        )
    return None


def _config_processes(command: list[str]) -> str | None:
    """`num_processes` of the configuration file that `accelerate launch` read."""
    if not command or not any("accelerate" in word for word in command[:4]):
        return None
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    path = _flag(command, "config_file") or default_config_file
    if "--cpu" in command or not os.path.isfile(path):
        return None
    return str(load_config_from_file(path).num_processes)


def set_threads(accelerator: Accelerator, command: list[str], environ: dict[str, str]) -> None:
    """Gives the CPU threads that nobody limited on purpose to the processes of this machine.

    `accelerate launch` and `torchrun` set OMP_NUM_THREADS=1 where the user said nothing, which
    leaves cores idle. A value from the user's own environment or flags is kept.
    """
    said = "OMP_NUM_THREADS" in environ or _flag(command, "num_cpu_threads_per_process")
    if accelerator.device.type != "cpu" or not command or said:
        return
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, _cores() // local))


def keep_memory() -> None:
    """Keeps glibc from giving the memory of each step back to the system.

    It trims its heap whenever a backward has freed the activations, and the next step pays for
    thousands of page faults: up to a tenth of the time of a small model. Values that the user set
    in the environment are kept; other C libraries are left alone.
    """
    trim_threshold, mmap_threshold = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)  # the most that glibc takes


def _cores() -> int:
    """Physical cores that this process may use."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(psutil.cpu_count(logical=False) or 1, allowed or 1))


def launch_words(processes: int, precision: str, *, cpu: bool) -> list[str]:
    """`accelerate launch` for one process, `torchrun` for several, with the precision of the run.

    >>> launch_words(2, "no", cpu=True)
    ['ACCELERATE_USE_CPU=true', 'torchrun', '--nproc_per_node', '2']
    """
    mixed = precision != "no"
    if processes == 1:
        return ["accelerate", "launch", *(["--mixed_precision", precision] if mixed else [])]
    settings = ["ACCELERATE_USE_CPU=true"] if cpu else []
    settings += [f"ACCELERATE_MIXED_PRECISION={precision}"] if mixed else []
    return [*settings, "torchrun", "--nproc_per_node", str(processes)]


def resume_command(out: str, processes: int, without: Collection[str] = ()) -> str:
    """The command line that continues this run, without some of its switches."""
    words, skip = [], False
    for word in sys.argv[1:]:
        head = word.split("=")[0]
        if skip or head in ("--out", "--resume"):
            skip = not skip and "=" not in word
            continue
        if word in without:
            continue
        words.append(word)
    launcher = launch_words(
        int(os.environ.get("LOCAL_WORLD_SIZE", processes)) if processes > 1 else 1,
        os.environ.get("ACCELERATE_MIXED_PRECISION", "no"),
        cpu=os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"),
    )
    return shlex.join([*launcher, sys.argv[0], *words, "--out", out, "--resume", "auto"])


def environment(accelerator: Accelerator) -> dict[str, Any]:
    """Versions, commit and hardware, for the record of a run."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    packages = ("torchvision", "timm", "open_clip_torch", "accelerate", "einops", "numpy")
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    hardware: dict[str, Any] = {
        "device": accelerator.device.type,
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "machine": platform.platform(),
        "cpu": _cpu_name(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
    }
    if accelerator.device.type == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name()
    return {"versions": versions, "commit": _commit(), "hardware": hardware}


def _cpu_name() -> str:
    import platform

    try:
        with open("/proc/cpuinfo") as file:
            return next(
                line.split(":")[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor()


def _commit() -> str | None:
    """The commit of the code, with `+` where files differ from it; None outside a checkout."""
    import subprocess
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        run = [
            subprocess.run(
                ["git", "-C", str(root), *args], capture_output=True, text=True, check=True
            )
            for args in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return run[0].stdout.strip() + ("+" if run[1].stdout.strip() else "")
