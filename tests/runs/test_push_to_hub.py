"""Pushing a trained agent, against a local stand-in of the hub: what arrives is the agent and its card."""

import os
import subprocess
import sys

from hub_stand_in import HubStandIn
from huggingface_hub import ModelCard
from paths import ROOT

PUSH = """
import sys
from toy import ColourTask, build_toy_model, quiet_config
from trl_gtr import ExpertCorrector, GTRTrainer

if __name__ == "__main__":
    model, processor = build_toy_model()
    args = quiet_config(
        sys.argv[1], push_to_hub=True, hub_model_id="me/agent", hub_token="hf_stand_in", eval_episodes=2
    )
    trainer = GTRTrainer(model, args, ColourTask(), ExpertCorrector(), processor)
    trainer.train()
    trainer.evaluate(metric_key_prefix="end")
    trainer.push_to_hub()
"""


def test_agent_and_card_arrive(tmp_path):
    folder = tmp_path / "run"
    with HubStandIn() as hub:
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        }
        done = subprocess.run(
            [sys.executable, "-c", PUSH, str(folder)], env=environment, capture_output=True, text=True, timeout=600
        )
    assert done.returncode == 0, done.stderr[-3000:]
    pushed = hub.files["me/agent"]
    for name in ("model.safetensors", "config.json", "value_head.safetensors", "README.md", "run.json"):
        assert pushed[name] == (folder / name).read_bytes(), name
    card = ModelCard(pushed["README.md"].decode())
    assert card.data.library_name == "trl-gtr"
    assert "load_policy('me/agent')" in card.text
    assert [result.metric_type for result in card.data.eval_results] == ["success", "true_thoughts"]
    assert hub.cards[-1] == pushed["README.md"].decode()
    assert hub.tokens == {"Bearer hf_stand_in"}
    assert not any(b"hf_stand_in" in content for content in pushed.values())  # the token stays here
    assert hub.unknown == []
