"""One line for an error, and an exit code that says whose fault it is."""

import errno
import logging
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from tripletune.core.program import progress, run_program, versions
from tripletune.models.run_folders import Preempted


class Pending(RuntimeError):
    exit_code = 3


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("bad \x1b[31mname"), 2, "error: bad \ufffd[31mname\n"),
        (OSError(errno.EROFS, "Read-only file system", "/here"), 2, "error: /here: Read-only file system\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "the disk (No space left on device); free"),
        (Pending("replies are waited for"), 3, "replies are waited for"),
        (ImportError("No module named 'ray'", name="ray"), 2, "'ray': run pip install 'tripletune[ray]'"),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534\nframe #0"),
            1,
            "no space",
        ),
        (OSError("173324 requested and 99296 written"), 1, "no space left on the disk"),
        (RuntimeError("Symlink loop from '/a'"), 2, "error: Symlink loop from '/a'\n"),
        (RuntimeError("basic_ios::clear: iostream error"), 1, "no space left on the disk"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), 1, "2 GiB.); use smaller batches"),
        (KeyboardInterrupt(), 130, "run the same command again"),
        (Preempted("SIGTERM: the same command continues"), 75, "SIGTERM: the same command continues\n"),
    ],
)
def test_an_error_is_one_line_and_a_code(error, code, said, capsys):
    def program():
        raise error

    assert run_program(program) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_full_disk_is_found_behind_other_errors(capsys):
    def program():
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("could not save") from error

    assert run_program(program) == 1
    assert "no space left on the disk" in capsys.readouterr().err


def test_what_nobody_foresaw_keeps_its_traceback():
    with pytest.raises(KeyError):
        run_program(lambda: {}["x"])


def test_log_lines_of_data_do_not_steer_the_terminal(capsys):
    assert run_program(lambda: logging.getLogger("x").info("a\x1b[2Jb")) == 0
    assert capsys.readouterr().err == "a\ufffd[2Jb\n"


def test_deepspeed_does_not_say_that_there_is_no_gpu():
    """Its logger, on stdout, gets its level only when a library imports it; a filter stays."""
    run_program(lambda: None)
    logger = logging.getLogger("DeepSpeed")
    record = logger.makeRecord("DeepSpeed", logging.WARNING, "", 0, "Setting accelerator to CPU. If you have", (), None)
    other = logger.makeRecord("DeepSpeed", logging.WARNING, "", 0, "something else", (), None)
    assert (bool(logger.filter(record)), bool(logger.filter(other))) == (False, True)


def test_what_is_not_installed_has_no_version():
    assert versions(["torch", "not-here"]) == {"torch": metadata.version("torch"), "not-here": "not installed"}


def test_a_bar_in_a_log_shows_its_last_state_once(capsys):
    def shown(steps):
        with progress(name="embedding", unit="row", total=4) as bar:
            # As after a minute of work.
            bar.mininterval = bar.delay = 0.0
            for step in steps:
                bar.update(step)
        return capsys.readouterr().err.splitlines()

    (line,) = shown([4])
    assert "4/4" in line
    assert ["4/4" in line for line in shown([2, 2])] == [False, True]
    assert progress(total=4).close() is None
    assert not capsys.readouterr().err, "a short pass leaves no line"


@pytest.mark.parametrize("words", [["ask"], ["build", "subq"], ["eval", "run"]])
def test_help_imports_nothing_that_only_the_work_needs(words):
    command = [sys.executable, "-X", "importtime", "-m", "tripletune", *words, "--help"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines}
    # Each took 3 to 20 % of the time of `--help`.
    needless = {
        "aiohttp",
        "asyncio",
        "numpy",
        "rich",
        "sqlite3",
        "torch",
        "tripletune.llm.ledger",
        "tripletune.rag.ask",
    }
    assert "tripletune.core.parser" in imported
    assert not needless & imported
