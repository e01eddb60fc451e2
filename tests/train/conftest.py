"""A run of this process that stops as if it was killed."""

from contextlib import contextmanager

import pytest
from transformers import TrainerCallback

from tripletune.train.engine import EngineMixin


@pytest.fixture
def killed_behind(monkeypatch):
    """`with killed_behind(step):` a run that stops there, behind this step of its trainer."""

    @contextmanager
    def kill(step):
        class Killed(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == step:
                    raise KeyboardInterrupt

        begin_run = EngineMixin.begin_run

        def begin(self, task):
            begin_run(self, task)
            self.add_callback(Killed())

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(EngineMixin, "begin_run", begin)
            yield

    return kill
