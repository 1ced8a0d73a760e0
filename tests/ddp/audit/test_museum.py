"""The museum: each exhibit has a bug that the audit finds at its line, and none once the bug is fixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp.museum.__main__ import FOLDER, exhibits, page
from tests.ddp.audit.forked import judge
from tests.support.launch import run_command

MOST_LINES = 40
# In the line that the audit names.
BLAMED = {
    "around_the_wrapper": "model.module(inputs)",
    "averages_parameters": "dist.all_reduce(",
    "clipping_on_one_rank": "clip_grad_norm_",
    "flag_after_forward": "require_backward_grad_sync",
    "hooks_lost": ".backward()",
    "optimizer_before_sharding": "optimizer.step()",
    "sharding_of_one": "optimizer.step()",
    "strided_broadcast": "broadcast(",
    "gathered_without_gradient": "F.cross_entropy",
    "last_micro_batch_only": "zero_grad",
    "loss_not_divided": "F.mse_loss",
    "mean_of_means": "F.cross_entropy",
    "norm_of_a_shard": "clip_grad",
    "norm_summed_twice": "all_reduce",
    "scaled_clipping": "clip_grad_norm_",
    "evaluation_counts_twice": "DataLoader(",
    "read_by_all": "DataLoader(",
    "same_crops": "DataLoader(",
    "same_noise": "torch.randn",
    "same_order": "DataLoader(",
    "weights_vanish": "WeightedRandomSampler(",
    "later_weights": "submit(",
    "repeated_epoch": "DataLoader(",
    "resumed_from_average": "torch.save",
    "scheduler_of_each_process": "scheduler.step()",
}


def test_the_page_is_that_of_the_exhibits() -> None:
    assert (FOLDER / "README.md").read_text() == page()


def test_every_exhibit_is_short_and_blamed() -> None:
    assert exhibits().keys() == BLAMED.keys()
    assert [name for name, path in exhibits().items() if len(path.read_text().splitlines()) > MOST_LINES] == []


@pytest.mark.examples
def test_an_exhibit_is_shown_both_ways() -> None:
    """Its story, its diff, and for both variants the number and what the audit says."""
    done = run_command("ddp.museum", "loss_not_divided")
    assert done.returncode == 0, done.stderr
    broken, fixed = done.stdout.partition("\nfixed:")[::2]
    assert "\n+" in broken
    assert "relative error" in broken
    assert "the loss is not divided" in broken
    assert "relative error" in fixed
    assert fixed.endswith("nothing wrong was found\n")


def test_an_unknown_exhibit_is_a_user_error() -> None:
    done = run_command("ddp.museum", "nothing")
    assert (done.returncode, done.stderr) == (
        2,
        "error: nothing: there is no such exhibit; python -m ddp.museum lists them\n",
    )


@pytest.mark.examples
@pytest.mark.parametrize("name", BLAMED)
def test_the_audit_finds_the_bug_and_nothing_else(tmp_path: Path, name: str) -> None:
    path = exhibits()[name]
    (finding,) = judge(tmp_path, path)
    file, line = finding.where.rsplit(":", 1)
    assert Path(file) == path, finding
    assert BLAMED[name] in path.read_text().splitlines()[int(line) - 1], finding
    assert judge(tmp_path, path, "--right") == []
