"""examples/: each runs from a folder outside the repository, with the packages installed or on PYTHONPATH."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.support.launch import REPOSITORY, error_lines, run_command

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
OWN = ("--model", "own_model_and_dataset:build", "--dataset", "own_model_and_dataset:load")
SMALL = ("--epochs", "1", "--device", "cpu", "--run-dir", "run")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project of one's own, with the examples in it."""
    for path in EXAMPLES:
        shutil.copy(path, tmp_path)
    return tmp_path


def run(folder: Path, *arguments: str, ranks: int = 0, status: int = 0) -> str:
    """Run a module in ``folder``, under torchrun if there are ranks; what it prints to stdout, or to stderr if it is to fail."""
    launcher = ("torch.distributed.run", f"--nproc_per_node={ranks}") if ranks else ()
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = run_command(*launcher, *arguments, cwd=folder, env=environment, timeout_s=280)
    assert (done.returncode != 0) == (status != 0), done.stderr
    return done.stderr if status else done.stdout


def weights_of_each_rank(output: str) -> list[str]:
    """The sums of the weights that the ranks print, exactly; their lines may run into each other."""
    return re.findall(r"sum of the weights (-?\d+\.\d+(?:e-?\d+)?)", output)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_its_imports_are_there(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(list(imports), []), path.name, "exec"), {})
    assert f" {path.name}" in text or path.stem == "own_model_and_dataset"  # the docstring has the command


def test_the_readme_shows_every_example() -> None:
    readme = (REPOSITORY / "examples" / "README.md").read_text()
    assert [path.name for path in EXAMPLES if f"]({path.name})" not in readme] == []


@pytest.mark.examples
@pytest.mark.parametrize("name", ["own_loop_by_hand.py", "own_loop_checkpoints.py", "own_loop_sharded.py"])
def test_a_loop_ends_the_threads_of_its_group(folder: Path, name: str) -> None:
    """One that still frees what backward has left there while Python shuts down aborts the process: one time in some hundreds."""
    with open(folder / name, "a") as file:
        file.write("import pathlib, time\ntime.sleep(0.5)  # the kernel forgets one a moment after its end\n")
        file.write(
            "print('threads:', *(comm.read_text() for comm in pathlib.Path('/proc/self/task').glob('*/comm')))\n"
        )
    names = run(folder, name, "10", "kept", ranks=1).partition("threads:")[2].split()
    assert names
    assert [other for other in names if "gloo" in other] == []


@pytest.mark.examples
def test_the_wrapper_by_hand_keeps_the_replicas_equal(folder: Path) -> None:
    one, other = weights_of_each_rank(run(folder, "own_loop_by_hand.py", ranks=2))
    assert one == other


@pytest.mark.examples
def test_the_line_for_torch_s_ddp_changes_no_bit(folder: Path) -> None:
    example = "torch_ddp_shared_memory.py"
    with_it, plain = (weights_of_each_rank(run(folder, example, *given, ranks=2)) for given in ((), ("plain",)))
    assert with_it == plain
    assert len(set(plain)) == 1


@pytest.mark.examples
def test_a_loop_that_is_continued_ends_with_the_same_bits(folder: Path) -> None:
    whole = weights_of_each_rank(run(folder, "own_loop_checkpoints.py", "30", "whole", ranks=2))
    of_part = weights_of_each_rank(run(folder, "own_loop_checkpoints.py", "17", "part", ranks=2))
    continued = weights_of_each_rank(run(folder, "own_loop_checkpoints.py", "30", "part", ranks=2))  # from step 10
    assert len(whole) == 2
    assert continued == whole != of_part
    assert sorted(path.name for path in (folder / "part").iterdir()) == ["step-00000020", "step-00000030"]
    # On two hosts, of which that of rank 0 has the folder.
    run(folder, "own_loop_checkpoints.py", "17", "part-0", ranks=2)
    each = f"{sys.executable} own_loop_checkpoints.py 30 part-$RANK"
    assert weights_of_each_rank(run(folder, "--no-python", "sh", "-c", each, ranks=2)) == whole


@pytest.mark.examples
def test_a_sharded_loop_continues_on_another_number_of_ranks(folder: Path) -> None:
    """On as many ranks, with the same bits; on three instead of two, up to rounding.

    Claim (README.md): a loop over shards of one's own continues from its checkpoints, on any number of ranks.
    """
    whole = weights_of_each_rank(run(folder, "own_loop_sharded.py", "20", "whole", ranks=2))
    run(folder, "own_loop_sharded.py", "10", "part", ranks=2)
    shutil.copytree(folder / "part", folder / "other")
    assert weights_of_each_rank(run(folder, "own_loop_sharded.py", "20", "part", ranks=2)) == whole
    on_three = weights_of_each_rank(run(folder, "own_loop_sharded.py", "20", "other", ranks=3))
    assert list(map(float, on_three)) == pytest.approx([float(whole[0])] * 3, rel=1e-5)


@pytest.mark.examples
def test_the_fast_loader_brings_every_image_of_a_folder_and_ddp_trains_on_it(folder: Path) -> None:
    for name, count, green in (("cats", 30, 0), ("dogs", 20, 200)):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (30, 20), (number, green, 0)).save(folder / "photos" / name / f"{number}.png")
    lines = run(folder, "fast_loader_own_folder", "photos").splitlines()
    assert lines[0] == "50 images of cats, dogs"
    assert [line.split(",")[0] for line in lines[1:]] == ["epoch 0: 50 images", "epoch 1: 50 images"]
    flags = "--dataset folder --data-dir photos --image-size 16 --model fashion-cnn --batch-size 10"
    assert "test accuracy 100.00 % after 1 epochs (10 of 10 samples)" in run(
        folder, "ddp.train", *flags.split(), *SMALL
    )


@pytest.mark.examples
def test_an_own_model_and_data_set_train_resume_and_are_evaluated(folder: Path) -> None:
    output = run(folder, "-m", "ddp.train", *OWN, *SMALL, ranks=2)
    accuracy = re.search(r"test accuracy ([\d.]+) % after 1 epochs \(\d+ of 400 samples\)", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 90
    resumed = run(folder, "ddp.train", *OWN, *SMALL[2:], "--epochs", "2", "--resume")
    assert "after 2 epochs" in resumed
    evaluated = run(folder, "ddp.evaluate", "--run-dir", "run", "--device", "cpu")
    assert "horizontal" in evaluated
    assert json.loads((folder / "run" / "config.json").read_text())["config"]["model"] == OWN[1]

    other = folder.joinpath("own_model_and_dataset.py").read_text().replace("seed=0", "seed=2")
    folder.joinpath("own_model_and_dataset.py").write_text(other)
    refused = run(folder, "ddp.train", *OWN, *SMALL[2:], "--epochs", "3", "--resume", status=2)
    assert "the run was started with other data" in error_lines(refused)[0]
