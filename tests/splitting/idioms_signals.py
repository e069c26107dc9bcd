"""Idioms of audio, time series, text and point clouds: samples that are no images."""

import random

import numpy as np
import torch
from idiom import ROWS, Table
from torch.utils.data import Dataset

TABLE = Table()


class Signals(Dataset):
    """Waveforms float32 [1, 256], a label, and a transform."""

    def __init__(self, transform=None, **others):
        time = torch.arange(256) / 256
        self.waves = [torch.sin(2 * torch.pi * (3 + i % 7) * time)[None] + i / 100 for i in range(ROWS)]
        self.transform = transform
        self.__dict__.update(others)

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        return self.transform(self.waves[index].clone()), index % 10


class Compose:
    """The references' own Compose."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for step in self.transforms:
            x = step(x)
        return x


class RandomGain:
    """Scale a waveform by a random gain in dB."""

    def __call__(self, wave):
        return wave * 10 ** (random.uniform(-6, 6) / 20)


class RandomCrop:
    """Take a random window of a waveform."""

    def __init__(self, length):
        self.length = length

    def __call__(self, wave):
        first = torch.randint(wave.shape[-1] - self.length + 1, (1,)).item()
        return wave[..., first : first + self.length]


def spectrogram(wave):
    """Return the power of the short-time Fourier transform, [1, 17, frames]."""
    return torch.stft(wave, 32, 16, window=torch.hann_window(32), return_complex=True).abs() ** 2


class FrequencyMask:
    """Set a random band of a spectrogram to 0, as SpecAugment does."""

    def __call__(self, spec):
        width, first = int(torch.randint(0, 5, ())), int(torch.randint(0, 12, ()))
        spec = spec.clone()
        spec[..., first : first + width, :] = 0
        return spec


@TABLE.add("audio: random gain of a waveform", "torch", "sample")
def gain():
    return Signals(RandomGain())


@TABLE.add("audio: random crop, gain", "torch", "sample")
def crop_and_gain():
    return Signals(Compose([RandomCrop(200), RandomGain()]))


@TABLE.add("audio: spectrogram, then masks", "torch", "sample")
def spec_augment():
    return Signals(Compose([spectrogram, FrequencyMask()]))


@TABLE.add("audio: a random gain before the spectrogram", "torch", "sample")
def gain_before():
    return Signals(Compose([RandomGain(), spectrogram]))


@TABLE.add("audio: clean and noisy waveform", "torch", "sample", "what the dataset does after it",
           invariant=lambda s: s["clean"].std() > 0 and bool((s["noisy"] - s["clean"]).abs().mean() > 0))  # fmt: skip
def denoising():
    class Denoising(Signals):
        def __getitem__(self, index):
            clean = self.waves[index]
            return {"clean": clean, "noisy": self.transform(clean)}

    return Denoising(lambda wave: wave + 0.1 * torch.randn_like(wave))


@TABLE.add("time series: jitter and scaling", "NumPy", "sample")
def jitter():
    def jittered(x):
        return x + np.random.normal(0, 0.03, x.shape).astype(np.float32)

    def scaled(x):
        return x * np.float32(np.random.normal(1, 0.1))

    class Series(Signals):
        def __getitem__(self, index):
            return self.transform(self.waves[index].numpy().T), index % 10

    return Series(Compose([jittered, scaled]))


@TABLE.add("time series: random windows in __getitem__", "NumPy", "refused", "draws outside of a pipeline")
def windows():
    class Windows(Signals):
        def __getitem__(self, index):
            first = np.random.randint(0, 256 - 64)
            return self.waves[index][0, first : first + 64], self.waves[index][0, first + 64]

    return Windows()


@TABLE.add("time series: past and future of one random window", "torch", "sample",
           "what the dataset does after it")  # fmt: skip
def forecasting():
    class Forecast(Signals):
        def __getitem__(self, index):
            window = self.transform(self.waves[index])
            return window[..., :48], window[..., 48:]

    return Forecast(RandomCrop(64))


@TABLE.add("text: tokens are masked, labels say which", "torch", "sample")
def masked_tokens():
    def mask(tokens):
        chosen = torch.rand(len(tokens)) < 0.15
        return {"input_ids": tokens.masked_fill(chosen, 103), "labels": tokens.masked_fill(~chosen, -100)}

    class Text(Signals):
        def __getitem__(self, index):
            return self.transform(torch.arange(32) + index)

    return Text(mask)


@TABLE.add("point clouds: rotation, jitter, subsampling", "NumPy", "sample")
def points():
    def rotated(cloud):
        angle = np.random.uniform(0, 2 * np.pi)
        cos, sin = np.cos(angle), np.sin(angle)
        return cloud @ np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]], np.float32)

    def subsampled(cloud):
        return cloud[np.random.choice(len(cloud), 32, replace=False)]

    class Clouds(Signals):
        def __getitem__(self, index):
            cloud = np.random.RandomState(index).rand(64, 3).astype(np.float32)
            return torch.from_numpy(self.transform(cloud)), index % 10

    return Clouds(Compose([rotated, subsampled]))


@TABLE.add("tabular rows: random noise on a vector", "torch", "sample")
def tabular():
    class Records(Signals):
        def __getitem__(self, index):
            return self.transform(torch.arange(8.0) + index), float(index)

    return Records(lambda row: row + 0.1 * torch.randn(8))
