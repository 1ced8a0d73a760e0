"""Record runs, and write a page of each to step through, docs/recordings/NAME.html, and its still, NAME.svg.

python -m maintain.recording              # lists the recordings, and those that are older than the code that they show
python -m maintain.recording NAME ...     # records these
python -m maintain.recording all
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.command_line.cli import command
from common.errors import UsageError
from maintain.recording.events import Recording, read
from maintain.recording.page import write_page
from maintain.recording.picture import draw
from maintain.recording.scenes import REPOSITORY, SCENES, Scene

OUTPUT = REPOSITORY / "docs/recordings"
TIMEOUT_S = (
    400  # agents of torchrun may wait for each other for five minutes after a restart, though their ranks are done
)


@command
def main() -> None:
    names = sys.argv[1:]
    if "-h" in names or "--help" in names:
        print(__doc__)
    elif not names:
        old = stale()
        for name, scene in SCENES.items():
            print(f"{name:26} {scene.title}{'  (older than its code)' if name in old else ''}")
    elif unknown := set(names) - {*SCENES, "all"}:
        raise UsageError(f"{min(unknown)}: there is no such recording; python -m maintain.recording lists them")
    else:
        for name in SCENES if "all" in names else names:
            print(f"{name}: {make(name)}", flush=True)
        (OUTPUT / "README.md").write_text(index())


def stale() -> list[str]:
    """The recordings that are missing, or that show other code than today's."""
    return [
        name
        for name, scene in SCENES.items()
        if not any(_checksum(scene) in page.read_text() for page in OUTPUT.glob(f"{name}.html"))
    ]


def index() -> str:
    """The page that lists all recordings, with their stills."""
    head = (OUTPUT / "README.md").read_text().partition("\n## ")[0]
    parts = [
        f"## {one.title}\n\n{one.text}\n\n[![{one.title}]({name}.svg)]({name}.html)\n" for name, one in SCENES.items()
    ]
    return "\n".join([head, *parts])


def make(name: str) -> Path:
    """Record a scene, and write its page and its still."""
    scene = SCENES[name]
    runs = []
    for arguments in scene.variants.values():
        with tempfile.TemporaryDirectory() as folder:
            runs.append(record(name, arguments, Path(folder)))
    page = OUTPUT / f"{name}.html"
    write_page(page, scene, runs, _checksum(scene))
    page.with_suffix(".svg").write_text(draw(runs[0], f"{scene.title}. {scene.text}") + "\n")
    return page


def record(name: str, arguments: Sequence[str], folder: Path) -> Recording:
    """Run the script on all ranks.

    :param folder: of the events
    :raises RuntimeError: if it fails
    """
    scene = SCENES[name]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "RECORDED_FILES": f"{folder}/files",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(scene.ranks),
    }
    agent = f"-m torch.distributed.run --nnodes {scene.ranks} --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint localhost:{port}"
    command = [sys.executable, *(agent.split() if scene.hosts else ())]
    command += ["-m", "maintain.recording.record", str(folder), name, *arguments]
    with open(folder / "errors", "w") as errors:
        processes = [
            subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=env | {"RANK": rank},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            for rank in map(str, range(scene.ranks))
        ]
        try:
            statuses = [process.wait(TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.terminate()  # an agent ends its rank
                process.wait()
    if max(statuses) > 0:  # a signal, whose number is negative, is part of a scene
        raise RuntimeError(f"{scene.script} {' '.join(arguments)} failed:\n{(folder / 'errors').read_text()}")
    return read(folder, scene.window)


def _checksum(scene: Scene) -> str:
    """Hash of the code that a recording shows, of the code that made it, and of the scene's text."""
    made_by = map(Path(__file__).with_name, ("events.py", "page.html", "page.py", "picture.py", "record.py"))
    content = b"".join(path.read_bytes() for path in (*scene.files, *made_by))
    return hashlib.sha256(content + repr(scene).encode()).hexdigest()


if __name__ == "__main__":
    main()
