"""A run of this process that stops as if it was killed, and a model to start from."""

from contextlib import contextmanager

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

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


@pytest.fixture
def adapted(tiny_llama, tmp_path):
    """A folder with an adapter that changes the tiny Llama."""
    settings = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), settings)
    model.save_pretrained(tmp_path / "adapted")
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path / "adapted")
    return tmp_path / "adapted"
