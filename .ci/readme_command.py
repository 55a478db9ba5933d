"""Print one of the README's marked commands: `python .ci/readme_command.py run` or `… test`.

A command is the bash block right below the line `<!-- command: NAME -->`.
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def readme_command(name: str) -> str:
    blocks = re.findall(
        rf"^<!-- command: {re.escape(name)} -->\n```bash\n(.*?)^```$",
        README.read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    if len(blocks) != 1:
        raise SystemExit(
            f"README.md has {len(blocks)} bash blocks below `<!-- command: {name} -->`; it needs exactly one"
        )
    return blocks[0].strip()


if __name__ == "__main__":
    print(readme_command(*sys.argv[1:]))
