import json
import os
import pickle
import random

import pytest
import torch

from patrickstar import _C
from patrickstar.checkpoint import Checkpoint, CheckpointError, save
from patrickstar.checkpoint.__main__ import main
from patrickstar.checkpoint.manifest import Manifest
from tests.bits import assert_same_bits
from tests.checkpoint.ranks import Held, HeldSink
from tests.checkpoint.ranks import HeldSource as Source
from tests.distributed import run_python

TENSORS = [
    Held("embed.weight", "master", torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), (0, 160)),
    Held("embed.weight", "exp_avg", torch.randn(20, 8, generator=torch.Generator().manual_seed(1)), (0, 160)),
    Held("mask", "buffer", torch.arange(5) > 2, (0, 5)),
]
FILE = "rank00000-00000.safetensors"


def saved(path, tensors=TENSORS):
    return save(path, "t", Source(tensors, 0), {"answer": 42})


def load(path, tensors=TENSORS):
    sink = HeldSink(tensors, 0)
    with Checkpoint(path) as checkpoint:
        checkpoint.load(sink)
    return sink


def flip(path, offset, bit):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["manifest.json", FILE])
def test_every_flipped_byte_is_refused(tmp_path, file):
    path = saved(tmp_path)
    size = (path / file).stat().st_size
    generator = random.Random(0)
    for offset in range(size):
        bit = generator.randrange(8)
        flip(path / file, offset, bit)
        with pytest.raises(CheckpointError) as caught:
            load(path)
        assert file in str(caught.value)
        with pytest.raises(CheckpointError), Checkpoint(path) as checkpoint:
            checkpoint.verify()
        flip(path / file, offset, bit)
    load(path).check()
    print(f"{size} of {size} refused")


def test_the_damaged_tensor_is_named(tmp_path):
    path = saved(tmp_path)
    with Checkpoint(path) as checkpoint:
        shard = checkpoint.tensor("embed.weight", "exp_avg").shards[0]
    flip(path / FILE, shard.offset + 3, 0)
    with pytest.raises(CheckpointError, match=rf"{FILE}: exp_avg of embed.weight \[0:160\] is damaged"):
        load(path)


@pytest.mark.parametrize("file", ["manifest.json", FILE])
def test_truncated_and_longer_files(tmp_path, file):
    path = saved(tmp_path)
    data = (path / file).read_bytes()
    for size in (*range(0, len(data), 37), len(data) - 1):
        (path / file).write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=file):
            load(path)
    (path / file).write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match=file):
        load(path)


@pytest.mark.parametrize("instead", ["nothing", "link", "fifo", "folder"])
@pytest.mark.parametrize("file", ["manifest.json", FILE])
def test_files_that_are_none(tmp_path, file, instead):
    path = saved(tmp_path)
    (path / file).rename(tmp_path / "moved")
    if instead == "link":
        (path / file).symlink_to(tmp_path / "moved")
    elif instead == "fifo":
        os.mkfifo(path / file)
    elif instead == "folder":
        (path / file).mkdir()
    with pytest.raises(CheckpointError, match=file):
        load(path)


def other_shape():
    return Held("embed.weight", "master", torch.zeros(8, 20), (0, 160))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda: TENSORS[:2], "not in this model: mask"),
        (lambda: [*TENSORS, Held("head", "master", torch.zeros(2), (0, 2))], "not in the checkpoint: head"),
        (lambda: [other_shape(), *TENSORS[1:]], r"embed.weight \(shape \(20, 8\) in the checkpoint, \(8, 20\) here\)"),
        (lambda: [*TENSORS[:2], Held("mask", "buffer", torch.zeros(5), (0, 5))], "mask .torch.bool in the checkpoint"),
        (lambda: [Held(f"q{i}", "master", torch.zeros(1), (0, 1)) for i in range(9)], "q0, q1, q2 and 6 more"),
    ],
)
def test_another_model_is_refused_before_anything_is_written(tmp_path, tensors, message):
    path = saved(tmp_path)
    sink = HeldSink(tensors(), 0)
    with Checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load(sink)
    assert "nothing was loaded" in str(caught.value)
    assert sink.got == {}


def test_another_kind_or_precision_of_the_same_parameter_is_taken(tmp_path):
    path = saved(tmp_path)
    frozen = Held("embed.weight", "frozen", TENSORS[0].values.to(torch.bfloat16), (0, 160))
    sink = load(path, [frozen, TENSORS[2]])
    assert_same_bits(sink.got[("embed.weight", "frozen")].view(20, 8), TENSORS[0].values)


def described(path):
    return json.loads((path / "manifest.json").read_bytes())["manifest"]


def as_file(value):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return b'{"crc32c":"' + f"{_C.crc32c(body):08x}".encode() + b'","manifest":' + body + b"}\n"


def change(*path_and_value):
    *path, value = path_and_value

    def apply(manifest):
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = value

    return apply


def shard(**fields):
    return lambda manifest: manifest["tensors"][0]["shards"][0].update(fields)


def renamed_file(name):
    def apply(manifest):
        manifest["files"][name] = manifest["files"].pop(FILE)
        for tensor in manifest["tensors"]:
            for piece in tensor["shards"]:
                piece["file"] = name

    return apply


def twice(manifest):
    manifest["tensors"].append(manifest["tensors"][0])


