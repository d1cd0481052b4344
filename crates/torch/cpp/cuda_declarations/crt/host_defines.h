// For the host compiler only: see ../README.md. In the real one these words mean something to NVIDIA's
// compiler alone, but for the alignment and the inlining.
#pragma once

#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define __forceinline__ __inline__ __attribute__((always_inline))

#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB

#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__

#define __host__
#define __device__
#define __global__
#define __constant__
#define __shared__
#define __managed__
