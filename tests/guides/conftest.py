import pytest
from peft import LoraConfig
from toy import ColourTask, quiet_config

from trl_gtr.guides.merged_teacher import MergedTeacher
from trl_gtr.trainer import GTRTrainer

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.fixture
def make_trainer(toy_checkpoint, tmp_path):
    """Makes a short run on the toy world with a merged teacher."""

    def make(guide=None, lora=False, name="run", **settings):
        sizes = {"rollout_steps": 2, "total_env_steps": 32}
        config = quiet_config(tmp_path / name, **{"learning_rate": 1e-3, **sizes, **settings})
        peft_config = LORA if lora else None
        guide = guide or MergedTeacher("sft")
        return GTRTrainer(toy_checkpoint, config, ColourTask(length=3), guide=guide, peft_config=peft_config)

    return make
