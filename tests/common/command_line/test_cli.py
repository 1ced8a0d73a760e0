"""``common.command_line.cli``: what a command line becomes, how a mistake in it is told, and who tells it."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.command_line.cli import command, from_settings, option, parse
from common.errors import UsageError
from tests.support.launch import run_program, run_ranks


@dataclass(frozen=True)
class Config:
    """One option of every kind."""

    batch_size: int = option(144, "samples per step", minimum=1, maximum=1000)
    seed: int = option(0, "any number at all")
    limit: int | None = option(None, "only so many (default: all)", minimum=1)
    dropout: float = option(0.25, "as a share, not in %", minimum=0, below=1)
    lr: float | None = option(None, "step size (default: follows)", above=0)
    model: str = option("cnn", "what to train", choices=("cnn", "mlp"))
    title: str = option("raw", "of the figure")
    run_dir: Path = option(Path("runs/one"), "where the results go")
    augment: bool = option(True, "augment the images")
    resume: bool = option(False, "continue the run")

    def __post_init__(self) -> None:
        if self.resume and self.limit is not None:
            raise UsageError("--resume and --limit contradict each other")


def parse_line(*arguments: str) -> Config:
    return parse(Config, "ddp.train", "What it does.", arguments)


def user_error(*arguments: str) -> str:
    """The one line in which a command line is refused."""
    with pytest.raises(UsageError) as error:
        parse_line(*arguments)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


def test_without_flags_every_option_has_its_default() -> None:
    assert parse_line() == Config()


def test_every_kind_of_flag_is_read_as_its_type() -> None:
    line = "--batch-size 7 --seed -3 --limit 5 --dropout 0 --lr 1e-3 --model mlp --title A --run-dir b/c --no-augment"
    expected = Config(7, -3, 5, 0.0, 1e-3, "mlp", "A", Path("b/c"), False, False)
    assert parse_line(*line.split()) == expected
    assert type(parse_line("--dropout", "0").dropout) is float
    assert isinstance(parse_line("--run-dir", "b").run_dir, Path)


def test_inclusive_limits_are_in_the_range() -> None:
    assert [parse_line("--batch-size", value).batch_size for value in ("1", "1000")] == [1, 1000]


@pytest.mark.parametrize(
    "flag, value, allowed",
    [
        ("--batch-size", "1001", "at least 1 and at most 1000"),
        ("--batch-size", "9" * 400, "at least 1 and at most 1000"),  # beyond every float
    ],
)
def test_a_value_out_of_its_range_is_refused_with_the_range(flag: str, value: str, allowed: str) -> None:
    message = user_error(flag, value)
    assert message.startswith(f"{flag} ")
    assert message.endswith(f" is out of range: it must be {allowed}")


def test_each_flag_that_is_not_there_has_its_likeliest() -> None:
    message = user_error("--rundir=x", "-1", "--lrr", "2")
    assert "--rundir=x -1 --lrr 2: did you mean --run-dir, --lr? (" in message


def test_the_help_says_what_each_option_is_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_line("--help")
    help_text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    for line in (
        "usage: python -m ddp.train",
        "What it does.",
        "--batch-size INT samples per step (default: 144)",
        "--seed INT any number at all (default: 0)",
        "--limit INT only so many (default: all)",
        "--dropout FLOAT as a share, not in % (default: 0.25)",
        "--model {cnn,mlp} what to train (default: cnn)",
        "--title STR of the figure (default: raw)",
        "--run-dir PATH where the results go (default: runs/one)",
        "--augment, --no-augment augment the images",
        "--resume continue the run",
    ):
        assert line in help_text
    assert "None" not in help_text


@dataclass(frozen=True)
class Moded:
    """A flag that may take a value."""

    compile: str | None = option(None, "with a mode", choices=("default", "fast"), implied="default")
    seed: int = option(0, "any number at all")


@pytest.mark.parametrize(
    ("line", "mode"),
    [("", None), ("--compile", "default"), ("--compile fast", "fast"), ("--compile --seed 1", "default")],
)
def test_a_flag_may_be_given_with_or_without_its_value(line: str, mode: str | None) -> None:
    assert parse(Moded, "moded", None, line.split()).compile == mode


def test_a_setting_of_another_version_is_refused() -> None:
    with pytest.raises(UsageError, match="unrecognized arguments: --no-later"):
        from_settings(Moded, "moded", {"later": False})


@dataclass(frozen=True)
class Lists:
    """Options that take several values."""

    num_workers: tuple[int, ...] = option((0, 2), "loader processes", minimum=0, maximum=8)
    rates: tuple[float, ...] = option((0.5,), "per second", above=0)
    loaders: tuple[str, ...] | None = option(None, "which (default: all)", choices=("stock", "fast"))
    folders: tuple[Path, ...] = option((), "places")
    verbose: bool = option(False, "say more")


def parse_lists(*arguments: str, underscores: bool = False) -> Lists:
    return parse(Lists, "lists", None, arguments, underscores=underscores)


def test_a_list_has_its_default_and_is_typed_with_commas() -> None:
    assert parse_lists() == Lists((0, 2), (0.5,), None, (), False)
    lists = parse_lists("--num-workers", "0, 4,8", "--rates", "1e-3,2,", "--loaders", "fast", "--folders", "a,b/c")
    assert lists == Lists((0, 4, 8), (0.001, 2.0), ("fast",), (Path("a"), Path("b/c")), False)
    assert [type(rate) for rate in lists.rates] == [float, float]


@pytest.mark.parametrize(
    "flag, text, message",
    [
        ("--num-workers", "1,,2", "--num-workers: invalid int value: ''"),
        ("--num-workers", "1,9", "--num-workers 9 is out of range: it must be at least 0 and at most 8"),
        ("--rates", "1,nan", "--rates nan is out of range: it must be finite and above 0"),
        ("--loaders", "fast,slow", "--loaders: invalid choice: 'slow' (choose from stock, fast)"),
    ],
)
def test_a_list_with_a_wrong_value_is_refused_in_a_line_that_names_it(flag: str, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_lists(flag, text)
    assert str(error.value).removesuffix(" (python -m lists --help lists what there is)") == message


def test_flags_are_taken_in_the_style_of_courses_too_where_that_is_wanted() -> None:
    for arguments in (["-num_workers", "1,3", "--verbose"], ["--num-workers", "1,3", "-verbose"]):
        assert parse_lists(*arguments, underscores=True) == Lists(num_workers=(1, 3), verbose=True)
    with pytest.raises(UsageError, match="unrecognized arguments: -num_workers 1"):
        parse_lists("-num_workers", "1")


@command
def wrong() -> None:
    raise UsageError("--lr 0 is out of range")


def test_a_user_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A user error is one line and status 2.

    Claim (README.md): bad input is one line, exit status 2.
    """
    with pytest.raises(SystemExit) as end:
        wrong()
    assert end.value.code == 2
    assert capsys.readouterr() == ("", "error: --lr 0 is out of range\n")


