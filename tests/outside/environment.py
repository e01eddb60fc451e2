"""A wheel of this checkout, and an environment that holds nothing else of it."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def copy_sources(folder: Path) -> None:
    """Copy what a wheel is made of: the build leaves folders in its source."""
    for name in sorted(path.name for path in (ROOT / "tripletune").iterdir() if path.is_symlink()):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tripletune", folder / "tripletune", symlinks=True)


def build(source: Path) -> subprocess.CompletedProcess[str]:
    """Build source archive and wheel, as `make dist` does, of a checkout that has its folders."""
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", str(source)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def build_wheel(source: Path) -> Path:
    """The wheel of a copy of this checkout, which is made in an empty folder."""
    copy_sources(source)
    built = build(source)
    assert built.returncode == 0, built.stdout
    (wheel,) = source.glob("dist/*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """The programs of a new environment that holds the wheel; dependencies are read where this Python has them."""
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "--disable-pip-version-check", "-q"]
    command = [*pip, "install", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(command, env=CLEAN, check=True)
    # Only now: pip would find the tripletune that is installed there. An editable install is not found this way.
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder / "bin"
