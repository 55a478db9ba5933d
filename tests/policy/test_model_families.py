"""One whole update of GTRTrainer on every model family, with LoRA on all linear layers; save, reload, answer alike."""

import math

import pytest
from peft import LoraConfig, PeftModel
from toy import ColourTask, quiet_config
from vlms import FAMILIES, some_images, video_stub

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.engines.transformers import TransformersEngine
from trl_gtr.policy.loading import lora_target_modules
from trl_gtr.trainer import GTRTrainer

ANSWER = '{"thoughts": "it is red", "action": "red"}'


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_with_lora(family, tiny_vlm, tmp_path):
    model, processor = tiny_vlm(family)
    task = ColourTask(length=2)
    args = quiet_config(
        tmp_path,
        gradient_checkpointing=True,
        num_envs=2,
        rollout_steps=2,
        total_env_steps=8,
        per_device_train_batch_size=2,
        max_completion_length=6,
        learning_rate=1e-2,
        cloning_weight="constant",
        value_head_sizes=[8],
    )
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=lora_target_modules(model))
    trainer = GTRTrainer(model, args, task, ExpertCorrector(), processing_class=processor, peft_config=lora)
    # A random model never writes JSON, so nobody corrects it: hand it a lesson.
    ids = trainer.policy.encode_response(ANSWER)
    trainer.guide.buffer.add("Which colour?", some_images(1)[0], ids, len(ids))
    trainer.train()
    logs = trainer.state.log_history
    assert all(entry["policy/ratio_start_max_dev"] < 1e-3 for entry in logs)
    assert all(math.isfinite(entry["loss/total"]) and entry["optim/grad_norm"] > 0 for entry in logs)
    assert logs[1]["loss/cloning"] < logs[0]["loss/cloning"]

    with video_stub():
        trainer.save_model(str(tmp_path / "saved"))
    prompts, images = ["Which colour?"] * 2, some_images(2)
    trained = trainer.engine.generate(prompts, images, greedy=True)
    reloaded = PeftModel.from_pretrained(tiny_vlm(family)[0], tmp_path / "saved")
    again = TransformersEngine(trainer.policy, reloaded).generate(prompts, images, greedy=True)
    assert [g.ids.tolist() for g in trained] == [g.ids.tolist() for g in again]
