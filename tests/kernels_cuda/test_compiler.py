"""CUDA C++ becomes cubins without a GPU, a driver or nvcc: for every architecture, once, whoever asks."""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from meshfn import kernels_cuda
from meshfn.kernels_cuda import ARCHITECTURES, CompileError, compile_kernel, compiler

# As the sizes of published models ask for them: aligned, half precision and fp32.
INSTANCES = (
    ("gemv.cu", "gemv<bf16, 8, 1, 2, RMS>"),
    ("gemv.cu", "gemv<bf16, 8, 1, 2, NO_NORM>"),
    ("gemv.cu", "gemv<fp16, 8, 4, 4, RMS_ZERO_CENTERED_IN_FP32>"),
    ("gemv.cu", "gemv<float, 4, 8, 4, NO_NORM>"),
    ("add_rms_norm.cu", "add_rms_norm<bf16, 8, 2, 256>"),
    ("add_rms_norm.cu", "add_rms_norm<float, 4, 4, 256>"),
    ("decode_attention.cu", "decode_attention<bf16, 8, 4, 8, 1, 8, 1>"),
    ("decode_attention.cu", "decode_attention<bf16, 8, 8, 32, 1, 32, 1>"),
    ("decode_attention.cu", "decode_attention<float, 4, 8, 32, 2, 32, 2>"),
    ("qkv_rope_cache.cu", "qkv_rope_cache<bf16, 2, NO_NORM>"),
    ("qkv_rope_cache.cu", "qkv_rope_cache<float, 8, RMS_ZERO_CENTERED_IN_FP32>"),
    ("latent_heads.cu", "queries_in<bf16, 8, 1>"),
    ("latent_heads.cu", "values_out<bf16, 8, 8>"),
    ("mla_decode.cu", "mla_decode<bf16, 8, 2, 5>"),
    ("mla_decode.cu", "mla_decode<fp16, 8, 1, 5>"),
    ("sample_advance.cu", "sample_advance<bf16, 8>"),
    ("sample_options.cu", "sample_options<bf16, 512>"),
    ("one_shot_all_reduce.cu", "one_shot_all_reduce<bf16, 512, 32, 32768>"),
    ("one_shot_all_reduce.cu", "one_shot_all_reduce<float, 512, 32, 32768>"),
)


def test_every_architecture_and_what_a_kernel_takes():
    """registers of a thread, static shared memory of a block; none spills."""
    lines = []
    for source, name in INSTANCES:
        made = [compile_kernel(source, name, arch) for arch in ARCHITECTURES]
        assert [m.spilled_bytes for m in made] == [0] * len(made), name
        assert all(m.code.startswith(b"\x7fELF") for m in made)
        lines.append(f"{name:50} {' '.join(f'{m.registers:4}' for m in made)}  {made[0].shared_bytes:4} B")
    assert_expected_inline(
        "\n".join([f"{'':50} {' '.join(a[3:].rjust(4) for a in ARCHITECTURES)}", *lines]),
        """\
                                                     80   89   90  100  120
gemv<bf16, 8, 1, 2, RMS>                             85   86   90  113  114    57 B
gemv<bf16, 8, 1, 2, NO_NORM>                         64   64   64   80   80    41 B
gemv<fp16, 8, 4, 4, RMS_ZERO_CENTERED_IN_FP32>      110  110  112  128  126   385 B
gemv<float, 4, 8, 4, NO_NORM>                       119  119  119  154  154   641 B
add_rms_norm<bf16, 8, 2, 256>                        64   64   95   80   80    32 B
add_rms_norm<float, 4, 4, 256>                       72   72   72   80   80    32 B
decode_attention<bf16, 8, 4, 8, 1, 8, 1>            156  157  158  155  155  4272 B
decode_attention<bf16, 8, 8, 32, 1, 32, 1>          252  249  254  249  253  8528 B
decode_attention<float, 4, 8, 32, 2, 32, 2>         229  231  235  235  234  8528 B
qkv_rope_cache<bf16, 2, NO_NORM>                     48   48   44   39   44  1024 B
qkv_rope_cache<float, 8, RMS_ZERO_CENTERED_IN_FP32>   47   48   48   45   45  4096 B
queries_in<bf16, 8, 1>                               63   64   67   72   74  4096 B
values_out<bf16, 8, 8>                              124  124  122  116  117     0 B
mla_decode<bf16, 8, 2, 5>                           249  251  249  247  245     0 B
mla_decode<fp16, 8, 1, 5>                           174  176  175  201  200     0 B
sample_advance<bf16, 8>                              48   48   47   48   45    97 B
sample_options<bf16, 512>                           102  102   98  100  100  17008 B
one_shot_all_reduce<bf16, 512, 32, 32768>            39   39   40   42   48     0 B
one_shot_all_reduce<float, 512, 32, 32768>           38   40   38   44   48     0 B""",
    )


