"""Prints, as JSON, every flag of torchrun and of `accelerate launch`, and every key of Accelerate's
configuration, as the installed packages define them."""

import dataclasses
import enum
import json
import typing

from accelerate.commands.config import config_args
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

ACCELERATES = launch_command_parser()
TORCHRUNS = get_args_parser()


def flags(parser):
    for action in parser._actions:
        if not action.option_strings or "--help" in action.option_strings:
            continue
        choices = [str(choice) for choice in action.choices or []]
        yield {
            "names": action.option_strings,
            "takes_value": action.nargs != 0,
            "number": action.type in (int, float),
            # One that is not its default, where there is such.
            "choice": next((it for it in reversed(choices) if it != str(action.default)), None),
        }


def value(annotation):
    """A value that is not its default."""
    options = [it for it in typing.get_args(annotation) if it is not type(None)] or [annotation]
    kind = options[0]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return list(kind)[0].value
    origin = typing.get_origin(kind) or kind
    return {bool: True, int: 2, dict: {"some_key": 1}, list: ["some"]}.get(origin, "some")


def keys(config):
    hints = typing.get_type_hints(config)
    return {field.name: value(hints[field.name]) for field in dataclasses.fields(config)}


print(
    json.dumps(
        {
            "accelerate": list(flags(ACCELERATES)),
            "torchrun": list(flags(TORCHRUNS)),
            "cluster": keys(config_args.ClusterConfig),
            "sagemaker": keys(config_args.SageMakerConfig),
        }
    )
)
