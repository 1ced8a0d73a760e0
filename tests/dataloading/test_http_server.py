"""The server that a benchmark reads from."""

from __future__ import annotations

import http.client
from pathlib import Path

import psutil
import pytest

from dataloading.dataset.lfw import LFWDataset
from dataloading.http_server import serve
from tests.dataloading.faults import Traces
from tests.support.launch import error_lines, ranks_below, run_command, start_command


def test_it_serves_the_folder_and_ends_with_the_block(pictures: Path) -> None:
    local = LFWDataset(pictures)
    before = Traces()
    with serve(pictures, latency_ms=0.5) as url:
        served = LFWDataset(url)
        assert list(served.files) == list(local.files)
        assert served.people == local.people
        assert [served.read(i) for i in range(len(served))] == [local.read(i) for i in range(len(local))]
        del served
    assert Traces() == before


def test_one_connection_serves_many_requests(pictures: Path) -> None:
    with serve(pictures) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        for _ in range(3):
            connection.request("GET", "/")
            response = connection.getresponse()
            response.read()
            assert response.status == 200
            assert not response.will_close
        connection.close()


@pytest.mark.faults
def test_it_ends_when_its_parent_is_killed(pictures: Path, tmp_path: Path) -> None:
    arguments = ("--path-to-folder", str(pictures), "--storage", "http", "--batches", "100000", "--workers", "0,")
    with start_command("dataloading.bench", *arguments, "--output", str(tmp_path)) as process:
        children: list[psutil.Process] = []
        while not children:
            assert process.poll() is None
            children = ranks_below(process.pid, ("dataloading.http_server",))
        process.kill()
        psutil.wait_procs(children, timeout=20)
        assert not any(child.is_running() for child in children)


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = run_command("dataloading.http_server", str(tmp_path / "missing"))
    assert done.returncode == 2
    assert error_lines(done.stderr) == [f"error: {tmp_path / 'missing'} is not a folder"]
