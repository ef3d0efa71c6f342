"""Do the tests find a fault? Each line of tests/faults.txt is put into the code alone.

`python -m tests.mutations` copies the checkout, writes one fault at a time into the copy, and runs the
tests that the line names until one fails. It ends with status 1 if the tests pass in spite of a
fault. Words after the command choose the lines that contain one of them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FAULTS = ROOT / "tests" / "faults.txt"
COPIED = ("hierfl", "models", "guides", "tests", "benchmarks", "examples", "docs")
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")


class Fault(NamedTuple):
    """A line of code, a wrong one in its place, and the tests that must fail then."""

    file: str
    right: str
    wrong: str
    tests: list[str]

    def apply(self, root: Path) -> str:
        """Write the wrong code into a file below `root`, and return the file as it was."""
        path = root / self.file
        text = path.read_text()
        path.write_text(text.replace(self.right, self.wrong))
        return text


def faults() -> Iterator[Fault]:
    """Read the faults; raise a ValueError where the right code is not in its file exactly once."""
    for line in FAULTS.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        file, change, tests = line.split(" :: ")
        right, wrong = change.split(" => ")
        count = (ROOT / file).read_text().count(right)
        if count != 1:
            raise ValueError(
                f"{file} holds {right!r} {count} times: choose a line that is there once"
            )
        yield Fault(file, right, wrong, tests.split())


def is_found(fault: Fault, root: Path) -> bool:
    """Return whether one of a fault's tests fails in a checkout that has the fault."""
    text = fault.apply(root)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        (root / fault.file).write_text(text)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.returncode == 1


def main(words: list[str]) -> int:
    """Print each fault and whether the tests find it; return 1 if one is not found."""
    missed = 0
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, root / name, symlinks=True)
        for name in FILES:
            shutil.copy(ROOT / name, root / name)
        for fault in faults():
            if words and not any(word in f"{fault.file} {fault.right}" for word in words):
                continue
            detected = is_found(fault, root)
            missed += not detected
            print(f"{'found ' if detected else 'MISSED'} {fault.file}: {fault.wrong}", flush=True)
    print(f"{missed} missed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
