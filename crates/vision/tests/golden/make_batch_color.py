"""Writes batch_color.json: saturation and hue, and saturation beside other lighting, by fastai 2.8.12.

    python make_batch_color.py > batch_color.json
"""

import json

import torch
from fastai.vision.augment import _BrightnessLogit, _ContrastLogit, _Hue, _SaturationLogit
from fastai.vision.core import TensorImage

torch.manual_seed(3)
image = (torch.rand(1, 3, 5, 6) * 255).round() / 255
# A grey pixel, black, white, and two channels alike.
image[0, :, 0, 0] = 0.4
image[0, :, 0, 1] = 0.0
image[0, :, 0, 2] = 1.0
image[0, :, 0, 3] = torch.tensor([0.7, 0.7, 0.2])
image[0, :, 0, 4] = torch.tensor([0.1, 0.6, 0.6])


def lighting(*functions):
    x = TensorImage(image.clone())
    for function in functions:
        function.before_call(x)

    def composed(y):
        for function in functions:
            y = function(y)
        return y

    return x.lighting(composed)


def brightness(draw):
    return _BrightnessLogit(draw=draw, p=1.0)


def contrast(draw):
    return _ContrastLogit(draw=draw, p=1.0)


def saturation(draw):
    return _SaturationLogit(draw=draw, p=1.0)


def hue(draw):
    x = TensorImage(image.clone())
    function = _Hue(draw=draw, p=1.0)
    function.before_call(x)
    return x.hsv(function)


cases = {
    "saturation": lighting(saturation(0.7)),
    "more_saturation": lighting(saturation(1.3)),
    "all_lighting": lighting(brightness(0.55), contrast(1.1), saturation(0.8)),
    "all_lighting_backwards": lighting(saturation(0.8), contrast(1.1), brightness(0.55)),
    "saturation_twice": lighting(saturation(0.8), brightness(0.45), saturation(1.25)),
    "hue": hue(0.93),
    "more_hue": hue(1.1),
    "no_hue": hue(0.0),
}
numbers = {name: torch.as_tensor(out).flatten().tolist() for name, out in cases.items()}
print(json.dumps({"shape": list(image.shape), "image": image.flatten().tolist(), "cases": numbers}))
