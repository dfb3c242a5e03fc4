"""The folder for a C++ program, the program itself, and ONNX."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from torch import nn

import dunes
from conftest import raising, refuses, refuses_command
from dunes import checkpoint
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.formats import cpp as export_native
from dunes.checkpoint.formats.cpp import SOURCES, checksum, encoding_tables, export_network
from dunes.checkpoint.formats.cpp import export_native as export
from dunes.checkpoint.formats.onnx import export_onnx, write_onnx
from dunes.checkpoint.weights.lazy_tensor import in_memory
from dunes.flags import option
from dunes.generate import decode_packages as step_package
from dunes.generate import sampler
from dunes.generate.decode_packages import step_source
from dunes.generate.sampling import RULES
from dunes.inference.text_generator import TextGenerator
from dunes.models.mnist import conv_net
from dunes.text import Tokenizer
from own_networks import Rows, Shared
from own_parts import Branching, Counting, ShiftedMLP
from test_step import changed, model_of

CONTEXT = 64
TEXT = 'def f(x):\n    return "größe", x  # a\ttab\r\n\r\nif f(1):\r    pass\n' * 4
PROMPTS = ["", "d", "def f(", TEXT[:40], "größe\r\n\r", "日本 \x00\r"]


def loaded(model=None, tokenizer=None, context=CONTEXT):
    return LoadedModel(model or model_of(), tokenizer or Tokenizer.train("bytes", []), context)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        head = [nn.Flatten(), nn.Linear(4 * 12 * 12, 10)]
        self.body = nn.Sequential(nn.Conv2d(1, 4, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(), *head)

    def forward(self, images):
        return self.body(images[:, None] / 255)


@pytest.fixture
def no_work(monkeypatch):
    """Fails the test when anything is compiled or exported."""

    fail = raising(AssertionError("work before the refusal"))
    for name in ("compile_step", "compile_graph"):
        monkeypatch.setattr(export_native.decode_packages, name, fail)
    monkeypatch.setattr(torch.export, "export", fail)
    monkeypatch.setattr(export_native, "why_not_compiled", lambda: "")  # which imports Inductor


def mixing():
    model = model_of()
    model.blocks[0].mlp = ShiftedMLP(64, 96)
    return model


def hooked():
    model = model_of()
    model.blocks[0].register_forward_hook(lambda *args: None)
    return model


@pytest.mark.parametrize(
    ("model", "context", "dtype", "message"),
    [
        (nn.Linear(2, 2), CONTEXT, None, "needs a Decoder, not a Linear"),
        (mixing, CONTEXT, None, "may mix tokens"),
        (hooked, CONTEXT, None, "without hooks"),
        (model_of, 4, None, "attends to 4 tokens; expected at least 8"),
        (lambda: model_of().to(torch.bfloat16), CONTEXT, torch.float16, "--dtype float16"),
        (lambda: model_of().to("meta"), CONTEXT, None, "on another device"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*may mix tokens")
def test_a_model_that_cannot_be_exported_is_refused(no_work, tmp_path, model, context, dtype, message):
    model = model if isinstance(model, nn.Module) else model()
    refuses(message, export, loaded(model, context=context), tmp_path / "out", dtype)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("network", [True, False])
def test_an_existing_folder_and_a_missing_compiler_are_refused(no_work, monkeypatch, tmp_path, network):
    def try_export(out):
        return export_network(Net(), torch.rand(1, 28, 28), out) if network else export(loaded(), out)

    refuses("exists already", try_export, tmp_path)
    monkeypatch.setattr(export_native, "why_not_compiled", lambda: "no C++ compiler; install g++")
    refuses("install g\\+\\+", try_export, tmp_path / "out")


class Made(nn.Module):
    def forward(self, x):
        return x + torch.tensor([1.0])


def hooked_network(before):
    network = nn.Linear(1, 1)
    (network.register_forward_pre_hook if before else network.register_forward_hook)(lambda *args: None)
    return network


class Pair(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("network", "example", "message"),
    [
        (Counting(), torch.rand(1), "count: a buffer that forward changes"),
        (Pair(), torch.rand(1), "one float32 tensor to another"),
        (nn.Embedding(3, 2), torch.tensor([1]), "one float32 tensor to another"),
        (hooked_network(before=True), torch.rand(1), "no hooks"),
        (hooked_network(before=False), torch.rand(1), "no hooks"),
    ],
)
def test_a_network_that_cannot_be_exported_is_refused(no_work, tmp_path, network, example, message):
    refuses(message, export_network, network, example, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("network", "message"),
    [(Branching(), "torch cannot export this model: "), (Made(), "a tensor made in forward; register it")],
)
def test_a_network_that_torch_cannot_export_is_refused_in_one_line(monkeypatch, tmp_path, network, message):
    monkeypatch.setattr(export_native, "why_not_compiled", lambda: "")
    monkeypatch.setattr(export_native.decode_packages, "compile_graph", lambda *args: pytest.fail("compiled"))
    refuses(message, export_network, network, torch.rand(1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_code_that_computes_something_else_is_refused(wrong):
    expected = torch.tensor([1.0, -2.0])
    check = lambda by: step_package.require_close("they", expected * by - expected, expected, torch.float32)
    check(1 + 1e-6)
    refuses(r"they differ by .* \(max 2", check, wrong)


@pytest.mark.parametrize("ids", [300, 200])
def test_a_program_writes_only_ids_that_model_and_tokenizer_have(ids):
    tokenizer, step = Tokenizer.train("bytes", []), SimpleNamespace(example=SimpleNamespace(keys=[], values=[]))
    expected = min(ids, tokenizer.vocab)
    card = export_native._decoder_card(loaded(model_of(vocab=ids), tokenizer), step)
    assert (card["vocabulary"], card["embedded"]) == (expected, ids)


def test_the_command_refuses_in_one_line(command, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    checkpoint.save(model_of(), model, Tokenizer.train("bytes", []), CONTEXT)
    for arguments, message in (
        (["--to", "cpp"], "exists already"),
        (["--to", "cpp", "--dtype", "q8_0"], "for --to gguf only"),
        (["--to", "onnx", "--dtype", "float16"], "weights are written in float32"),
        (["--to", "elf"], "expected hf, gguf, compressed-tensors, cpp, onnx"),
    ):
        out.mkdir(exist_ok=True)
        refuses_command(message, command("export", model, out, *arguments))


def test_a_network_needs_the_sizes_of_its_input_and_a_form_that_has_networks(monkeypatch, command, tmp_path):
    keep(tmp_path / "net")
    monkeypatch.setattr(export_native, "why_not_compiled", lambda: "")
    for arguments, message in (
        (["--to", "cpp"], "--example is missing: the sizes of the network's input"),
        (["--to", "onnx", "--example", "0"], "--example is missing"),
        (["--to", "hf", "--example", "1"], "no language model; for networks, expected cpp or onnx"),
        (["--to", "cpp", "--example", "1", "28", "28", "--dtype", "float16"], "weights are written in float32"),
        (["--to", "cpp", "--example", "1", "27", "28"], "images of shape (1, 27, 28); expected (B, 28, 28)"),
    ):
        refuses_command(message, command("export", tmp_path / "net", tmp_path / "out", *arguments))
    assert not (tmp_path / "out").exists()


def keep(folder):
    """A folder with a digit classifier."""
    torch.manual_seed(0)
    checkpoint.save(conv_net(), folder, architecture=checkpoint.Architecture.of_function(conv_net))
    return checkpoint.load_network(folder)


@pytest.mark.parametrize("chunk", [export_native.CHUNK, 16])
def test_any_changed_byte_changes_the_checksum_whatever_is_read_at_once(chunk, monkeypatch, tmp_path):
    data, file = bytearray(range(1, 22)), tmp_path / "file"
    file.write_bytes(data)
    sums = {checksum(file)}
    monkeypatch.setattr(export_native, "CHUNK", chunk)
    assert {checksum(file)} == sums
    for i in range(len(data)):
        file.write_bytes(data[:i] + bytes([data[i] ^ 0x80]) + data[i + 1 :])
        sums.add(checksum(file))
    file.write_bytes(data + b"\0")  # of which the sum of words alone would not know
    assert len(sums | {checksum(file)}) == len(data) + 2


def test_only_tokenizers_trained_here_have_tables():
    bpe = Tokenizer.train("bpe", [TEXT], vocab=300)
    tables = encoding_tables(bpe)
    assert tables is not None
    assert (len(tables["first"]), len(tables["merges"]), len(tables["ends"])) == (256, 300 - 265, 300)
    for change in (
        lambda content: content.update(pre_tokenizer=content["pre_tokenizer"]["pretokenizers"][1]),
        lambda content: content["added_tokens"][0].update(special=False),
        lambda content: content.update(normalizer={"type": "NFC"}),
    ):
        change(content := json.loads(bpe.json()))
        assert encoding_tables(Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))) is None


STUB = """
#include <cstdio>
#include "dunes.h"
dunes_model *dunes_open(const char *) { return reinterpret_cast<dunes_model *>(1); }
void dunes_close(dunes_model *) {}
const char *dunes_error(void) { return "begun"; }
int dunes_generates(const dunes_model *) { return 1; }
void dunes_set_threads(int) {}
dunes_text *dunes_start(dunes_model *, const int64_t *, int64_t, int64_t, const dunes_sampling *sampling) {
  std::printf("%llu", static_cast<unsigned long long>(sampling->seed));
  return nullptr;
}
const char *dunes_no_tokenizer(const dunes_model *) { return ""; }
int64_t dunes_prompt(const dunes_model *, const char *, int64_t, int64_t *, int64_t) { return 0; }
const char *dunes_token(const dunes_model *, int64_t, int64_t *) { return ""; }
int64_t dunes_next(dunes_text *) { return DUNES_END; }
void dunes_free(dunes_text *) {}
int dunes_sizes(const dunes_model *, int64_t *, int64_t *, int64_t *, int64_t *) { return 0; }
int dunes_run(dunes_model *, const float *, float *) { return 0; }
"""


def test_the_program_takes_seeds_modulo_2_to_the_64_as_python_does(tmp_path):
    (tmp_path / "stub.cpp").write_text(STUB)
    program = tmp_path / "program"
    files = [SOURCES / "main.cpp", tmp_path / "stub.cpp"]
    subprocess.run(["g++", "-std=c++17", "-I", SOURCES, *files, "-o", program], check=True)
    for seed in (0, 7, -1, 2**63, 2**64 - 1):
        done = subprocess.run([program, "folder", "x", "--seed", str(seed)], capture_output=True, text=True)
        assert done.stdout == str(seed % 2**64)
    done = subprocess.run([program, "folder", "x", "--seed", str(2**64)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--seed" in done.stderr


def test_the_sampling_rules_of_the_program_are_those_of_python():
    header, library = ((SOURCES / name).read_text() for name in ("dunes.h", "dunes.cpp"))
    table = re.findall(r'RULE\((\w+), (\w+), "--([\w-]+) [A-Z]", .*, "(.*)"\)', header)
    assert table == [
        ("int64_t" if isinstance(rule.neutral, int) else "double", name, option(name), rule.expected)
        for name, rule in RULES.items()
        if rule.process and not rule.raw
    ]
    assert re.findall(r"^Tensor (\w+)\(", library, re.M) == [name for _, name, *_ in table]


# The program: from here on everything is compiled.


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """A folder with the library and the program."""
    if shutil.which("cmake") is None or step_package.why_not_compiled():
        pytest.skip("needs cmake and a C++ compiler")
    folder = tmp_path_factory.mktemp("native-build")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", SOURCES, "-B", folder, prefix], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("native-home")


@pytest.fixture
def packages(home, monkeypatch):
    """Compiled steps are kept for all tests here."""
    monkeypatch.setenv("DUNES_HOME", str(home))


@pytest.fixture(scope="session")
def folder(home, tmp_path_factory):
    """An exported model of bytes with float16 matrices, of which other tests change copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUNES_HOME", str(home))
        export(loaded(), out := tmp_path_factory.mktemp("native") / "out", torch.float16)
    return out


