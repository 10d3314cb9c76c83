"""The command line: what a user sees, types wrong, and finds in the folder afterwards."""

import ast
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import loka_sim
from loka_sim import modelspec
from loka_sim.cli import main
from loka_sim.cli.output import figure, shorten
from loka_sim.dispatch import table
from loka_sim.schemas import problem

LONG = "a" * 5000
ROOT = Path(__file__).parents[2]


def run(capsys, *argv):
    """Exit code, stdout and stderr of a command line."""
    code = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def spec_file(made_up_model, tmp_path):
    path = tmp_path / "model.yaml"
    modelspec.save(made_up_model, path)
    return path


def subprocess_run(*argv, **options):
    return subprocess.run([sys.executable, "-m", "loka_sim", *argv], capture_output=True, text=True, timeout=120, **options)


# What it prints


def test_whatif_prints_the_screen(capsys, made_up, spec_file, monkeypatch):
    monkeypatch.chdir(spec_file.parent)
    code, out, err = run(capsys, "whatif", spec_file.name)
    assert code == 0 and err == ""
    assert "FP8 pays: dense step" in out and "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_command_line_and_api_agree(capsys, made_up, spec_file):
    code, out, _ = run(
        capsys,
        "whatif",
        spec_file,
        "--batch",
        4096,
        "--gpus",
        3,
        "--mods",
        "no_bias",
        "--max-mere",
        0.1,
        "--min-speedup",
        1.2,
        "--json",
    )
    answer = loka_sim.whatif(str(spec_file), batch=4096, gpus=3, mods=["no_bias"], max_mere=0.1, min_speedup=1.2)
    document = json.loads(out)
    assert code == (0 if answer.pays else 1) and document == answer.to_dict()
    assert problem(document, "whatif") is None


def test_the_command_in_the_document_repeats_it(capsys, made_up, spec_file):
    _, out, _ = run(capsys, "whatif", spec_file, "--batch", 512, "--mods", "all", "--gpus", 2, "--json")
    words = json.loads(out)["command"].split()
    assert words[:2] == ["loka-sim", "whatif"]
    _, again, _ = run(capsys, *words[1:], "--json")
    assert json.loads(again) == json.loads(out)


def test_a_negative_verdict_is_exit_code_1(capsys, made_up, spec_file):
    code, out, err = run(capsys, "whatif", spec_file, "--min-speedup", 50)
    assert code == 1 and err == ""
    assert "FP8 does not pay" in out


@pytest.mark.parametrize("verb", ["models", "kernels"])
def test_lists(capsys, verb):
    code, out, err = run(capsys, verb)
    assert code == 0 and err == "" and max(map(len, out.splitlines())) <= 100
    code, out, err = run(capsys, verb, "--json")
    document = json.loads(out)
    assert code == 0 and document["schema_version"] == 1 and document[verb]
    names = {entry["name"] for entry in document[verb]}
    assert ("wukong-production" if verb == "models" else "torch/fp8_rowwise_fast") in names


def test_capture_writes_a_spec_that_reads_back(capsys, spec_file, made_up_model, tmp_path):
    target = tmp_path / "copy.json"
    code, out, _ = run(capsys, "capture", spec_file, "--out", target)
    assert code == 0 and "6 sites" in out and "fft: not a GEMM" in out
    assert modelspec.load(target) == made_up_model
    code, out, _ = run(capsys, "capture", spec_file, "--json")
    assert json.loads(out) == json.loads(target.read_text())


def test_version_and_help(capsys):
    assert run(capsys, "--version")[:2] == (0, f"loka-sim {loka_sim.__version__}\n")
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for verb in ("whatif", "compare", "export", "capture", "models", "kernels"):
        assert f"    {verb} " in out
        code, text, _ = run(capsys, verb, "--help")
        assert code == 0 and "--json" in text


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from loka_sim.cli import main; code = main(['whatif', '--help']); "
        "heavy = {'torch', 'numpy', 'pandas', 'xgboost', 'sklearn', 'jsonschema', 'yaml'} & set(sys.modules); "
        "sys.exit(code or bool(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 0


