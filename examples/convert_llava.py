"""Convert a checkpoint of the original LLaVA code into a folder that transformers (and this package) can load.

python examples/convert_llava.py --source llava-v1.6-mistral-7b-sft --output llava-v1.6-mistral-7b-sft-hf
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trl_gtr.policy.llava_checkpoints import convert_checkpoint
from trl_gtr.policy.loading import check_processor
from trl_gtr.scripts.arguments import parse_arguments
from trl_gtr.scripts.usage import one_line_errors

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class ConvertArguments:
    source: str = field(metadata={"help": "Folder of a LlavaMistralForCausalLM or LlavaLlamaForCausalLM."})
    output: str = field(metadata={"help": "Folder to write; new or empty."})
    vision_tower: str | None = field(
        default=None,
        metadata={"help": "Name or folder of the vision tower, if the checkpoint does not hold it."},
    )
    chat_format: str | None = field(
        default=None, metadata={"help": "'mistral' or 'vicuna': the conversation that the model was trained with."}
    )
    dtype: str = field(default="bfloat16", metadata={"help": "Of the converted weights: bfloat16, float16, float32."})


def convert(args: ConvertArguments) -> tuple[Any, Any]:
    if args.dtype not in DTYPES:
        raise ValueError(f"--dtype is one of {', '.join(DTYPES)}, not {args.dtype!r}.")
    output = Path(args.output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: choose another --output.")
    if not (Path(args.source) / "config.json").is_file():
        raise ValueError(f"There is no config.json in {args.source}: --source must be the checkpoint's folder.")
    model, processor = convert_checkpoint(
        args.source,
        vision_tower=args.vision_tower,
        chat_format=args.chat_format,
        dtype=DTYPES[args.dtype],
    )
    check_processor(model, processor)
    return model, processor


def main() -> None:
    with one_line_errors():
        (args,) = parse_arguments([ConvertArguments], description=__doc__)
        model, processor = convert(args)
    output = Path(args.output)
    model.save_pretrained(output)
    processor.save_pretrained(output)
    print(f"{type(model).__name__} with {sum(p.numel() for p in model.parameters()):,} parameters is in {output}.")


if __name__ == "__main__":
    main()
