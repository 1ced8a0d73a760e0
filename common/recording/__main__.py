"""Record runs, and write a page of each to scrub, docs/recordings/NAME.html, and its still, NAME.svg.

python -m common.recording              # lists the recordings, and those that are older than the code that they show
python -m common.recording NAME ...     # records these
python -m common.recording all
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from common.cli import command
from common.errors import UsageError
from common.recording.scenes import SCENES, Scene

REPOSITORY = Path(__file__).parents[2]
OUTPUT = REPOSITORY / "docs" / "recordings"
TIMEOUT_S = (
    400  # After a restart, agents of torchrun may wait for each other for five minutes, though their ranks are done.
)


@command
def main() -> None:
    names = sys.argv[1:]
    unknown = [name for name in names if name not in (*SCENES, "all", "-h", "--help")]
    if unknown:
        raise UsageError(f"{unknown[0]}: there is no such recording; python -m common.recording lists them")
    if "-h" in names or "--help" in names:
        print(__doc__)
        return
    if not names:
        old = stale()
        for name, scene in SCENES.items():
            print(f"{name:26} {scene.title}{'  (older than its code)' if name in old else ''}")
        return
    for name in SCENES if "all" in names else names:
        print(f"{name}: {make(name)}", flush=True)
    (OUTPUT / "README.md").write_text(index())


def stale() -> list[str]:
    """The recordings that are missing, or that show other code than today's."""
    pages = {name: OUTPUT / f"{name}.html" for name in SCENES}
    return [
        name for name, page in pages.items() if not page.exists() or _checksum(SCENES[name]) not in page.read_text()
    ]


def index() -> str:
    """The page that lists all recordings, with their stills."""
    parts = [(OUTPUT / "README.md").read_text().partition("\n## ")[0]]
    for name, scene in SCENES.items():
        parts.append(f"## {scene.title}\n\n{scene.text}\n\n[![{scene.title}]({name}.svg)]({name}.html)\n")
    return "\n".join(parts)


def make(name: str) -> Path:
    """Record a scene, and write its page and its still."""
    from common.recording.events import read
    from common.recording.page import Run, write_page
    from common.recording.picture import draw

    scene = SCENES[name]
    runs = []
    for title, arguments in scene.variants.items():
        with tempfile.TemporaryDirectory() as folder:
            _record(scene, arguments, Path(folder))
            runs.append(Run(title, read(Path(folder), scene.window, scene.milestone), _sources(scene)))
    page = OUTPUT / f"{name}.html"
    write_page(page, scene.title, scene.text, f"python -m common.recording {name}", _checksum(scene), runs)
    (OUTPUT / f"{name}.svg").write_text(draw(runs[0].recording, f"{scene.title}. {scene.text}") + "\n")
    return page


def _record(scene: Scene, arguments: tuple[str, ...], folder: Path) -> None:
    """Run the script on all ranks.

    :raises RuntimeError: if it fails
    """
    sources = ",".join(map(str, _sources(scene)))
    rank = [
        "-m",
        "common.recording.record",
        str(folder),
        sources,
        ",".join(scene.calls),
        str(REPOSITORY / scene.script),
        *arguments,
    ]
    settings = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "RECORDED_FILES": f"{folder}/files"}
    agent = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(scene.ranks),
        "--max-restarts",
        "3",
        "--rdzv-backend",
        "c10d",
    ]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    processes = []
    for number in range(scene.ranks):
        identity = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(scene.ranks)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started = [*agent, "--rdzv-endpoint", f"localhost:{port}", *rank] if scene.hosts else rank
        with open(folder / f"{number}.stderr", "w") as errors:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *started],
                    env=os.environ | settings | ({} if scene.hosts else identity | address),
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            )
    try:
        for number, process in enumerate(processes):
            if process.wait(TIMEOUT_S) > 0:  # a signal, whose number is negative, is part of a scene
                said = (folder / f"{number}.stderr").read_text()
                raise RuntimeError(f"{scene.script} {' '.join(arguments)} failed:\n{said}")
    finally:
        for process in processes:
            process.terminate()  # an agent ends its rank
            process.wait()


def _sources(scene: Scene) -> list[Path]:
    return [REPOSITORY / path for path in (scene.script, *scene.sources)]


def _checksum(scene: Scene) -> str:
    """Of the code that a recording shows and that made it, and of what the scene says."""
    made_by = [
        path for path in sorted(Path(__file__).parent.glob("*.*")) if path.name not in ("scenes.py", "__main__.py")
    ]
    content = b"".join(path.read_bytes() for path in (*_sources(scene), *made_by))
    return hashlib.sha256(content + repr(scene).encode()).hexdigest()


if __name__ == "__main__":
    main()