def run(build, *arguments):
    return subprocess.run([build / "dunes", *map(str, arguments)], capture_output=True, timeout=60)


def ids_of(build, folder, ids, *options):
    done = run(build, folder, *options, "--ids", " ".join(map(str, ids)))
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def python_ids(model, prompt, limit, sample=None):
    generator = TextGenerator(model, step_source(model.model))
    return [piece.token.id for piece in generator.stream(model.tokenizer.prompt(prompt), limit, sample)]


@pytest.mark.slow
def test_its_text_is_that_of_python_token_for_token(build, folder, packages):
    model = loaded()
    options = [
        "--temperature",
        1.1,
        "--top-k",
        60,
        "--top-p",
        0.9,
        "--min-p",
        0.01,
        "--typical-p",
        0.8,
        "--seed",
        3,
    ]
    for prompt in PROMPTS:
        ids = model.tokenizer.prompt(prompt)
        for arguments, make in (
            ([], lambda: None),
            (["--temperature", 0.8, "--top-k", -1, "--seed", 7], lambda: sampler(0.8, seed=7)),
            (options, lambda: sampler(1.1, top_k=60, top_p=0.9, min_p=0.01, typical_p=0.8, seed=3)),
        ):
            expected = python_ids(model, prompt, 2 * CONTEXT, make())
            assert ids_of(build, folder, ids, "--max-tokens", 2 * CONTEXT, *arguments) == expected, prompt
    assert len(expected) > CONTEXT, "the text goes on beyond the context"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
