"""A GAN on digits of 8 x 8 pixels: two models and two optimizers in one loop of one's own, on any number of workers.

manyhosts run --workers 2 examples/dcgan.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.utils.data import TensorDataset

import manyhosts as mh

LATENT = 16


class Generator(nn.Sequential):
    """Noise, shape (samples, LATENT), to pictures, shape (samples, 1, 8, 8)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(LATENT, 32 * 2 * 2), nn.Unflatten(1, (32, 2, 2)), nn.BatchNorm2d(32), nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip


class Critic(nn.Sequential):
    """Pictures to how real they look, shape (samples, 1)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(32 * 2 * 2, 1),
        )  # fmt: skip


def real_and_fake(batch):
    """How far the critic is from telling real pictures from made ones."""
    (real,) = batch
    fake = run.models["generator"](torch.randn(len(real), LATENT)).detach()
    judged_real, judged_fake = run.models["critic"](real), run.models["critic"](fake)
    loss = cross_entropy(judged_real, torch.ones_like(judged_real))
    return loss + cross_entropy(judged_fake, torch.zeros_like(judged_fake))


def fooled(batch):
    """How far the generator is from pictures that the critic takes for real."""
    judged = run.models["critic"](run.models["generator"](torch.randn(len(batch[0]), LATENT)))
    return cross_entropy(judged, torch.ones_like(judged))


def step(run):
    """One step: both models, all or nothing."""
    run.backward(real_and_fake, "critic")
    run.update("critic")
    run.backward(fooled, "generator")
    run.update("generator", clip=10.0)


images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
run = mh.Run(
    models={"generator": Generator, "critic": Critic},
    optimizers={name: lambda params: torch.optim.Adam(params, 2e-3, (0.5, 0.999)) for name in ("generator", "critic")},
    data=mh.Data(train=TensorDataset(images), batch_size=64),
    virtual_workers=6,
)

if __name__ == "__main__":
    run.fit(step, "5 epochs")
