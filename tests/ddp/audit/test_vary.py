"""The same job again: what must be equal is, and each change of the script is seen by the variation that it breaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ddp.audit.libraries.__main__ import FLAGS, FOLDER
from ddp.audit.trace import RankTrace, Trace
from ddp.audit.vary import KINDS, Variation, plan, vary
from ddp.audit.watch.event_types import JoinBegins
from tests.ddp.audit.forked import watch

SCRIPT = FOLDER / "torch_alone.py"
NOTHING = Trace([RankTrace([], rank, []) for rank in range(2)], [], {})  # two ranks that do nothing


def varied(
    folder: Path, source: str, kinds: Sequence[str], arguments: Sequence[str] = FLAGS, resume: str | None = None
) -> list[Variation]:
    """The variations of a script.

    :param arguments: of the script; of the table's job if none are given
    :param resume: the script's switch
    """
    path = folder / "job.py"
    path.write_text(source)
    script = [str(path), *arguments]
    plans = plan(kinds, script, 2, "batch-size", "micro-steps", resume)
    base = watch(folder, script)
    return [vary(one, base, watch) for one in plans]


@pytest.mark.examples
def test_a_right_script_comes_to_the_same_result(tmp_path: Path) -> None:
    found = varied(tmp_path, SCRIPT.read_text(), KINDS)
    assert [variation.finding for variation in found] == [None] * 6
    assert found[0][1:3] == ("run again", "the same samples and the same bits in 9 steps")
    resumed = "the same samples and the same bits in 6 steps (from step 3 on)"
    assert found[4][1:3] == ("killed and started again, after 6 steps", resumed)
    assert found[5][1:3] == ("killed and started again, after 4 steps", resumed)


@pytest.mark.examples
@pytest.mark.parametrize(
    ("kind", "was", "becomes", "said"),
    [
        ("repeat", "torch.manual_seed(0)", "torch.seed()", "takes other samples"),
        ("ranks", "seed=0", "seed=ranks", "takes other samples: 48, of which"),
        ("ranks", "/ args.micro_steps", "/ args.micro_steps / ranks", "has other gradients"),
        ("micro-steps", " / args.micro_steps", "", "has other gradients"),
        ("resume", '    optimizer.load_state_dict(state["optimizer"])\n', "", "uses another learning rate"),
        ("resume", '    model.module.load_state_dict(state["model"])\n', "", "it begins anew"),
        ("resume", "sampler.set_epoch(epoch)", "sampler.set_epoch(epoch - first_epoch)", "takes the samples of step 0"),
        ("resume", "range(first_epoch, 3)", "range(first_epoch, first_epoch + 3)", "it takes 9 steps where 6 are left"),
    ],
)
def test_what_differs_is_said(tmp_path: Path, kind: str, was: str, becomes: str, said: str) -> None:
    source = SCRIPT.read_text()
    assert was in source
    texts = [one.finding.text for one in varied(tmp_path, source.replace(was, becomes), [kind]) if one.finding]
    assert texts
    assert all(said in text for text in texts)


def test_a_script_that_starts_its_own_ranks_is_not_compared() -> None:
    found = vary(plan(["ranks"], ["x.py"], 2, None, None, None)[0], NOTHING, lambda *_: NOTHING)
    assert (found.text, found.is_judged) == ("not compared: the script made a group of 2 ranks", False)


def test_steps_under_join_are_not_compared() -> None:
    joined = Trace([RankTrace([JoinBegins()], rank, []) for rank in range(2)], [], {})
    (again,) = plan(["micro-steps"], ["x.py", "--steps", "2"], 2, None, "steps", None)
    found = vary(again, joined, lambda *_: joined)
    assert found.text.startswith("not compared: under join") and not found.is_judged