def test_its_tokenizers_are_those_of_python(build, folder, tmp_path, kind):
    from safetensors.numpy import save_file

    tokenizer = Tokenizer.train(kind, [TEXT], vocab=300)
    out = shutil.copytree(folder, tmp_path / "out")
    save_file(dict(encoding_tables(tokenizer)), out / "tokenizer.safetensors")
    edit(out, "tokenizer.safetensors", vocabulary=tokenizer.vocab, empty=tokenizer.prompt(""))
    client = compile_c(build, tmp_path, ENCODER)
    for prompt in [*PROMPTS[1:-1], TEXT, " ".join(TEXT), "a" * 500, "日本größe"]:
        done = subprocess.run([client, out, prompt], capture_output=True, text=True, check=True)
        assert [int(i) for i in done.stdout.split()] == tokenizer.encode(prompt), prompt
    written = ids_of(build, out, tokenizer.prompt("def"), "--max-tokens", 30)
    printed = b"def" + b"".join(tokenizer.token_bytes[i] for i in written) + b"\n"
    assert run(build, out, "--max-tokens", 30, "def").stdout == printed


ENCODER = """
#include <stdio.h>
#include <string.h>
#include "dunes.h"
int main(int count, char **arguments) {
  int64_t ids[4096], n;
  dunes_model *model = count > 2 ? dunes_open(arguments[1]) : 0;
  if (!model) return 1;
  n = dunes_prompt(model, arguments[2], (int64_t)strlen(arguments[2]), ids, 4096);
  for (int64_t i = 0; i < n; i++) printf("%lld\\n", (long long)ids[i]);
  dunes_close(model);
  return n < 0;
}
"""


