"""The loader as a library, called as its documentation does not say; a command that makes one such call.

python -m tests.adversary.attempts.library NAME FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tests.adversary.attempt import Attempt

CALLS: dict[str, tuple[Callable[[str], Any], str]] = {}


def call(line: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """A call that must be refused in words that match ``line``."""

    def keep(function: Callable[[str], Any]) -> Callable[[str], Any]:
        CALLS[function.__name__] = (function, line)
        return function

    return keep


def files(folder: str, **settings: Any) -> Any:
    from dataloading.dataset.lfw import LFWDataset

    return LFWDataset(folder, **settings)


def batches(folder: str, **settings: Any) -> Any:
    from dataloading.dataset.batches import LFWBatches

    return LFWBatches(files(folder, **settings))


def loader(folder: str, **settings: Any) -> Any:
    from dataloading.loader.fast_loader import FastLoader

    return FastLoader(batches(folder), **settings)


@call(r"transform")
def transform(folder: str) -> None:
    batches(folder, transform=lambda image: image)


@call(r"there is no decoder 'guess' \(--decoder\): pillow, simplejpeg, torchcodec")
def decoder(folder: str) -> None:
    files(folder, decoder="guess")


@call(r"there is no augmentation 'all' \(--augmentation\): none, affine$")
def augmentation(folder: str) -> None:
    files(folder, augmentation="all")


@call(r"on_error \(--on-error\) is 'ignore': it must be raise or skip")
def on_error(folder: str) -> None:
    files(folder, on_error="ignore")


@call(r"image_size \(--image-size\) is (0|-3): it must be at least 1")
def image_size_of_zero(folder: str) -> None:
    files(folder, image_size=0)[0]


@call(r"image_size \(--image-size\) is (0|-3): it must be at least 1")
def image_size_below_zero(folder: str) -> None:
    batches(folder, image_size=-3)


@call(r"not there")
def nowhere(folder: str) -> None:
    files(folder + "/nowhere")


@call(r"there is no file 24: the data set has 24")
def index_beyond_the_end(folder: str) -> None:
    files(folder)[24]


@call(r"there is no file -25: the data set has 24")
def index_before_the_start(folder: str) -> None:
    files(folder)[-25]


@call(r"there is no file 24: the data set has 24")
def index_of_a_batch_beyond_the_end(folder: str) -> None:
    batches(folder)[24]


@call(r"LFWBatches")
def the_files_themselves(folder: str) -> None:
    from dataloading.loader.fast_loader import FastLoader

    FastLoader(files(folder), 4)


@call(r"batch_size 0")
def batch_size_of_zero(folder: str) -> None:
    loader(folder, batch_size=0)


@call(r"num_workers -1")
def workers_below_zero(folder: str) -> None:
    loader(folder, num_workers=-1)


@call(r"worker pool 'fibers'")
def another_pool(folder: str) -> None:
    loader(folder, pool="fibers")


@call(r"prefetch_batches 0")
def nothing_ahead(folder: str) -> None:
    loader(folder, prefetch_batches=0)


@call(r"sampler excludes shuffle")
def sampler_and_shuffle(folder: str) -> None:
    loader(folder, sampler=[0, 1], shuffle=True)


@call(r"batch_sampler excludes")
def batch_sampler_and_batch_size(folder: str) -> None:
    loader(folder, batch_sampler=[[0, 1]], batch_size=2)


@call(r"device cuda is not there: give one that is, or leave it out for batches on the CPU")
def a_gpu_that_is_not_there(folder: str) -> None:
    loader(folder, device="cuda")


@call(r"multiprocessing_context \(--start-method\) is 'fibers'")
def another_start_method(folder: str) -> None:
    list(loader(folder, pool="processes", num_workers=1, multiprocessing_context="fibers"))


@call(r"there is no file 99: the data set has 24")
def sampler_beyond_the_end(folder: str) -> None:
    list(loader(folder, sampler=[0, 99], num_workers=0))


@call(r"there is no file 99: the data set has 24")
def sampler_beyond_the_end_in_a_thread(folder: str) -> None:
    list(loader(folder, sampler=[0, 99], num_workers=1, pool="threads"))


@call(r"there is no file 99: the data set has 24")
def sampler_beyond_the_end_in_a_process(folder: str) -> None:
    list(loader(folder, sampler=[0, 99], num_workers=1, pool="processes"))


def main() -> None:
    name, folder = sys.argv[1:]
    try:
        CALLS[name][0](folder)
    except Exception as error:  # as a caller would see it
        from common.errors import UsageError, one_line

        from_a_process = str(error).startswith(
            "in a loader process"
        )  # and with the traceback from there, as torch's have
        if not isinstance(error, UsageError | ValueError | TypeError | IndexError) and not from_a_process:
            raise
        message = str(error).strip().splitlines()[-1] if from_a_process else str(error)
        print(f"error: {one_line(message)}", file=sys.stderr)
        sys.exit(2)


ATTEMPTS = [Attempt(f"tests.adversary.attempts.library {name} {{faces}}", line) for name, (_, line) in CALLS.items()]

if __name__ == "__main__":
    main()
