"""The model of the demo: a small convolutional net on scikit-learn's 8 x 8 digits.

Without batch-norm and dropout, so that every split of a batch gives the one-device result.
Sized so that a pass of 128 samples takes tens of milliseconds on one core: long enough for an
emulated slow device to be steady, short enough for a demo.
"""

from torch import Tensor, nn

from .synthetic import Parts, classification_loss, image_batches


class DigitsCNN(nn.Module):
    """Three convolutions and two linear layers; 188,234 parameters.

    Input ``[batch, 1, 8, 8]``, output ``[batch, 10]`` logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def digits_cnn() -> Parts:
    """The demo's model on random 8 x 8 images."""
    return DigitsCNN(), image_batches(1, 8, 10), classification_loss