def test_nothing_heavy_is_imported_with_it() -> None:
    program = "import sys, common.command_line.cli; print(*{'torch', 'numpy', 'matplotlib', 'PIL'} & set(sys.modules))"
    assert run_program(program).stdout == "\n"


class Interrupted:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def interrupted_in_a_finalizer() -> int | str | None:
    @command
    def main() -> None:
        thing = Interrupted()
        del thing
        time.sleep(60)

    try:
        main()
    except SystemExit as end:
        return end.code
    return None


def test_ctrl_c_in_a_finalizer_is_not_lost() -> None:
    assert run_ranks(interrupted_in_a_finalizer, 1, fresh=True) == [130]


@dataclass(frozen=True)
class Named:
    """An option that takes a function."""

    model: str = option("cnn", "what to train", choices=("cnn", "mlp"), or_function=True)


def parse_named(*arguments: str) -> Named:
    return parse(Named, "named", None, arguments)


def test_an_option_takes_one_of_its_choices_or_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_named("--model", "mlp").model == "mlp"
    assert parse_named("--model", "a.b:c").model == "a.b:c"
    for value in ("vgg", ":c", "a:", ":"):
        with pytest.raises(
            UsageError, match=f"--model: invalid choice: '{value}' .choose from cnn, mlp or module:function"
        ):
            parse_named("--model", value)
    with pytest.raises(SystemExit):
        parse_named("--help")
    assert "--model {cnn,mlp,MODULE:FUNCTION}" in capsys.readouterr().out


HALF_BUILT = """
import os, signal
from common.command_line.cli import command
from common.signals.stop_request import stop_signals

class HalfBuilt:
    def __init__(self):
        os.kill(os.getpid(), signal.{name})
        self.workers = []
    def __del__(self):
        self.workers.clear()

@command
def main():
    {block}
        HalfBuilt()

main()
"""


@pytest.mark.parametrize(
    ("name", "block", "status"), [("SIGINT", "if True:", 130), ("SIGTERM", "with stop_signals():", 143)]
)
def test_what_a_stop_signal_meets_half_built_prints_nothing(name: str, block: str, status: int) -> None:
    """As torch's DataLoader, whose iterator cannot be finalized before it has workers."""
    program = HALF_BUILT.format(name=name, block=block)
    done = run_program(program)
    assert (done.returncode, done.stderr) == (status, f"stopped by {name}\n")
