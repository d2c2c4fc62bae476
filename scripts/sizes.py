"""What is committed and how long the bench is: `make check-size` prints it, a test holds it below MOST.

python scripts/sizes.py
"""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
MB = 2**20
MOST = {"results/, MB": 12.0, "docs/report.html, MB": 2.0, "cli + experiments + report, lines": 8650}


def megabytes(*paths: Path) -> float:
    return sum(path.stat().st_size for path in paths) / MB


def committed(folder: str) -> list[Path]:
    """The files of a folder that git keeps or would keep."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", folder]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def sizes() -> dict[str, float]:
    """Each size by its name in MOST."""
    parts = (ROOT / "src" / "protofed" / name for name in ("cli", "experiments", "report"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for part in parts for path in part.glob("*.py"))
    found = (megabytes(*committed("results")), megabytes(ROOT / "docs" / "report.html"), lines)
    return dict(zip(MOST, found, strict=True))


if __name__ == "__main__":
    for name, size in sizes().items():
        print(f"{name:<36} {size:8.6g}  (at most {MOST[name]:g})")