@pytest.mark.verify
@pytest.mark.parametrize("dtype", ["float", "bf16", "fp16"])
def test_every_instance(dtype):
    whole = 4 if dtype == "float" else 8
    for vector in (1, 2, 4, 8):
        if vector > whole:
            continue
        for room, rows in ((1, 2), (2, 2), (4, 4), (8, 4)):
            for norm in ("NO_NORM", "RMS", "RMS_ZERO_CENTERED", "RMS_IN_FP32", "RMS_ZERO_CENTERED_IN_FP32"):
                made = compile_kernel("gemv.cu", f"gemv<{dtype}, {vector}, {room}, {rows}, {norm}>", "sm_90")
                assert made.spilled_bytes == 0
        for kept, threads in ((1, 128), (1, 256), (2, 256), (4, 256)):
            name = f"add_rms_norm<{dtype}, {vector}, {kept}, {threads}>"
            assert all(compile_kernel("add_rms_norm.cu", name, arch).spilled_bytes == 0 for arch in ARCHITECTURES)
        for room in (1, 2, 4, 8):
            for kernel in ("queries_in", "values_out"):
                name = f"{kernel}<{dtype}, {vector}, {room}>"
                assert all(compile_kernel("latent_heads.cu", name, a).spilled_bytes == 0 for a in ARCHITECTURES)
        for tiles, steps in itertools.product((1,) if dtype == "float" else (1, 2), range(1, 6)):
            name = f"mla_decode<{dtype}, {vector}, {tiles}, {steps}>"
            assert all(compile_kernel("mla_decode.cu", name, a).spilled_bytes == 0 for a in ARCHITECTURES)
        for queries, width in itertools.product((1, 2, 4, 8), (64, 80, 256)):
            vectors = width // vector
            lanes = min(32, 1 << (vectors - 1).bit_length())
            by = f"{lanes}, {-(-vectors // lanes)}"
            name = f"decode_attention<{dtype}, {vector}, {queries}, {by}, {by}>"
            assert all(compile_kernel("decode_attention.cu", name, a).spilled_bytes == 0 for a in ("sm_80", "sm_90"))
        assert compile_kernel("sample_advance.cu", f"sample_advance<{dtype}, {vector}>", "sm_90").spilled_bytes == 0
    one_shot = f"one_shot_all_reduce<{dtype}, 512, 32, 32768>"
    made = [compile_kernel("one_shot_all_reduce.cu", one_shot, arch) for arch in ARCHITECTURES]
    assert [m.spilled_bytes for m in made] == [0] * len(made)
    for threads in (128, 512):
        made = [compile_kernel("sample_options.cu", f"sample_options<{dtype}, {threads}>", a) for a in ARCHITECTURES]
        assert [m.spilled_bytes for m in made] == [0] * len(made)


NAME = "add_rms_norm<float, 1, 1, 128>"


@pytest.fixture
def built(monkeypatch):
    """How often something was compiled."""
    seen, build = [], compiler._build
    monkeypatch.setattr(compiler, "_build", lambda *args: (seen.append(args), build(*args))[1])
    return seen


