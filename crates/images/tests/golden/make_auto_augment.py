"""Writes auto_augment.json with torchvision 0.29 and Pillow 13:

    python make_auto_augment.py > auto_augment.json

Outputs are images of the size of the input; their CRC-32 stands for them. What torchvision draws is written beside
them. Its AugMix computes on tensors, also for PIL images; here it applies the operations of PIL images, so that one
set of pixels is right for all automatic augmentations.
"""

import json
import zlib

import PIL
import torch
import torchvision
from PIL import Image
from torchvision.transforms import InterpolationMode, autoaugment
from torchvision.transforms import functional as F
from torchvision.transforms.autoaugment import AugMix, AutoAugment, AutoAugmentPolicy, RandAugment, TrivialAugmentWide

WIDTH, HEIGHT, FILL = 13, 11, [9, 80, 200]
torch.manual_seed(1)
waves = torch.arange(WIDTH * HEIGHT * 3).reshape(HEIGHT, WIDTH, 3)
pixels = (127 + 90 * torch.sin(waves * 0.37) + 60 * torch.rand(HEIGHT, WIDTH, 3) - 30).clamp(0, 255).to(torch.uint8)
image = F.to_pil_image(pixels.permute(2, 0, 1))
apply_op = autoaugment._apply_op


def crc(image):
    return zlib.crc32(image.tobytes())


def policies(policy):
    transform = AutoAugment(policy)
    cases = []
    for number, sub_policy in enumerate(transform.policies):
        for signs in ([0, 1], [1, 0]):
            transform.get_params = lambda _: (number, torch.zeros(2), torch.tensor(signs))
            cases.append([signs, crc(transform(image))])
    return {"policies": transform.policies, "outputs": cases}


def interpolated():
    """Each map of the plane at the strongest of each kind."""
    spaces = {
        "rand_augment": RandAugment()._augmentation_space(31, (HEIGHT, WIDTH)),
        "trivial_augment": TrivialAugmentWide()._augmentation_space(31),
    }
    cases = []
    for space, magnitudes in spaces.items():
        for name in ["ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"]:
            for place in [3, 20, 30]:
                for sign in [1, -1]:
                    for mode in [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC]:
                        magnitude = sign * float(magnitudes[name][0][place])
                        output = crc(apply_op(image, name, magnitude, mode, FILL))
                        cases.append([space, name, place, sign < 0, mode.value, output])
    return cases


def aug_mix(seed, **options):
    """Records what is drawn: the weights, and each chain's operations with the place of their magnitude."""
    transform = AugMix(fill=FILL, **options)
    space = transform._augmentation_space(10, (HEIGHT, WIDTH))
    weights, applied = [], []

    def sample(params):
        drawn = torch._sample_dirichlet(params)
        weights.append(drawn[0].tolist())
        return drawn

    def on_pil(tensor, name, magnitude, interpolation, fill):
        whole = F.to_pil_image(tensor[0])
        magnitudes = space[name][0]
        place = 0 if magnitudes.ndim == 0 else [abs(m) for m in magnitudes.tolist()].index(abs(magnitude))
        applied.append([name, place, magnitude < 0, bool((tensor == batch).all())])
        return F.pil_to_tensor(apply_op(whole, name, magnitude, interpolation, fill))[None]

    batch = F.pil_to_tensor(image)[None]
    transform._sample_dirichlet = sample
    autoaugment._apply_op = on_pil
    torch.manual_seed(seed)
    output = transform(image)
    autoaugment._apply_op = apply_op
    torch.manual_seed(seed)
    transform._sample_dirichlet = torch._sample_dirichlet
    on_tensors = F.pil_to_tensor(transform(image)).int() - F.pil_to_tensor(output).int()
    # The first operation of a chain gets the image itself.
    chains = []
    for name, place, negative, first in applied:
        if first and (not chains or chains[-1]):
            chains.append([])
        chains[-1].append([name, place, negative])
    assert len(chains) == transform.mixture_width, (chains, transform.mixture_width)
    bilinear = transform.interpolation == InterpolationMode.BILINEAR
    return {
        "bilinear": bilinear,
        "all_ops": transform.all_ops,
        "severity": transform.severity,
        "weights": weights,
        "chains": chains,
        "output": crc(output),
        "mean_difference_on_tensors": on_tensors.abs().double().mean().item(),
    }


space = AugMix()._augmentation_space(10, (HEIGHT, WIDTH))
few = AugMix(all_ops=False)._augmentation_space(10, (HEIGHT, WIDTH))
print(
    json.dumps(
        {
            "source": f"torchvision {torchvision.__version__}, Pillow {PIL.__version__}",
            "width": WIDTH,
            "height": HEIGHT,
            "fill": FILL,
            "image": pixels.flatten().tolist(),
            "auto_augment": {policy.value: policies(policy) for policy in AutoAugmentPolicy},
            "interpolated": interpolated(),
            "aug_mix_space": {name: [m.tolist(), signed] for name, (m, signed) in space.items()},
            "aug_mix_few": list(few),
            "aug_mix": [
                aug_mix(5),
                aug_mix(6, severity=10, alpha=0.3),
                aug_mix(7, severity=10, mixture_width=2, chain_depth=2, all_ops=False),
                aug_mix(9, severity=10, mixture_width=4, interpolation=InterpolationMode.NEAREST),
            ],
        }
    )
)
