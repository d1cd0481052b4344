// The loops of optimizer steps on the CPU, over memory in which the elements of a parameter, its gradient and its
// states lie in the same order.
//
// An element's result depends on its numbers alone: not on its place in a tensor, the tensor's size or alignment,
// the number of threads or the instruction set. Every operation here is one that IEEE 754 rounds correctly (add,
// multiply, divide, square root, conversion), in a vector as in a scalar, and the file is compiled so that none are
// contracted to fused multiply-adds (build.rs). Sharded training rests on it: a shard's elements get the bits that
// they get in the whole tensor. Exceptions are the payloads of NaNs, and sums over a tensor, which depend on its
// length and on nothing else.
//
// Without ATen's headers, so that compiling takes seconds.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace brigade {

// What a rule does to a weight and its gradient before all else.
struct DecayNumbers {
  // What the gradient is multiplied by: its sign, and what undoes a loss scale.
  double factor = 1;
  // Weight decay: this times the weight is added to the gradient.
  double added = 0;
  // Decoupled weight decay: what the weight is multiplied by.
  double keep = 1;
};

struct AdamNumbers {
  DecayNumbers decay;
  double beta1, beta2, eps;
  // The learning rate without the bias of the mean.
  double size;
  // The root of the bias of the mean of squares.
  double root_bias;
};

struct SgdNumbers {
  DecayNumbers decay;
  double lr, momentum, dampening;
  bool nesterov;
  // Momentum buffers take the gradient as it is; they are not read.
  bool first;
};

struct AdagradNumbers {
  DecayNumbers decay;
  double lr, eps;
};

struct RmsPropNumbers {
  DecayNumbers decay;
  double lr, alpha, eps, momentum;
  bool momentum_of_gradient;
};

struct RectifiedNumbers {
  DecayNumbers decay;
  double beta1, beta2, eps, size, root_scale;
  // The step is divided by the root of the mean of squares.
  bool adaptive;
};

struct QhAdamNumbers {
  DecayNumbers decay;
  double lr, beta1, beta2, nu1, nu2, eps, mean_scale, square_scale;
};

struct LambNumbers {
  DecayNumbers decay;
  double beta1, beta2, eps, mean_scale, root_scale;
};

struct LarcNumbers {
  DecayNumbers decay;
  double momentum;
};

// Sums of squares.
struct Norms {
  double first = 0;
  double second = 0;
};

// These may be null: `largest` without amsgrad, `buffer` without momentum, and `mean` of RMSprop where it is not
// centered. The first loop of LAMB and of LARC returns sums of squares over its range: of weights and updates, and of
// weights and slopes.
#define BRIGADE_STEP_LOOPS(T)                                                                            \
  void adam_loop(                                                                                        \
      T* parameter, const T* gradient, T* mean, T* square, T* largest, int64_t count,                    \
      const AdamNumbers& step);                                                                          \
  void sgd_loop(T* parameter, const T* gradient, T* buffer, int64_t count, const SgdNumbers& step);      \
  void adagrad_loop(T* parameter, const T* gradient, T* sum, int64_t count, const AdagradNumbers& step); \
  void rmsprop_loop(                                                                                     \
      T* parameter, const T* gradient, T* square, T* mean, T* buffer, int64_t count,                     \
      const RmsPropNumbers& step);                                                                       \
  void rectified_loop(                                                                                   \
      T* parameter, const T* gradient, T* mean, T* square, int64_t count, const RectifiedNumbers& step); \
  void qhadam_loop(                                                                                      \
      T* parameter, const T* gradient, T* mean, T* square, int64_t count, const QhAdamNumbers& step);    \
  void look_ahead_loop(T* fast, T* slow, int64_t count, double alpha);                                   \
  Norms lamb_moments_loop(                                                                               \
      T* parameter, const T* gradient, T* mean, T* square, int64_t count, const LambNumbers& step);      \
  void lamb_update_loop(                                                                                 \
      T* parameter, const T* mean, const T* square, int64_t count, const LambNumbers& step,              \
      double rate);                                                                                      \
  Norms larc_norms_loop(                                                                                 \
      const T* parameter, const T* gradient, int64_t count, const LarcNumbers& step);                    \
  void larc_loop(                                                                                        \
      T* parameter, const T* gradient, T* buffer, int64_t count, const LarcNumbers& step, double rate);

BRIGADE_STEP_LOOPS(float)
BRIGADE_STEP_LOOPS(double)

#undef BRIGADE_STEP_LOOPS

// 16-bit types are stepped in float32. Their conversions are loops of their own: within those of the steps compilers
// make no vectors of them.
void widen(const c10::BFloat16* from, float* to, int64_t count);
void widen(const c10::Half* from, float* to, int64_t count);
void narrow(const float* from, c10::BFloat16* to, int64_t count);
void narrow(const float* from, c10::Half* to, int64_t count);

} // namespace brigade
