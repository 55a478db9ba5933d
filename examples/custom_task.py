"""A game, a task and a corrector of one's own, and an agent that learns it: `python examples/custom_task.py`.

A lamp shines on a board of 3 × 3 cells. The agent says in which row and column it sees it and presses that cell's
number; three lamps are an episode. The embedded model doesn't know this game's words, so it begins with some
demonstrations; GTR goes on from there. Every field can be given on the command line; `--help` lists them.
"""

from pathlib import Path

import gymnasium as gym
import numpy as np
from trl import SFTConfig, SFTTrainer

from trl_gtr import Correction, GTRTrainer, ThoughtFormat
from trl_gtr.guides.sft_data import make_sft_dataset, prompt_and_completion
from trl_gtr.responses.format import Field
from trl_gtr.scripts import train as launch
from trl_gtr.tasks import Rubric


class LampEnv(gym.Env):
    """Pictures and rewards; `info` holds what a player has to see."""

    observation_space, action_space = gym.spaces.Box(0, 255, (96, 96, 3), np.uint8), gym.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._light()

    def step(self, action):
        reward, self.steps = (1.0 if action == self.cell else -1.0), self.steps + 1
        picture, info = self._light()
        return picture, reward, self.steps == 3, False, info

    def _light(self):
        self.cell = int(self.np_random.integers(9))
        row, column = divmod(self.cell, 3)
        picture = self.np_random.integers(0, 60, (96, 96, 3), dtype=np.uint8)
        picture[32 * row : 32 * row + 32, 32 * column : 32 * column + 32] += np.uint8(190)
        return picture, {"seen": f"{row + 1} {column + 1}", "cell": str(self.cell + 1)}


class LampTask:
    """The words around it. Nothing to subclass: any object with these members is a task."""

    name = "lamp"
    format = ThoughtFormat([Field("seen", "text", "row and column of the lamp")], action_help="the cell's number")
    rubric = Rubric(role="", questions={})  # what a corrector that is a language model would be asked

    def make_env(self, *, evaluation=False):
        return LampEnv()

    def prompt(self, observation, info):
        return "Lamp?"  # a large model needs the rules here, and `self.format.instructions()`

    def public_state(self, info):
        return {}

    def legal_actions(self, info):
        return [str(number) for number in range(1, 10)]

    def to_env_action(self, response, info):
        return int(response.action) - 1 if response.action in self.legal_actions(info) else None

    def judge(self, response, info):
        return {"seen": response.fields.get("seen") == info["seen"]}

    def expert(self, info, hint=None):
        return self.format.respond({"seen": info["seen"]}, info["cell"])

    def success(self, transitions):
        return all(step.reward > 0 for step in transitions)

    def solvable(self, info):
        return True


class LampCorrector:
    """One call brings a step of every environment. (Where a task has an expert, `ExpertCorrector` does the same.)"""

    def correct(self, requests):
        return [self._correct(request.response, request.task.expert(request.info)) for request in requests]

    def _correct(self, response, right):
        if response.fields == right.fields:
            return Correction("right", action=right.action)
        return Correction("corrected", thought=dict(right.fields), action=right.action)


if __name__ == "__main__":
    config = Path(__file__).parent / "configs" / "custom_task.yaml"
    with launch.one_line_errors():
        script, args, model_args, _ = launch.parse(config, description=__doc__)
        launch.check_output_dir(args, task := LampTask())
        model, processor, _ = launch.load_model(model_args, args.model_init_kwargs)
    data = prompt_and_completion(make_sft_dataset(task, 768, seed=args.seed))
    settings = {"num_train_epochs": 1, "per_device_train_batch_size": 32, "learning_rate": 2e-3, "max_length": None}
    settings |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no"}
    SFTTrainer(model, SFTConfig(args.output_dir, **settings), train_dataset=data, processing_class=processor).train()
    launch.train_and_report(GTRTrainer(model, args, task, LampCorrector(), processor), {"lamp": task}, script.report)
