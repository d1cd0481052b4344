"""Makes tiny wheels for the tests of setup, and prints the pins that fit them.

Arguments: the folder for the wheels, libtorch's version, and the file of the real pins.
"""

import hashlib
import json
import os
import sys
import zipfile

folder, version, pinned = sys.argv[1:]
os.makedirs(folder, exist_ok=True)


def wheel(package, version, tag, files, keep):
    stem = f"{package.replace('-', '_')}-{version}"
    path = os.path.join(folder, f"{stem}-{tag}.whl")
    files = dict(files)
    files[f"{stem}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    files[f"{stem}.dist-info/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files[f"{stem}.dist-info/RECORD"] = ""
    files[f"{stem}.dist-info/licenses/LICENSE"] = "a licence\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    with open(path, "rb") as source:
        digest = hashlib.sha256(source.read()).hexdigest()
    return {
        "package": package,
        "version": version,
        "platform": tag.split("-")[2].split(".")[0],
        "sha256": digest,
        "download_bytes": os.path.getsize(path),
        "installed_bytes": sum(len(text) for text in files.values()),
        "keep": keep + ["*.dist-info/licenses/*"],
    }


torch_files = {
    "torch/version.py": f"__version__ = '{version}+cu130'\n",
    "torch/include/ATen/ATen.h": "// a header\n",
    "torch/lib/libtorch_cpu.so": "x" * 3_000_000,  # small in the wheel, large on disk
    "torch/lib/libtorch_cuda.so": "cuda",
    "torch/lib/libtorch.so": "stub",
    "torch/nn/__init__.py": "python",
}
torch = wheel(
    "torch",
    version,
    "cp311-cp311-manylinux_2_28_x86_64",
    torch_files,
    ["torch/version.py", "torch/include/*", "torch/lib/libtorch_cpu.so"],
)
runtime = wheel(
    "nvidia-cuda-runtime",
    "13.0.96",
    "py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64",
    {"nvidia/cu13/lib/libcudart.so.13": "cudart", "nvidia/cu13/include/cuda.h": "// cuda\n"},
    ["nvidia/cu13/lib/libcudart.so.13"],
)
# The versions are those of the pins, with which the tests look for the result.
with open(pinned) as source:
    real = json.load(source)["tpu"]
backend = wheel(
    "torch-tpu",
    real["backend"]["version"],
    "cp311-cp311-manylinux_2_31_x86_64",
    {
        "torch_tpu/csrc/common/libxla_base.so": "base",
        "torch_tpu/csrc/common/glue_2_13_0/libpywrap_2_13_0_common.so": "glue",
        "torch_tpu/__init__.py": "python",
    },
    ["torch_tpu/csrc/common/libxla_base.so", "torch_tpu/csrc/common/glue_2_13_0/*"],
)
plugin_cpu = wheel(
    real["plugin_cpu"]["package"],
    real["plugin_cpu"]["version"],
    "py3-none-manylinux_2_27_x86_64",
    {"lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so": "cpu"},
    ["lammps_jax_pjrt_cpu/*"],
)
plugin_tpu = wheel(
    real["plugin_tpu"]["package"],
    real["plugin_tpu"]["version"],
    "cp311-cp311-manylinux_2_31_x86_64",
    {"libtpu/libtpu.so": "tpu"},
    ["libtpu/libtpu.so"],
)
tpu = {"libtorch": ["2.13.0"], "backend": backend, "plugin_cpu": plugin_cpu, "plugin_tpu": plugin_tpu}
cuda_torch = dict(torch, keep=torch["keep"][:2] + ["torch/lib/*", "*.dist-info/licenses/*"])
cuda_runtime = dict(runtime, keep=runtime["keep"] + ["nvidia/cu13/include/*"])
pins = {"python": "311", "cpu": [torch, runtime], "cuda": [cuda_torch, cuda_runtime], "tpu": tpu}
print(json.dumps(pins))
