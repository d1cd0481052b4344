"""Writes batch_augment.json: maps of the plane by torchvision 0.28 and fastai 2.8.12, lighting by fastai.

    python make_batch_augment.py > batch_augment.json
"""

import json
import math

import torch
import torchvision.transforms.functional as F
from fastai.vision.augment import _BrightnessLogit, _ContrastLogit, _WarpCoord, _prepare_mat, affine_mat
from fastai.vision.core import TensorImage

torch.manual_seed(3)
height, width = 9, 12
image = (torch.rand(1, 2, height, width) * 255).round() / 255
bilinear = F.InterpolationMode.BILINEAR
one, zero = torch.ones(1), torch.zeros(1)


def fastai(angle=0.0, zoom=None, warp=None, flip=False, size=None):
    matrix = torch.eye(3)[None]
    if flip:
        matrix = matrix @ affine_mat(-one, zero, zero, zero, one, zero)
    if angle:
        theta = torch.tensor([angle * math.pi / 180])
        matrix = matrix @ affine_mat(theta.cos(), theta.sin(), zero, -theta.sin(), theta.cos(), zero)
    if zoom:
        scale, column, row = zoom
        s = one / scale
        column, row = (1 - s) * (2 * column - 1), (1 - s) * (2 * row - 1)
        matrix = matrix @ affine_mat(s, zero, column, zero, s, row)
    warped = None
    x = TensorImage(image.clone())
    if warp:
        warped = _WarpCoord(draw_x=warp[0], draw_y=warp[1], p=1.0)
        warped.before_call(x)
    matrix = _prepare_mat(x, matrix)
    return x.affine_coord(matrix, warped, sz=size)


def lighting(brightness, contrast):
    x = TensorImage(image.clone())
    functions = [_BrightnessLogit(draw=brightness, p=1.0), _ContrastLogit(draw=contrast, p=1.0)]
    for function in functions:
        function.before_call(x)
    return x.lighting(lambda y: functions[1](functions[0](y)))


cases = {
    "affine": F.affine(image, 20.0, [1, -2], 1.2, [5.0, -3.0], bilinear),
    "rotate": F.rotate(image, 30.0, bilinear),
    "perspective": F.perspective(
        image,
        [[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]],
        [[1, 2], [width - 3, 1], [width - 2, height - 2], [2, height - 1]],
        bilinear,
    ),
    "fastai": fastai(7.0, (1.08, 0.3, 0.8), (0.1, -0.15), True),
    "fastai_size": fastai(7.0, (1.08, 0.3, 0.8), (0.1, -0.15), True, (7, 10)),
    "lighting": lighting(0.55, 1.1),
}
numbers = {name: torch.as_tensor(out).flatten().tolist() for name, out in cases.items()}
print(json.dumps({"shape": [1, 2, height, width], "image": image.flatten().tolist(), "cases": numbers}))
