"""Use the installed wheel as its user would: `python -I check_wheel.py <repository>`, from outside the repository.

This is the place for every promise about the bare wheel: names that import, files that are shipped.
"""

import importlib.metadata
import sys
from pathlib import Path

import trl_gtr
import trl_gtr.environments

assert "torch" not in sys.modules, "import trl_gtr.environments loads torch"

from trl_gtr import make_task  # noqa: E402

package = Path(trl_gtr.__file__).parent
assert Path(sys.argv[1]).resolve() not in package.resolve().parents, f"not the wheel but the repository: {package}"
for file in (Path(sys.argv[1]) / "trl_gtr").rglob("*"):
    if file.is_file() and "__pycache__" not in file.parts:
        shipped = package / file.relative_to(Path(sys.argv[1]) / "trl_gtr")
        assert shipped.exists(), f"{file} is not in the wheel; see package-data in pyproject.toml"
assert trl_gtr.__version__ == importlib.metadata.version("trl-gtr")
for name in trl_gtr.__all__:
    assert getattr(trl_gtr, name) is not None, name

for name in ("points24", "ezpoints", "number_line", "blackjack"):
    task = make_task(name)
    env = task.make_env()
    observation, info = env.reset(seed=0)
    assert observation.shape == (300, 300, 3), (name, observation.shape)
    assert task.prompt(observation, info)
print(f"trl-gtr {trl_gtr.__version__}: {', '.join(trl_gtr.__all__)} from {package}")
