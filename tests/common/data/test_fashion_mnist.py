"""``common.data.fashion_mnist``: every layout it is found in, every way it can be damaged, and its download.

The data is Debian's ``dataset-fashion-mnist``; the mirrors are threads of this process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import gzip
import hashlib
import http.server
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import FashionMNIST

from common.data.fashion_mnist import DEBIAN_FOLDER, SAMPLES, SIDE, default_folder, download, read
from common.errors import UsageError

IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
NAMES = [IMAGES, LABELS, "train-images-idx3-ubyte", "train-labels-idx1-ubyte"]
UNREACHABLE = "http://127.0.0.1:1/"

needs_debians_files = pytest.mark.skipif(
    not all((DEBIAN_FOLDER / f"{name}.gz").is_file() for name in NAMES),
    reason=f"no Fashion-MNIST in {DEBIAN_FOLDER}: apt-get install dataset-fashion-mnist",
)


@pytest.fixture(scope="module")
def original() -> dict[str, bytes]:
    """The test split's two files, uncompressed."""
    return {name: gzip.decompress((DEBIAN_FOLDER / f"{name}.gz").read_bytes()) for name in (IMAGES, LABELS)}


def write(path: Path, content: bytes) -> None:
    """Write a file, gzipped when its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)


def idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """An array in MNIST's format."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def refusal(folder: Path, split: str = "test") -> str:
    """The one line in which a split is refused."""
    with pytest.raises(UsageError) as error:
        read(folder, split)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


@needs_debians_files
@pytest.mark.parametrize("split", ["train", "test"])
def test_debians_files_are_fashion_mnist_of_balanced_classes(split: str) -> None:
    """Debian's files are Fashion-MNIST of balanced classes.

    Claim (README.md): Fashion-MNIST in torchvision's layout, as plain files, from Debian's package, or downloaded
    once per node.
    """
    images, labels = read(DEBIAN_FOLDER, split)
    assert images.shape == (SAMPLES[split], SIDE, SIDE)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int64
    assert np.bincount(labels).tolist() == [SAMPLES[split] // 10] * 10


@needs_debians_files
@pytest.mark.parametrize("layout", ["FashionMNIST/raw/", ""])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_every_layout_reads_as_torchvision_reads_its_own(
    layout: str, suffix: str, original: dict[str, bytes], tmp_path: Path
) -> None:
    """Every layout reads as torchvision reads its own.

    Claim (README.md): Fashion-MNIST in torchvision's layout, as plain files, from Debian's package, or downloaded
    once per node.
    """
    for name, content in original.items():
        write(tmp_path / "ours" / (layout + name + suffix), content)
        write(tmp_path / "torchvision/FashionMNIST/raw" / name, content)
        write(
            tmp_path / "torchvision/FashionMNIST/raw" / name.replace("t10k", "train"), b""
        )  # it wants to see all four
    images, labels = read(tmp_path / "ours", "test")
    reference = FashionMNIST(str(tmp_path / "torchvision"), train=False)
    np.testing.assert_array_equal(images, reference.data.numpy())
    np.testing.assert_array_equal(labels, reference.targets.numpy())


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in its header": lambda content: content[:6],
    "one byte short": lambda content: content[:-1],
    "one byte long": lambda content: content + b"\0",
    "text": lambda content: b"<!DOCTYPE html><title>404 Not Found</title>" * 1000,
    "another type": lambda content: bytes([0, 0, 9]) + content[3:],
    "an unknown type": lambda content: bytes([0, 0, 10]) + content[3:],
}


@needs_debians_files
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("damaged", [IMAGES, LABELS])
def test_a_damaged_or_foreign_file_is_named(
    damage: str, damaged: str, original: dict[str, bytes], tmp_path: Path
) -> None:
    for name, content in original.items():
        write(tmp_path / name, DAMAGES[damage](content) if name == damaged else content)
    assert str(tmp_path / damaged) in refusal(tmp_path)


