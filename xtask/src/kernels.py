"""kernels.py LIBTORCH SOURCE: compiles the kernels as programs do on a GPU, for several generations of them.

NVRTC needs no GPU. It lies in the folder of libtorch or, as PyTorch's packages have it, beside that.
"""

import ctypes
import glob
import os
import sys

torch, source = sys.argv[1:]
folders = (f"{torch}/lib", f"{os.path.dirname(torch)}/nvidia/*/lib")
found = [path for folder in folders for path in glob.glob(folder + "/libnvrtc*.so*") if ".alt." not in path]
# NVRTC opens the library with its built-in functions by name.
for path in sorted(found, key=lambda path: "builtins" not in path):
    nvrtc = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
if not found:
    sys.exit(f"there is no libnvrtc in {' or '.join(folders)}")

text = open(source, "rb").read()
failed = False
for capability in (80, 86, 90, 100, 120):
    for half in (0, 1):
        program = ctypes.c_void_p()
        name = os.path.basename(source).encode()
        if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None) != 0:
            sys.exit("NVRTC does not start")
        options = [f"--gpu-architecture=sm_{capability}", "--std=c++17", f"-DBRIGADE_HALF={half}"]
        texts = (ctypes.c_char_p * len(options))(*map(str.encode, options))
        if nvrtc.nvrtcCompileProgram(program, len(options), texts) != 0:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            print(f"{' '.join(options)}:\n{log.value.decode()}", file=sys.stderr)
            failed = True
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
sys.exit(failed)
