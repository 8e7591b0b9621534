"""Images in folders and tar shards: the same batches from both, for any number of workers, from any step on."""

import io
import sys
import tarfile
from itertools import islice

import numpy as np
import PIL.Image
import pytest
import torch
from torch.testing import assert_close
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from horst.lab.data.epoch_order import derive_seed
from horst.lab.data.image_files import find_images
from horst.lab.data.imagenet import MEAN, STD, ImageNet
from horst.lab.data.mixing import Mixing

CLASSES = ("ant", "bee", "cat")
# From Python 3.12 on, forking a process with threads warns; loaders do it everywhere.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def picture(seed, mode="RGB"):
    rng = np.random.default_rng(seed)
    width, height = rng.integers(20, 50, 2)
    pixels = rng.integers(256, size=(height // 4, width // 4, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels).resize((int(width), int(height))).convert(mode)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("imagenet")
    for split, count in (("train", 5), ("val", 3)):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for k in range(count):
                mode = ("L", "CMYK", "RGB")[k] if k < 3 else "RGB"  # ImageNet has all three
                picture(100 * label + 10 * k + len(split), mode).save(root / split / name / f"{k}.JPEG", "JPEG")
    return root


@pytest.fixture(scope="module")
def shards(root, tmp_path_factory):
    """The same images in the same order, four to a shard."""
    shards = tmp_path_factory.mktemp("shards")
    for split in ("train", "val"):
        (shards / split).mkdir()
        samples = ImageFolder(root / split).samples
        for first in range(0, len(samples), 4):
            files = []
            for k, (path, label) in enumerate(samples[first : first + 4]):
                with open(path, "rb") as file:
                    files += [(f"part/{first + k:04}.jpg", file.read()), (f"part/{first + k:04}.cls", b"%d\n" % label)]
            write_tar(shards / split / f"{first:03}.tar", [*files, ("README.txt", b"not a sample")])
    return shards


def write_tar(path, files, mode="w"):
    with tarfile.open(path, mode) as tar:
        folder = tarfile.TarInfo("part")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def make(root, **changes):
    return ImageNet(root, **{"batch_size": 4, "image_size": 16, "resize": 20, "workers": 0, "seed": 7, **changes})


def take(source, count, start=0):
    return list(islice(source.batches(start), count))


def assert_same(first, second):
    for (x, y), (other_x, other_y) in zip(first, second, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_folders_are_numbered_as_torchvision_does(root):
    files, reference = find_images(root / "train"), ImageFolder(root / "train")
    assert [(files.place(i), int(files.labels[i])) for i in range(len(files))] == reference.samples
    assert list(files.class_names) == reference.classes
    for i in range(len(files)):
        assert files.load(i).tobytes() == reference[i][0].tobytes()


def test_shards_hold_the_same_images(root, shards):
    files, reference = find_images(shards / "train"), find_images(root / "train")
    assert torch.equal(files.labels, reference.labels)
    assert files.classes == 3
    for i in range(len(files)):
        assert files.load(i).tobytes() == reference.load(i).tobytes()


def test_batches_come_out_the_same_from_folders_and_shards(root, shards):
    assert_same(take(make(root), 5), take(make(shards), 5))
    assert_same(list(make(root).evaluation_batches()), list(make(shards).evaluation_batches()))


def test_training_images_are_torchvisions_crops_from_the_images_own_seed(root):
    source = make(root)
    reference = ImageFolder(root / "train")
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(16, interpolation=v2.InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32),
            v2.Normalize(MEAN, STD),
        ]
    )
    for (_, epoch, index), (images, labels) in zip(source.order.batches(2), take(source, 4, start=2), strict=False):
        for image, label, i in zip(images, labels, index.tolist(), strict=True):
            torch.manual_seed(derive_seed(7, "augment", epoch, i))
            assert_close(image, transform(reference[i][0]))
            assert int(label) == reference.targets[i]


def test_an_image_is_cropped_anew_every_epoch(root):
    source = make(root, batch_size=15)
    first, second = take(source, 2)
    order = [source.order.permutation(epoch).argsort() for epoch in (0, 1)]
    same = (first[0][order[0]] == second[0][order[1]]).flatten(1).all(1)
    assert torch.equal(first[1][order[0]], second[1][order[1]])
    assert not bool(same.all())


def test_the_number_of_workers_does_not_matter(root):
    expected = take(make(root, mixing=Mixing()), 5)
    for workers in (1, 2):
        source = make(root, mixing=Mixing(), workers=workers)
        assert_same(take(source, 5), expected)
    assert_same(list(source.evaluation_batches()), list(make(root).evaluation_batches()))


@pytest.mark.parametrize("start", [1, 2, 3, 7])
def test_a_resumed_run_sees_what_the_uninterrupted_one_does(root, start):
    source = make(root, mixing=Mixing())
    assert source.steps_per_epoch == 3
    assert_same(take(make(root, mixing=Mixing()), 2, start), take(source, start + 2)[start:])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mixing", [None, Mixing()])
def test_processes_together_see_what_one_would(root, world_size, mixing):
    whole = take(make(root, batch_size=12, mixing=mixing), 3)
    parts = [
        take(make(root, batch_size=12, mixing=mixing, rank=rank, world_size=world_size), 3)
        for rank in range(world_size)
    ]
    assert_same(
        [tuple(torch.cat(tensors) for tensors in zip(*batch, strict=True)) for batch in zip(*parts, strict=True)], whole
    )


def test_the_evaluation_resizes_and_cuts_out_the_middle(root):
    reference = ImageFolder(root / "val")
    transform = v2.Compose(
        [
            v2.Resize(20, interpolation=v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(16),
            v2.ToImage(),
            v2.ToDtype(torch.float32),
            v2.Normalize(MEAN, STD),
        ]
    )
    seen = []
    for rank in range(2):
        share = list(range(rank, 9, 2))
        images, labels = zip(
            *make(root, rank=rank, world_size=2, evaluation_batch_size=2).evaluation_batches(), strict=True
        )
        assert len(images) == 3
        assert_close(torch.cat(images), torch.stack([transform(reference[i][0]) for i in share]))
        assert torch.cat(labels).tolist() == [reference.targets[i] for i in share]
        seen += share
    assert sorted(seen) == list(range(9))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_generator_is_left_alone(root, workers):
    before = torch.get_rng_state()
    source = make(root, workers=workers, mixing=Mixing())
    take(source, 2)
    list(source.evaluation_batches())
    assert torch.equal(torch.get_rng_state(), before)


def test_mixing_gives_rows_of_shares_and_images_channels_last(root):
    images, targets = next(make(root, mixing=Mixing()).batches())
    assert images.shape == (4, 3, 16, 16)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert_close(targets.sum(1), torch.ones(4))


@pytest.mark.gpu
def test_on_a_gpu_batches_are_those_of_a_cpu(root):
    for (x, y), (gpu_x, gpu_y) in zip(take(make(root), 5), take(make(root, device="cuda", workers=2), 5), strict=True):
        assert_close(gpu_x.cpu(), x)
        assert torch.equal(gpu_y.cpu(), y)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named(root, tmp_path, workers):
    for split in ("train", "val"):
        (tmp_path / split / "ant").mkdir(parents=True)
        whole = (root / split / "ant" / "3.JPEG") if split == "train" else (root / split / "ant" / "2.JPEG")
        (tmp_path / split / "ant" / "1.jpg").write_bytes(whole.read_bytes())
    (tmp_path / "train" / "ant" / "2.jpg").write_bytes(whole.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"^\S+ant/2.jpg is no whole image: .*Replace it or take it out\.$"):
        take(make(tmp_path, batch_size=2, workers=workers), 1)
    (tmp_path / "val" / "ant" / "1.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"^\S+ant/1.jpg is no whole image: .*Replace it or take it out\.$"):
        list(make(tmp_path, batch_size=2, workers=workers).evaluation_batches())


def test_a_size_beyond_reason_and_a_broken_chunk_are_damage_too(tmp_path):
    (tmp_path / "ant").mkdir()
    for name in ("huge.bmp", "broken.png"):
        picture(0).save(tmp_path / "ant" / name)
    content = bytearray((tmp_path / "ant" / "huge.bmp").read_bytes())
    content[18:26] = (1 << 16).to_bytes(4, "little") * 2  # width and height
    (tmp_path / "ant" / "huge.bmp").write_bytes(content)
    content = bytearray((tmp_path / "ant" / "broken.png").read_bytes())
    pixels = content.index(b"IDAT")
    content[pixels - 4 : pixels] = (9).to_bytes(4, "big")  # the chunk's length: the next one has no name then
    (tmp_path / "ant" / "broken.png").write_bytes(content)
    files = find_images(tmp_path)
    for i, name in enumerate(("broken.png", "huge.bmp")):
        with pytest.raises(ValueError, match=rf"ant/{name} is no whole image: "):
            files.load(i)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_is_gone_is_named(root, tmp_path, workers):
    for split in ("train", "val"):
        (tmp_path / split / "ant").mkdir(parents=True)
        (tmp_path / split / "ant" / "1.jpg").write_bytes((root / split / "ant" / "2.JPEG").read_bytes())
    source = make(tmp_path, batch_size=1, workers=workers)
    (tmp_path / "train" / "ant" / "1.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"^\[Errno 2\] No such file or directory: '\S+ant/1.jpg'$"):
        take(source, 1)


def test_a_shard_cut_short_after_it_was_found_is_named(shards, tmp_path):
    path = tmp_path / "1.tar"
    content = (shards / "train" / "000.tar").read_bytes()
    path.write_bytes(content)
    files = find_images(tmp_path)
    path.write_bytes(content[: int(files.offset[2]) + 20])
    assert files.load(1).mode == "RGB"
    with pytest.raises(ValueError, match=r"1.tar at byte \d+ is no whole image"):
        files.load(2)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ([("1.jpg", b"x"), ("2.jpg", b"x"), ("2.cls", b"0")], r"only one of the two is there for 1 \(1 in all\)"),
        ([("1.cls", b"0")], r"only one of the two is there for 1 "),
        ([("1.jpg", b"x"), ("1.cls", b"cat")], "1.cls of .* must hold a class number, got b'cat'"),
        ([("1.jpg", b"x"), ("1.png", b"x"), ("1.cls", b"0")], "two images called '1'"),
        ([("1.jpg", b"x"), ("1.cls", b"-1")], "labels count from 0, .* have -1"),
        ([("1.txt", b"x")], "the 1 shards in .* hold no image"),
    ],
)
def test_bad_shards_are_refused(tmp_path, files, text):
    write_tar(tmp_path / "a.tar", files)
    with pytest.raises(ValueError, match=text):
        find_images(tmp_path)


def test_compressed_and_truncated_shards_say_what_to_do(shards, tmp_path):
    write_tar(tmp_path / "a.tar", [("1.jpg", b"x"), ("1.cls", b"0")], "w:gz")
    with pytest.raises(ValueError, match=r"a.tar is no whole uncompressed tar file: .* Unpack compressed shards"):
        find_images(tmp_path)
    (tmp_path / "a.tar").write_bytes((shards / "train" / "000.tar").read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"a.tar is no whole uncompressed tar file"):
        find_images(tmp_path)


@pytest.mark.parametrize("left", [0, 200, 512])
def test_a_shard_that_ends_at_a_header_is_refused(shards, tmp_path, left):
    """Python's tarfile takes what is left of the header, and a missing one, for the end."""
    content = (shards / "train" / "000.tar").read_bytes()
    with tarfile.open(shards / "train" / "000.tar") as tar:
        header = tar.getmember("part/0002.jpg").offset
    (tmp_path / "a.tar").write_bytes(content[: header + left])
    with pytest.raises(ValueError, match=r"a.tar is no whole uncompressed tar file: .* copy it again"):
        find_images(tmp_path)


@pytest.mark.parametrize("damage", [b"\0" * 512, b"\xff" * 512])
def test_a_damaged_header_is_not_taken_for_the_end(shards, tmp_path, damage):
    content = bytearray((shards / "train" / "000.tar").read_bytes())
    with tarfile.open(shards / "train" / "000.tar") as tar:
        header = tar.getmember("part/0002.jpg").offset
    content[header : header + 512] = damage
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a.tar is no whole .*: no header can be read at byte {header}, but there"):
        find_images(tmp_path)


def test_bad_folders_say_what_belongs_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is no folder. It must hold a folder for each class, or .tar shards"):
        find_images(tmp_path / "none")
    (tmp_path / "1.jpg").touch()
    with pytest.raises(FileNotFoundError, match=r"holds neither class folders nor .tar shards"):
        find_images(tmp_path)
    (tmp_path / "ant").mkdir()
    with pytest.raises(FileNotFoundError, match=r"ant holds no image. Images end in .jpg"):
        find_images(tmp_path)


def test_classes_must_agree(root, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).symlink_to(root / split, target_is_directory=True)
    make(tmp_path)
    (tmp_path / "val").unlink()
    (tmp_path / "val" / "dog").mkdir(parents=True)
    picture(0).save(tmp_path / "val" / "dog" / "1.png")
    with pytest.raises(
        ValueError, match="must have the same classes, got 3 and 1; only one of them has the folder 'ant'"
    ):
        make(tmp_path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"image_size": 21}, r"image_size must lie in \[1, resize=20\], got 21"),
        ({"workers": -1}, "workers must be at least 0, got -1"),
        ({"batch_size": 16}, "15 training samples make no batch of 16"),
    ],
)
def test_bad_sources_are_refused(root, changes, text):
    with pytest.raises(ValueError, match=text):
        make(root, **changes)


def test_without_torchvision_the_extra_is_named(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.transforms.v2", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "\.\[vision\]"'):
        make(root)
