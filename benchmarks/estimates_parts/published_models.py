"""ResNeXt-101 32x4d as NVIDIA's examples train it, for counting."""

from torch import nn

from hetflow.profilers.zoo import images
from hetflow.profilers.zoo.synthetic import Parts, classification_loss, image_batches

GROUPS, BASE = 32, 128


def resnext101() -> Parts:
    """ResNet-101 whose 3x3 convolutions are twice as wide, in 32 groups."""
    model = images.ResNet((3, 4, 23, 3), bottleneck=True)
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
