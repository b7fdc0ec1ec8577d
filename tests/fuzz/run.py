"""Fuzzes one target after another with atheris: `make fuzz`, `make fuzz ARGS="wire vllm --seconds 600"`.

Each runs in a process of its own. An input that breaks the property is kept in `.fuzz/TARGET/crash-…`, beside what grew
of the corpus, and ends the run with status 1.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path

FOLDER = Path(".fuzz")
INSTRUMENTED = ["event_plane", "advisor.entries", "advisor.segment_files", "advisor.segment_format"]
RSS_MIB_MAX = 2_048
INPUT_BYTES_MAX = 16_384


def fuzz(name: str, seconds: int, corpus: Path) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)

    def mutate(raw: bytes, bytes_max: int, seed: int) -> bytes:
        drawn = random.Random(seed)
        mutated: bytes = atheris.Mutate(raw, bytes_max) if drawn.random() < 0.3 else target.mutate(raw, drawn)
        return mutated[:bytes_max]

    options = [
        f"-max_total_time={seconds}", f"-rss_limit_mb={RSS_MIB_MAX}", f"-max_len={INPUT_BYTES_MAX}", "-timeout=10",
        f"-artifact_prefix={corpus}/", "-print_final_stats=1", "-verbosity=0",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], str(corpus), *options], target.check, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="all where none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (60)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        (name,) = arguments.targets
        fuzz(name, arguments.seconds, FOLDER / name)
    from tests.fuzz.targets import TARGETS

    unknown = set(arguments.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown target {', '.join(sorted(unknown))}: there are {', '.join(TARGETS)}")
    broken = []
    for name in arguments.targets or TARGETS:
        print(f"== {name}, {arguments.seconds} s", flush=True)
        command = [sys.executable, "-m", "tests.fuzz.run", name, "--here", "--seconds", str(arguments.seconds)]
        if subprocess.run(command, check=False).returncode != 0:
            broken.append(name)
    print(f"broken: {', '.join(broken)}: see {FOLDER}/TARGET/crash-*" if broken else "nothing broke")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