def test_whatif_of_a_zoo_model_needs_no_torch():
    program = (
        "import sys; from loka_sim.cli import main; code = main(['whatif', 'wukong-small', '--json']); "
        "print(sorted({'torch', 'torchao'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n"
    document = json.loads(done.stdout)
    assert problem(document, "whatif") is None
    assert document["statistics"]["name"] == "wukong-small" and document["statistics"]["sites"]["assumed"] == 0
    assert done.returncode == (0 if document["verdict"]["pays"] else 1)


def test_no_colour_without_a_terminal_and_with_no_color(monkeypatch):
    from loka_sim.cli.output import Style

    assert not Style.of_stdout().enabled
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Style.of_stdout().enabled
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Style.of_stdout().enabled


def test_a_terminal_that_knows_ascii_alone():
    done = subprocess_run("whatif", "dlrm-small", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode in (0, 1) and done.stderr == "" and "not worth it" in done.stdout


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "loka_sim", "kernels"], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert done.returncode == 141 and done.stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "loka_sim", "models"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 2 and done.stderr.startswith("loka-sim: cannot write the output") and done.stderr.count("\n") == 1


def test_documents_that_are_no_documents(capsys, tmp_path):
    """Bottomless, a folder, below a file: exit code 3 for what is read, 2 for where to write; one line each."""
    deep, folder, file = tmp_path / "deep", tmp_path / "folder", tmp_path / "file"
    deep.mkdir()
    (folder / "dispatch_table.json").mkdir(parents=True)
    file.write_text("")
    for name in ("dispatch_table.json", "manifest.json"):
        (deep / name).write_text("[" * 100_000)
    for argv, code, said in (
        (("export", deep), 3, "nested too deeply"),
        (("export", folder), 3, "Is a directory; write it again with"),
        (("whatif", "dlrm-small", "--out", deep), 2, "holds other files"),
        (("whatif", "dlrm-small", "--out", file / "run"), 2, "a file stands where a folder"),
        (("capture", "dlrm-small", "--out", file / "spec.yaml"), 2, "a file stands where a folder"),
        (("capture", "dlrm-small", "--out", folder), 2, "it is a folder; name a file"),
    ):
        got, out, err = run(capsys, *argv)
        assert (got, out, err.count("\n")) == (code, "", 1) and said in err


def test_a_closed_output_is_no_bug():
    done = subprocess.run(
        ["sh", "-c", '"$0" -m loka_sim models >&-', sys.executable], stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("a.b.c", 5, "a.b.c"), ("layers.3.interaction.dhen.1.out", 20, "layers.….dhen.1.out"), ("abcdefghij", 7, "ab…ghij")],
)
def test_shorten(text, width, expected):
    assert shorten(text, width) == expected and len(expected) <= width


def test_figures():
    assert [figure(value) for value in (3.14159, 99.94, 100.4, 12345.6)] == ["3.1", "99.9", "100", "12,346"]


# The run folder


