"""Image data sets from the folder HIERFL_DATA; import them from `hierfl.datasets`."""

import io
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hierfl.core.extras import extras_for
from hierfl.core.tables import Shown, printed
from hierfl.data.clients import ClientData
from hierfl.datasets.files import Arrays, DataFile, load, read_from

_DIGITS = tuple("0123456789")
_CHARACTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_CLOTHES = tuple(
    "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot".split(",")
)


@printed
@dataclass(frozen=True, eq=False)
class Labeled:
    """Labeled rows without clients, to be partitioned with `hierfl.data.partition`.

    Args:
        x: (n, channels, height, width) float32 in [0, 1].
        y: (n,) int64, 0..L-1.
        classes: names of the L classes.
    """

    x: Tensor
    y: Tensor
    classes: tuple[str, ...]

    def __tables__(self) -> Shown:
        import pandas as pd  # slow to import

        counts = torch.bincount(self.y.long(), minlength=len(self.classes)).tolist()
        frame = pd.DataFrame({"class": self.classes, "rows": counts})
        return Shown(f"{len(self)} labeled rows, x of shape {tuple(self.x.shape[1:])}", frame)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.y)


def _layout(*parts: str) -> dict[str, str]:
    layout: dict[str, str] = {}
    for part in parts:
        layout |= {f"x_{part}": "uint8 (n, 28, 28)", f"y_{part}": "labels (n,)"}
    return layout


_BOTH = _layout("train", "test")


_MNIST = DataFile("mnist.npz", "MNIST (LeCun, Cortes and Burges, CC BY-SA 3.0)", _BOTH)
_FASHION = DataFile("fashion_mnist.npz", "Fashion-MNIST (Zalando Research, MIT license)", _BOTH)
_NOTMNIST = DataFile("notmnist_10k.npz", "notMNIST (Y. Bulatov), letters A-J", _layout("test"))
_EMNIST = DataFile(
    "emnist_byclass_test.npz",
    "EMNIST ByClass, test split (NIST; Cohen et al. 2017)",
    {**_layout("test"), "mapping": "characters (62,)"},
)
_WRITER = "position of the writer in `writers` (n,)"
_FEMNIST = DataFile(
    "femnist.npz",
    "FEMNIST with its writers, from LEAF (Caldas et al. 2018)",
    {
        **_layout("train", "test", "extra"),
        "client_train": _WRITER,
        "client_test": _WRITER,
        "client_extra": "position of the writer in `writers_extra` (n,)",
        "writers": "names (N,)",
        "writers_extra": "names of writers with no training rows",
    },
)
_CIFAR10 = DataFile(
    "cifar10_jpgpack.npz",
    "CIFAR-10 (Krizhevsky 2009) as JPEG images without their common header",
    {
        "header0": "uint8, the header",
        "body_train": "uint8, the concatenated bodies",
        "len_train": "number of bytes of each body (n,)",
        "y_train": "labels (n,)",
        "body_test": "as body_train",
        "len_test": "as len_train",
        "y_test": "as y_train",
        "classes": "names (10,)",
    },
)


def _part(arrays: Arrays, part: str, classes: tuple[str, ...]) -> Labeled:
    labels = torch.from_numpy(arrays[f"y_{part}"].astype(np.int64))
    images = torch.from_numpy(arrays[f"x_{part}"])[:, None].to(torch.float32) / 255.0
    return Labeled(images, labels, classes)


def _train_test(source: DataFile, classes: tuple[str, ...]) -> tuple[Labeled, Labeled]:
    arrays = load(source)
    return _part(arrays, "train", classes), _part(arrays, "test", classes)


@read_from(_MNIST)
def mnist() -> tuple[Labeled, Labeled]:
    """MNIST in its official split: (60,000 training images, 10,000 test images), x (n, 1, 28, 28).

    Raises:
        FileNotFoundError: the file is missing; the message says how to get it. Every data set of
            this module raises this error.
        ValueError: the file is damaged, or another one. So does every data set of this module.
    """
    return _train_test(_MNIST, _DIGITS)


@read_from(_FASHION)
def fashion_mnist() -> tuple[Labeled, Labeled]:
    """Fashion-MNIST's official split: (60,000 training, 10,000 test images), x (n, 1, 28, 28)."""
    return _train_test(_FASHION, _CLOTHES)


@read_from(_NOTMNIST)
def notmnist() -> Labeled:
    """The letters A to J in 10,000 images of different fonts, x (n, 1, 28, 28).

    They serve as out-of-distribution data for models of digits or clothes.
    """
    return _part(load(_NOTMNIST), "test", tuple("ABCDEFGHIJ"))


@read_from(_EMNIST)
def emnist_byclass_test() -> Labeled:
    """EMNIST ByClass's test split: 116,323 digits and letters in 62 classes, x (n, 1, 28, 28)."""
    arrays = load(_EMNIST)
    return _part(arrays, "test", tuple(str(c) for c in arrays["mapping"]))


@read_from(_FEMNIST)
def femnist() -> tuple[ClientData, ClientData, ClientData]:
    """LEAF's FEMNIST by writer: (training rows, test rows, rows of writers without training rows).

    Each writer is a client. Fields: `x` (n, 1, 28, 28) in [0, 1]; `y` (n,) int64, 62 classes:
    digits, capital letters, small letters. The first two parts hold the same 105 writers. The third
    holds 79 others, whose mix of labels differs.
    """
    arrays = load(_FEMNIST)

    def writers(part: str, names: str) -> ClientData:
        images, own = _part(arrays, part, _CHARACTERS), arrays[names].tolist()
        return ClientData.from_arrays(arrays[f"client_{part}"], names=own, x=images.x, y=images.y)

    extra = writers("extra", "writers_extra")
    return writers("train", "writers"), writers("test", "writers"), extra


@read_from(_CIFAR10)
def cifar10() -> tuple[Labeled, Labeled]:
    """CIFAR-10: (50,000 training images, 10,000 test images), x (n, 3, 32, 32), from JPEG (lossy).

    The file stores the images class by class. They are shuffled here, always in the same order, so
    that any slice has all classes. Decoding takes a few seconds.

    Raises:
        ImportError: Pillow is not installed.
        FileNotFoundError: the file is missing; the message says how to get it.
    """
    arrays = load(_CIFAR10)
    classes = tuple(str(name) for name in arrays["classes"])
    train, test = (_decoded(arrays, part, classes) for part in ("train", "test"))
    return train, test


def _decoded(arrays: Arrays, part: str, classes: tuple[str, ...]) -> Labeled:
    with extras_for("cifar10, stored as JPEG,"):
        from PIL import Image
    header, body = arrays["header0"].tobytes(), arrays[f"body_{part}"].tobytes()
    ends = np.cumsum(arrays[f"len_{part}"], dtype=np.int64)
    starts = ends - arrays[f"len_{part}"]
    pixels = np.empty((len(ends), 32, 32, 3), dtype=np.uint8)
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        with Image.open(io.BytesIO(header + body[start:end])) as image:
            pixels[i] = np.asarray(image)
    order = np.random.Generator(np.random.Philox(0)).permutation(len(ends))
    x = torch.from_numpy(pixels[order]).permute(0, 3, 1, 2).to(torch.float32) / 255.0
    return Labeled(x, torch.from_numpy(arrays[f"y_{part}"][order].astype(np.int64)), classes)
