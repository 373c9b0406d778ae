"""Models as NVIDIA's examples train them, for counting."""

import torch
from torch import nn

from hetflow.profilers.zoo.models import Parts, ResNet, classification_loss, image_batches, resnet50

GROUPS, BASE = 32, 128


def resnext101() -> Parts:
    """32x4d: ResNet-101 whose 3x3 convolutions are twice as wide, in 32 groups."""
    model = ResNet((3, 4, 23, 3), bottleneck=True)
    for level, depth in enumerate((3, 4, 23, 3)):
        width = BASE << level
        for index in range(depth):
            block = model.blocks[sum((3, 4, 23, 3)[:level]) + index]
            for number in (0, 2, 4):
                before = block.body[number][0]
                inputs = before.in_channels if number == 0 else width
                outputs = before.out_channels if number == 4 else width
                block.body[number] = nn.Sequential(
                    nn.Conv2d(
                        inputs,
                        outputs,
                        before.kernel_size,
                        before.stride,
                        before.padding,
                        groups=GROUPS if number == 2 else 1,
                        bias=False,
                    ),
                    nn.BatchNorm2d(outputs),
                )
    return model, image_batches(3, 224, 1000), classification_loss


def resnet50_channels_last() -> Parts:
    """As their 16-bit runs have it."""
    return _channels_last(resnet50())


def resnext101_channels_last() -> Parts:
    """As their 16-bit runs have it."""
    return _channels_last(resnext101())


def _channels_last(parts: Parts) -> Parts:
    model, *others = parts
    return model.to(memory_format=torch.channels_last), *others


def bert_large() -> Parts:
    """bert-large-uncased with a classifier of sequences of 512 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )

    def batch(size: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.randint(config.vocab_size, (size, 512)),
            "labels": torch.randint(2, (size,)),
        }

    return BertForSequenceClassification(config), batch, lambda model, batch: model(**batch).loss
