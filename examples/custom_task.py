"""A custom game and task: which of 3 × 3 cells has the dim lamp? Run `python examples/custom_task.py`."""

from pathlib import Path

import gymnasium as gym
import numpy as np
from trl import SFTConfig, SFTTrainer

from trl_gtr import ExpertCorrector, Field, GTRTrainer, Task, ThoughtFormat, make_sft_dataset, prompt_and_completion
from trl_gtr.scripts import train as launch


class LampEnv(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 255, (96, 96, 3), np.uint8), gym.spaces.Discrete(9)
    cells = ("A1", "A2", "A3", "B1", "B2", "B3", "C1", "C2", "C3")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell, noise = int(self.np_random.integers(9)), self.np_random.integers(0, 230, (96, 96, 3))
        self.picture = np.uint8(noise + np.kron(np.eye(9)[self.cell].reshape(3, 3, 1), np.full((32, 32, 3), 25)))
        return self.picture, {"cell": self.cells[self.cell]}  # hidden from the agent

    def step(self, action):
        return self.picture, 1.0 if action == self.cell else -1.0, True, False, {"cell": self.cells[self.cell]}


class LampTask(Task):
    name, format = "lamp", ThoughtFormat([Field("seen", "text", "the cell with the lamp")], action_help="A1 to C3")

    def make_env(self, *, evaluation=False):
        return LampEnv()

    def prompt(self, observation, info):
        return "Lamp?"  # a large model needs the rules here, and `self.format.instructions()`

    def legal_actions(self, info):
        return LampEnv.cells

    def to_env_action(self, response, info):
        return LampEnv.cells.index(response.action) if response.action in LampEnv.cells else None

    def success(self, transitions):
        return transitions[-1].reward > 0

    def expert(self, info, hint=None):  # optional: the right response, for demonstrations and the corrector
        return self.format.respond({"seen": info["cell"]}, info["cell"])

    def judge(self, response, info):  # optional: which parts of a thought are true
        return {"seen": response.fields.get("seen") == info["cell"]}


if __name__ == "__main__":
    with launch.one_line_errors():
        run, args, models, *_ = launch.parse(Path(__file__).parent / "configs/custom_task.yaml", description=__doc__)
        launch.check_output_dir(args, task := LampTask())
        model, processor, _ = launch.load_model(models, args.model_init_kwargs)
    data = prompt_and_completion(make_sft_dataset(task, 64, seed=args.seed))  # the model must know the words first
    sft = SFTConfig(args.output_dir, max_steps=48, learning_rate=1e-3, use_cpu=True, bf16=False, save_strategy="no")
    SFTTrainer(model, sft, train_dataset=data, processing_class=processor).train()
    launch.train_and_report(GTRTrainer(model, args, task, ExpertCorrector(), processor), {"lamp": task}, run.report)