def test_out_holds_table_report_document_and_manifest(capsys, made_up, spec_file, tmp_path):
    folder = tmp_path / "runs" / "first"
    code, out, err = run(capsys, "whatif", spec_file, "--out", folder)
    assert code == 0 and err == "" and f"loka-sim export {folder}/dispatch_table.json --to torchao" in out
    assert sorted(path.name for path in folder.iterdir()) == [
        "dispatch_table.json",
        "manifest.json",
        "report.html",
        "whatif.json",
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["first"]
    document = json.loads((folder / "whatif.json").read_text())
    assert document == loka_sim.whatif(str(spec_file)).to_dict()
    assert table.load(folder) == table.from_whatif(document)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["command"] == ["loka-sim", "whatif", str(spec_file), "--out", str(folder)]
    assert manifest["inputs"]["model_fingerprint"] == document["model"]["fingerprint"]
    for name, entry in manifest["files"].items():
        payload = (folder / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(payload).hexdigest(), "bytes": len(payload)}
    assert folder.stat().st_mode & 0o777 == 0o755


def test_out_replaces_a_run_of_ours(capsys, made_up, spec_file, tmp_path):
    folder = tmp_path / "run"
    for batch in (2048, 4096):
        assert run(capsys, "whatif", spec_file, "--batch", batch, "--out", folder)[0] == 0
        assert json.loads((folder / "whatif.json").read_text())["settings"]["batch"] == batch
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.yaml", "run"]


def test_out_takes_an_empty_folder(capsys, made_up, spec_file, tmp_path):
    (tmp_path / "empty").mkdir()
    assert run(capsys, "whatif", spec_file, "--out", tmp_path / "empty")[0] == 0


@pytest.mark.parametrize("out", ["", ".", ".."])
def test_out_is_not_where_one_stands(capsys, made_up, spec_file, tmp_path, monkeypatch, out):
    """A run's folder is exchanged whole: the shell that stands in it would be left in one that is gone."""
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    code, stdout, err = run(capsys, "whatif", spec_file, "--out", out)
    assert code == 2 and stdout == "" and "is where you are" in err and err.count("\n") == 1
    assert Path.cwd() == tmp_path / "here" / "below" and not any(Path.cwd().iterdir())


@pytest.mark.parametrize(
    "argv",
    [
        ("whatif", LONG), ("whatif", f"{LONG}.json"), ("whatif", "dlrm-small", "--statistics", LONG),
        ("whatif", "dlrm-small", "--calibration", LONG), ("whatif", "dlrm-small", "--cluster", LONG), ("export", LONG),
        ("compare", LONG, LONG), ("step", "dlrm-small", "--table", LONG), ("capture", "dlrm-small", "--out", f"{LONG}.json"),
    ],
)  # fmt: skip
def test_names_that_are_too_long(capsys, argv):
    code, out, err = run(capsys, *argv)
    assert code in (2, 3) and out == "" and err.count("\n") == 1


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A folder that nobody may look into: for root, who may all, by what its files answer."""
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0)
    stat = os.stat

    def refuse(path, *arguments, **options):
        if str(path).startswith(f"{folder}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse)
    yield folder
    folder.chmod(0o755)


@pytest.mark.parametrize(
    "argv",
    [
        ("whatif", "dlrm-small", "--statistics", "DIR"), ("whatif", "dlrm-small", "--calibration", "DIR"),
        ("whatif", "dlrm-small", "--cluster", "DIR"), ("export", "DIR"), ("compare", "DIR", "DIR"),
        ("step", "dlrm-small", "--table", "DIR"),
    ],
)  # fmt: skip
def test_what_may_not_be_read(capsys, closed, argv):
    code, out, err = run(capsys, *(str(closed / "inner") if word == "DIR" else word for word in argv))
    assert code == 3 and out == "" and err.count("\n") == 1
    assert f"cannot read {closed / 'inner'}: Permission denied; give a path that you may read" in err


def test_sizes_beyond_reading(capsys, spec_file, tmp_path):
    document = yaml.safe_load(spec_file.read_text())
    document["sites"][0]["passes"]["output"]["n"] = 10**300
    (tmp_path / "wide.json").write_text(json.dumps(document))
    code, out, err = run(capsys, "whatif", tmp_path / "wide.json")
    assert code == 2 and "has a dimension of 10^300; write a smaller size" in err and len(err) < 200


def test_out_leaves_other_folders_alone(capsys, made_up, spec_file, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep me")
    code, out, err = run(capsys, "whatif", spec_file, "--out", folder)
    assert code == 2 and out == "" and "holds other files" in err
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    # A run of ours in which somebody keeps a file is not ours to replace either.
    run(capsys, "whatif", spec_file, "--out", tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("keep me")
    assert run(capsys, "whatif", spec_file, "--out", tmp_path / "run")[0] == 2
    assert (tmp_path / "run" / "notes.txt").read_text() == "keep me"


def test_a_failure_while_writing_leaves_the_older_run(capsys, made_up, spec_file, tmp_path, monkeypatch):
    import loka_sim.run_folder as module

    folder = tmp_path / "run"
    assert run(capsys, "whatif", spec_file, "--out", folder)[0] == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(self, payload):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Path, "write_bytes", full)
    code, out, err = run(capsys, "whatif", spec_file, "--batch", 512, "--out", folder)
    assert code == 2 and out == "" and "No space left on device" in err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.yaml", "run"]


def test_out_follows_a_link_to_a_folder(capsys, made_up, spec_file, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for _ in range(2):
        assert run(capsys, "whatif", spec_file, "--out", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "whatif.json").is_file()


def test_save_run_is_the_same_folder(capsys, made_up, spec_file, tmp_path):
    run(capsys, "whatif", spec_file, "--out", tmp_path / "a")
    loka_sim.save_run(loka_sim.whatif(str(spec_file)), tmp_path / "b")
    for name in ("whatif.json", "dispatch_table.json", "report.html"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


# What users get wrong


def broken(path: Path, how: str) -> Path:
    """A damaged copy of a spec file."""
    document = modelspec.load(path).to_dict()
    target = path.with_name(f"{how}.json")
    if how == "unknown_key":
        document["sitess"] = []
    if how == "negative":
        document["sites"][0]["passes"]["output"]["n"] = -512
    text = json.dumps(document)
    target.write_text(text[: len(text) // 2] if how == "truncated" else text)
    return target


@pytest.mark.parametrize(
    ("how", "words"), [("unknown_key", "sitess"), ("negative", "-512"), ("truncated", "truncated")]
)  # fmt: skip
def test_broken_spec_files(capsys, spec_file, how, words):
    path = broken(spec_file, how)
    code, out, err = run(capsys, "whatif", path)
    assert code in (2, 3) and out == ""
    assert err.count("\n") == 1 and words in err and path.name in err


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["whatif", "wukongg"], 2, "did you mean wukong"),
        (["whatif", "no_such_package.model:make"], 2, "no_such_package"),
        (["whatif", "json:no_such_function"], 2, "no_such_function"),
        (["whatif", "wukong", "--batch", "many"], 2, "--batch"),
        (["whatif", "wukong", "--batch", "-1"], 2, "--batch -1 is no positive whole number"),
        (["whatif", "wukong", "--hardware", "tpu"], 2, "tpu"),
        (["whatif", "wukong", "--mods", "faster"], 2, "unknown mod 'faster'"),
        (["whatif", "wukong", "--statistics", "nowhere"], 2, "nowhere"),
        (["whatif", "dlrm-small", "--statistics", "wukong-small"], 2, "do not fit model"),
        (["whatif"], 2, "MODEL"),
        (["whatif", "wukong", "--nonsense"], 2, "--nonsense"),
        (["what"], 2, "invalid choice: 'what'"),
        ([], 2, "VERB"),
        (["compare", "nowhere", "nothing"], 3, "nowhere"),
        (["export", "nowhere.json"], 3, "nowhere.json"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, argv, code, words):
    monkeypatch.chdir(tmp_path)
    found, out, err = run(capsys, *argv)
    assert (found, out) == (code, "")
    assert err.startswith("loka-sim: ") and err.count("\n") == 1 and words in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["manifest.json", "statistics.safetensors"])
def test_truncated_statistics_are_one_line(capsys, made_up, spec_file, tmp_path, name):
    from loka_sim.statistics import folder_of_shipped

    folder = tmp_path / "statistics"
    shutil.copytree(folder_of_shipped() / "dlrm-small", folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:1000])
    code, out, err = run(capsys, "whatif", "dlrm-small", "--statistics", folder)
    assert (code, out) == (3, "") and err.count("\n") == 1 and str(folder) in err


def test_a_model_of_the_users_own(capsys, made_up, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_model.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))\n"
        "    return model, (torch.empty(2048, 4096),)\n"
    )
    code, out, err = run(capsys, "whatif", "their_model:make", "--out", "run")
    assert code == 0 and err == ""
    assert "errors assume independent standard normal values" in out
    decided = {site["name"]: site["passes"] for site in json.loads((tmp_path / "run" / "whatif.json").read_text())["sites"]}
    assert decided["0"]["output"]["status"] == "fast" and decided["2"]["output"]["status"] == "illegal"
    assert "grad_input" not in decided["0"]


def test_an_import_that_fails_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_model_that_fails.py").write_text("raise RuntimeError('no license')\n")
    code, out, err = run(capsys, "whatif", "their_model_that_fails:make")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "no license" in err


def test_out_that_cannot_be_written_is_refused_before_the_work(capsys, made_up, spec_file, tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "run"):
        code, out, err = run(capsys, "whatif", spec_file, "--out", target)
        assert (code, out) == (2, "") and err.count("\n") == 1 and str(target) in err
    assert made_up.calls == 0


def test_export_that_cannot_be_written(capsys, made_up, spec_file, tmp_path):
    run(capsys, "whatif", spec_file, "--out", tmp_path / "run")
    (tmp_path / "file").write_text("")
    code, out, err = run(capsys, "export", tmp_path / "run", "--to", "torchao", "--out", tmp_path / "file" / "fp8.py")
    assert (code, out) == (2, "") and err.count("\n") == 1
    code, out, err = run(capsys, "export", tmp_path / "run", "--to", "megatron")
    assert (code, out) == (2, "") and "megatron" in err and err.count("\n") == 1


def test_a_model_without_gemms_is_one_line_that_names_what_is_not_accounted_for(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_layers.py").write_text(
        "import torch\n"
        "def norm():\n    return torch.nn.LayerNorm(64), (torch.empty(128, 64),)\n"
        "def bilinear():\n    return torch.nn.Bilinear(16, 32, 64), (torch.empty(128, 16), torch.empty(128, 32))\n"
    )
    code, out, err = run(capsys, "whatif", "their_layers:norm")
    assert (code, out, err) == (2, "", "loka-sim: LayerNorm has no GEMM at all; nothing can be decided\n")
    code, out, err = run(capsys, "step", "their_layers:bilinear")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "not accounted for ((root): _trilinear" in err


def test_export_writes_a_module(capsys, made_up, spec_file, tmp_path):
    run(capsys, "whatif", spec_file, "--out", tmp_path / "run")
    code, out, _ = run(capsys, "export", tmp_path / "run", "--out", tmp_path / "fp8.py")
    assert code == 0 and out == f"wrote {tmp_path / 'fp8.py'}: 2 modules in FP8\n"
    source = (tmp_path / "fp8.py").read_text()
    compile(source, "fp8.py", "exec")
    code, out, _ = run(capsys, "export", tmp_path / "run" / "dispatch_table.json")
    assert code == 0 and out == source


def test_a_bug_says_so(capsys, monkeypatch):
    import loka_sim.whatif  # noqa: F401

    def explode(*_, **__):
        raise ZeroDivisionError("the 7th site")

    monkeypatch.setattr(sys.modules["loka_sim.whatif"], "whatif", explode)
    code, out, err = run(capsys, "whatif", "wukong")
    assert (code, out) == (101, "")
    assert "Traceback" in err and "the 7th site" in err and err.endswith("please report the lines above with the command\n")


def test_an_interrupt_is_quiet(capsys, monkeypatch):
    import loka_sim.whatif  # noqa: F401

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["loka_sim.whatif"], "whatif", interrupt)
    assert run(capsys, "whatif", "wukong") == (130, "", "loka-sim: interrupted\n")


@pytest.mark.parametrize("module", ["argparse", "loka_sim.cli.whatif", "numpy"])
def test_an_interrupt_while_modules_are_imported_is_quiet(module):
    """As if the key were pressed when that module is first looked for."""
    program = (
        "import runpy, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "sys.argv = ['loka-sim', 'whatif', 'wukong-small', '--json']\n"
        "runpy.run_module('loka_sim', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "loka-sim: interrupted\n")


def test_nothing_that_takes_long_is_imported_before_an_interrupt_is_quiet():
    """What a command and an interrupt have to wait for: next to nothing."""
    program = "import sys; before = set(sys.modules); import loka_sim.__main__; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    more = {name.partition(".")[0] for name in ast.literal_eval(done.stdout)} - {"loka_sim"}
    assert more <= {"__future__", "importlib", "types", "warnings"}
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["loka-sim"]
    assert script == "loka_sim.__main__:main"


def damaged_specs():
    from loka_sim.resolve import zoo_names

    text = zoo_names()["dlrm-small"].read_text()
    document = json.loads(text)
    yield "truncated", text[: len(text) // 2]
    yield "empty", ""
    changes = {"sites": "none"}, {"sites": [{}]}, {"batch": None}, {"fused": [1, 2]}, {"tables": [{"rows": "many"}]}
    for number, change in enumerate(changes):
        yield f"field {number}", json.dumps({**document, **change})
    yield "no object", "[1, 2]"


@pytest.mark.parametrize("damage", [name for name, _ in damaged_specs()])
def test_a_damaged_specification_of_the_package_is_one_line(capsys, tmp_path, monkeypatch, damage):
    import loka_sim.resolve

    path = tmp_path / "dlrm-small.json"
    path.write_text(dict(damaged_specs())[damage])
    monkeypatch.setattr(loka_sim.resolve, "zoo_names", lambda: {"dlrm-small": path})
    code, out, err = run(capsys, "whatif", "dlrm-small")
    assert (code, out) == (3, "") and err.count("\n") == 1
    assert "the package is damaged, install it again" in err and str(path) in err


def test_python_dash_m():
    done = subprocess_run("whatif", "wukongg")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
