import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tripletune.train.tracking import check_tracking


class UsageError(Exception):
    pass


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    def login() -> None:
        raise UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(login=login, errors=SimpleNamespace(UsageError=UsageError), __spec__=True)
    )
    monkeypatch.delenv("WANDB_MODE", raising=False)


def test_wandb_without_login_is_told_before_anything_is_loaded(no_login: None) -> None:
    with pytest.raises(ValueError, match=r"No API key configured.*WANDB_MODE=offline") as error:
        check_tracking(["tensorboard", "wandb"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_offline_needs_no_login(mode: str, no_login: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    check_tracking(["wandb"])


def test_no_tracker_asks_nothing(no_login: None) -> None:
    check_tracking(["none"])


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_a_missing_package_is_named(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if tracker in name else find(name))
    with pytest.raises(ValueError, match=f"pip install {tracker}"):
        check_tracking([tracker])