def compile_c(build, folder, text):
    """A C program that is linked to the library."""
    (folder / "client.c").write_text(text)
    link = ["-L", build, "-ldunes", f"-Wl,-rpath,{build}", "-Wl,--allow-shlib-undefined"]
    command = ["gcc", "-Wall", "-Werror", "-I", SOURCES, folder / "client.c", *link, "-o", folder / "client"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "client"


@pytest.mark.slow
def test_the_example_of_the_docs_is_a_program(build, folder, packages, tmp_path):
    page = Path(dunes.__file__).parents[1] / "docs" / "native.md"
    client = compile_c(build, tmp_path, re.search(r"```c\n(.*?)```", page.read_text(), re.S)[1])
    model = loaded()
    ids = python_ids(model, "def f(", 40, sampler(0.8, top_k=50, seed=7))
    done = subprocess.run([client, folder, "def f("], capture_output=True, check=True)
    assert done.stdout == b"".join(model.tokenizer.token_bytes[i] for i in ids)


def edit(out, *changed, **facts):
    """Change the card of a folder, and the checksums of changed files."""
    card = json.loads((out / "card.json").read_text()) | facts
    card["files"] |= {name: checksum(out / name) for name in changed}
    (out / "card.json").write_text(json.dumps(card))


@pytest.mark.slow
def test_a_folder_for_another_machine_is_refused_in_one_line(build, folder, tmp_path):
    machine = ({"machine": "aarch64"}, {"system": "Darwin"}, {"torch": "2.10.0"}, {"instructions": "sse2 avx1024"})
    for facts in (*machine, {"format": 2}, {"files": {}}):
        out = shutil.copytree(folder, tmp_path / next(iter(facts)))
        assert run(build, out, "--max-tokens", 1, "x").returncode == 0
        edit(out, **facts)
        fails(run(build, out, "x"))


def fails(done, part=""):
    assert (done.returncode, done.stdout) == (2, b""), done
    error = done.stderr.decode(errors="replace")
    assert part in error, error
    assert error.startswith("error: ")
    assert error.count("\n") == 1, error


@pytest.mark.slow
def test_damaged_files_are_refused_in_one_line(build, folder, tmp_path):
    names = [*json.loads((folder / "card.json").read_text())["files"]]
    used = [n for n in names if n.endswith((".so", ".safetensors"))]
    assert len(used) == 5, "one, few, text, weights, tokenizer"
    for name in used:
        data = (folder / name).read_bytes()
        middle = len(data) // 2
        changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        for damaged in (data[:-9], changed, b"", None):
            out = shutil.copytree(folder, tmp_path / name)
            (out / name).unlink()
            if damaged is not None:
                (out / name).write_bytes(damaged)
            fails(run(build, out, "x"), f"{name}: ")
            shutil.rmtree(out)


@pytest.mark.slow
def test_files_with_their_checksum_and_another_content_are_refused_in_one_line(build, folder, tmp_path):
    weights = (folder / "weights.safetensors").read_bytes()
    size = int.from_bytes(weights[:8], "little")
    edits = ((b"[0,", b"[8,", 1), (b'"F32"', b'"F99"', 1), (b"weight", b"height"), (b"{", b"[", 1))
    headers = [weights[8 : 8 + size].replace(*edit) for edit in edits]
    files = [weights[:8] + header + weights[8 + size :] for header in headers]
    for i, edited in enumerate([*files, (1 << 62).to_bytes(8, "little") + weights[8:], weights[:4]]):
        out = shutil.copytree(folder, tmp_path / str(i))
        (out / "weights.safetensors").write_bytes(edited)
        edit(out, "weights.safetensors")
        fails(run(build, out, "x"))
    for i, text in enumerate(["", "{", '{"format": 1', "[" * 99, '{"format": "x"}', "\x00"]):
        out = shutil.copytree(folder, tmp_path / f"card {i}")
        (out / "card.json").write_text(text)
        fails(run(build, out, "x"), "card.json: ")


@pytest.mark.slow
def test_its_refusals_of_wrong_use_are_one_line(build, folder, tmp_path):
    for arguments in (
        *(["--ids", "1 2 300"], ["--ids", "1 x"], ["--temperature", "-1", "x"], ["--image", "digit.pgm"]),
        ["--max-tokens", "1e3", "x"],
    ):
        fails(run(build, folder, *arguments))
    out = shutil.copytree(folder, tmp_path / "out")
    (out / "tokenizer.safetensors").unlink()
    edit(out, no_tokenizer="the model has no tokenizer", files=without(out, "tokenizer.safetensors"))
    fails(run(build, out, "x"), "the model has no tokenizer: use --ids")
    assert len(ids_of(build, out, [5, 6], "--max-tokens", 4)) == 4
    fails(run(build, tmp_path / "nothing", "x"), "nothing/card.json: cannot be read")


def without(out, name):
    files = json.loads((out / "card.json").read_text())["files"]
    return {key: value for key, value in files.items() if key != name}


@pytest.mark.long
def test_a_rolling_cache_and_int8_layers(build, packages, tmp_path):
    """Windows of all layers, which a text outgrows; prompts are then read by other code than in Python."""
    from dunes import augment

    model = model_of("mistral", window=16, vocab=265)
    augment.quantize(model, kind="int8")
    export(loaded(model), tmp_path / "out", torch.float32)
    for prompt in PROMPTS[:3]:
        expected = python_ids(loaded(model), prompt, 100)
        ids = loaded(model).tokenizer.prompt(prompt)
        assert ids_of(build, tmp_path / "out", ids, "--max-tokens", 100) == expected


@pytest.mark.slow
def test_a_digit_is_classified_as_by_the_network(build, tmp_path):
    torch.manual_seed(0)
    network = Net().train()
    export_network(network, torch.rand(1, 28, 28), tmp_path / "out")
    assert network.training
    image = torch.randint(256, (28, 28), dtype=torch.uint8)
    (tmp_path / "digit.pgm").write_bytes(b"P5\n# grey\n28 28\n255\n" + bytes(image.flatten().tolist()))
    label, *outputs = map(float, run(build, tmp_path / "out", "--image", tmp_path / "digit.pgm").stdout.split())
    expected = network.eval()(image[None].float())[0]
    assert label == expected.argmax()
    torch.testing.assert_close(torch.tensor(outputs), expected.detach(), atol=1e-5, rtol=1e-5)
    (tmp_path / "wide.pgm").write_bytes(b"P5 29 28 255\n" + bytes(29 * 28))
    fails(run(build, tmp_path / "out", "--image", tmp_path / "wide.pgm"), "29 x 28 pixels; expected 28 x 28")
    (tmp_path / "short.pgm").write_bytes(b"P5 28 28 255\n" + bytes(28 * 27))
    fails(run(build, tmp_path / "out", "--image", tmp_path / "short.pgm"), "truncated")
    fails(run(build, tmp_path / "out", "x"), "give it --image")


@pytest.mark.slow
def test_weights_that_are_written_wrong_are_found_before_the_folder_is_in_place(monkeypatch, tmp_path):
    write = export_native.write_file
    halved = lambda path, weights: write(path, in_memory({n: t.read() / 2 for n, t in weights.items()}))
    monkeypatch.setattr(export_native, "write_file", halved)
    refuses("compiled, its numbers differ by", export_network, Net(), torch.rand(1, 28, 28), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["digits", "lstm", "shared"])
@pytest.mark.parametrize("to", ["cpp", "onnx"])
def test_the_command_exports_networks(request, kind, to, command, tmp_path):
    if kind == "digits":
        network = keep(tmp_path / "net")
    else:
        build = Rows if kind == "lstm" else Shared
        checkpoint.save(build(), tmp_path / "net", architecture=checkpoint.Architecture.of_function(build))
        network = checkpoint.load_network(tmp_path / "net", build=build)
    out, image = tmp_path / ("out" if to == "cpp" else "out.onnx"), torch.randint(256, (1, 28, 28)).float()
    arguments = [tmp_path / "net", out, "--to", to, "--example", 1, 28, 28, "--trust-code"]
    if to == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
    assert not command("export", *arguments)[0]
    expected = network(image)[0].detach()
    if to == "onnx":
        (outputs,) = onnxruntime.InferenceSession(out).run(None, {"input": image.numpy()})
        outputs = outputs[0].tolist()
    else:
        pixels = bytes(image.byte().flatten().tolist())
        (tmp_path / "digit.pgm").write_bytes(b"P5 28 28 255\n" + pixels)
        done = run(request.getfixturevalue("build"), out, "--image", tmp_path / "digit.pgm")
        label, *outputs = map(float, done.stdout.split())
        assert label == expected.argmax()
    torch.testing.assert_close(torch.tensor(outputs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "dunes"])
def test_onnx_computes_the_same(tmp_path, family):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = model_of(family)
    print(export_onnx(loaded(model), tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for shape in ((1, 1), (3, 20), (1, CONTEXT)):
        ids = torch.randint(300, shape)
        (logits,) = session.run(["logits"], {"ids": ids.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), model(ids), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_onnx_of_adapters_and_quantized_layers_and_of_an_example_with_gradients(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    for change in ("int4", "lora"):
        model, ids = changed(change), torch.randint(300, (2, 9))
        with torch.no_grad():
            expected = model(ids)
        export_onnx(loaded(model), tmp_path / f"{change}.onnx")
        (logits,) = onnxruntime.InferenceSession(tmp_path / f"{change}.onnx").run(None, {"ids": ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-3, rtol=1e-4)
    write_onnx(nn.Linear(3, 2), torch.randn(2, 3, requires_grad=True), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").is_file()


@pytest.mark.slow
def test_onnx_that_computes_something_else_is_not_written(monkeypatch, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")

    class Off(onnxruntime.InferenceSession):
        def run(self, *arguments):
            return [output * 1.001 for output in super().run(*arguments)]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Off)
    refuses("--to onnx: onnxruntime computes another result", export_onnx, loaded(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_onnx_refuses_by_name(monkeypatch, tmp_path):
    from dunes.checkpoint.formats import onnx as module

    monkeypatch.setattr(module, "extra", lambda name, of: None)
    refuses("mixture", export, loaded(model_of("mixtral")), tmp_path / "model.onnx")
    for model in (model_of("mistral", window=16), model_of("gemma2", windows=(2, None))):
        refuses("window", export_onnx, loaded(model), tmp_path / "model.onnx")
    refuses(str(tmp_path), export_onnx, loaded(), tmp_path / "model")
    monkeypatch.setattr(module, "LARGEST", 1000)
    refuses("1 kB", export_onnx, loaded(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    (tmp_path / "model.onnx").symlink_to(tmp_path / "elsewhere")
    refuses("expected a new file", export_onnx, loaded(), tmp_path / "model.onnx")
