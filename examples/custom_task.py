"""A custom game and task: which of 3 × 3 cells has the lamp? Run `python examples/custom_task.py`."""

from pathlib import Path

import gymnasium as gym
import numpy as np
from trl import SFTConfig, SFTTrainer

from trl_gtr import ExpertCorrector, Field, GTRTrainer, Task, ThoughtFormat, make_sft_dataset, prompt_and_completion
from trl_gtr.scripts import train as launch


class LampEnv(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 255, (96, 96, 3), np.uint8), gym.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = int(self.np_random.integers(9))
        lamp = np.kron(np.eye(9)[self.cell].reshape(3, 3, 1), np.full((32, 32, 3), 190))
        self.picture = (lamp + self.np_random.integers(0, 60, (96, 96, 3))).astype(np.uint8)
        return self.picture, {"cell": self.cell}  # hidden from the agent

    def step(self, action):
        return self.picture, 1.0 if action == self.cell else -1.0, True, False, {"cell": self.cell}


class LampTask(Task):
    name = "lamp"
    format = ThoughtFormat([Field("seen", "text", "row and column of the lamp")], action_help="the cell's number")

    def make_env(self, *, evaluation=False):
        return LampEnv()

    def prompt(self, observation, info):
        return "Lamp?"  # a large model needs the rules here, and `self.format.instructions()`

    def legal_actions(self, info):
        return list("123456789")

    def to_env_action(self, response, info):
        return int(response.action) - 1 if response.action in self.legal_actions(info) else None

    def success(self, transitions):
        return transitions[-1].reward > 0

    def expert(self, info, hint=None):  # optional: the right response, for demonstrations and the corrector
        return self.format.respond({"seen": f"{info['cell'] // 3 + 1} {info['cell'] % 3 + 1}"}, str(info["cell"] + 1))


if __name__ == "__main__":
    with launch.one_line_errors():
        script, args, models, _ = launch.parse(Path(__file__).parent / "configs/custom_task.yaml", description=__doc__)
        launch.check_output_dir(args, task := LampTask())
        model, processor, _ = launch.load_model(models, args.model_init_kwargs)
    # The embedded model doesn't know this game's words, so train on expert demonstrations first, then GTR.
    data = prompt_and_completion(make_sft_dataset(task, 64, seed=args.seed))
    sft = SFTConfig(args.output_dir, learning_rate=1e-3, max_length=None, use_cpu=True, bf16=False, save_strategy="no")
    SFTTrainer(model, sft, train_dataset=data, processing_class=processor).train()
    launch.train_and_report(GTRTrainer(model, args, task, ExpertCorrector(), processor), {"lamp": task}, script.report)
