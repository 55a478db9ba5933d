"""Lets a torchvision built for CUDA be imported beside a CPU build of torch, on which its operators don't exist.

Put this folder on PYTHONPATH. Only for tests: nothing here calls these operators, torchvision merely names them.
"""

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")
for _signature in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
):
    _LIBRARY.define(_signature)
