from types import SimpleNamespace

import accelerate
import pytest

from tripletune.train.extraction_config import ExtractionConfig
from tripletune.train.text_dry_run import _steps


class Rows(list):
    column_names = ("input_ids", "labels", "length")


@pytest.mark.parametrize(("devices", "expected"), [(1, "25 optimiser steps of 8 rows a device"), (4, "7 optimiser")])
def test_the_devices_share_the_rows(monkeypatch, devices, expected):
    monkeypatch.setattr(accelerate, "PartialState", lambda: SimpleNamespace(num_processes=devices))
    monkeypatch.setattr("tripletune.train.text_dry_run.rows_meta", lambda rows: {"label_tokens": 1})
    config = ExtractionConfig()
    config.train.epochs, config.train.batch_size, config.train.gradient_accumulation = 1, 4, 2
    assert _steps(config, Rows(range(200))).startswith(expected)
