"""Two classic networks for MNIST's digits: a multilayer perceptron and a small convolutional network.

Sources: http://yann.lecun.com/exdb/publis/pdf/lecun-98.pdf (convolutions and pooling for digits),
https://arxiv.org/abs/1411.4280 (dropout of entire channels).
"""

# Shapes: B batch.

from torch import Tensor, nn

MEAN = 33.3
"""Mean of the pixels of MNIST's training set, on a scale from 0 to 255."""
STD = 78.6
"""Standard deviation of the pixels of MNIST's training set, on a scale from 0 to 255."""


class Normalize(nn.Module):
    """Converts images (B, 28, 28) with pixels from 0 to 255 to float32, with mean 0 and standard deviation 1.

    A model that starts with this layer accepts uint8, so that batches have a quarter of the bytes of float32.
    Raises ValueError for other shapes.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 28, 28) of any dtype, from 0 to 255 -> normalised images (B, 28, 28) in float32."""
        if images.dim() != 3 or images.shape[1:] != (28, 28):
            raise ValueError(f"images of shape {tuple(images.shape)}; expected (B, 28, 28)")
        return (images.float() - MEAN) / STD


def mlp(hidden: int = 128) -> nn.Sequential:
    """A perceptron 784-`hidden`-10 with ReLU: images (B, 28, 28) from 0 to 255 -> class scores (B, 10)."""
    return nn.Sequential(Normalize(), nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def conv_net(dropout: float = 0.25) -> nn.Sequential:
    """A convolutional network: images (B, 28, 28) from 0 to 255 -> class scores (B, 10).

    It has two 5 x 5 convolutions with pooling, then a perceptron 320-50-10. `dropout` is the probability of
    zeroing a channel of the second convolution, and of zeroing a hidden unit.
    """
    features = [
        *(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, 5), nn.Dropout2d(dropout), nn.MaxPool2d(2), nn.ReLU()),
    ]
    head = [nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(dropout), nn.Linear(50, 10)]
    return nn.Sequential(Normalize(), nn.Unflatten(1, (1, 28)), *features, *head)
