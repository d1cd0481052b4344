// Random numbers that follow from a seed and a place, so that a backward makes those of the forward again.
#pragma once

#include "every_cpu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <cmath>
#include <cstdint>
#include <mutex>

namespace brigade {

// One number of libtorch's generator for the CPU.
inline uint64_t draw_seed() {
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::scoped_lock lock(generator->mutex_);
  return generator->random64();
}

constexpr int64_t kPhiloxLanes = 16;
// Values of 16 bits that are made together.
constexpr int64_t kPhiloxTile = 8 * kPhiloxLanes;

// A tile of the row: Philox4x32 with 7 rounds, the fewest that pass all of BigCrush (Salmon et al., 2011).
BRIGADE_INLINE void philox(uint64_t seed, uint64_t row, uint32_t tile, uint16_t* __restrict out) {
  uint32_t a[kPhiloxLanes], b[kPhiloxLanes], c[kPhiloxLanes], d[kPhiloxLanes];
  for (int64_t lane = 0; lane < kPhiloxLanes; ++lane) {
    a[lane] = tile * static_cast<uint32_t>(kPhiloxLanes) + static_cast<uint32_t>(lane);
    b[lane] = static_cast<uint32_t>(row);
    c[lane] = static_cast<uint32_t>(row >> 32);
    d[lane] = 0;
  }
  auto low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 7; ++round) {
    for (int64_t lane = 0; lane < kPhiloxLanes; ++lane) {
      const uint64_t first = uint64_t{0xD2511F53} * a[lane];
      const uint64_t second = uint64_t{0xCD9E8D57} * c[lane];
      a[lane] = static_cast<uint32_t>(second >> 32) ^ b[lane] ^ low;
      b[lane] = static_cast<uint32_t>(second);
      c[lane] = static_cast<uint32_t>(first >> 32) ^ d[lane] ^ high;
      d[lane] = static_cast<uint32_t>(first);
    }
    low += 0x9E3779B9;
    high += 0xBB67AE85;
  }
  for (int64_t lane = 0; lane < kPhiloxLanes; ++lane) {
    out[lane] = static_cast<uint16_t>(a[lane]);
    out[kPhiloxLanes + lane] = static_cast<uint16_t>(a[lane] >> 16);
    out[2 * kPhiloxLanes + lane] = static_cast<uint16_t>(b[lane]);
    out[3 * kPhiloxLanes + lane] = static_cast<uint16_t>(b[lane] >> 16);
    out[4 * kPhiloxLanes + lane] = static_cast<uint16_t>(c[lane]);
    out[5 * kPhiloxLanes + lane] = static_cast<uint16_t>(c[lane] >> 16);
    out[6 * kPhiloxLanes + lane] = static_cast<uint16_t>(d[lane]);
    out[7 * kPhiloxLanes + lane] = static_cast<uint16_t>(d[lane] >> 16);
  }
}

// What dropout multiplies with: 0, or what keeps the mean.
struct Dropping {
  uint64_t seed = 0;
  // Values below it, of 16 bits, are dropped: the probability in steps of 1/65536.
  int32_t below = 0;
  double kept = 1;

  Dropping() = default;
  Dropping(double probability, uint64_t seed)
      : seed(seed),
        below(static_cast<int32_t>(std::lround(probability * 65536))),
        // By the probability that it is, not the one that was asked for: then the mean is exact.
        kept(below == 65536 ? 0 : 65536.0 / (65536 - below)) {}

  bool drops() const {
    return below > 0;
  }

  // The factors of a tile of a row.
  template <typename C>
  BRIGADE_INLINE void factors(uint64_t row, uint32_t tile, C* __restrict out) const {
    uint16_t random[kPhiloxTile];
    philox(seed, row, tile, random);
    const C keep = static_cast<C>(kept);
    for (int64_t at = 0; at < kPhiloxTile; ++at) {
      out[at] = static_cast<int32_t>(random[at]) < below ? C{0} : keep;
    }
  }
};

} // namespace brigade