@needs_debians_files
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-10_000],
        lambda content: content[:40] + b"\xff" * 1000 + content[1040:],
        lambda content: b"text" * 999,
    ],
    ids=["empty", "truncated", "garbled", "not gzip"],
)
def test_a_damaged_gzip_file_is_named(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    for name in (IMAGES, LABELS):
        shutil.copy(DEBIAN_FOLDER / f"{name}.gz", tmp_path)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    assert refusal(tmp_path).startswith(f"{path} is damaged or truncated")


@needs_debians_files
@pytest.mark.parametrize("foreign", [IMAGES, LABELS])
def test_mnists_contents_under_the_same_names_are_refused(
    foreign: str, original: dict[str, bytes], tmp_path: Path
) -> None:
    mnist = {
        IMAGES: idx(np.full((10_000, SIDE, SIDE), 33, np.uint8)),  # MNIST's mean grey
        LABELS: idx(np.resize(np.array([7, 2, 1, 0, 4, 1, 4, 9, 5, 9], np.uint8), 10_000)),  # MNIST's first labels
    }
    for name, content in (original | {foreign: mnist[foreign]}).items():
        write(tmp_path / name, content)
    assert re.match(f"{re.escape(str(tmp_path / foreign))} holds other (images|labels)", refusal(tmp_path))


@pytest.mark.parametrize(
    "debian, data, expected",
    [(False, False, "data"), (False, True, "data"), (True, False, "debian"), (True, True, "data")],
)
def test_debians_folder_is_the_default_only_when_there_is_no_other(
    debian: bool, data: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("common.data.fashion_mnist.DEBIAN_FOLDER", Path("debian"))
    for folder, exists in (("debian", debian), ("data", data)):
        if exists:
            Path(folder).mkdir()
    assert default_folder() == Path(expected)


class Files(http.server.SimpleHTTPRequestHandler):
    """A mirror."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def mirror(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve in a thread; the mirror's address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def use_mirrors(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str], Path], None]:
    """Let torchvision download from these mirrors alone, and expect the files of a folder."""

    def use(mirrors: list[str], folder: Path) -> None:
        digests = [hashlib.md5((folder / f"{name}.gz").read_bytes()).hexdigest() for name in NAMES]
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setattr(FashionMNIST, "mirrors", mirrors)
        monkeypatch.setattr(FashionMNIST, "resources", [(f"{n}.gz", d) for n, d in zip(NAMES, digests, strict=True)])

    return use


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with four small files in the right format, for what is not about their contents."""
    for name in NAMES:
        write(tmp_path / "tiny" / f"{name}.gz", idx(np.zeros((3, 2, 2) if "images" in name else (3,), np.uint8)))
    return tmp_path / "tiny"


@needs_debians_files
def test_what_was_downloaded_reads_as_the_original(
    use_mirrors: Callable[[list[str], Path], None], original: dict[str, bytes], tmp_path: Path
) -> None:
    """Downloaded files read as the original.

    Claim (README.md): Fashion-MNIST in torchvision's layout, as plain files, from Debian's package, or downloaded
    once per node.
    """
    with mirror(functools.partial(Files, directory=str(DEBIAN_FOLDER))) as address:
        use_mirrors([UNREACHABLE, address], DEBIAN_FOLDER)
        download(tmp_path)
    for name, content in original.items():
        assert (tmp_path / "FashionMNIST/raw" / name).read_bytes() == content
    assert read(tmp_path, "test")[0].tobytes() == original[IMAGES][16:]


def download_refusal(folder: Path) -> str:
    """The one line in which a download fails."""
    with pytest.raises(UsageError) as error:
        download(folder)
    message = str(error.value)
    del error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # torchvision leaves an answer of 404 open
        gc.collect()
    assert len(message.splitlines()) == 1
    assert str(folder) in message
    assert "--download" in message
    return message


def test_an_unreachable_mirror_is_named(
    use_mirrors: Callable[[list[str], Path], None], tiny: Path, tmp_path: Path
) -> None:
    use_mirrors([UNREACHABLE], tiny)
    assert UNREACHABLE in download_refusal(tmp_path)


def test_a_mirror_that_serves_something_else_is_refused(
    use_mirrors: Callable[[list[str], Path], None], tiny: Path, tmp_path: Path
) -> None:
    for name in NAMES:
        write(tmp_path / "mirror" / f"{name}.gz", b"something else")
    with mirror(functools.partial(Files, directory=str(tmp_path / "mirror"))) as address:
        use_mirrors([address], tiny)
        download_refusal(tmp_path / "data")