def test_a_cubin_is_compiled_once(tmp_path, built):
    first = compile_kernel("add_rms_norm.cu", NAME, "sm_90", cache=tmp_path)
    assert compile_kernel("add_rms_norm.cu", NAME, "sm_90", cache=tmp_path) == first
    assert len(built) == 1
    assert compile_kernel("add_rms_norm.cu", NAME, "sm_80", cache=tmp_path).code != first.code
    assert len(built) == 2
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b[:-1] + b"?",
        lambda b: b"{}\n",
        lambda b: b"[]\n" + b,
        lambda b: b.replace(b'"symbol": "_Z', b'"symbol": "_Y', 1),
    ],
)
def test_a_damaged_entry_is_built_again(tmp_path, built, damage):
    first = compile_kernel("add_rms_norm.cu", NAME, "sm_90", cache=tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert compile_kernel("add_rms_norm.cu", NAME, "sm_90", cache=tmp_path) == first
    assert len(built) == 2
    assert path.read_bytes() == whole


def test_another_text_or_header_is_another_entry(tmp_path, monkeypatch):
    for name in ("add_rms_norm.cu", "common.cuh"):
        (tmp_path / name).write_text((compiler.HERE / name).read_text())
    monkeypatch.setattr(compiler, "HERE", tmp_path)
    keys = []
    for change in (None, "add_rms_norm.cu", "common.cuh"):
        if change:
            (tmp_path / change).write_text((tmp_path / change).read_text() + "\n// changed\n")
        compiler._text.cache_clear()
        keys.append(compiler._key("add_rms_norm.cu", NAME, "sm_90"))
    compiler._text.cache_clear()
    assert len(set(keys)) == 3


def test_two_processes_at_once_and_one_that_dies(tmp_path):
    """Both have the cubin, neither reads half of one; what a dead one left behind is nobody's entry."""
    (tmp_path / "dead.part").write_bytes(b"half")
    code = (
        "import sys, hashlib; from pathlib import Path; from meshfn.kernels_cuda import compile_kernel\n"
        f"c = compile_kernel('add_rms_norm.cu', {NAME!r}, 'sm_90', cache=Path(sys.argv[1]))\n"
        "print(hashlib.sha256(c.code).hexdigest())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) for _ in "ab"
    ]
    assert len({process.communicate(timeout=120)[0] for process in running}) == 1
    assert [process.returncode for process in running] == [0, 0]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".cubin", ".part"]


def test_an_error_shows_the_kernels_own_line(tmp_path, monkeypatch):
    text = (compiler.HERE / "add_rms_norm.cu").read_text().replace("rsqrtf(", "rsqrtff(")
    (tmp_path / "wrong.cu").write_text(text)
    (tmp_path / "common.cuh").write_text((compiler.HERE / "common.cuh").read_text())
    monkeypatch.setattr(compiler, "HERE", tmp_path)
    compiler._text.cache_clear()
    with pytest.raises(CompileError) as error:
        compile_kernel("wrong.cu", NAME, "sm_90", cache=tmp_path / "cache")
    compiler._text.cache_clear()
    line = next(i for i, each in enumerate(text.splitlines(), 1) if "rsqrtff" in each)
    assert f'wrong.cu({line}): error: identifier "rsqrtff" is undefined' in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_without_nvrtc(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    assert_expected_inline(
        str(compiler.missing()),
        """\
NVRTC is not here (import of cuda.core halted; None in sys.modules)
    fix: pip install 'meshfn[cuda]'""",
    )
    compiler._version.cache_clear()
    with pytest.raises(RuntimeError, match="NVRTC is not here"):
        compile_kernel("add_rms_norm.cu", NAME, "sm_90", cache=tmp_path)


def test_importing_and_planning_touch_no_cuda():
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import meshfn.kernels_cuda, meshfn.programs\n"
        "print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] in ('cuda', 'nvidia')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_text_is_packaged():
    here = Path(kernels_cuda.__file__).parent
    assert {path.suffix for path in here.iterdir() if path.is_file()} == {".py", ".cu", ".cuh"}


def occupied(tmp_path: Path) -> Path:
    """A folder that cannot be made: a file stands there. (One without permissions does not stop a superuser.)"""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cubins"


def test_where_nothing_can_be_kept_it_is_said(tmp_path, monkeypatch, built):
    with pytest.warns(RuntimeWarning, match=r"is not kept[\s\S]*fix: set XDG_CACHE_HOME"):
        made = compile_kernel("add_rms_norm.cu", NAME, "sm_90", cache=occupied(tmp_path))
    assert made.code.startswith(b"\x7fELF")

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(RuntimeError, match="this user has no home\n    fix: set HOME"):
        compile_kernel("add_rms_norm.cu", NAME, "sm_90")
    assert len(built) == 1


@pytest.mark.parametrize("value", ["", "here", "./here"])
def test_a_cache_is_not_where_one_happens_to_stand(tmp_path, monkeypatch, value):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler._cache_folder() == tmp_path / ".cache" / "meshfn" / "cubins"


def test_an_architecture_that_is_not_known(tmp_path):
    assert compile_kernel("add_rms_norm.cu", NAME, "sm_90a", cache=tmp_path).registers > 0
    for arch in ("sm_12", "sm_999", ""):
        with pytest.raises(CompileError, match=rf'arch="{arch}"\): NVRTC [\d.]+ does not know it\n    fix: a newer'):
            compile_kernel("add_rms_norm.cu", NAME, arch, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_threads_that_want_the_same_kernel(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        wanted = [pool.submit(compile_kernel, "add_rms_norm.cu", NAME, "sm_90", cache=tmp_path) for _ in range(8)]
    assert len({each.result() for each in wanted}) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]