HOSTILE = {
    "another format": change("format", "pickle"),
    "a later version": change("version", 3),
    "no tensors": lambda m: m.pop("tensors"),
    "tensors is a dict": change("tensors", {}),
    "a tensor is a list": change("tensors", 0, []),
    "a tensor twice": twice,
    "a value under two kinds": lambda m: m["tensors"].append({**m["tensors"][0], "kind": "frozen"}),
    "an unknown kind": change("tensors", 0, "kind", "code"),
    "an unknown dtype": change("tensors", 0, "dtype", "object"),
    "a dtype of another size": change("tensors", 0, "dtype", "F64"),
    "a negative dimension": change("tensors", 0, "shape", [-20, -8]),
    "a dimension that is a float": change("tensors", 0, "shape", [20.0, 8]),
    "a dimension that is true": change("tensors", 0, "shape", [160, True]),
    "a dimension that is text": change("tensors", 0, "shape", ["160"]),
    "a product that overflows": change("tensors", 0, "shape", [2**40, 2**40]),
    "a thousand dimensions": change("tensors", 0, "shape", [1] * 1000 + [160]),
    "an order that is no permutation": change("tensors", 0, "order", [0, 0]),
    "an order of booleans": change("tensors", 0, "order", [False, True]),
    "no shards": change("tensors", 0, "shards", []),
    "a missing shard": shard(end=80, bytes=320),
    "a shard that begins late": shard(begin=1),
    "a shard that runs backwards": shard(begin=160, end=0),
    "bytes that are not the elements'": shard(bytes=639),
    "an offset in the header": shard(offset=0),
    "an offset in another tensor": lambda m: shard(offset=m["tensors"][1]["shards"][0]["offset"])(m),
    "an offset beyond the file": shard(offset=2**61),
    "an offset beyond 64 bits": shard(offset=2**80),
    "a negative offset": shard(offset=-8),
    "a file that is not listed": shard(file="rank00001-00000.safetensors"),
    "a checksum of nine digits": shard(crc32c="0123456789"),
    "a checksum that is a number": shard(crc32c=1),
    "a file above the folder": renamed_file("../rank00000-00000.safetensors"),
    "an absolute file": renamed_file("/etc/passwd"),
    "a file without a name": renamed_file(""),
    "a file with a newline": renamed_file(FILE + "\n"),
    "a file of another size": change("files", FILE, "bytes", 10),
    "a header of a terabyte": change("files", FILE, "header_bytes", 2**40),
    "a file that is a number": change("files", FILE, 3),
    "a file without tensors": change(
        "files", "rank00000-00001.safetensors", {"bytes": 8, "header_bytes": 4, "header_crc32c": "00000000"}
    ),
    "no ranks": lambda m: m.pop("num_ranks"),
    "state is a list": change("state", []),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests(tmp_path, name):
    path = saved(tmp_path)
    manifest = described(path)
    (path / "manifest.json").write_bytes(as_file(manifest))
    load(path).check()
    HOSTILE[name](manifest)
    (path / "manifest.json").write_bytes(as_file(manifest))
    with pytest.raises(CheckpointError, match="manifest.json"):
        load(path)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"NaN",
        b"{}",
        b'{"format":"patrickstar checkpoint","version":1,"version":1}',
        b"9" * 10_000,
        b"\xff\xfe{",
        b'{"format":"patrickstar checkpoint","version":1e999}',
        pickle.dumps(os.system),
    ],
    ids=range(10),
)
def test_bodies_that_are_no_manifest(body):
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(as_file(body))
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(body)


def test_a_manifest_survives_itself(tmp_path):
    data = (saved(tmp_path) / "manifest.json").read_bytes()
    assert Manifest.from_bytes(data).to_bytes() == data


def test_nothing_but_tensors_and_json_is_read():
    from pathlib import Path

    import patrickstar

    package = Path(patrickstar.__file__).parent
    files = [*(package / "checkpoint").glob("*.py"), *(package / "engine").glob("*state*.py")]
    sources = {path.name: path.read_text() for path in files}
    assert len(sources) > 10
    for name, source in sources.items():
        for word in ("import pickle", "torch.load", "torch.save", "eval(", "exec(", "__import__", "import_module"):
            assert word not in source, f"{word} in {name}"


def test_verify_on_the_command_line(tmp_path, capsys):
    path = saved(tmp_path)
    save(tmp_path, "u", Source(TENSORS, 0), {})
    assert main(["verify", str(tmp_path)]) == 0
    assert "latest is u" in capsys.readouterr().out
    assert main(["verify", str(path)]) == 0
    assert main(["verify", str(tmp_path), "--tag", "u", "--threads", "2"]) == 0
    assert capsys.readouterr().out.count("every byte is right") == 2
    (path / "stranger").touch()
    assert main(["verify", str(tmp_path)]) == 1
    assert "stranger does not belong there" in capsys.readouterr().out
    (path / "stranger").unlink()
    flip(path / FILE, 1000, 0)
    done = run_python("-m", "patrickstar.checkpoint", "verify", tmp_path)
    assert done.returncode == 1
    assert f"{path}: DAMAGED" in done.stdout
    assert f"{tmp_path / 'u'}: every byte is right" in done.stdout
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert "nothing was saved there yet" in capsys.readouterr().err
