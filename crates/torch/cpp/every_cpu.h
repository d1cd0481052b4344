// Loops compiled once for each generation of vector units.
#pragma once

// The vector units that are there, chosen when the program is loaded; libtorch's own kernels do the same.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define BRIGADE_EVERY_CPU \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
// For a function in two versions, of which the second has instructions that no loop is compiled to.
#define BRIGADE_ANY_X86 __attribute__((target("default")))
#define BRIGADE_X86_V3 __attribute__((target("arch=x86-64-v3")))
#else
#define BRIGADE_EVERY_CPU
#endif
#define BRIGADE_INLINE inline __attribute__((always_inline))
